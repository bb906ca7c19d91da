"""Where parameters and rows live on the mesh, derived from the logical axes of the abstract tree.

A rule maps each logical axis to a mesh axis, or to none. What no rule covers, what would use a mesh axis twice, and
what a mesh axis does not divide is an error before anything is compiled, unless the rule itself says to keep it whole.

Two meshes ('data', 'model') over the same devices, in the same order. Training is fully sharded over 'data' (FSDP): weights
travel once a micro-batch, which is less than the activations that tensor parallelism would send for all but tiny
batches. Decoding splits heads, hidden units and vocabulary over 'model', so that `model` devices hold one copy of the
weights between them, and rows over 'data'. `reshard` goes from one layout to the other, `offload` to host memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from sesa_jax.policy.arch import Architecture, ModelError, Path, Spec, is_spec


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to a logical axis."""

    mesh_axis: str | None = None  # None: every device holds all of it
    or_whole: bool = False  # keep it whole where the mesh axis does not divide it; otherwise that is an error


Rules = Mapping[str, Rule]
VOCAB_BLOCK = 128  # tokens of the vocabulary whose mass the sampler sums up at once

WHOLE = Rule()
TRAIN: Rules = {
    # Fully sharded parameters: each matrix is split along D over 'data', the axis that also splits the rows. A tiny
    # model on an odd number of devices is simply held by each of them.
    'width': Rule('data', or_whole=True),
    'layers': WHOLE,
    'vocab': WHOLE,
    'heads': WHOLE,
    'kv_heads': WHOLE,
    'hidden': WHOLE,
    'norm': WHOLE,
    'rank': WHOLE,  # of adapters (lora.py)
}
DECODE: Rules = {
    **dict.fromkeys(TRAIN, WHOLE),
    'heads': Rule('model'),
    'kv_heads': Rule('model'),
    'hidden': Rule('model'),
    'vocab': Rule('model', or_whole=True),
}


