"""What a run tells about itself: one JSON line a step on disk, TensorBoard scalars, and the person at the terminal.

`metrics.jsonl` is the truth: it is appended durably and repeats byte for byte, but for the fields under `time`.
TensorBoard files are made from it and can be made again. Left out: what the numbers mean (`selfplay/step.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sesa_jax.run.clock import SYSTEM, Clock
from sesa_jax.run.files import canonical, sync
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.visible import clean, duration

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_RECENT = 8
"""Steps whose mean time gives the estimate of what is left."""


class MetricsLog:
    """Appends to `metrics.jsonl` and to TensorBoard. Open it after recovery has cut the file to its offset."""

    def __init__(self, folder: RunFolder, clock: Clock = SYSTEM):
        self._clock = clock
        self._file = open(folder.metrics, 'ab')  # noqa: SIM115
        sync(folder.path)  # a new file needs its name to be durable, too
        self._writer = _rebuilt(folder)

    def append(self, line: Mapping[str, Any]) -> int:
        """Write one step durably; returns the offset behind it. `line` needs `step`; `time` gets the wall clock.

        NumPy and JAX scalars become Python's. JSON has no NaN and no infinity: such a value is written as null, and its
        name is listed under `non_finite`.
        """
        bad: list[str] = []
        data = _plain(line, '', bad)
        data['step'] = int(data['step'])
        data['time'] = {**data.get('time', {}), 'wall': round(self._clock.wall(), 3)}
        if bad:
            data['non_finite'] = sorted(bad)
        self._file.write(canonical(data))
        self._file.flush()
        os.fsync(self._file.fileno())
        _scalars(self._writer, data)
        self._writer.flush()
        return self._file.tell()

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a `metrics.jsonl`. A last line that was cut off is left out; other damage is a ValueError."""
    lines = path.read_bytes().split(b'\n')
    rows = []
    for number, raw in enumerate(lines, 1):
        try:
            if raw:
                rows.append(json.loads(raw))
        except ValueError as error:
            if number == len(lines):  # no newline behind it: still being written, or torn by a crash
                continue
            raise ValueError(f'{path}, line {number} is not JSON: {error}') from error
    return rows


def rebuild_tensorboard(folder: RunFolder) -> None:
    """Make the TensorBoard folder anew from `metrics.jsonl`."""
    _rebuilt(folder).close()


def _rebuilt(folder: RunFolder) -> SummaryWriter:
    """A writer into a new TensorBoard folder that holds the steps of `metrics.jsonl`, and none that was dropped."""
    from tensorboardX import SummaryWriter  # here, for it imports torch where that is installed: seconds for a report

    shutil.rmtree(folder.tensorboard, ignore_errors=True)
    writer = SummaryWriter(str(folder.tensorboard))
    for row in read_metrics(folder.metrics) if folder.metrics.exists() else []:
        _scalars(writer, row)
    return writer


def flatten(data: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts with their keys joined by '/'; lists are leaves."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f'{prefix}{key}/')
        else:
            yield f'{prefix}{key}', value


def _scalars(writer: SummaryWriter, row: Mapping[str, Any]) -> None:
    wall = row['time']['wall']
    for name, value in flatten(row):
        if isinstance(value, int | float) and name not in ('step', 'time/wall'):
            writer.add_scalar(name, value, row['step'], walltime=wall)


def _plain(value: Any, name: str, bad: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f'{name}.{k}' if name else str(k), bad) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f'{name}.{i}', bad) for i, v in enumerate(value)]
    if hasattr(value, 'tolist'):  # NumPy and JAX, scalars and arrays
        value = np.asarray(value)
        return _plain(value.tolist(), name, bad)
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(name)
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f'metric {name} is a {type(value).__name__}: only numbers, text, lists and dicts can be written')


def get(row: Mapping[str, Any], name: str) -> Any:
    """The value at a path such as 'solver/reward_mean', or None where any part of it is missing."""
    value: Any = row
    for part in name.split('/'):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def valid_rate(row: Mapping[str, Any]) -> float | None:
    """Share of the questions asked for that were valid; None without a challenger."""
    issued, valid = get(row, 'challenger/issued'), get(row, 'challenger/valid')
    return valid / issued if issued and valid is not None else None


class Reporter:
    """Tells the person: a live panel on a terminal, one plain line a step elsewhere (logs, pipes, CI)."""

    def __init__(self, steps: int, title: str, console: Console | None = None, clock: Clock = SYSTEM):
        self._console = console or Console(highlight=False)
        self._steps, self._title, self._clock = steps, clean(title), clock
        self._marks = [clock.monotonic()]
        self._live: Live | None = None

    def __enter__(self) -> Reporter:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """One message, above the panel where there is one. Control characters and markup in it are not obeyed."""
        self._console.print(clean(text), soft_wrap=True, markup=False, emoji=False, highlight=False)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a step's line of metrics."""
        self._marks = [*self._marks, self._clock.monotonic()][-_RECENT - 1 :]
        each = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        eta = each * (self._steps - row['step'])
        if self._live is not None:
            self._live.update(panel(row, self._steps, self._title, eta))
        else:
            self.say(plain_line(row, self._steps, eta))


def plain_line(row: Mapping[str, Any], steps: int, eta: float) -> str:
    """A step on one line; what a run does not have is shown as '-'."""
    return ' | '.join(
        [
            f'step {row["step"]}/{steps}',
            f'valid {_number(valid_rate(row), ".2f")}',
            f'p {" ".join(map(str, get(row, "solver/p_histogram") or ["-"]))}',
            f'reward {_number(get(row, "solver/reward_mean"), ".3f")}',
            f'cards {_number(get(row, "bank/active"), "d")}',
            *([f'held-out {_number(get(row, "validation/solve_rate"), ".3f")}'] if row.get('validation') else []),
            f'{_number(get(row, "time/total"), ".1f")} s',
            f'ETA {duration(eta)}',
        ]
    )


def panel(row: Mapping[str, Any], steps: int, title: str, eta: float) -> Panel:
    """The live panel: progress, rates, and the histogram of how many rollouts of a problem succeeded."""
    histogram = get(row, 'solver/p_histogram') or []
    facts = Table.grid(padding=(0, 2))
    facts.add_row('valid questions', _number(valid_rate(row), '.2f'), 'cards', _number(get(row, 'bank/active'), 'd'))
    facts.add_row(
        'solver reward',
        _number(get(row, 'solver/reward_mean'), '.3f'),
        'held-out solve rate',
        _number(get(row, 'validation/solve_rate'), '.3f'),
    )
    bars = Table.grid(padding=(0, 1))
    for solved, count in enumerate(histogram):
        share = count / max(1, sum(histogram))
        bars.add_row(f'{solved}/{len(histogram) - 1} solved', Text('█' * round(30 * share)), str(count))
    progress = Table.grid(padding=(0, 1))
    progress.add_row(
        f'step {row["step"]}/{steps}',
        ProgressBar(total=max(1, steps), completed=row['step'], width=30),
        f'{_number(get(row, "time/total"), ".1f")} s a step, {duration(eta)} left',
    )
    return Panel(Group(progress, facts, bars), title=escape(title), title_align='left')


def _number(value: Any, form: str) -> str:
    return '-' if value is None else format(value, form)
