"""Low-rank adapters (LoRA, arXiv 2106.09685): x W becomes x W + (alpha / r) (x A) B, and only A and B are trained.

The base, every W and all that has no adapter, is frozen and kept once: for all policies, and as the reference of the KL
term, which is the policy with its adapters off. B starts at 0, so a fresh policy is its base, bit for bit; A is drawn
from a normal distribution whose width keeps the variance of x.

* `applied` puts the adapters beside their matrices, for learning: no merged weights exist, and no W gets a gradient.
* `merged` adds them in, for rollouts and export: plain parameters, at no cost per token.

Left out: dropout before A, adapters of embedding, head, norms and biases, and folders in the format of PEFT.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax import config
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture, ModelError, Spec, is_spec, layer_specs
from sesa_jax.policy.transformer import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """What is trained of one policy, by the name of the projection."""

    a: dict[str, jax.Array]  # f32[L, in, r]
    b: dict[str, jax.Array]  # f32[L, r, out]
    scale: float = dataclasses.field(metadata={'static': True})  # alpha / r


Policy = Params | Adapters
"""The parameters of a policy that has all of its own, or its adapters."""


def abstract(arch: Architecture, options: config.Lora) -> dict[str, Any]:
    """The tree of Specs, {'a': {projection: [L, in, r]}, 'b': {projection: [L, r, out]}}.

    ModelError for a rank that a matrix cannot have, and for options under which nothing would be trained.
    """
    if not 0 < options.alpha < math.inf or not options.projections:
        raise ModelError('--lora.alpha must be a number above 0, and --lora.projections name one at least')
    a, b = {}, {}
    for name, spec in layer_specs(arch).items():
        if name not in options.projections:
            continue
        (rows, columns), (read, written) = spec.shape, spec.axes
        if not 0 < options.rank <= min(rows, columns):
            raise ModelError(
                f'--lora.rank {options.rank}: the matrix {name} [{rows}, {columns}] has ranks from 1 to '
                f'{min(rows, columns)}; take one of these, or leave it out of --lora.projections'
            )
        shape, axes = (arch.layers, rows, options.rank), ('layers', read, 'rank')
        a[name] = Spec(shape, axes, 'normal', 1 / math.sqrt(rows), '', False)
        shape, axes = (arch.layers, options.rank, columns), ('layers', 'rank', written)
        b[name] = Spec(shape, axes, 'zeros', 0.0, '', False)
    return {'a': a, 'b': b}


def init(arch: Architecture, options: config.Lora, seed: Sequence[int], mesh: jax.sharding.Mesh) -> Adapters:
    """Fresh adapters in the train layout. Drawn by the host, so that every mesh gets the same bits."""
    specs, rng = abstract(arch, options), np.random.default_rng(seed)

    def value(spec: Spec) -> np.ndarray:
        if spec.init == 'zeros':
            return np.zeros(spec.shape, np.float32)
        return spec.std * rng.standard_normal(spec.shape, np.float32)

    values = jax.tree.map(value, specs, is_leaf=is_spec)
    arrays = jax.tree.map(sharding.placed, values, sharding.shardings(specs, sharding.TRAIN, mesh))
    return Adapters(**arrays, scale=options.alpha / options.rank)


def shapes(arch: Architecture, options: config.Lora, mesh: jax.sharding.Mesh | None = None) -> Adapters:
    """Adapters as jax.ShapeDtypeStruct: the target of a checkpoint restore. On a mesh they lie in the train layout."""
    specs = abstract(arch, options)
    tree = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs, is_leaf=is_spec)
    if mesh is not None:
        places = sharding.shardings(specs, sharding.TRAIN, mesh)
        tree = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)
    return Adapters(**tree, scale=options.alpha / options.rank)


def applied(base: Params, adapters: Adapters) -> Params:
    """The base with the adapters beside their matrices, as `<projection>_a` and, times alpha / r, `<projection>_b`;
    `transformer.Layer` reads them."""
    beside = {f'{name}_a': a for name, a in adapters.a.items()}
    beside |= {f'{name}_b': adapters.scale * b for name, b in adapters.b.items()}
    return {**base, 'layers': {**base['layers'], **beside}}


def merged(base: Params, adapters: Adapters) -> Params:
    """Plain parameters, W + (alpha / r) A B: these in float32, the others as they are in the base."""
    layers = dict(base['layers'])
    for name, a in adapters.a.items():
        product = jnp.einsum('lir,lro->lio', a, adapters.b[name], precision=jax.lax.Precision.HIGHEST)
        layers[name] = layers[name].astype(jnp.float32) + adapters.scale * product
    return {**base, 'layers': layers}
