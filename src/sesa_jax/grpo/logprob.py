"""Log-probs of the sampled tokens under some weights: the learner's half of the agreement with the sampler.

The distribution is the sampler's: temperature-scaled, unfiltered, over the tokenizer's own ids. The output head is the
dear part at a large vocabulary, so it runs on action tokens only, in chunks whose logits are computed again in the
backward pass; as many chunks run as there are action tokens, under one compiled shape.

On a mesh each device works through its own rows (`shard_map`): one all-gather of the head's weights in the dtype of the
arithmetic before the first chunk, one reduce-scatter of their float32 gradient behind the last, and nothing in between.
Left out: packing several rows into one, and a head that is split over the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract

HEAD_CHUNK = 1024
"""Tokens per device whose logits exist at one time."""
Entropy = Literal['none', 'value', 'gradient']


def token_logprobs(
    params: transformer.Params,
    arch: Architecture,
    ids: jax.Array,
    lengths: jax.Array,
    is_action: jax.Array,
    *,
    temperature: jax.Array | float,
    allowed: int,
    entropy: Entropy = 'none',
    rows: NamedSharding | None = None,
    chunk: int = HEAD_CHUNK,
    remat: str = 'none',
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of each action token, given all tokens before it in its row.

    Args:
      params: of `arch`.
      ids: i32[B, T], right padded.
      lengths: i32[B], tokens of each row.
      is_action: bool[B, T]; never True at position 0, nor behind the length.
      temperature: > 0; divides the logits. No gradient flows to it.
      allowed: ids at and above it (padded rows of the vocabulary) have probability 0.
      entropy: 'none' returns zeros, 'value' has no gradient.
      rows: sharding of the rows on a mesh; every device then computes the head of its own rows. `params` lie there as
        `sharding.TRAIN` says.
      chunk: tokens of the head per device at a time.
      remat: what of a layer is not recomputed in the backward pass (`transformer.hidden`).
      dtype: of the arithmetic; the softmax is float32 in any case, and so are the sums of gradients over chunks and
        devices.

    Returns:
      f32[B, T] log-probs and f32[B, T] entropies in nats, both 0 where not is_action.
    """
    b, t = ids.shape
    chex.assert_shape(is_action, (b, t))
    chex.assert_shape(lengths, (b,))
    x = transformer.hidden(params, arch, ids, lengths, remat=remat, dtype=dtype, rows_sharding=rows)
    name = 'embed' if arch.tied else 'head'
    head = _Head(arch, allowed, entropy, chunk, jnp.dtype(dtype).name, params[name].dtype.name)
    arguments = (params[name], x, ids, is_action, jnp.asarray(temperature, jnp.float32))
    if rows is None:
        return _by_row(head, *arguments)
    place = sharding.shardings(abstract(arch), sharding.TRAIN, rows.mesh)[name].spec
    head = dataclasses.replace(head, mesh_axis='data', split=place.index('data') if 'data' in place else None)
    whole = PartitionSpec()
    local = jax.shard_map(
        functools.partial(_by_row, head),
        mesh=rows.mesh,
        in_specs=(place, rows.spec, rows.spec, rows.spec, whole),
        out_specs=(rows.spec, rows.spec),
    )
    return local(*arguments)


