"""Exact sampling with log-probabilities, and the keys that make a row independent of its neighbours.

A token is drawn by inverting the cumulative distribution in two levels: one uniform picks a block of the vocabulary by
its mass, a second one picks the token inside that block. The product of the two is the softmax, it needs two random
numbers a row where the Gumbel trick needs one per vocabulary entry, and the normaliser that it computes anyway is the
one of the log-probability. A vocabulary that is split over devices stays split: what travels is the mass of each block,
and the block that was picked. Top-k and top-p, for evaluation, choose among fewer tokens; the log-probability stays that of
the whole distribution, which is the policy's.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from sesa_jax.policy.sharding import VOCAB_BLOCK as BLOCK
from sesa_jax.records import Role

LANES = 16  # entries of a block that are summed side by side

ROLES: dict[Role, int] = {'challenger': 0, 'solver': 1}


def row_keys(seed: int, step: int, role: jax.Array, problem: jax.Array, sample: jax.Array) -> jax.Array:
    """One key per row, folded from (seed, step, role, problem, sample): u32[B, 2].

    `role` (values of `ROLES`), `problem` and `sample` are i32[B]. No batch size, place or device enters.
    """
    base = jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), step)

    def one(*path: jax.Array) -> jax.Array:
        key = base
        for part in path:
            key = jax.random.fold_in(key, part)
        return jax.random.key_data(key)

    return jax.vmap(one)(role, problem, sample)


def token_uniforms(keys: jax.Array, position: jax.Array) -> jax.Array:
    """Two uniforms in [0, 1) for the token at absolute `position` i32[B] of rows with `keys` u32[B, 2]: f32[B, 2]."""

    def one(key: jax.Array, where: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl='threefry2x32'), where), (2,))

    return jax.vmap(one)(keys, position)


def sample(
    logits: jax.Array,
    uniforms: jax.Array,
    temperature: jax.Array,
    *,
    allowed: int,
    keep: tuple[jax.Array, jax.Array] | None = None,
    rows_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row, as a pure function of the random numbers.

    Args:
      logits: f32[B, V].
      uniforms: f32[B, 2] in [0, 1), from `token_uniforms`.
      temperature: f32[B]; 0 takes the most likely token (the lowest id among equals).
      allowed: ids >= allowed (rows of a padded vocabulary) are neither drawn nor normalised over.
      keep: top_k i32[B] (0: all) and, within those, top_p f32[B] (1: all); equals at the edge stay together.
      rows_sharding: where the masses of the blocks are brought together, for logits whose V is split.

    Returns:
      token i32[B], and its log-probability f32[B] under the unfiltered distribution at that temperature (at
      temperature 1 for greedy rows, whose own distribution is a point).
    """
    chex.assert_rank([logits, uniforms, temperature], [2, 2, 1])
    rows = logits.shape[0]
    is_greedy = temperature <= 0
    scaled = logits.astype(jnp.float32) / jnp.where(is_greedy, 1.0, temperature)[:, None]
    scaled = jnp.where(jnp.arange(logits.shape[1]) < allowed, scaled, -jnp.inf)
    scaled = jnp.pad(scaled, ((0, 0), (0, -logits.shape[1] % BLOCK)), constant_values=-jnp.inf)
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    choice = scaled if keep is None else _kept(scaled, *keep)
    blocks = choice.reshape(rows, -1, BLOCK)
    mass = _masses(blocks, peak)
    if rows_sharding is not None:
        mass = jax.lax.with_sharding_constraint(mass, rows_sharding)
    block, total = _invert(mass, uniforms[:, 0])
    if keep is not None:
        total = jnp.sum(_masses(scaled.reshape(blocks.shape), peak), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # f32[B, BLOCK]
    offset = _invert(jnp.exp(inside - peak), uniforms[:, 1])[0]
    # The bound only matters for logits that are NaN: the id stays a real one, and the log-prob says NaN.
    drawn = block * BLOCK + offset
    token = jnp.minimum(jnp.where(is_greedy, jnp.argmax(scaled, axis=-1), drawn), allowed - 1).astype(jnp.int32)
    logit = jnp.where(is_greedy, peak[:, 0], jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0])
    return token, logit - peak[:, 0] - jnp.log(total)


def _masses(blocks: jax.Array, peak: jax.Array) -> jax.Array:
    """Sums f32[B, C] of exp(x - peak) over the last axis of blocks f32[B, C, BLOCK]; peak f32[B, 1].

    Column by column of LANES entries, because XLA's CPU compiler gives a sum to a library and writes down all
    exponentials for it: as much memory as the logits themselves. What it gets to sum here is an eighth of that. The
    barrier keeps the exponentials out of the library's reach; without it jaxlib 0.12 writes down the columns instead.
    """
    columns = (blocks[:, :, begin : begin + LANES] for begin in range(0, BLOCK, LANES))
    partial = functools.reduce(jnp.add, [jnp.exp(column - peak[:, :, None]) for column in columns])
    return jnp.sum(jax.lax.optimization_barrier(partial), axis=-1)


def _kept(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """scaled f32[B, V] with -inf for what neither filter keeps."""
    ranked = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(scaled.shape[1])
    inside = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    weights = jax.nn.softmax(jnp.where(inside, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights  # mass of the tokens that are more likely
    # In float32 the sum can reach 1 long before the last token; a row without top-p must not lose the rest.
    inside &= (before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    edge = jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= edge, scaled, -jnp.inf)


def _invert(mass: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First entry whose cumulative mass exceeds uniform * total, and the total; mass f32[B, C], uniform f32[B].

    A cumulative sum that is computed as a tree may rise by rounding over an entry of mass 0, so entries without mass
    are ruled out explicitly, and the last one with mass takes what rounding leaves over.
    """
    cumulative = jnp.cumsum(mass, axis=-1)
    total = cumulative[:, -1]
    is_possible = mass > 0
    is_hit = (cumulative > (uniform * total)[:, None]) & is_possible
    last = mass.shape[-1] - 1 - jnp.argmax(is_possible[:, ::-1], axis=-1)
    return jnp.where(is_hit.any(axis=-1), jnp.argmax(is_hit, axis=-1), last), total
