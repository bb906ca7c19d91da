"""Curves and a heat map as numbers that a template turns into inline SVG. No drawing library, no script, no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 560, 200  # of a whole chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 26  # margins that hold the labels
MAX_COLUMNS = 80
"""Columns of the heat map; more steps than that share a column."""


class Tick(NamedTuple):
    at: float  # SVG coordinate
    label: str


class Mark(NamedTuple):
    x: float
    y: float
    label: str  # shown when the pointer rests on it


class Series(NamedTuple):
    name: str
    points: str  # of a polyline; steps without a value are passed over
    marks: tuple[Mark, ...]
    last: str  # the newest value, as text


class Curve(NamedTuple):
    series: tuple[Series, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    share: float  # 0..1, the darkness
    label: str


class HeatMap(NamedTuple):
    boxes: tuple[Box, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def curve(
    steps: Sequence[int], values: dict[str, Sequence[float | None]], *, top: float | None = None, form: str = '.2f'
) -> Curve | None:
    """One line per entry of `values` over `steps`; steps with None are passed over. None if there is nothing to draw.

    The vertical axis starts at 0 (a curve that starts elsewhere makes noise look like news) and ends at `top`, or above
    the largest value.
    """
    found = [value for line in values.values() for value in line if value is not None]
    if not found:
        return None
    high = top if top is not None else _above(max(found))
    first, last = steps[0], steps[-1]

    def x_of(step: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * ((step - first) / (last - first) if last > first else 0.5), 2)

    def y_of(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value, high) / high), 2)

    series = []
    for name, line in values.items():
        known = [(step, value) for step, value in zip(steps, line, strict=True) if value is not None]
        if not known:
            continue
        marks = tuple(Mark(x_of(s), y_of(v), f'{name}, step {s}: {format(v, form)}') for s, v in known)
        points = ' '.join(f'{mark.x},{mark.y}' for mark in marks)
        series.append(Series(name, points, marks, format(known[-1][1], form)))
    y_ticks = tuple(Tick(y_of(high * part / 4), _short(high * part / 4)) for part in range(5))
    return Curve(tuple(series), _step_ticks(first, last, x_of), y_ticks)


def heat_map(steps: Sequence[int], histograms: Sequence[Sequence[int]]) -> HeatMap | None:
    """Columns are steps, rows the number of solved rollouts (0 at the bottom), darkness the share of the problems.

    Steps with a histogram of another length than the last one's are left out (there is one G in a run).
    """
    rows = [(step, counts) for step, counts in zip(steps, histograms, strict=True) if counts and sum(counts)]
    rows = [(step, counts) for step, counts in rows if len(counts) == len(rows[-1][1])]
    if not rows:
        return None
    group = -(-len(rows) // MAX_COLUMNS)
    columns = [rows[i : i + group] for i in range(0, len(rows), group)]
    levels = len(rows[0][1])
    width, height = (WIDTH - LEFT - RIGHT) / len(columns), (HEIGHT - TOP - BOTTOM) / levels
    boxes = []
    for i, column in enumerate(columns):
        counts = [sum(c[level] for _, c in column) for level in range(levels)]
        span = f'step {column[0][0]}' + (f' to {column[-1][0]}' if len(column) > 1 else '')
        for level, count in enumerate(counts):
            label = f'{span}: {count} of {sum(counts)} problems with {level} of {levels - 1} solved'
            x, y = LEFT + i * width, TOP + (levels - 1 - level) * height
            share = round(count / sum(counts), 4)
            boxes.append(Box(round(x, 2), round(y, 2), round(width, 2), round(height, 2), share, label))
    picked = sorted({0, len(columns) // 2, len(columns) - 1})
    x_ticks = tuple(Tick(round(LEFT + (i + 0.5) * width, 2), str(columns[i][0][0])) for i in picked)
    y_ticks = tuple(
        Tick(round(TOP + (levels - 0.5 - level) * height, 2), f'{level}/{levels - 1}') for level in range(levels)
    )
    return HeatMap(tuple(boxes), x_ticks, y_ticks)


def _above(value: float) -> float:
    """The smallest of 1, 2, 4, 5, 8, 10 times a power of ten that is >= `value`; 1 for values up to 0."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** len(str(int(value))) if value >= 1 else 1.0
    return next(scale * step for step in (0.1, 0.2, 0.4, 0.5, 0.8, 1.0) if scale * step >= value)


def _short(value: float) -> str:
    return f'{value:g}' if value < 1000 else f'{value:.0f}'


def _step_ticks(first: int, last: int, x_of: Callable[[int], float]) -> tuple[Tick, ...]:
    """At most six ticks, at whole steps."""
    gap = max(1, -(-(last - first) // 5))
    return tuple(Tick(x_of(step), str(step)) for step in range(first, last + 1, gap))
