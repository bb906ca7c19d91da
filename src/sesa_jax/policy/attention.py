"""Attention of queries over keys that lie at known positions, and the rotary positions themselves.

`causal` serves training, on rows that begin at position 0: cuDNN's fused kernel where it exists, else `attend`. `attend`
is the plain form, for a row of any length, and `step` that of one decoded token over two pieces of memory. None of them
ever holds the scores of all queries of a long row at once.

Left out: writing keys and values into a cache (transformer.py), and sliding windows. Alphabet: see arch.py.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax.policy.arch import Architecture

log = logging.getLogger(__name__)

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine, f32[B, T, 1, H/2]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
MASKED = -1e30  # finite, so that a row without any visible slot gives no NaN
NOWHERE = np.int32(2**30)  # the position of a key that no query may see
QUERY_BLOCK = 64  # queries whose scores exist at once
SPAN, MOST_SPANS = 256, 4  # the least number of queries in a span, and the most spans of a row


# --- rotary positions -------------------------------------------------------------------------------------------------


def frequencies(arch: Architecture) -> np.ndarray:
    """Radians per position of each pair, f32[H/2]; stretched as Llama 3.1 does where the architecture says so.

    Every step is rounded to float32 as transformers does it: these are the angles that the weights were trained with,
    and one unit in the last place of a frequency is 1e-4 radians at position 8,192.
    """
    one, exponents = np.float32(1), np.arange(0, arch.head_size, 2, dtype=np.float32) / np.float32(arch.head_size)
    plain = one / (arch.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    if (scaling := arch.rope_scaling) is None:
        return plain
    context, factor = np.float32(scaling.original_max_positions), np.float32(scaling.factor)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    wave = one / plain * np.float32(2 * math.pi)  # positions of one turn
    kept = (one / wave * context - low) / (high - low)  # share that stays as it was
    mixed = (one - kept) * plain / factor + kept * plain
    return np.where(wave > context / low, plain / factor, np.where(wave < context / high, plain, mixed))


def rotation(arch: Architecture, positions: jax.Array) -> Rotation:
    """Cosine and sine of the rotary angles of positions i32[B, T]."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies(arch)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns the pairs (i, i + H/2) of x [B, T, heads, H]."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


# --- the plain form ---------------------------------------------------------------------------------------------------


def heads_first(x: jax.Array) -> jax.Array:
    """[B, T, K, H] -> [B, K, T, H], the order of the cache."""
    return x.transpose(0, 2, 1, 3)


