"""The forward passes of a causal language model: training, appending to a cache, and one decode step.

One Linen module, `Layer`, holds the arithmetic of a layer once, for all families; the three passes differ only in the
attention that they hand to it (attention.py). Parameters, cache and staging buffers are arguments and results, nothing
is mutable.

* `hidden` scans over stacked layers: one compiled layer, for training and log-probs.
* `prefill`, `extend` and `decode_step` run over a tuple of layers (`unstack`). Slicing stacked weights inside a jitted
  step would keep a second copy of them alive, and a stacked cache would be copied in each step.
* A cache is [B, K, S, H]: both products of attention read it in place. With [B, S, K, H] the CPU transposes the whole
  cache twice per layer and step.
* Rows that begin with the same prompt share its keys and values (`Slots`): they are kept, and read, once a group.
* In a chunk of decode steps the slots do not change: step i writes column i of the small staging buffers, and `merge`
  moves them into the slots once, at the end of the chunk.

Left out: sampling, stopping and batching (rollout/), and the loss (grpo/). Alphabet: see arch.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
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
    'none': None,
    'nothing': jax.checkpoint_policies.nothing_saveable,
    'projections': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What the backward pass finds of a layer: all of it (no remat), nothing, or the outputs of its seven matrices."""
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys (after norm and rotation) and values of every layer, one array per layer."""

    k: tuple[jax.Array, ...]  # L of [B, K, S, H]
    v: tuple[jax.Array, ...]  # L of [B, K, S, H]

    @property
    def rows(self) -> int:
        return self.k[0].shape[0]

    @property
    def size(self) -> int:
        return self.k[0].shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The memory of R rows in Q groups of R / Q consecutive rows: the prompt of each group once, and the rows' own
    tokens in blocks, so that a step reads and passes on only the blocks that are in use."""

    prompt: Cache  # [Q, K, P, H]
    own: tuple[Cache, ...]  # each [R, K, S, H]; own token i of a row lies in the block that holds place i

    @property
    def group_size(self) -> int:
        return self.own[0].rows // self.prompt.rows

    @property
    def begins(self) -> tuple[int, ...]:
        """The first place of each block."""
        return tuple(itertools.accumulate((block.size for block in self.own[:-1]), initial=0))


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

        def dense(y: jax.Array, name: str) -> jax.Array:
            # As matrices: of three axes XLA would transpose the gradient of the output for that of the weights, slowly.
            flat = y.reshape(-1, y.shape[-1])
            out = flat @ w[name]
            if self.has_variable('params', f'{name}_a'):  # an adapter stands beside it (lora.py)
                a, b = (self.get_variable('params', f'{name}_{part}').astype(x.dtype) for part in 'ab')
                out = out + (flat @ a) @ b
            return out.reshape(*y.shape[:-1], -1)

        with jax.named_scope('attention'):
            y = rms_norm(x, w['attention_norm'], arch.eps)

            def heads(name: str, count: int) -> jax.Array:
                out = dense(y, name)
                out = out + w[f'{name}_bias'] if arch.qkv_bias else out
                return out.reshape(rows, tokens, count, arch.head_size)

            q, k, v = heads('query', arch.heads), heads('key', arch.kv_heads), heads('value', arch.kv_heads)
            if arch.qk_norm:
                q, k = rms_norm(q, w['query_norm'], arch.eps), rms_norm(k, w['key_norm'], arch.eps)
            q, k = attention.rotate(q, rotation), attention.rotate(k, rotation)
            attended, state = attend(q, k, v)
            x = x + dense(attended.reshape(rows, tokens, -1).astype(x.dtype), 'output')
        with jax.named_scope('mlp'):
            y = rms_norm(x, w['mlp_norm'], arch.eps)
            x = x + dense(nn.silu(dense(y, 'gate')) * dense(y, 'up'), 'down')
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
    remat: str = 'none',
    dtype: Any = jnp.float32,
    rows_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Final-norm hidden states f32[B, T, D] of right-padded ids i32[B, T]; exactly 0 behind each row's length i32[B].

    remat: what the backward pass finds of a layer instead of computing it again, one of `REMAT`. With 'nothing', a third
        more work, for memory that grows with L by [B, T, D] only.
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

    if remat not in REMAT:
        raise ConfigError(f'remat {remat!r} is no policy; there are {", ".join(REMAT)}')
    if policy := REMAT[remat]:  # the scan itself keeps the recomputation apart
        block = jax.checkpoint(block, prevent_cse=False, policy=policy)
    x, _ = jax.lax.scan(block, keep(params['embed'][ids].astype(dtype)), params['layers'])
    x = rms_norm(x, params['final_norm'], arch.eps).astype(jnp.float32)
    return jnp.where((jnp.arange(tokens) < lengths[:, None])[..., None], x, 0.0)


