"""The forward passes of a causal language model: training, appending to a cache, and one decode step.

One Linen module, `Layer`, holds the arithmetic of a layer once, for all families; the three passes differ only in the
attention that they hand to it (attention.py). Parameters, cache and staging buffers are arguments and results, nothing
is mutable.

* `hidden` scans over stacked layers: one compiled layer, for training and log-probs.
* `extend` and `decode_step` run over a tuple of layers (`unstack`). Slicing stacked weights inside a jitted step would
  keep a second copy of them alive, and a stacked cache would be copied in each step.
* The cache is [B, K, S, H]: both products of attention read it in place. With [B, S, K, H] the CPU transposes the whole
  cache twice per layer and step.
* In a chunk of decode steps the cache does not change: step i writes column i of the small staging buffers, and `merge`
  moves them into the cache once, at the end of the chunk.

Left out: sampling, stopping and batching (rollout/), and the loss (grpo/). Alphabet: see arch.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from sesa_jax.config import ConfigError
from sesa_jax.policy import attention
from sesa_jax.policy.arch import Architecture, Spec, abstract, is_spec, layer_specs, leaves

Params = dict[str, Any]
REMAT = {
    'nothing': jax.checkpoint_policies.nothing_saveable,
    'projections': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What the backward pass finds of a layer: nothing, or the outputs of its seven matrices."""
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys (after norm and rotation) and values of every layer, one array per layer."""

    k: tuple[jax.Array, ...]  # L of [B, K, S, H]
    v: tuple[jax.Array, ...]  # L of [B, K, S, H]

    @property
    def slots(self) -> int:
        return self.k[0].shape[2]


def init(arch: Architecture, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Fresh parameters. Under `jit` with `out_shardings` they are born sharded."""
    keys = jax.random.split(key, len(list(leaves(abstract(arch)))))
    specs, treedef = jax.tree.flatten(abstract(arch), is_leaf=is_spec)
    return treedef.unflatten([_initial(spec)(k, spec.shape, dtype) for spec, k in zip(specs, keys, strict=True)])


def _initial(spec: Spec) -> Callable[..., jax.Array]:
    if spec.init == 'normal':
        return nn.initializers.normal(spec.std)
    return {'ones': nn.initializers.ones, 'zeros': nn.initializers.zeros}[spec.init]


class Layer(nn.Module):
    """One decoder layer: attention and a gated MLP, both behind an RMS norm and added to the stream."""

    arch: Architecture

    @nn.compact
    def __call__(self, x: jax.Array, rotation: attention.Rotation, attend: Attend) -> tuple[jax.Array, Any]:
        """x [B, T, D] -> [B, T, D], and what `attend(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H])` returned beside its
        [B, T, N, H]. Computes in x's dtype."""
        arch, rows, tokens = self.arch, *x.shape[:2]
        w = {
            name: self.param(name, _initial(spec), spec.shape).astype(x.dtype)
            for name, spec in layer_specs(arch).items()
        }
        with jax.named_scope('attention'):
            y = rms_norm(x, w['attention_norm'], arch.eps)

            def heads(name: str, count: int) -> jax.Array:
                out = y @ w[name]
                out = out + w[f'{name}_bias'] if arch.qkv_bias else out
                return out.reshape(rows, tokens, count, arch.head_size)

            q, k, v = heads('query', arch.heads), heads('key', arch.kv_heads), heads('value', arch.kv_heads)
            if arch.qk_norm:
                q, k = rms_norm(q, w['query_norm'], arch.eps), rms_norm(k, w['key_norm'], arch.eps)
            q, k = attention.rotate(q, rotation), attention.rotate(k, rotation)
            attended, state = attend(q, k, v)
            x = x + attended.reshape(rows, tokens, -1).astype(x.dtype) @ w['output']
        with jax.named_scope('mlp'):
            y = rms_norm(x, w['mlp_norm'], arch.eps)
            x = x + (nn.silu(y @ w['gate']) * (y @ w['up'])) @ w['down']
        return x, state


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Over the last axis, in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


