"""Trajectories on disk: one JSON object a line, gzip without a time stamp, so that equal rollouts are equal bytes.

Lossless. How long a search took stands apart, under `time`, because it is the only part that differs between a run and
its repetition. Left out: prompts as text (whoever shows a rollout decodes its ids), and rewards (the step has them).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sesa_jax.records import Search, Trajectory, Turn, document_from_json, to_json


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write the file whole or not at all (a temporary file beside it, then a rename)."""
    path = Path(path)
    partial = path.with_name(path.name + '.partial')
    with partial.open('wb') as raw:
        with gzip.GzipFile(filename='', fileobj=raw, mode='wb', compresslevel=6, mtime=0) as file:
            for trajectory in trajectories:
                line = json.dumps(_to_line(trajectory), allow_nan=False, separators=(',', ':'))
                file.write(line.encode() + b'\n')
        raw.flush()
        os.fsync(raw.fileno())
    partial.replace(path)


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Inverse of `write_trajectories`. A damaged file is a ValueError that names the line."""
    trajectories = []
    try:
        with gzip.open(path, 'rt', encoding='utf-8') as file:
            for line in file:
                trajectories.append(_from_line(json.loads(line)))
    except (EOFError, gzip.BadGzipFile, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: line {len(trajectories) + 1} is not a trajectory ({error!r})') from error
    return trajectories


def _to_line(trajectory: Trajectory) -> dict[str, Any]:
    line = to_json(trajectory)
    line['is_action'] = ''.join('1' if flag else '0' for flag in trajectory.is_action)
    # The shortest decimal that gives the same float32; the float64 one is twice as long.
    line['logprobs'] = [float(str(value)) for value in trajectory.logprobs]
    line['time'] = {'latency': [search.pop('latency') for search in line['searches']]}
    return line


def _from_line(line: dict[str, Any]) -> Trajectory:
    latency = line.pop('time')['latency']
    searches = tuple(
        Search(s['query'], tuple(document_from_json(d) for d in s['documents']), s['outcome'], seconds)
        for s, seconds in zip(line.pop('searches'), latency, strict=True)
    )
    return Trajectory(
        ids=np.array(line.pop('ids'), np.int32),
        is_action=np.array([flag == '1' for flag in line.pop('is_action')], bool),
        logprobs=np.array(line.pop('logprobs'), np.float32),
        turns=tuple(Turn(**turn) for turn in line.pop('turns')),
        searches=searches,
        card_ids=tuple(line.pop('card_ids')),
        **line,
    )