def logits(params: Params, arch: Architecture, hidden: jax.Array, *, dtype: Any = jnp.float32) -> jax.Array:
    """f32[..., V] of hidden states [..., D], over all V rows of the embedding; products in `dtype`, sums in float32."""
    weights = params['embed' if arch.tied else 'head'].astype(dtype)
    product = '...d,vd->...v' if arch.tied else '...d,dv->...v'
    return jnp.einsum(product, hidden.astype(dtype), weights, preferred_element_type=jnp.float32)


def logits_gradient(
    weights: jax.Array, arch: Architecture, hidden: jax.Array, slope: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `logits` of hidden states [M, D], for slope f32[M, V]: to the embedding [V, D] or head [D, V] that is
    the `weights`, in float32, and to the hidden states, in their dtype. Products in the weights' dtype, sums in float32;
    the transpose that JAX makes rounds the first to the weights' dtype and takes the slope into the products as it is."""
    slope = slope.astype(weights.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if arch.tied:
        to_weights, to_hidden = product('mv,md->vd', slope, hidden), product('mv,vd->md', slope, weights)
    else:
        to_weights, to_hidden = product('md,mv->dv', hidden, slope), product('mv,dv->md', slope, weights)
    return to_weights, to_hidden.astype(hidden.dtype)


# --- decoding ---------------------------------------------------------------------------------------------------------


def unstack(params: Params, arch: Architecture, dtype: Any = None) -> Params:
    """The same parameters with 'layers' as a tuple of L dicts, cast to `dtype` if given; where arch.vocab is larger than
    theirs, embedding and head have zeros behind it.

    Call it once per policy update, under a `jit` of its own, and pass the result to the decode functions.
    """
    cast = params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], cast['layers']) for i in range(arch.layers))
    more = arch.vocab - cast['embed'].shape[0]
    words = {'embed': jnp.pad(cast['embed'], ((0, more), (0, 0)))}
    if not arch.tied:
        words['head'] = jnp.pad(cast['head'], ((0, 0), (0, more)))
    return {**cast, **words, 'layers': layers}


