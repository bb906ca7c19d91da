"""Where parameters and rows live on the mesh, derived from the logical axes of the abstract tree.

A rule maps each logical axis to a mesh axis, or to none. What no rule covers, what would use a mesh axis twice, and
what a mesh axis does not divide is an error before anything is compiled, unless the rule itself says to keep it whole.

Left out: tensor parallelism for decoding (the mesh has a 'model' axis, of size 1 now) and several processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sesa_jax.policy.arch import ModelError, Path, Spec, is_spec


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to a logical axis."""

    mesh_axis: str | None = None  # None: every device holds all of it
    or_whole: bool = False  # keep it whole where the mesh axis does not divide it; otherwise that is an error


Rules = Mapping[str, Rule]

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
}
DECODE: Rules = dict.fromkeys(TRAIN, WHOLE)
"""Each device decodes its own rows with all of the parameters."""


def make_mesh(devices: int | None = None) -> Mesh:
    """A mesh ('data', 'model') over the first `devices` devices (None or 0: all), model = 1."""
    present = jax.devices()
    count = devices or len(present)
    if not 0 < count <= len(present):
        raise ModelError(f'a mesh of {count} devices was asked for, but {len(present)} are present')
    return Mesh(np.asarray(present[:count]).reshape(count, 1), ('data', 'model'))


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
    return PartitionSpec(*used)


def rows(mesh: Mesh) -> NamedSharding:
    """Arrays whose first axis is B: split over 'data'."""
    return NamedSharding(mesh, PartitionSpec('data'))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def padded_rows(count: int, mesh: Mesh) -> int:
    """The smallest multiple of the 'data' axis that holds `count` rows; the added rows must carry no weight."""
    ways = mesh.shape['data']
    return -(-count // ways) * ways