@dataclasses.dataclass(frozen=True)
class _Head:
    """Static arguments of the head on one device."""

    arch: Architecture
    allowed: int
    entropy: Entropy
    chunk: int
    dtype: str
    master: str  # dtype of the weights, and of their gradient
    mesh_axis: str | None = None  # of the devices that hold the other rows
    split: int | None = None  # axis of the weights that is split over them; None where each device holds all

    def whole(self, weights: jax.Array) -> jax.Array:
        weights = weights.astype(self.dtype)
        if self.split is None:
            return weights
        return jax.lax.all_gather(weights, self.mesh_axis, axis=self.split, tiled=True)

    def own_share(self, gradient: jax.Array) -> jax.Array:
        """Sum over devices of f32[whole weights], as this device holds it: the transpose of `whole`."""
        if self.split is not None:
            gradient = jax.lax.psum_scatter(gradient, self.mesh_axis, scatter_dimension=self.split, tiled=True)
        return gradient.astype(self.master)

    def zeros(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        """Zeros that each device fills with something else."""
        return self.own(jnp.zeros(shape, dtype))

    def own(self, x: jax.Array) -> jax.Array:
        """x that is the same on all devices, as a value of each; gradients are then summed over them."""
        return x if self.mesh_axis is None else jax.lax.pcast(x, self.mesh_axis, to='varying')

    def logits(self, weights: jax.Array, x: jax.Array) -> jax.Array:
        name = 'embed' if self.arch.tied else 'head'
        return transformer.logits({name: weights}, self.arch, x, dtype=jnp.dtype(self.dtype))

    def scores(self, logits: jax.Array, wanted: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log-probs f32[M] of ids `wanted` i32[M] under logits f32[M, V], and entropies f32[M]."""
        logits = logits[..., : self.allowed] / temperature
        normaliser = jax.scipy.special.logsumexp(logits, axis=-1)
        # A masked sum instead of a gather: its gradient is elementwise, not a scatter over the vocabulary.
        chosen = jnp.where(jnp.arange(self.allowed) == wanted[..., None], logits, 0.0).sum(axis=-1)
        if self.entropy == 'none':
            return chosen - normaliser, jnp.zeros_like(normaliser)
        free = normaliser
        if self.entropy == 'value':
            logits, free = jax.lax.stop_gradient((logits, normaliser))
        mean = (jnp.exp(logits - free[..., None]) * logits).sum(axis=-1)
        return chosen - normaliser, free - mean


def _by_row(
    head: _Head, weights: jax.Array, x: jax.Array, ids: jax.Array, is_action: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """f32[B, T] log-probs and entropies of the rows of one device; weights as it holds them, x [B, T, D]."""
    b, t = ids.shape
    # Token t is predicted from the hidden state of t - 1. The predicting positions, packed to the front.
    predicts = jnp.pad(is_action[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    targets = jnp.pad(ids[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    chunk = min(head.chunk, b * t)
    chunks = -(-b * t // chunk)
    place = jnp.nonzero(predicts, size=chunks * chunk, fill_value=b * t)[0].reshape(chunks, chunk)
    x = x.reshape(b * t, -1).astype(head.dtype)
    packed = x.at[place].get(mode='fill', fill_value=0)
    wanted = targets.at[place].get(mode='fill', fill_value=0)
    filled = -(-predicts.sum() // chunk)
    if head.split is None:
        weights = head.own(weights)
    results = _in_chunks(head, weights, packed, wanted, filled, temperature)

    # Back to rows: position t of a row reads the packed slot of its own rank.
    rank = jnp.clip(jnp.cumsum(predicts) - 1, 0)

    def to_rows(values: jax.Array) -> jax.Array:  # [chunks, chunk] -> f32[B, T]
        spread = jnp.where(predicts, values.reshape(-1)[rank], 0.0).reshape(b, t)
        return jnp.pad(spread[:, :-1], ((0, 0), (1, 0)))

    logprobs, entropies = (to_rows(values) for values in results)
    return logprobs, entropies


# A rule of its own for the gradient: autodiff would round the weights' gradient to `dtype` in every chunk, multiply
# float32 with bfloat16, and on a mesh sum it over the devices once a chunk (12 times 2.5 GB for a row of 12,288 tokens
# of Qwen3-8B).
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(
    head: _Head, weights: jax.Array, x: jax.Array, wanted: jax.Array, filled: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`scores` f32[chunks, M] of x [chunks, M, D] and wanted i32[chunks, M]; 0 in chunks at and behind `filled`."""
    return _forward(head, weights, x, wanted, filled, temperature)[0]


def _forward(
    head: _Head, weights: jax.Array, x: jax.Array, wanted: jax.Array, filled: jax.Array, temperature: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    with jax.named_scope('head'):
        whole = head.whole(weights)

        def step(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            found = head.scores(head.logits(whole, x[i]), wanted[i], temperature)
            return tuple(all_.at[i].set(one) for all_, one in zip(results, found, strict=True))

        results = jax.lax.fori_loop(0, filled, step, (head.zeros(wanted.shape), head.zeros(wanted.shape)))
    return results, (whole, x, wanted, filled, temperature)


def _backward(
    head: _Head, kept: tuple[jax.Array, ...], slopes: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    whole, x, wanted, filled, temperature = kept
    with jax.named_scope('head'):

        def step(i: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits, here = head.logits(whole, x[i]), (wanted[i], temperature)
            _, pull = jax.vjp(lambda logits: head.scores(logits, *here), logits)
            (slope,) = pull(tuple(slope[i] for slope in slopes))
            to_weights, to_x = transformer.logits_gradient(whole, head.arch, x[i], slope)
            return gradients[0] + to_weights, gradients[1].at[i].set(to_x)

        zeros = head.zeros(whole.shape), head.zeros(x.shape, x.dtype)
        to_weights, to_x = jax.lax.fori_loop(0, filled, step, zeros)
        return head.own_share(to_weights), to_x, None, None, None


_in_chunks.defvjp(_forward, _backward)