# --- training ---------------------------------------------------------------------------------------------------------


def hidden(
    params: Params,
    arch: Architecture,
    ids: jax.Array,
    lengths: jax.Array,
    *,
    remat: bool | str = False,
    dtype: Any = jnp.float32,
    rows_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Final-norm hidden states f32[B, T, D] of right-padded ids i32[B, T]; exactly 0 behind each row's length i32[B].

    remat: recompute each layer in the backward pass; a third more work, for memory that grows with L by [B, T, D] only.
        True keeps nothing within a layer; the name of one of `REMAT` keeps something and recomputes less.
    dtype: of the arithmetic; parameters are cast where they are used, so gradients come back in their own dtype.
    rows_sharding: keeps the activations split by rows on a mesh, so that the compiler gathers weights, not rows.
    """
    chex.assert_rank(ids, 2)
    chex.assert_shape(lengths, ids.shape[:1])
    tokens = ids.shape[1]
    turn = attention.rotation(arch, jnp.arange(tokens)[None])
    attend = attention.causal(lengths, tokens, arch.head_size, jnp.dtype(dtype))

    def keep(x: jax.Array) -> jax.Array:
        return x if rows_sharding is None else jax.lax.with_sharding_constraint(x, rows_sharding)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x, _ = Layer(arch).apply({'params': layer}, x, turn, lambda q, k, v: (attend(q, k, v), None))
        return keep(x), None

    if remat:
        name = 'nothing' if remat is True else remat
        if name not in REMAT:
            raise ConfigError(f'remat {name!r} is no policy; there are {", ".join(REMAT)}')
        block = jax.checkpoint(
            block, prevent_cse=False, policy=REMAT[name]
        )  # the scan itself keeps the recomputation apart
    x, _ = jax.lax.scan(block, keep(params['embed'][ids].astype(dtype)), params['layers'])
    x = rms_norm(x, params['final_norm'], arch.eps).astype(jnp.float32)
    return jnp.where((jnp.arange(tokens) < lengths[:, None])[..., None], x, 0.0)


def logits(params: Params, arch: Architecture, hidden: jax.Array, *, dtype: Any = jnp.float32) -> jax.Array:
    """f32[..., V] of hidden states [..., D], over all V rows of the embedding; products in `dtype`, sums in float32."""
    x = hidden.astype(dtype)
    if arch.tied:
        return jnp.einsum('...d,vd->...v', x, params['embed'].astype(dtype), preferred_element_type=jnp.float32)
    return jnp.einsum('...d,dv->...v', x, params['head'].astype(dtype), preferred_element_type=jnp.float32)


# --- decoding ---------------------------------------------------------------------------------------------------------


def unstack(params: Params, arch: Architecture, dtype: Any = None) -> Params:
    """The same parameters with 'layers' as a tuple of L dicts, cast to `dtype` if given.

    Call it once per policy update, under a `jit` of its own, and pass the result to the decode functions.
    """
    cast = params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], cast['layers']) for i in range(arch.layers))
    return {**cast, 'layers': layers}


def init_cache(arch: Architecture, rows: int, slots: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache of `slots` tokens for each of `rows` rows."""

    def empty() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((rows, arch.kv_heads, slots, arch.head_size), dtype) for _ in range(arch.layers))

    return Cache(k=empty(), v=empty())


def init_staging(arch: Architecture, rows: int, steps: int, dtype: Any = jnp.float32) -> Cache:
    """The buffers of a chunk of `steps` decode steps: a cache of that many slots."""
    return init_cache(arch, rows, steps, dtype)


