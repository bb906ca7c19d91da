"""Where rows live while they are rolled out: pools of places whose memory and shapes are known before the first launch.

`shared` holds groups of rows that begin with one prompt, `single` rows with a prompt of their own, and `long` the few
that outgrow a short place. Each has its slots on the device (policy/transformer.py), and remembers here who lives where.
Left out: when a row comes, moves and goes (driver.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from sesa_jax.config import Lengths, Rollout
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.transformer import Slots
from sesa_jax.rollout.row import Row

STEP = 32  # lengths of prompts and observations are padded to multiples of it


@dataclass(frozen=True)
class PoolShape:
    """Places for groups * group_size rows."""

    name: str
    groups: int
    group_size: int
    prompt: int  # tokens of a group's prompt
    blocks: tuple[int, ...]  # own tokens of a row, block by block

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def capacity(self) -> int:
        return sum(self.blocks)

    def level(self, own: int) -> int:
        """How many blocks hold `own` tokens."""
        blocks, held = 1, self.blocks[0]
        while held < own:
            held += self.blocks[blocks]
            blocks += 1
        return blocks

    def nbytes(self, arch: Architecture, item: int) -> int:
        """Bytes of keys and values with `item` bytes a number, over all devices."""
        token = 2 * arch.layers * arch.kv_heads * arch.head_size * item
        return token * (self.groups * self.prompt + self.rows * self.capacity)


def pool_shapes(places: Rollout, lengths: Lengths, group_size: int, mesh: Mesh) -> dict[str, PoolShape]:
    """The pools of an engine, by name. Rows are split over the 'data' axis of the mesh, so their numbers are rounded up.

    Of the blocks of a short place each is as long as all before it: most rows end within the first ones, and those are
    then all that is read.
    """
    short = min(places.short, lengths.response) if places.long else lengths.response
    prompt = _round_up(lengths.prompt, STEP)
    first = _round_up(-(-short // 2 ** (places.blocks - 1)), 8)
    blocks = (first, *(first * 2**n for n in range(places.blocks - 1)))
    groups = sharding.padded_rows(max(places.rows // group_size, 1), mesh)
    shapes = {
        'shared': PoolShape('shared', groups, group_size, prompt, blocks),
        'single': PoolShape('single', sharding.padded_rows(places.single, mesh), 1, prompt, blocks),
    }
    if short < lengths.response:
        whole = _round_up(lengths.response, 8)
        shapes['long'] = PoolShape('long', sharding.padded_rows(places.long, mesh), 1, prompt, (whole,))
    return shapes


def prompt_sizes(lengths: Lengths) -> tuple[int, ...]:
    """Lengths that prompts are padded to: about a third of the longest, and the longest."""
    longest = _round_up(lengths.prompt, STEP)
    return tuple(sorted({_round_up(-(-longest // 3), STEP), longest}))


def observation_sizes(lengths: Lengths) -> tuple[int, ...]:
    """Lengths that observations are padded to: half of the longest, and the longest. An observation's last token is the
    next to be fed, the one that was sampled before it is taken in with the others: as many as it has."""
    longest = _round_up(lengths.observation, STEP)
    return tuple(sorted({_round_up(-(-longest // 2), STEP), longest}))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


class Pool:
    """The places of one shape: slots on the device and their inhabitants. A group is free when none of its rows is left."""

    def __init__(self, shape: PoolShape, slots: Slots) -> None:
        self.shape, self.slots = shape, slots
        self.prompt_length = np.zeros(shape.groups, np.int32)
        self.rows: list[Row | None] = [None] * shape.rows

    @property
    def living(self) -> list[int]:
        """Places with a row that has not ended, in order."""
        return [place for place, row in enumerate(self.rows) if row is not None]

    def free_groups(self) -> list[int]:
        size = self.shape.group_size
        taken = {place // size for place in self.living}
        return [group for group in range(self.shape.groups) if group not in taken]

    def settle(self, group: int, rows: Sequence[Row]) -> None:
        """Give a free group to rows with the same prompt."""
        begin = group * self.shape.group_size
        self.rows[begin : begin + len(rows)] = rows
        self.prompt_length[group] = rows[0].prompt_length

    def prompts_of(self, places: Sequence[int]) -> np.ndarray:
        """i32, the prompt length of each place."""
        return self.prompt_length[np.asarray(places, np.int32) // self.shape.group_size]


def placed(mesh: Mesh, slots: Slots) -> Slots:
    """Inside jit: keep rows and groups split over the 'data' axis of the mesh, and the kv heads over 'model'."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding.cache(mesh)), slots)