def _grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, g*T, H]: the queries of one kv head as the rows of one product; g = N / K."""
    rows, tokens, heads, size = q.shape
    q = q.reshape(rows, tokens, kv_heads, heads // kv_heads, size)
    return q.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)


def _ungrouped(x: jax.Array, tokens: int) -> jax.Array:
    """Inverse of `_grouped`."""
    rows, kv_heads, _, size = x.shape
    x = x.reshape(rows, kv_heads, -1, tokens, size)
    return x.transpose(0, 3, 1, 2, 4).reshape(rows, tokens, -1, size)


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array, tokens: int) -> jax.Array:
    """Masked scores f32[B, K, g*T, S] of grouped queries against keys [B, K, S, H]; visible bool[B or 1, T, S]."""
    scores = jnp.einsum('bkqh,bksh->bkqs', q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    rows, kv_heads, _, slots = scores.shape
    split = scores.reshape(rows, kv_heads, -1, tokens, slots)
    return jnp.where(visible[:, None, None], split, MASKED).reshape(scores.shape)


def _block(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Some queries [B, T, N, H] with all of their scores; products in their dtype, softmax in float32."""
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    visible = key_positions[:, None, :] <= positions[..., None]
    weights = jax.nn.softmax(_scores(_grouped(q, k.shape[1]), k, visible, q.shape[1]), axis=-1).astype(v.dtype)
    return _ungrouped(jnp.einsum('bkqs,bksh->bkqh', weights, v), q.shape[1])


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, key_positions: jax.Array | None = None
) -> jax.Array:
    """q [B, T, N, H] over k, v [B, K, S, H] -> [B, T, N, H]. Each query, at position i32[B or 1, T], sees the keys up
    to its position; theirs are key_positions i32[B or 1, S], where NOWHERE hides a key.

    Works through the queries in a loop over small blocks whose scores the backward pass computes again: they stay in the
    processor's cache, and a program of any length is short. (Unrolled, the learner's program ran no faster and
    took twice the time to compile.) Without key_positions, queries and keys are the same tokens from position 0 on; a row
    from 512 tokens on is then cut into up to four spans, since a span needs no key behind its last query.
    """
    tokens = q.shape[1]
    spans = min(max(tokens // SPAN, 1), MOST_SPANS) if key_positions is None else 1
    size = -(-tokens // spans)
    if key_positions is None:  # so that their gradients are summed over spans and blocks in float32
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    outputs = []
    for begin in range(0, tokens, size):
        end = min(begin + size, tokens)
        seen = end if key_positions is None else k.shape[2]
        where = jnp.arange(seen)[None] if key_positions is None else key_positions
        outputs.append(_span(q[:, begin:end], k[:, :, :seen], v[:, :, :seen], positions[:, begin:end], where))
    return jnp.concatenate(outputs, axis=1)


def _span(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """`_block`, at most QUERY_BLOCK queries at a time."""
    rows, tokens = q.shape[:2]
    blocks = -(-tokens // QUERY_BLOCK)
    if blocks == 1:
        return _block(q, k, v, positions, key_positions)
    size = -(-tokens // blocks)

    def split(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [blocks, B, size, ...], filled up with zeros."""
        x = jnp.pad(x, [(0, 0), (0, blocks * size - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)

    again = jax.checkpoint(_block, prevent_cse=False)  # the loop itself keeps the recomputation apart
    out = jax.lax.map(lambda piece: again(piece[0], k, v, piece[1], key_positions), (split(q), split(positions)))
    return jnp.moveaxis(out, 0, 1).reshape(rows, blocks * size, *out.shape[3:])[:, :tokens]


def step(q: jax.Array, pieces: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """One query a row, q [R, 1, N, H], over several pieces of memory in one softmax -> [R, 1, N, H].

    A piece is (keys, values [B, K, S, H], visible bool[B or 1, S]); B divides R, and R / B consecutive rows share one
    row of it, whose keys are then read once for all of them. Sums over pieces are in float32.
    """
    rows, _, heads, size = q.shape
    scored = []
    for k, v, visible in pieces:
        shared = rows // k.shape[0]
        grouped = _grouped(q.reshape(k.shape[0], shared, heads, size), k.shape[1])
        scored.append((_scores(grouped, k, visible[:, None], shared), v, shared))

    def by_row(x: jax.Array, shared: int) -> jax.Array:
        """[B, K, g * R/B, X] -> [R, 1, N, X]"""
        return _ungrouped(x, shared).reshape(rows, 1, heads, -1)

    peak = functools.reduce(
        jnp.maximum, [by_row(scores.max(axis=-1, keepdims=True), shared) for scores, _, shared in scored]
    )
    total, out = 0.0, 0.0
    for scores, v, shared in scored:
        weights = jnp.exp(scores - _grouped(peak.reshape(-1, shared, heads, 1), v.shape[1]))
        total += by_row(weights.sum(axis=-1, keepdims=True), shared)
        product = jnp.einsum('bkqs,bksh->bkqh', weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        out += by_row(product, shared)
    return (out / total).astype(q.dtype)


# --- training ---------------------------------------------------------------------------------------------------------


def causal(lengths: jax.Array, tokens: int, head_size: int, dtype: jnp.dtype) -> Attention:
    """Causal attention over right-padded rows, (q [B, T, N, H], k, v [B, T, K, H]) -> [B, T, N, H]; the fused kernel
    where it exists. What it gives behind a row's length means nothing."""
    refusal = why_not_fused(*device(), dtype, head_size)
    _say_once(refusal)
    if refusal is None:
        counts = jnp.maximum(lengths, 1).astype(jnp.int32)  # an empty row still needs one key
        real = (jnp.arange(tokens) < counts[:, None])[..., None, None]

        def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            # Whatever the kernel leaves behind the length, in its output or in its gradients, reaches nothing.
            out = jax.nn.dot_product_attention(
                *(jnp.where(real, x, 0) for x in (q, k, v)),
                is_causal=True,
                query_seq_lengths=counts,
                key_value_seq_lengths=counts,
                implementation='cudnn',
            )
            return jnp.where(real, out, 0)

        return fused
    # With padding on the right, the causal mask alone hides it from every real token.
    positions = jnp.arange(tokens)[None]
    return lambda q, k, v: attend(q, heads_first(k), heads_first(v), positions)


def device() -> tuple[str, str]:
    """Platform of the default devices ('cpu', 'cuda', 'rocm', 'tpu') and the compute capability of the first."""
    first = jax.devices()[0]
    platform = first.platform
    if platform == 'gpu':
        platform = 'rocm' if 'rocm' in first.client.platform_version.lower() else 'cuda'
    return platform, str(getattr(first, 'compute_capability', ''))


def why_not_fused(platform: str, capability: str, dtype: jnp.dtype, head_size: int) -> str | None:
    """Why cuDNN's kernel cannot serve, or None where it can. A cuDNN that is missing altogether stays JAX's error:
    the plain form would be slow without anybody having asked for it."""
    if platform != 'cuda':
        return f'platform {platform} has no cuDNN'
    if int(capability.partition('.')[0] or 0) < 8:
        return f'cuDNN attention needs compute capability 8.0 (Ampere) or newer, not {capability or "unknown"}'
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'cuDNN attention needs bfloat16 or float16, not {dtype}'
    if head_size > 128 or head_size % 8:
        return f'cuDNN attention needs a head size of at most 128 and a multiple of 8, not {head_size}'
    return None


@functools.cache
def _say_once(refusal: str | None) -> None:
    log.info('training attention: %s', 'cuDNN' if refusal is None else f'plain XLA ({refusal})')
