"""The jitted functions of the engine: prompts in, observations in, a chunk of tokens out, rows from pool to pool.

Slots are taken and given back (donated, so they are updated in place), and rows are known only by arrays; what a row
is, and what follows its turn, is the host's business. They are functions of their arguments alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.transformer import Cache, Params, Slots
from sesa_jax.rollout import sampling
from sesa_jax.rollout.cache import PoolShape, placed
from sesa_jax.rollout.row import CUT, END, RUNNING, TAG

Stops = tuple[jax.Array, jax.Array, jax.Array]
"""The automaton of `episode.stop_table` (table [states, V], accept bool[states]), and bool[V]: which ids are ends."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What a chunk needs to know of its rows. A budget of 0 marks a row that is not active."""

    prompt_length: jax.Array  # i32[Q]
    token: jax.Array  # i32[R], the newest id, not in the slots
    start: jax.Array  # i32[R], own tokens in the slots
    state: jax.Array  # i32[R], of the stop automaton
    budget: jax.Array  # i32[R], tokens that may still be sampled
    uniforms: jax.Array  # f32[chunk, R, 2], from `chunk_uniforms`
    temperature: jax.Array  # f32[R]
    top_k: jax.Array  # i32[R]
    top_p: jax.Array  # f32[R]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What the host reads of a chunk, in one transfer."""

    steps: jax.Array  # i32, taken by the whole chunk
    tokens: jax.Array  # i32[chunk, R]
    logprobs: jax.Array  # f32[chunk, R]
    count: jax.Array  # i32[R], tokens that the row sampled
    state: jax.Array  # i32[R], of the stop automaton
    ending: jax.Array  # i32[R]: RUNNING, TAG, END or CUT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    """What changes from step to step."""

    step: jax.Array  # i32
    token: jax.Array  # i32[R]
    state: jax.Array  # i32[R]
    count: jax.Array  # i32[R], tokens sampled in this chunk
    ending: jax.Array  # i32[R]
    staging: Cache  # keys and values of this chunk: column i belongs to step i of every row
    tokens: jax.Array  # i32[chunk, R]
    logprobs: jax.Array  # f32[chunk, R]


@functools.partial(jax.jit, static_argnames=('shape', 'arch', 'mesh', 'dtype'))
def empty(*, shape: PoolShape, arch: Architecture, mesh: Mesh, dtype: Any) -> Slots:
    """The slots of a pool that nobody lives in yet."""
    slots = transformer.init_slots(arch, shape.groups, shape.group_size, shape.prompt, shape.blocks, dtype)
    return placed(mesh, slots)


@functools.partial(jax.jit, static_argnames=('arch', 'mesh'), donate_argnames=('prompt',))
def prefill(
    params: Params,
    prompt: Cache,
    ids: jax.Array,
    lengths: jax.Array,
    groups: jax.Array,
    *,
    arch: Architecture,
    mesh: Mesh,
) -> Cache:
    """The prompts [Q, K, P, H] with those of ids i32[M, T], lengths i32[M], in groups i32[M]; group Q drops one."""
    new = transformer.prefill(params, arch, ids, lengths, prompt.k[0].dtype)

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[groups, :, : new.shape[2]].set(new, mode='drop')

    return placed(mesh, jax.tree.map(written, prompt, new))


@functools.partial(jax.jit, static_argnames=('arch', 'mesh'), donate_argnames=('own',))
def append(
    params: Params,
    prompt: Cache,
    own: tuple[Cache, ...],
    rows: jax.Array,
    ids: jax.Array,
    prompt_length: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    arch: Architecture,
    mesh: Mesh,
) -> tuple[Cache, ...]:
    """The blocks with ids i32[E, T] added to rows i32[E]; see `transformer.extend`."""
    slots = transformer.extend(params, arch, Slots(prompt, own), rows, ids, prompt_length, start, count)[1]
    return placed(mesh, slots).own


@functools.partial(jax.jit, static_argnames=('chunk', 'mesh'))
def chunk_uniforms(keys: jax.Array, position: jax.Array, *, chunk: int, mesh: Mesh) -> jax.Array:
    """f32[chunk, R, 2] for the tokens at positions i32[R] and the ones behind them; keys u32[R, 2].

    Apart from `decode`, because the key arithmetic would be a third of the time that `decode` takes to compile.
    """
    uniforms = jax.vmap(lambda step: sampling.token_uniforms(keys, position + step))(jnp.arange(chunk))
    return jax.lax.with_sharding_constraint(uniforms, sharding.replicated(mesh))