def extend(
    params: Params,
    arch: Architecture,
    cache: Cache,
    ids: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    reach: int | None = None,
) -> tuple[jax.Array, Cache]:
    """Appends tokens to the cache: (hidden f32[B, T, D], cache).

    params come from `unstack`. ids i32[B, T] hold count i32[B] tokens each, right padded; they take the slots and
    positions start i32[B] onward, and see the slots before them and each other causally. What lies behind `count`, or
    falls behind the last slot, is not written; hidden states there mean nothing (a caller keeps start + count <= S).
    reach: a static bound on start + count; only that many slots are read.
    """
    chex.assert_rank(ids, 2)
    chex.assert_shape([start, count], ids.shape[:1])
    tokens = ids.shape[1]
    reach = cache.slots if reach is None else min(reach, cache.slots)
    offsets = jnp.arange(tokens)
    positions = start[:, None] + offsets  # [B, T]
    turn = attention.rotation(arch, positions)
    x = params['embed'][ids].astype(cache.k[0].dtype)
    keys, values = [], []
    for layer, old_k, old_v in zip(params['layers'], cache.k, cache.v, strict=True):

        def attend(q, k, v, old_k=old_k, old_v=old_v):
            new_k, new_v = (
                _write(old, attention.heads_first(new), start, count) for old, new in ((old_k, k), (old_v, v))
            )
            return attention.attend(q, new_k[:, :, :reach], new_v[:, :, :reach], positions), (new_k, new_v)

        x, (new_k, new_v) = Layer(arch).apply({'params': layer}, x, turn, attend)
        keys.append(new_k)
        values.append(new_v)
    x = rms_norm(x, params['final_norm'], arch.eps).astype(jnp.float32)
    return x, Cache(k=tuple(keys), v=tuple(values))


def _write(old: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Puts new [B, K, T, H] into slots start.. of old [B, K, S, H]; behind `count` or S nothing is written."""
    rows, _, tokens, _ = new.shape
    offsets = jnp.arange(tokens)
    slots = jnp.where(offsets < count[:, None], start[:, None] + offsets, old.shape[2])  # [B, T]; S drops
    updates = new.transpose(0, 2, 1, 3).astype(old.dtype)  # the indexed axes come first: [B, T, K, H]
    return old.at[jnp.arange(rows)[:, None], :, slots].set(updates, mode='drop', unique_indices=False)


def decode_step(
    params: Params,
    arch: Architecture,
    cache: Cache,
    staging: Cache,
    step: jax.Array,
    ids: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One token for every row, at step `step` of a chunk: (hidden f32[B, D], staging).

    ids i32[B] take position start + step, where start i32[B] is the number of cached tokens at the start of the chunk.
    Each sees the cache slots before `start` and the staging columns up to `step`, in one softmax. The cache is read
    only. Rows that stopped earlier in the chunk compute garbage that `merge` leaves behind.
    """
    chex.assert_rank(ids, 1)
    chex.assert_shape(start, ids.shape)
    turn = attention.rotation(arch, (start + step)[:, None])
    in_cache = (jnp.arange(cache.slots) < start[:, None])[:, None]  # [B, 1, S]
    in_staging = (jnp.arange(staging.slots) <= step)[None, None]  # [1, 1, n]
    x = params['embed'][ids][:, None].astype(cache.k[0].dtype)
    keys, values = [], []
    for i, layer in enumerate(params['layers']):

        def attend(q, k, v, i=i):
            staged = tuple(
                jax.lax.dynamic_update_slice_in_dim(old, attention.heads_first(new).astype(old.dtype), step, axis=2)
                for old, new in ((staging.k[i], k), (staging.v[i], v))
            )
            return attention.step(q, (cache.k[i], cache.v[i]), staged, in_cache, in_staging), staged

        x, (staged_k, staged_v) = Layer(arch).apply({'params': layer}, x, turn, attend)
        keys.append(staged_k)
        values.append(staged_v)
    x = rms_norm(x[:, 0], params['final_norm'], arch.eps).astype(jnp.float32)
    return x, Cache(k=tuple(keys), v=tuple(values))


def merge(cache: Cache, staging: Cache, start: jax.Array, count: jax.Array) -> Cache:
    """Moves the first count i32[B] staged columns of each row into the cache slots start i32[B] onward."""

    def all_layers(old: tuple[jax.Array, ...], new: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(_write(o, n, start, count) for o, n in zip(old, new, strict=True))

    return Cache(k=all_layers(cache.k, staging.k), v=all_layers(cache.v, staging.v))
