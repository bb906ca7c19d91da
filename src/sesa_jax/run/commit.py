"""One file says that a step happened: `steps/00012.json`, written last, atomically, after both stores are durable.

Everything that a resumed run starts from is named in it by digest, so weights, moments, bank, queue and metrics carry
the same step without a transaction over several stores. Recovery takes the newest record whose parts verify and drops
what lies behind it: a run that is killed at any moment and resumed ends with the same bits as one that was not.
Left out: how each part is checked (the caller passes that in) and how the bank is cut back (`skills/bank.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sesa_jax.run.crash import crash_point
from sesa_jax.run.files import remove, seal, sync, unseal, write_atomic
from sesa_jax.run.folder import RunFolder

__all__ = ['CommitRecord', 'Recovery', 'crash_point', 'newest_valid', 'read', 'recorded', 'truncate_behind', 'write']


@dataclasses.dataclass(frozen=True)
class CommitRecord:
    """Where a run stood at the end of a step."""

    step: int  # 0: before the first step
    checkpoint: str  # digest of the saved tree (`checkpoint.save`)
    bank_seq: int  # last event of the bank; 0 without a bank
    bank_hash: str  # chain hash up to that event
    queue_hash: str  # of the pending failures
    metrics_offset: int  # bytes of metrics.jsonl that belong to steps up to this one
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON-ready state that no store holds, such as the reuse pool and counters; sealed with the record."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The record to go on from (None: start at the beginning), and why each newer one cannot be used."""

    record: CommitRecord | None
    skipped: tuple[tuple[int, str], ...]  # (step, reason), newest first


def write(folder: RunFolder, record: CommitRecord) -> None:
    """Commit a step. The checkpoint, the bank and the metrics of `record` must be durable before the call."""
    crash_point('commit.before_write')
    for place in (folder.rollouts, folder.questions):  # their files are synced by who writes them, their names here
        sync(place)
    write_atomic(folder.record_file(record.step), seal(dataclasses.asdict(record)), 'commit')


def read(folder: RunFolder, step: int) -> CommitRecord:
    """The record of a step. FileNotFoundError if there is none, ValueError if a bit of it changed."""
    file = folder.record_file(step)
    data = unseal(file.read_bytes(), str(file))
    if data.keys() != {field.name for field in dataclasses.fields(CommitRecord)}:
        raise ValueError(f'{file} has fields that this version does not understand')
    return CommitRecord(**data)


def recorded(folder: RunFolder) -> list[int]:
    """Steps that have a record, whole or damaged, in order."""
    return sorted(int(file.stem) for file in folder.steps.glob('*.json') if file.stem.isdigit())


def newest_valid(
    folder: RunFolder,
    verify_checkpoint: Callable[[CommitRecord], str | None],
    verify_bank: Callable[[CommitRecord], str | None],
) -> Recovery:
    """Walk back from the newest record to one whose parts all verify.

    The callbacks return None for a good part, else the reason in words. The metrics are checked here: the file must
    reach the offset, and its last line up to there must be that step's.
    """
    skipped = []
    for step in reversed(recorded(folder)):
        try:
            record = read(folder, step)
            reason = None if record.step == step else f'{folder.record_file(step)} is the record of step {record.step}'
        except (OSError, ValueError) as error:
            reason = str(error)
        if reason is None:
            reason = _verify_metrics(folder.metrics, record) or verify_checkpoint(record) or verify_bank(record)
        if reason is None:
            return Recovery(record, tuple(skipped))
        skipped.append((step, reason))
    return Recovery(None, tuple(skipped))


def truncate_behind(folder: RunFolder, record: CommitRecord | None) -> None:
    """Remove everything that came after `record` (None: everything but the config and the bank).

    Records go first, newest first: killed in between, the next recovery finds the same record again. A final
    evaluation and report of a later step go too. The bank is cut back by its own `open(at_seq=...)`.
    """
    last = record.step if record else -1
    for step in reversed([step for step in recorded(folder) if step > last]):
        remove(folder.record_file(step))
    sync(folder.steps)
    crash_point('truncate.after_records')
    for child in folder.checkpoints.iterdir():
        if child.name.isdigit() and int(child.name) > last:
            remove(child)
    for place in (folder.rollouts, folder.questions):
        for file in place.glob('step_*.jsonl.gz'):
            number = file.name.removeprefix('step_').removesuffix('.jsonl.gz')
            if number.isdigit() and int(number) > last:
                remove(file)
    if folder.metrics.exists():
        with open(folder.metrics, 'r+b') as file:
            file.truncate(record.metrics_offset if record else 0)
            os.fsync(file.fileno())
    if folder.evaluation.exists() and _step_of(folder.evaluation) != last:
        remove(folder.evaluation)
        remove(folder.report)
    for place in (folder.checkpoints, folder.rollouts, folder.questions, folder.path):
        sync(place)


def _step_of(evaluation: Path) -> int | None:
    try:
        return json.loads(evaluation.read_text(encoding='utf-8')).get('step')
    except (ValueError, AttributeError):
        return None


def _verify_metrics(metrics: Path, record: CommitRecord) -> str | None:
    """None if the first `metrics_offset` bytes end with the line of the record's step."""
    if record.metrics_offset == 0:
        return None
    if not metrics.exists():
        return f'{metrics} is missing'
    with open(metrics, 'rb') as file:
        head = file.read(record.metrics_offset)
    if len(head) < record.metrics_offset:
        return f'{metrics} has {len(head)} bytes, the record needs {record.metrics_offset}'
    try:
        found = json.loads(head.splitlines()[-1])['step']
    except (ValueError, KeyError, TypeError):
        found = None
    if not head.endswith(b'\n') or found != record.step:
        return f'{metrics} does not hold the line of step {record.step} where the record says'
    return None
