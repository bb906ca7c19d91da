"""Intervals and tests against values worked out by hand or known from tables."""

import math
import warnings

import numpy as np
import pytest

from sesa_jax.evals.statistics import Interval, mcnemar, minimum_detectable, paired_bootstrap, wilson


def test_wilson_follows_its_formula():
    z, n, k = 1.959963984540054, 10, 8
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    assert wilson(8, 10) == pytest.approx((centre - half, centre + half), abs=1e-12)


def test_wilson_touches_the_ends_exactly():
    assert wilson(0, 10).low == 0.0
    assert wilson(10, 10).high == 1.0
    assert wilson(0, 10).high == pytest.approx(0.27753, abs=1e-5)


def test_wilson_of_nothing_is_everything():
    assert wilson(0, 0) == Interval(0.0, 1.0)


@pytest.mark.parametrize(('correct', 'n'), [(-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_share(correct, n):
    with pytest.raises(ValueError, match='no share'):
        wilson(correct, n)


@pytest.mark.parametrize(
    ('wins', 'losses', 'expected'),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (10, 2, 2 * (1 + 12 + 66) / 2**12), (3, 3, 1.0), (2, 10, 158 / 4096)],
)
def test_mcnemar_is_the_exact_binomial_test(wins, losses, expected):
    assert mcnemar(wins, losses) == pytest.approx(expected, rel=1e-12)


def test_bootstrap_repeats_and_depends_on_its_seed():
    data = [[1, 0, -1, 1, 0, 0, 1, 0]]
    assert paired_bootstrap(data) == paired_bootstrap(data)
    assert any(paired_bootstrap(data, seed=s) != paired_bootstrap(data) for s in range(5))


def test_bootstrap_matches_the_normal_interval_on_many_questions():
    rng = np.random.default_rng(0)
    data = rng.choice([-1, 0, 1], p=[0.1, 0.6, 0.3], size=4000)
    half = 1.96 * data.std() / math.sqrt(len(data))
    found = paired_bootstrap([list(data)])
    assert found == pytest.approx((data.mean() - half, data.mean() + half), abs=0.1 * half)


def test_strata_take_the_difference_between_cells_out_of_the_interval():
    always, never = [1] * 50, [0] * 50
    assert paired_bootstrap([always, never]) == Interval(0.5, 0.5)  # each cell is certain, only their mix would vary
    mixed = paired_bootstrap([always + never])
    assert mixed.low < 0.45
    assert mixed.high > 0.55


def test_cells_weigh_by_their_questions():
    assert paired_bootstrap([[1] * 30, [0] * 10]) == Interval(0.75, 0.75)


def test_cells_of_one_question_and_empty_cells_are_no_special_case():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert paired_bootstrap([[1], [], [0, 0, 0]]) == Interval(0.25, 0.25)
        assert paired_bootstrap([[1]]) == Interval(1.0, 1.0)
        assert paired_bootstrap([[], []]) == Interval(-1.0, 1.0)


def test_minimum_detectable_solves_the_sample_size_formula():
    d = minimum_detectable(100, 0.2)
    need = (1.959964 * math.sqrt(0.2) + 0.841621 * math.sqrt(0.2 - d * d)) ** 2 / d**2
    assert need == pytest.approx(100, rel=1e-5)


def test_minimum_detectable_shrinks_with_more_questions_and_grows_with_more_noise():
    assert minimum_detectable(400, 0.2) < minimum_detectable(100, 0.2) < minimum_detectable(100, 0.4)


def test_minimum_detectable_has_the_power_that_it_promises():
    n, share = 300, 0.3
    d = minimum_detectable(n, share)
    rng = np.random.default_rng(1)
    wins, losses, _ = rng.multinomial(n, [(share + d) / 2, (share - d) / 2, 1 - share], size=2000).T
    power = np.mean([mcnemar(int(w), int(k)) < 0.05 for w, k in zip(wins, losses, strict=True)])
    assert 0.75 < power < 0.83  # the exact test is a little stricter than the normal approximation


def test_minimum_detectable_says_when_nothing_could_be_seen():
    assert minimum_detectable(10, 0.05) is None
    assert minimum_detectable(0, 0.5) is None
    assert minimum_detectable(100, 0.0) is None