def init_cache(arch: Architecture, rows: int, size: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache of `size` tokens for each of `rows` rows."""

    def empty() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((rows, arch.kv_heads, size, arch.head_size), dtype) for _ in range(arch.layers))

    return Cache(k=empty(), v=empty())


def init_slots(
    arch: Architecture, groups: int, group_size: int, prompt: int, blocks: Sequence[int], dtype: Any = jnp.float32
) -> Slots:
    """Empty slots: `prompt` tokens for each group, and blocks of so many own tokens for each of its rows."""
    own = tuple(init_cache(arch, groups * group_size, size, dtype) for size in blocks)
    return Slots(init_cache(arch, groups, prompt, dtype), own)


def prefill(params: Params, arch: Architecture, ids: jax.Array, lengths: jax.Array, dtype: Any = jnp.float32) -> Cache:
    """Keys and values [B, K, T, H] of right-padded rows ids i32[B, T] that begin at position 0; lengths i32[B]. What
    lies behind a row's length means nothing. params come from `unstack`."""
    chex.assert_rank(ids, 2)
    chex.assert_shape(lengths, ids.shape[:1])
    attend = attention.causal(lengths, ids.shape[1], arch.head_size, jnp.dtype(dtype))
    turn = attention.rotation(arch, jnp.arange(ids.shape[1])[None])
    x = params['embed'][ids].astype(dtype)
    keys, values = [], []
    for layer in params['layers']:
        x, (k, v) = Layer(arch).apply({'params': layer}, x, turn, lambda q, k, v: (attend(q, k, v), (k, v)))
        keys.append(attention.heads_first(k).astype(dtype))
        values.append(attention.heads_first(v).astype(dtype))
    return Cache(k=tuple(keys), v=tuple(values))


def extend(
    params: Params,
    arch: Architecture,
    slots: Slots,
    rows: jax.Array,
    ids: jax.Array,
    prompt_length: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, Slots]:
    """Appends tokens to some rows: (hidden f32[E, T, D], slots).

    params come from `unstack`. rows i32[E] without repetition; R marks padding. ids i32[E, T] hold count i32[E] tokens
    each, right padded; they become the own tokens start i32[E] onward, behind a prompt of prompt_length i32[E] tokens,
    and see what lies before them and each other causally. What lies behind `count`, or falls behind the last block, is
    not written; hidden states there mean nothing.
    """
    chex.assert_rank(ids, 2)
    chex.assert_shape([rows, prompt_length, start, count], ids.shape[:1])
    offsets = jnp.arange(ids.shape[1])
    positions = (prompt_length + start)[:, None] + offsets  # [E, T]
    turn = attention.rotation(arch, positions)
    known = [_positions(slots.prompt.size, 0, prompt_length, 0)]
    for begin, block in zip(slots.begins, slots.own, strict=True):
        known.append(_positions(block.size, begin, start + count, prompt_length))
    key_positions = jnp.concatenate(known, axis=1)  # [E, P + S]
    group = rows // slots.group_size
    x = params['embed'][ids].astype(slots.prompt.k[0].dtype)
    own = [([], []) for _ in slots.own]  # keys and values of each block, a layer after the other
    for i, layer in enumerate(params['layers']):

        def attend(q, k, v, i=i):
            # Written first and read from there: writes that do not come before the reads make XLA copy all slots.
            for begin, block, olds in zip(slots.begins, slots.own, own, strict=True):
                for old, new, done in ((block.k[i], k, olds[0]), (block.v[i], v, olds[1])):
                    done.append(_write(old, rows, attention.heads_first(new), start - begin, count))
            k, v = (
                jnp.concatenate([_rows(prompt, group), *(_rows(block[one][i], rows) for block in own)], axis=2)
                for one, prompt in enumerate((slots.prompt.k[i], slots.prompt.v[i]))
            )
            return attention.attend(q, k, v, positions, key_positions), None

        x, _ = Layer(arch).apply({'params': layer}, x, turn, attend)
    x = rms_norm(x, params['final_norm'], arch.eps).astype(jnp.float32)
    return x, Slots(slots.prompt, tuple(Cache(tuple(k), tuple(v)) for k, v in own))


def decode_step(
    params: Params,
    arch: Architecture,
    slots: Slots,
    staging: Cache,
    step: jax.Array,
    ids: jax.Array,
    prompt_length: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One token for every row, at step `step` of a chunk: (hidden f32[R, D], staging).

    ids i32[R] become the own tokens start + step of their rows, where start i32[R] is the number of own tokens in the
    slots at the start of the chunk, behind prompts of prompt_length i32[Q]. Each sees its group's prompt, its own
    tokens before `start` and the staging columns up to `step`, in one softmax. The slots are read only. Rows that
    stopped earlier in the chunk compute garbage that `merge` leaves behind.
    """
    chex.assert_rank(ids, 1)
    chex.assert_shape(start, ids.shape)
    chex.assert_shape(prompt_length, (slots.prompt.rows,))
    turn = attention.rotation(arch, (jnp.repeat(prompt_length, slots.group_size) + start + step)[:, None])
    in_prompt = jnp.arange(slots.prompt.size) < prompt_length[:, None]  # [Q, P]
    in_own = [
        begin + jnp.arange(block.size) < start[:, None] for begin, block in zip(slots.begins, slots.own, strict=True)
    ]
    in_staging = (jnp.arange(staging.size) <= step)[None]  # [1, n]
    x = params['embed'][ids][:, None].astype(slots.prompt.k[0].dtype)
    keys, values = [], []
    for i, layer in enumerate(params['layers']):

        def attend(q, k, v, i=i):
            staged = tuple(
                jax.lax.dynamic_update_slice_in_dim(old, attention.heads_first(new).astype(old.dtype), step, axis=2)
                for old, new in ((staging.k[i], k), (staging.v[i], v))
            )
            pieces = [
                (slots.prompt.k[i], slots.prompt.v[i], in_prompt),
                *((block.k[i], block.v[i], seen) for block, seen in zip(slots.own, in_own, strict=True)),
                (*staged, in_staging),
            ]
            return attention.step(q, pieces), staged

        x, (staged_k, staged_v) = Layer(arch).apply({'params': layer}, x, turn, attend)
        keys.append(staged_k)
        values.append(staged_v)
    x = rms_norm(x[:, 0], params['final_norm'], arch.eps).astype(jnp.float32)
    return x, Cache(k=tuple(keys), v=tuple(values))


def merge(slots: Slots, staging: Cache, start: jax.Array, count: jax.Array) -> Slots:
    """Moves the first count i32[R] staged columns of each row to its own places start i32[R] onward."""
    return _added(slots, None, staging, start, count)


def _positions(size: int, begin: int, filled: jax.Array, offset: jax.Array | int) -> jax.Array:
    """i32[E, size]: positions of the keys in places begin.. of which those below filled i32[E] hold something."""
    place = begin + jnp.arange(size)
    return jnp.where(place < filled[:, None], place + jnp.reshape(offset, (-1, 1)), attention.NOWHERE)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows `index` of x; an index outside it gives some other row."""
    return x.at[index].get(mode='clip')


def _added(slots: Slots, rows: jax.Array | None, new: Cache, start: jax.Array, count: jax.Array) -> Slots:
    """The slots with the first count i32[E] columns of `new` at the own places start i32[E] onward of rows i32[E], or of
    each row."""
    own = []
    for begin, block in zip(slots.begins, slots.own, strict=True):
        k, v = (
            tuple(_write(old, rows, one, start - begin, count) for old, one in zip(olds, news, strict=True))
            for olds, news in ((block.k, new.k), (block.v, new.v))
        )
        own.append(Cache(k, v))
    return Slots(slots.prompt, tuple(own))


def _write(old: jax.Array, rows: jax.Array | None, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Puts new [E, K, T, H] into places start.. of rows of old [R, K, S, H]; outside of it nothing is written.

    rows None: E is R, row by row, so that rows that are split over devices stay where they are.
    """
    offsets = jnp.arange(new.shape[2])
    place = start[:, None] + offsets
    place = jnp.where((offsets < count[:, None]) & (place >= 0), place, old.shape[2])  # [E, T]; S drops
    updates = new.transpose(0, 2, 1, 3).astype(old.dtype)  # the indexed axes come first: [E, T, K, H]
    if rows is None:
        return jax.vmap(lambda x, where, new: x.at[:, where].set(new.swapaxes(0, 1), mode='drop'))(old, place, updates)
    return old.at[rows[:, None], :, place].set(updates, mode='drop')
