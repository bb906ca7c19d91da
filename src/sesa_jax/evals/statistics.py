"""How sure a measured rate or difference is. The formulas are SciPy's; this file only says which one is meant.

Intervals are two-sided at 95% everywhere. Differences are always paired: the same questions, answered under two
conditions. Left out: anything that knows what a question or a condition is (`dual_path.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95
RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_260
POWER = 0.8


class Interval(NamedTuple):
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(correct: int, n: int) -> Interval:
    """Wilson's interval of a share; [0, 1] without any observation."""
    if not 0 <= correct <= n:
        raise ValueError(f'{correct} correct of {n} is no share')
    if n == 0:
        return Interval(0.0, 1.0)
    found = stats.binomtest(correct, n).proportion_ci(CONFIDENCE, method='wilson')
    # At 0 and n the bound is exact, but for the last bit of the square root.
    return Interval(0.0 if correct == 0 else float(found.low), 1.0 if correct == n else float(found.high))


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p value of McNemar's test: of the pairs that differ, is a share of 1/2 plausible?"""
    return 1.0 if wins + losses == 0 else float(stats.binomtest(wins, wins + losses, 0.5).pvalue)


def paired_bootstrap(
    differences: Sequence[Sequence[float]], *, resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> Interval:
    """Percentile interval of the mean paired difference over all questions, questions drawn anew within each stratum.

    `differences`: for each stratum (cell), the difference of each question in it (after minus before, in [-1, 1]).
    Stratum sizes stay as they are, so the mix of the cells adds no variance. The seed is fixed: equal data, equal
    interval. Without any observation the interval is [-1, 1]. Like every bootstrap it knows only the differences that
    it saw: with a handful of questions read the exact p value beside it.
    """
    n = sum(len(stratum) for stratum in differences)
    if n == 0:
        return Interval(-1.0, 1.0)
    # A stratum of one question gives the same question in every draw: a constant, which SciPy would refuse.
    fixed = sum(stratum[0] for stratum in differences if len(stratum) == 1)
    # Sorted, so that the order of the questions cannot reach the interval.
    drawn = [np.sort(np.asarray(stratum, dtype=np.float64)) for stratum in differences if len(stratum) > 1]
    if not drawn:
        return Interval(fixed / n, fixed / n)

    def mean(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return (fixed + sum(sample.sum(axis=axis) for sample in samples)) / n

    found = stats.bootstrap(
        drawn,
        mean,
        paired=False,  # each stratum is drawn by itself; the pairing is in the differences
        vectorized=True,
        method='percentile',
        confidence_level=CONFIDENCE,
        n_resamples=resamples,
        batch=max(1, 2_000_000 // n),  # 16 MB at a time
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def minimum_detectable(n: int, discordant: float, *, power: float = POWER) -> float | None:
    """Smallest paired difference of two rates that a two-sided 5% McNemar test of `n` pairs finds with `power`.

    `discordant`: share of the pairs that differ. Normal approximation: with d the difference, n d^2 =
    (z_a sqrt(discordant) + z_b sqrt(discordant - d^2))^2. None if even a difference as large as `discordant` (all
    discordant pairs one way) would be missed.
    """
    if n <= 0 or discordant <= 0:
        return None
    z_alpha, z_beta = stats.norm.ppf(0.5 + CONFIDENCE / 2), stats.norm.ppf(power)

    def excess(d: float) -> float:
        spread = math.sqrt(max(0.0, discordant - d * d))
        return math.sqrt(n) * d - z_alpha * math.sqrt(discordant) - z_beta * spread

    if excess(discordant) < 0:
        return None
    return float(optimize.brentq(excess, 0.0, discordant))
