"""Rows of different lengths -> padded arrays of few shapes. NumPy only; nothing here knows a model.

Rows are sorted by length; the longest row that is left chooses the length bucket of the next micro-batch, and the next
longest rows fill it up to the token budget. The last one takes a quarter of the rows where that holds the rest.
Left out: packing several rows into one.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

from sesa_jax.records import Trajectory

LENGTHS = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2176, 2560, 3072, 3584, 4352, 5120, 6144, 8192, 12288)
"""Padded row lengths. Every one that occurs is compiled, so they are few: from 1,280 to 6,144 each is about a fifth longer
than the one before. Of 1,280 log-normal lengths (mean 2,500, cv 0.6) on eight devices 14 % of the tokens are padding, in 13
shapes; with steps of up to a third it was 15 to 16 %."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One row for the learner: what was sampled, and what it was worth."""

    trajectory: Trajectory
    advantage: float
    is_included: bool = True
    is_dead: bool = False  # its group taught nothing (`GroupScores.is_dead`)

    @property
    def order(self) -> tuple[int, str, int]:
        """Longest first, then by name: a total order, so that the caller's order of rows means nothing."""
        return -len(self.trajectory.ids), self.trajectory.problem_id, self.trajectory.sample


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Right-padded arrays of B rows; padding rows have length 0 and do not count."""

    ids: np.ndarray  # i32[B, T]
    is_action: np.ndarray  # bool[B, T]
    sampler: np.ndarray  # f32[B, T]; the sampler's log-probs
    lengths: np.ndarray  # i32[B]
    advantage: np.ndarray  # f32[B]
    is_counted: np.ndarray  # bool[B]

    @property
    def digest(self) -> tuple[tuple[int, ...], int]:
        """(shape, CRC-32 of all values)."""
        return self.ids.shape, zlib.crc32(b''.join(array.tobytes() for array in vars(self).values()))


def check(samples: Sequence[Sample], allowed: int) -> None:
    """Raises ValueError, naming the row, for one that cannot be trained on."""
    for sample in samples:
        row = sample.trajectory
        name, length = row.rollout_id, len(row.ids)
        if not len(row.is_action) == len(row.logprobs) == length:
            raise ValueError(f'{name}: {length} ids, {len(row.is_action)} action flags, {len(row.logprobs)} log-probs')
        if length > LENGTHS[-1]:
            raise ValueError(f'{name}: {length} tokens; the longest row that can be trained on has {LENGTHS[-1]}')
        if row.is_action[0]:
            raise ValueError(f'{name}: its first token is an action, but nothing comes before it')
        if row.ids.min() < 0 or row.ids[row.is_action].max(initial=0) >= allowed:
            raise ValueError(f'{name}: an action token is not below {allowed}, the number of ids that may be sampled')
        if not np.isfinite(sample.advantage):
            raise ValueError(f'{name}: its advantage is {sample.advantage}')


def by_problem(samples: Sequence[Sample], problems: int | None) -> list[list[Sample]]:
    """Mini-batches of `problems` problems each (the last may have fewer), by problem id; None: one of all rows."""
    if not samples:
        return []
    names = sorted({s.trajectory.problem_id for s in samples})
    problems = problems or len(names)
    part = {name: i // problems for i, name in enumerate(names)}
    minis: list[list[Sample]] = [[] for _ in range(part[names[-1]] + 1)]
    for sample in samples:
        minis[part[sample.trajectory.problem_id]].append(sample)
    return minis


def micro_batches(samples: Sequence[Sample], tokens: int, ways: int = 1) -> list[MicroBatch]:
    """Cuts rows into micro-batches of about `tokens` padded tokens, each a multiple of `ways` rows.

    A micro-batch has at least `ways` rows, also where those hold more tokens than asked for. Each length that occurs
    has at most two row counts: the one that fills the budget, and a quarter of it for what is left at the end.
    """
    rest = sorted(samples, key=lambda s: s.order)
    out = []
    while rest:
        length = next(size for size in LENGTHS if size >= len(rest[0].trajectory.ids))
        quarter, full = _row_counts(tokens // length, ways)
        count = quarter if len(rest) <= quarter else full
        out.append(_pad(rest[:count], count, length))
        rest = rest[count:]
    return out


def _row_counts(most: int, ways: int) -> tuple[int, int]:
    """The row counts that are compiled at one length: a quarter of the full one, rounded up, and the full one."""
    full = max(most // ways, 1)
    return -(-full // 4) * ways, full * ways


def _pad(samples: Sequence[Sample], rows: int, length: int) -> MicroBatch:
    batch = MicroBatch(
        ids=np.zeros((rows, length), np.int32),
        is_action=np.zeros((rows, length), bool),
        sampler=np.zeros((rows, length), np.float32),
        lengths=np.zeros(rows, np.int32),
        advantage=np.zeros(rows, np.float32),
        is_counted=np.zeros(rows, bool),
    )
    for i, sample in enumerate(samples):
        row, size = sample.trajectory, len(sample.trajectory.ids)
        batch.ids[i, :size], batch.is_action[i, :size], batch.sampler[i, :size] = row.ids, row.is_action, row.logprobs
        batch.lengths[i], batch.advantage[i], batch.is_counted[i] = size, sample.advantage, True
    return batch
