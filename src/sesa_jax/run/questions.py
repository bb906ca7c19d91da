"""The questions of each step on disk, with what became of them: `questions/step_00012.jsonl.gz`.

With their hashes and the bank version that each was answered under, so that a second run can take the schedule of the
first. Left out: the rollouts themselves (`rollout/trajectory.py`); a row here and a trajectory there share the
problem's id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sesa_jax.records import Outcome, Problem, to_json
from sesa_jax.run.files import read_jsonl_gz, write_jsonl_gz


def question_row(
    problem: Problem, outcomes: Sequence[Outcome], card_ids: Sequence[str], bank_version: int
) -> dict[str, Any]:
    """One problem of a step as JSON-ready data; `outcomes` in the order of the samples."""
    return {
        **to_json(problem),
        'question_hash': problem.question_hash,
        'target_hash': problem.target.hash,
        'card_ids': list(card_ids),
        'bank_version': bank_version,
        'outcomes': [to_json(outcome) for outcome in outcomes],
    }


def write_questions(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Durable, whole or not at all, with bytes that repeat."""
    write_jsonl_gz(path, rows)


def read_questions(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one step's file, in order. A damaged file is a ValueError that names it."""
    try:
        yield from read_jsonl_gz(path)
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f'{path} is damaged: {error}') from error
