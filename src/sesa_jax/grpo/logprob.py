"""Log-probs of the sampled tokens under some weights: the learner's half of the agreement with the sampler.

The distribution is the sampler's: temperature-scaled, unfiltered, over the tokenizer's own ids. The output head is the
dear part at a large vocabulary, so it runs on action tokens only, in chunks that are recomputed in the backward pass,
and chunks without an action token are skipped: one compiled shape serves any share of action tokens.
Left out: packing several rows into one, and a head that is split over the vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sesa_jax.policy import transformer
from sesa_jax.policy.arch import Architecture

HEAD_CHUNK = 1024
"""Tokens per device whose logits exist at one time."""


def token_logprobs(
    params: transformer.Params,
    arch: Architecture,
    ids: jax.Array,
    lengths: jax.Array,
    is_action: jax.Array,
    *,
    temperature: jax.Array | float,
    allowed: int,
    entropy: Literal['none', 'value', 'gradient'] = 'none',
    rows: NamedSharding | None = None,
    chunk: int = HEAD_CHUNK,
    remat: str | bool = False,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of each action token, given all tokens before it in its row.

    Args:
      params: of `arch`.
      ids: i32[B, T], right padded.
      lengths: i32[B], tokens of each row.
      is_action: bool[B, T]; never True at position 0, nor behind the length.
      temperature: > 0; divides the logits.
      allowed: ids at and above it (padded rows of the vocabulary) have probability 0.
      entropy: 'none' returns zeros, 'value' has no gradient.
      rows: sharding of the rows on a mesh; every device then computes the head of its own rows.
      chunk: tokens of the head per device at a time.
      remat: whether, and by which policy, layers are recomputed in the backward pass (`transformer.hidden`).
      dtype: of the arithmetic; the softmax is float32 in any case.

    Returns:
      f32[B, T] log-probs and f32[B, T] entropies in nats, both 0 where not is_action.
    """
    b, t = ids.shape
    chex.assert_shape(is_action, (b, t))
    chex.assert_shape(lengths, (b,))
    shards = 1 if rows is None else rows.mesh.shape['data']
    local = b // shards * t  # tokens of one device
    x = transformer.hidden(params, arch, ids, lengths, remat=remat, dtype=dtype, rows_sharding=rows)
    if rows is not None:  # one gather of the head's weights for all chunks
        name = 'embed' if arch.tied else 'head'
        whole = NamedSharding(rows.mesh, PartitionSpec())
        params = {**params, name: jax.lax.with_sharding_constraint(params[name], whole)}

    # Token t is predicted from the hidden state of t - 1. Each device's predicting positions, packed to the front.
    predicts = jnp.pad(is_action[:, 1:], ((0, 0), (0, 1))).reshape(shards, local)
    targets = jnp.pad(ids[:, 1:], ((0, 0), (0, 1))).reshape(shards, local)
    chunk = min(chunk, local)
    chunks = -(-local // chunk)
    place = jax.vmap(lambda mask: jnp.nonzero(mask, size=chunks * chunk, fill_value=local)[0])(predicts)
    is_real = place < local
    packed = jnp.take_along_axis(
        x.reshape(shards, local, arch.width), place[..., None], axis=1, mode='fill', fill_value=0
    )
    wanted = jnp.take_along_axis(targets, place, axis=1, mode='fill', fill_value=0)

    def by_chunk(array: jax.Array) -> jax.Array:  # [shards, chunks * chunk, ...] -> [chunks, shards, chunk, ...]
        return jnp.swapaxes(array.reshape(shards, chunks, chunk, *array.shape[2:]), 0, 1)

    def head(x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope('head'):
            logits = transformer.logits(params, arch, x, dtype=dtype)[..., :allowed] / temperature
            normaliser = jax.scipy.special.logsumexp(logits, axis=-1)
            # A masked sum instead of a gather: its gradient is elementwise, not a scatter over the vocabulary.
            chosen = jnp.where(jnp.arange(allowed) == wanted[..., None], logits, 0.0).sum(axis=-1)
            if entropy == 'none':
                return chosen - normaliser, jnp.zeros_like(normaliser)
            if entropy == 'value':
                logits, free = jax.lax.stop_gradient((logits, normaliser))
            else:
                free = normaliser
            mean = (jnp.exp(logits - free[..., None]) * logits).sum(axis=-1)
            return chosen - normaliser, free - mean

    def step(_: None, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        x, wanted, is_real = inputs
        empty = (jnp.zeros(x.shape[:2]), jnp.zeros(x.shape[:2]))
        return None, jax.lax.cond(is_real.any(), head, lambda *_: empty, x, wanted)

    scanned = (by_chunk(packed), by_chunk(wanted), by_chunk(is_real))
    _, results = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), None, scanned)

    # Back to rows: position t of a row reads the packed slot of its own rank.
    rank = jnp.clip(jnp.cumsum(predicts, axis=1) - 1, 0)

    def to_rows(values: jax.Array) -> jax.Array:  # [chunks, shards, chunk] -> f32[B, T]
        flat = jnp.swapaxes(values, 0, 1).reshape(shards, chunks * chunk)
        spread = jnp.where(predicts, jnp.take_along_axis(flat, rank, axis=1), 0.0).reshape(b, t)
        return jnp.pad(spread[:, :-1], ((0, 0), (1, 0)))

    logprobs, entropies = (to_rows(values) for values in results)
    return logprobs, entropies