def make_mesh(devices: int | None = None, model: int = 1) -> Mesh:
    """A mesh ('data', 'model') over the first `devices` devices of all processes (None or 0: all of them).

    `model`: devices of the 'model' axis. Raises ModelError for more devices than there are, or an uneven split.
    """
    present = jax.devices()
    count = devices or len(present)
    if not 0 < count <= len(present):
        raise ModelError(f'a mesh of {count} devices was asked for, but {len(present)} are present')
    if not 0 < model <= count or count % model:
        raise ModelError(f'{count} devices cannot be split into groups of {model} for tensor parallelism')
    return Mesh(np.asarray(present[:count]).reshape(count // model, model), ('data', 'model'))


def decode_mesh(arch: Architecture, devices: int | None = None, model: int = 0) -> Mesh:
    """The mesh of the decode layout. `model` 0: as many devices as query heads, kv heads and devices allow.

    Raises ModelError where `model` would cut a head in two.
    """
    count = devices or len(jax.devices())
    most = math.gcd(arch.heads, arch.kv_heads, count)
    if model and (arch.heads % model or arch.kv_heads % model):
        raise ModelError(
            f'--tensor-parallel {model}: {arch.heads} query and {arch.kv_heads} kv heads cannot be split over {model} '
            f'devices; the most for {count} devices is {most}'
        )
    return make_mesh(count, model or most)


def shardings(tree: dict[str, Any], rules: Rules, mesh: Mesh) -> dict[str, Any]:
    """A NamedSharding for every Spec of an abstract tree (`arch.abstract`)."""

    def place(keys: tuple[Any, ...], spec: Spec) -> NamedSharding:
        return NamedSharding(mesh, _partition(tuple(key.key for key in keys), spec, rules, mesh))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_spec)


def _partition(path: Path, spec: Spec, rules: Rules, mesh: Mesh) -> PartitionSpec:
    name = f'parameter {"/".join(path)} {list(spec.shape)}'
    used: list[str | None] = []
    for size, axis in zip(spec.shape, spec.axes, strict=True):
        if axis not in rules:
            raise ModelError(f'{name}: no rule for its axis {axis!r}; there are rules for {", ".join(rules)}')
        rule = rules[axis]
        if rule.mesh_axis is None:
            used.append(None)
            continue
        if rule.mesh_axis not in mesh.shape:
            raise ModelError(f'{name}: the rule for {axis!r} names mesh axis {rule.mesh_axis!r}, not in {mesh.shape}')
        ways = mesh.shape[rule.mesh_axis]
        if size % ways:
            if not rule.or_whole:
                raise ModelError(
                    f'{name}: axis {axis!r} of size {size} cannot be split over the {ways} devices of mesh axis '
                    f'{rule.mesh_axis!r}; use a number of devices that divides {size}'
                )
            used.append(None)
            continue
        if rule.mesh_axis in used:
            raise ModelError(f'{name}: two of its axes {spec.axes} would be split over mesh axis {rule.mesh_axis!r}')
        used.append(rule.mesh_axis)
    return _shortest(used, mesh)


def _shortest(axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
    """The spec without mesh axes of one device and without None at its end. JAX gives a program's result the spec of any
    argument that lies alike, so of several spellings another one may come back, and with it a second compilation."""
    kept = [axis if axis is not None and mesh.shape[axis] > 1 else None for axis in axes]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def unstacked(tree: dict[str, Any], layers: int) -> dict[str, Any]:
    """Shardings of the tree that `transformer.unstack` makes: 'layers' is a tuple, without the leading axis."""

    def one(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))

    return {**tree, 'layers': (jax.tree.map(one, tree['layers']),) * layers}


def offload(tree: Any) -> Any:
    """The tree in the pinned memory of the hosts, split as it was. Give up the original to free the devices' memory.

    Outside jit, whole trees only: what a compiled program offloads by itself has been wrong on GPUs.
    """
    return jax.tree.map(lambda x: _moved(x, 'pinned_host'), tree)


def onload(tree: Any) -> Any:
    """The inverse of `offload`."""
    return jax.tree.map(lambda x: _moved(x, 'device'), tree)


def _moved(x: jax.Array, kind: str) -> jax.Array:
    """x with its parts in another memory of the same devices."""
    place = x.sharding.with_memory_kind(kind)
    if x.is_fully_addressable:
        return jax.device_put(x, place)
    # Of an array over several processes `device_put` makes a compiled program; each process moves its own parts.
    parts = [
        jax.device_put(part.data, SingleDeviceSharding(part.device, memory_kind=kind)) for part in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, place, parts)


def placed(array: np.ndarray, place: NamedSharding | None) -> jax.Array:
    """What every process has in its memory, on the devices of `place`; each process puts its own parts there.

    `device_put` would first send the array of process 0 to all others, to compare, and makes of an uncommitted scalar of
    JAX an array that cannot be read (0.10.1).
    """
    if place is None or place.is_fully_addressable:
        return jax.device_put(array, place)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def rows(mesh: Mesh) -> NamedSharding:
    """Arrays whose first axis is B: split over 'data'."""
    return NamedSharding(mesh, PartitionSpec('data'))


def cache(mesh: Mesh) -> NamedSharding:
    """Keys and values [B, K, S, H]: rows split over 'data', kv heads over 'model'."""
    return NamedSharding(mesh, PartitionSpec('data', 'model'))


def padded_vocab(vocab: int, mesh: Mesh) -> int:
    """The vocabulary of a decode copy: it holds `vocab`, and each device of 'model' gets whole blocks of the sampler."""
    block = VOCAB_BLOCK * mesh.shape['model']
    return -(-vocab // block) * block


def decode_arch(arch: Architecture, mesh: Mesh) -> Architecture:
    return dataclasses.replace(arch, vocab=padded_vocab(arch.vocab, mesh))


def logits(mesh: Mesh, vocab: int) -> NamedSharding:
    """Logits [B, V] of a decode step: V is split over 'model' where that leaves whole blocks of the sampler."""
    return NamedSharding(mesh, PartitionSpec('data', 'model' if vocab == padded_vocab(vocab, mesh) else None))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def padded_rows(count: int, mesh: Mesh) -> int:
    """The smallest multiple of the 'data' axis that holds `count` rows; the added rows must carry no weight."""
    ways = mesh.shape['data']
    return -(-count // ways) * ways