@functools.partial(jax.jit, static_argnames=('arch', 'mesh', 'allowed', 'is_filtered'), donate_argnames=('own',))
def decode(
    params: Params,
    prompt: Cache,
    own: tuple[Cache, ...],
    inputs: Inputs,
    stops: Stops,
    *,
    arch: Architecture,
    mesh: Mesh,
    allowed: int,
    is_filtered: bool = False,
) -> tuple[tuple[Cache, ...], Outputs]:
    """A chunk of decode steps, as many as `inputs.uniforms` has; on a CPU fewer, when no row is active any more.

    The blocks come back with all tokens of the chunk but each row's newest. Rows stop inside a chunk and never start,
    so what a row sampled are its first `count` columns. `allowed`: ids from there on are never sampled. `is_filtered`:
    top_k and top_p are looked at.
    """
    chunk, rows = inputs.uniforms.shape[:2]
    slots = Slots(prompt, own)
    table, accept, is_end = stops
    dtype = prompt.k[0].dtype

    def active(loop: _Loop) -> jax.Array:
        return (loop.ending == RUNNING) & (inputs.budget > 0)

    def body(loop: _Loop) -> _Loop:
        is_active = active(loop)
        hidden, staging = transformer.decode_step(
            params, arch, slots, loop.staging, loop.step, loop.token, inputs.prompt_length, inputs.start
        )
        logits = transformer.logits(params, arch, hidden, dtype=dtype)
        logits = jax.lax.with_sharding_constraint(logits, sharding.logits(mesh, logits.shape[1]))
        keep = (inputs.top_k, inputs.top_p) if is_filtered else None
        token, logprob = sampling.sample(
            logits,
            inputs.uniforms[loop.step],
            inputs.temperature,
            allowed=allowed,
            keep=keep,
            rows_sharding=sharding.rows(mesh),
        )
        state = table[loop.state, token].astype(jnp.int32)
        count = loop.count + is_active
        # A turn that ended by itself with its last token was not cut.
        ending = jnp.select([accept[state], is_end[token], count >= inputs.budget], [TAG, END, CUT], RUNNING)
        return _Loop(
            step=loop.step + 1,
            token=token,  # a row that has stopped goes on with garbage that nobody keeps
            state=jnp.where(is_active, state, loop.state),
            count=count,
            ending=jnp.where(is_active, ending, loop.ending),
            staging=placed(mesh, staging),
            tokens=loop.tokens.at[loop.step].set(token),
            logprobs=loop.logprobs.at[loop.step].set(logprob),
        )

    zeros = jnp.zeros(rows, jnp.int32)
    loop = _Loop(
        step=jnp.int32(0),
        token=inputs.token,
        state=inputs.state,
        count=zeros,
        ending=zeros + RUNNING,
        staging=placed(mesh, transformer.init_cache(arch, rows, chunk, dtype)),
        tokens=jnp.zeros((chunk, rows), jnp.int32),
        logprobs=jnp.zeros((chunk, rows), jnp.float32),
    )
    if mesh.devices.flat[0].platform == 'cpu':
        loop = jax.lax.while_loop(lambda loop: (loop.step < chunk) & active(loop).any(), body, loop)
    else:
        # On a GPU a condition that depends on data stalls every step for a copy to the host.
        loop = jax.lax.fori_loop(0, chunk, lambda _, loop: body(loop), loop)
    own = placed(mesh, transformer.merge(slots, loop.staging, inputs.start, loop.count)).own
    outputs = Outputs(loop.step, loop.tokens, loop.logprobs, loop.count, loop.state, loop.ending)
    return own, jax.lax.with_sharding_constraint(outputs, sharding.replicated(mesh))


@functools.partial(jax.jit, static_argnames='mesh', donate_argnames=('target',))
def move(source: Slots, target: Slots, rows: jax.Array, places: jax.Array, *, mesh: Mesh) -> Slots:
    """The target, whose groups are single rows, with rows i32[M] of the source in its places i32[M]; R drops one."""
    group = rows // source.group_size

    def taken(x: jax.Array, index: jax.Array) -> jax.Array:
        return x.at[index].get(mode='clip')

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[places, :, : new.shape[2]].set(new, mode='drop')

    prompt = jax.tree.map(lambda new, old: put(old, taken(new, group)), source.prompt, target.prompt)
    whole = jax.tree.map(lambda *parts: jnp.concatenate([taken(part, rows) for part in parts], axis=2), *source.own)
    own = tuple(
        jax.tree.map(lambda new, old, begin=begin: put(old, new[:, :, begin : begin + old.shape[2]]), whole, block)
        for begin, block in zip(target.begins, target.own, strict=True)
    )
    return placed(mesh, Slots(prompt, own))
