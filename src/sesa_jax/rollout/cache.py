"""Where the keys and values of a batch of rows live, and the few shapes that they may have.

Rows of a batch finish their turns at different times, so the rows that still decode are brought together in a small
*working* cache, and the others wait in the *parked* one. Working shapes come from a table of row counts and a table of
slot counts; that bounds how often anything is compiled. Left out: sharing the memory of a common prompt (its keys and
values are computed once and then copied), and fixed slots that outlive a batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.transformer import Cache, init_cache

log = logging.getLogger(__name__)

ROW_BUCKETS = (8, 16, 32, 80, 128)
# 32, 64, 128, 256, 384, 512, 768, 1024, 1536, ... 49152: at most half of a large bucket is empty.
LENGTH_BUCKETS = (32, 64, 128, 256, *(size * 2**n for n in range(8) for size in (384, 512)))
# Few rows with few slots are too cheap to be worth a shape of their own: decoding asks for at least so many row-slots,
# up to so many slots.
MIN_CELLS, MIN_SLOTS = 32768, 1024


def bucket(size: int, table: Sequence[int]) -> int:
    """The smallest entry of `table` that holds `size`."""
    for entry in table:
        if entry >= size:
            return entry
    raise ValueError(f'{size} does not fit into the largest bucket, {table[-1]}')


class Shapes(set[tuple[Any, ...]]):
    """Every (function, sizes) that was used so far, which is what was compiled. New ones are logged."""

    def note(self, *shape: Any) -> None:
        if shape not in self:
            log.info('new shape, compiling: %s', shape)
            self.add(shape)


class RowCache:
    """The cache of one batch: `focus` chooses the rows to work on; `work` is theirs, padded to a bucket."""

    def __init__(
        self, rows: int, row_buckets: Sequence[int], *, arch: Architecture, mesh: Mesh, dtype: Any, shapes: Shapes
    ) -> None:
        self.arch, self.mesh, self.row_buckets, self.dtype, self.shapes = arch, mesh, row_buckets, dtype, shapes
        self.total = bucket(rows, row_buckets)
        self.index = np.zeros(0, np.int32)  # i32[R], the batch row of each working row; `total` on padding
        self.needed = 0  # slots that some row may have filled, as a bucket
        self.work: Cache | None = None  # [R, K, S, H]
        self.parked: Cache | None = None  # [total, K, needed, H], made when it is first needed

    def focus(self, rows: Sequence[int], slots: int, size: int | None = None) -> None:
        """Bring batch rows `rows` into `work`, with room for `slots` tokens each.

        `size`: the exact number of working rows; None: the bucket that holds `rows`. Rows that are there already stay
        in their places, possibly beside others that the caller must leave inactive, as long as the size is the same.
        """
        slots = room = bucket(slots, LENGTH_BUCKETS)
        if size is None:
            size = bucket(len(rows), self.row_buckets)
            room = max(slots, bucket(min(MIN_CELLS // size, MIN_SLOTS), LENGTH_BUCKETS))
        if self.work is None or size != len(self.index) or not np.isin(rows, self.index).all():
            self.park()
            self.index = np.full(size, self.total, np.int32)
            self.index[: len(rows)] = rows
            if self.parked is None:
                self.work = self._empty(size, room)
            else:
                self.work = self._take(self.parked, self.index, room)
        elif room > self.work.slots:
            self.shapes.note('resize', size, self.work.slots, room)
            self.work = resize(self.mesh, self.work, room)
        self.needed = max(self.needed, slots)

    def park(self) -> None:
        """Write the working rows back."""
        if self.work is None:
            return
        if self.parked is None:
            self.parked = self._empty(self.total, self.needed)
        elif self.parked.slots < self.needed:
            self.shapes.note('resize', self.total, self.parked.slots, self.needed)
            self.parked = resize(self.mesh, self.parked, self.needed)
        self.shapes.note('put', self.total, self.parked.slots, len(self.index), self.work.slots)
        self.parked = put(self.mesh, self.parked, self.work, self.index)
        self.work = None

    def spread(self, source: np.ndarray) -> None:
        """Give each batch row the contents of batch row `source[row]`; source i32[total]."""
        self.park()
        self.parked = self._take(self.parked, source, self.parked.slots)

    def _empty(self, rows: int, slots: int) -> Cache:
        self.shapes.note('empty', rows, slots)
        return empty(self.mesh, self.arch, rows, slots, self.dtype)

    def _take(self, cache: Cache, index: np.ndarray, slots: int) -> Cache:
        self.shapes.note('take', self.total, cache.slots, len(index), slots)
        return take(self.mesh, cache, index, slots)


def placed(mesh: Mesh, cache: Cache) -> Cache:
    """Inside jit: keep the rows split over the 'data' axis of the mesh, and the kv heads over 'model'."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding.cache(mesh)), cache)


def _sized(x: jax.Array, slots: int) -> jax.Array:
    """x [B, K, S, H] with `slots` slots: filled up with zeros that no row can see."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def empty(mesh: Mesh, arch: Architecture, rows: int, slots: int, dtype: Any) -> Cache:
    return placed(mesh, init_cache(arch, rows, slots, dtype))


@functools.partial(jax.jit, static_argnums=(0, 2))
def resize(mesh: Mesh, cache: Cache, slots: int) -> Cache:
    """The cache with more slots."""
    return placed(mesh, jax.tree.map(lambda x: _sized(x, slots), cache))


@functools.partial(jax.jit, static_argnums=(0, 3))
def take(mesh: Mesh, cache: Cache, index: jax.Array, slots: int) -> Cache:
    """Rows `index` i32[R] of the cache with `slots` slots, fewer or more; an index outside it gives some other row."""

    def one(x: jax.Array) -> jax.Array:
        return _sized(x[:, :, :slots].at[index].get(mode='clip'), slots)

    return placed(mesh, jax.tree.map(one, cache))


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
def put(mesh: Mesh, cache: Cache, rows: Cache, index: jax.Array) -> Cache:
    """The cache with `rows` written to its rows `index` i32[R]; an index outside it is dropped."""
    slots = min(cache.slots, rows.slots)
    return placed(
        mesh, jax.tree.map(lambda x, new: x.at[index, :, :slots].set(new[:, :, :slots], mode='drop'), cache, rows)
    )
