"""The jitted functions of the engine: append tokens to the cache, draw random numbers, decode a chunk of tokens.

The cache is taken and given back (donated, so it is updated in place), and rows are known only by arrays; what a row
is, and what follows its turn, is the host's business (engine.py). They are functions of their arguments alone, so
engines and roles share what was compiled.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.transformer import Cache, Params
from sesa_jax.rollout import sampling
from sesa_jax.rollout.cache import placed

CHUNK = 16  # decode steps between two looks by the host
RUNNING, TAG, END, CUT = range(4)  # whether and how a turn ended: a closing tag, an end id, the budget

Stops = tuple[jax.Array, jax.Array, jax.Array]
"""The automaton of `episode.stop_table` (table [states, V], accept bool[states]), and bool[V]: which ids are ends."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What a chunk needs to know of its rows. A budget of 0 marks a row that is not active."""

    token: jax.Array  # i32[R], the newest id, not in the cache
    start: jax.Array  # i32[R], cached tokens, so the position of `token`
    state: jax.Array  # i32[R], of the stop automaton
    budget: jax.Array  # i32[R], tokens that may still be sampled
    uniforms: jax.Array  # f32[CHUNK, R, 2], from `chunk_uniforms`
    temperature: jax.Array  # f32[R]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What the host reads of a chunk, in one transfer."""

    steps: jax.Array  # i32, taken by the whole chunk
    tokens: jax.Array  # i32[CHUNK, R]
    logprobs: jax.Array  # f32[CHUNK, R]
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
    tokens: jax.Array  # i32[CHUNK, R]
    logprobs: jax.Array  # f32[CHUNK, R]


@functools.partial(jax.jit, static_argnames=('arch', 'mesh', 'reach'), donate_argnames=('cache',))
def append(
    params: Params,
    cache: Cache,
    ids: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    arch: Architecture,
    mesh: Mesh,
    reach: int,
) -> Cache:
    """The cache with ids i32[R, T] written to the slots from start i32[R] on; count i32[R] of them are real.

    `reach`: no row reads beyond this slot.
    """
    return placed(mesh, transformer.extend(params, arch, cache, ids, start, count, reach=reach)[1])


@jax.jit
def chunk_uniforms(keys: jax.Array, start: jax.Array) -> jax.Array:
    """f32[CHUNK, R, 2] for the tokens at positions start + 1, start + 2, ...; keys u32[R, 2], start i32[R].

    Apart from `decode`, because the key arithmetic would be a third of the time that `decode` takes to compile.
    """
    return jax.vmap(lambda step: sampling.token_uniforms(keys, start + 1 + step))(jnp.arange(CHUNK))


@functools.partial(jax.jit, static_argnames=('arch', 'mesh', 'allowed'), donate_argnames=('cache',))
def decode(
    params: Params,
    cache: Cache,
    inputs: Inputs,
    stops: Stops,
    floor: int,
    *,
    arch: Architecture,
    mesh: Mesh,
    allowed: int,
) -> tuple[Cache, Outputs]:
    """Up to CHUNK decode steps; on a CPU fewer, as soon as no more than `floor` rows are active.

    The cache comes back with all tokens of the chunk but each row's newest. Rows stop inside a chunk and never start,
    so what a row sampled are its first `count` columns. `allowed`: ids from there on are never sampled.
    """
    rows = len(inputs.token)
    table, accept, is_end = stops
    dtype = cache.k[0].dtype

    def active(loop: _Loop) -> jax.Array:
        return (loop.ending == RUNNING) & (inputs.budget > 0)

    def body(loop: _Loop) -> _Loop:
        is_active = active(loop)
        hidden, staging = transformer.decode_step(
            params, arch, cache, loop.staging, loop.step, loop.token, inputs.start
        )
        logits = transformer.logits(params, arch, hidden, dtype=dtype)
        # Gathered, a split vocabulary costs a row's logits over the wire; the sampler then has the same bits anywhere.
        logits = jax.lax.with_sharding_constraint(logits, sharding.rows(mesh))
        token, logprob = sampling.sample(logits, inputs.uniforms[loop.step], inputs.temperature, allowed=allowed)
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
        staging=placed(mesh, transformer.init_staging(arch, rows, CHUNK, dtype)),
        tokens=jnp.zeros((CHUNK, rows), jnp.int32),
        logprobs=jnp.zeros((CHUNK, rows), jnp.float32),
    )
    if mesh.devices.flat[0].platform == 'cpu':
        loop = jax.lax.while_loop(lambda loop: (loop.step < CHUNK) & (active(loop).sum() > floor), body, loop)
    else:
        # On a GPU a condition that depends on data stalls every step for a copy to the host.
        loop = jax.lax.fori_loop(0, CHUNK, lambda _, loop: body(loop), loop)
    cache = placed(mesh, transformer.merge(cache, loop.staging, inputs.start, loop.count))
    outputs = Outputs(loop.step, loop.tokens, loop.logprobs, loop.count, loop.state, loop.ending)
    return cache, jax.lax.with_sharding_constraint(outputs, sharding.replicated(mesh))
