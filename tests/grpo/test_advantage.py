"""Exact values of the score kernel, and a float64 reference over random cases."""

import functools
import typing

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sesa_jax.config import Advantage
from sesa_jax.grpo import advantage
from sesa_jax.policy import sharding

RULES = typing.get_args(Advantage)
COMPARED = ('group', 'batch', 'reinforce++-baseline', 'rloo')  # all but the raw reward
WITHIN = ('group', 'reinforce++-baseline', 'rloo')  # compared within the group
STD_HALF = 0.5 / (0.5 + 1e-6)  # |advantage| of a group whose rewards are half 0, half 1


def score(
    rewards, group=None, *, included=None, correct=None, groups=None, normalise='group', shaping=True, penalty=0.1
):
    rewards = np.asarray(rewards, np.float32)
    group = np.zeros(len(rewards), int) if group is None else np.asarray(group)
    included = np.ones(len(rewards), bool) if included is None else np.asarray(included, bool)
    correct = rewards > 0.5 if correct is None else np.asarray(correct, bool)
    groups = int(group.max()) + 1 if groups is None else groups
    return advantage.scores(
        rewards, group, included, correct, groups=groups, penalty=penalty, frontier_shaping=shaping, normalise=normalise
    )


def test_groups_are_named_by_ids():
    got = score([1, 1, 0, 1], [0, 1, 0, 1]).advantage
    np.testing.assert_allclose(got, [STD_HALF, 0, -STD_HALF, 0], rtol=1e-6)
    assert got[1] == 0 and got[3] == 0


def test_population_std_with_its_epsilon():
    std = np.sqrt(0.16)  # of 1, 0, 0, 0, 0 with ddof 0
    want = np.array([0.8, -0.2, -0.2, -0.2, -0.2]) / (std + 1e-6)
    np.testing.assert_allclose(score([1, 0, 0, 0, 0]).advantage, want, rtol=1e-6)


def test_tiny_differences_are_damped_by_epsilon():
    want = 1e-6 / (1e-6 + 1e-6)
    np.testing.assert_allclose(score([0.0, 2e-6]).advantage, [-want, want], rtol=1e-5)


@pytest.mark.parametrize('rewards', [[0.1] * 3, [0.7] * 5, [-0.1] * 7, [0.0] * 4, [1 / 3] * 6])
@pytest.mark.parametrize('normalise', COMPARED)
def test_equal_rewards_give_exactly_zero(rewards, normalise):
    got = score(rewards, normalise=normalise)
    assert (got.advantage == 0).all() and got.is_dead.tolist() == [True]


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    np.testing.assert_allclose(score([1, 0, 0, 0, 0], normalise='rloo').advantage, [1] + [-0.25] * 4, rtol=1e-6)
    got = score([3, 1, 0, 4, 1], [1, 0, 0, 1, 0], normalise='rloo').advantage
    np.testing.assert_allclose(got, [-1, 0.5, -1, 1, 0.5], rtol=1e-6)


def test_leave_one_out_of_left_out_rows():
    got = score([1, np.nan, 0, 1], included=[1, 0, 1, 1], normalise='rloo')
    np.testing.assert_allclose(got.advantage, [0.5, 0, -1, 0.5], rtol=1e-6)
    assert got.advantage[1] == 0


def test_group_baseline_then_one_std_for_the_step():
    """Differences 0.5, -0.5 and 1, -1: the second group keeps twice the size; the dead one counts in the std."""
    got = score([1, 3, 0, 1, 7, 7, 7], [0, 1, 0, 1, 2, 2, 2], normalise='reinforce++-baseline')
    want = np.array([0.5, 1, -0.5, -1, 0, 0, 0]) / (np.sqrt(2.5 / 7) + 1e-6)
    np.testing.assert_allclose(got.advantage, want, rtol=1e-6)
    assert got.is_dead.tolist() == [False, False, True] and (got.advantage[4:] == 0).all()


@pytest.mark.parametrize('normalise', WITHIN)
def test_a_row_alone_in_its_group_is_compared_with_nothing(normalise):
    got = score([5, 1, 0], [1, 0, 0], normalise=normalise)
    assert got.advantage[0] == 0 and (got.advantage[1:] != 0).all()
    assert got.is_included.all() and got.is_dead.tolist() == [False, True]


@pytest.mark.parametrize('normalise', COMPARED)
def test_a_common_offset_changes_nothing(normalise):
    rewards, group = np.array([0.0, 1.0, 0.5, 0.25]), [0, 1, 0, 1]
    near, far = (score(rewards + offset, group, normalise=normalise).advantage for offset in (0, 4096))
    np.testing.assert_allclose(near, far, rtol=1e-6)


@pytest.mark.parametrize('normalise', WITHIN)
def test_dead_groups_are_found_per_group(normalise):
    got = score([0.1, 0.1, 0.1, 0, 1, 1], [0, 0, 0, 1, 1, 1], normalise=normalise)
    assert got.is_dead.tolist() == [True, False]
    assert (got.advantage[:3] == 0).all() and (got.advantage[3:] != 0).all()


@pytest.mark.parametrize('normalise', RULES)
def test_permuting_rows_permutes_the_result(normalise):
    rng = np.random.default_rng(0)
    rewards, group = rng.choice([0.0, 0.5, 1.0], 23), rng.integers(0, 5, 23)
    included = rng.random(23) > 0.2
    order = rng.permutation(23)
    plain = score(rewards, group, included=included, groups=5, normalise=normalise)
    shuffled = score(rewards[order], group[order], included=included[order], groups=5, normalise=normalise)
    np.testing.assert_allclose(shuffled.advantage, plain.advantage[order], atol=1e-6)
    np.testing.assert_array_equal(shuffled.is_included, plain.is_included[order])
    np.testing.assert_array_equal(shuffled.solve_rate, plain.solve_rate)


def test_left_out_rows_take_no_part():
    got = score([1, np.nan, 0, 1], included=[1, 0, 1, 1], correct=[1, 1, 0, 1])
    alone = score([1, 0, 1])
    np.testing.assert_array_equal(got.advantage[[0, 2, 3]], alone.advantage)
    assert got.advantage[1] == 0 and not got.is_included[1]
    np.testing.assert_allclose(got.solve_rate, [2 / 3], rtol=1e-6)


def test_a_group_with_one_row_left_is_dropped():
    got = score([1, 0, 1, 0], [0, 0, 1, 1], included=[1, 0, 1, 1])
    assert got.is_included.tolist() == [False, False, True, True]
    assert got.is_scored.tolist() == [False, True]
    assert got.advantage[0] == 0 and got.solve_rate[0] == 0
    assert got.frontier_reward[0] == 0  # neither -lambda nor 1 - p: nothing is known about the question
    assert not got.is_dead[0] and not got.is_frontier[0]


@pytest.mark.parametrize('normalise', ['batch', 'reinforce++-baseline'])
def test_a_dropped_group_leaves_the_statistics_of_the_step_alone(normalise):
    got = score([5, 0, 1, 0], [0, 0, 1, 1], included=[1, 0, 1, 1], normalise=normalise)
    np.testing.assert_allclose(got.advantage, [0, 0, STD_HALF, -STD_HALF], rtol=1e-6)


def test_a_group_that_began_with_one_row_stays():
    got = score([1, 0], [0, 1])
    assert got.is_included.all() and got.is_scored.all()
    assert (got.advantage == 0).all()


def test_batch_normalises_over_the_whole_step():
    rewards = np.array([0.64, -0.1, 0.96, -0.1, 1.0])
    got = score(rewards, np.arange(5), included=[1, 1, 1, 1, 0], normalise='batch')
    kept = rewards[:4]
    np.testing.assert_allclose(got.advantage[:4], (kept - kept.mean()) / (kept.std() + 1e-6), rtol=1e-5)
    assert got.advantage[4] == 0 and not got.is_dead.any()


def test_raw_is_the_reward_itself():
    got = score([0.64, 0.0, -0.1, 0.3], np.arange(4), included=[1, 1, 1, 0], normalise='raw')
    np.testing.assert_array_equal(got.advantage, np.float32([0.64, 0.0, -0.1, 0.0]))
    assert got.is_dead.tolist() == [False, True, False, False]


@pytest.mark.parametrize(('solved', 'want'), list(enumerate([-0.1, 0.64, 0.96, 0.96, 0.64, -0.1])))
def test_frontier_reward(solved, want):
    got = score([1] * solved + [0] * (5 - solved))
    np.testing.assert_allclose(got.frontier_reward, [want], rtol=1e-6)
    assert got.is_frontier.tolist() == [0 < solved < 5]


@pytest.mark.parametrize('solved', range(6))
def test_without_shaping_the_challenger_earns_one_minus_p(solved):
    got = score([1] * solved + [0] * (5 - solved), shaping=False)
    np.testing.assert_allclose(got.frontier_reward, [1 - solved / 5], atol=1e-7)


def test_solve_rate_counts_correct_rows_not_rewards():
    got = score([0.2, 0.9, 0.9, 0.0], correct=[1, 0, 0, 0])
    assert got.solve_rate.tolist() == [0.25]


def test_identical_questions_stay_apart_and_empty_groups_are_unscored():
    got = score([1, 0, 1, 1], [0, 0, 2, 2], groups=4)
    assert got.is_scored.tolist() == [True, False, True, False]
    assert got.solve_rate.tolist() == [0.5, 0, 1, 0]
    np.testing.assert_allclose(got.frontier_reward, [1, 0, -0.1, 0], rtol=1e-6)


def test_no_rows_at_all():
    got = score(np.zeros(0), np.zeros(0, int), groups=3)
    assert got.advantage.shape == (0,) and not got.is_scored.any() and (got.frontier_reward == 0).all()


def test_few_shapes_are_compiled():
    before = advantage.kernel._cache_size()
    for rows in range(33, 65):
        score(np.arange(rows) % 2, np.arange(rows) // 5, groups=15)
    assert advantage.kernel._cache_size() - before <= 1


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'group': [0, 3]}, 'group ids span 0..3, but there are 2 groups'),
        ({'group': [-1, 0]}, 'group ids span -1..0'),
        ({'rewards': [1.0, np.inf]}, r'rewards of rows \[1\] are not finite'),
        ({'included': [True]}, r'is_included has shape \(1,\)'),
        ({'normalise': 'std'}, "normalise is 'std'"),
    ],
)
def test_the_door_refuses(change, message):
    arguments = {'rewards': [1.0, 0.0], 'group': [0, 1], 'groups': 2, 'correct': [True, False]} | change
    with pytest.raises(ValueError, match=message):
        score(**arguments)


def steps(count=3, rows=32, groups=8):
    """Arguments of the kernel for `count` steps, [S, N] each."""
    rng = np.random.default_rng(1)
    shape = (count, rows)
    correct = rng.random(shape) < 0.4
    rewards = (correct + 0.25 * rng.integers(0, 3, shape)).astype(np.float32)
    return rewards, rng.integers(0, groups, shape).astype(np.int32), rng.random(shape) < 0.8, correct


def kernel(normalise):
    return functools.partial(advantage.kernel, groups=8, frontier_shaping=True, normalise=normalise)


@pytest.mark.parametrize('normalise', RULES)
def test_vmap_over_steps(normalise):
    arguments, penalty = steps(), np.float32(0.1)
    many = jax.vmap(kernel(normalise), in_axes=(0, 0, 0, 0, None))(*arguments, penalty)
    for i in range(3):
        one = kernel(normalise)(*(x[i] for x in arguments), penalty)
        for name, got, want in zip(one._fields, many, one, strict=True):
            np.testing.assert_allclose(got[i], want, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('normalise', ['group', 'reinforce++-baseline'])
def test_rows_that_lie_on_a_mesh(normalise):
    """Of one device: the sharding that GSPMD sees, without the cost of a process with eight."""
    mesh = sharding.make_mesh(1)
    arguments = [x[0] for x in steps()]
    plain = kernel(normalise)(*arguments, np.float32(0.1))
    placed = kernel(normalise)(*(jax.device_put(x, sharding.rows(mesh)) for x in arguments), np.float32(0.1))
    for name, got, want in zip(plain._fields, placed, plain, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)
    assert set(placed.advantage.sharding.device_set) == set(mesh.devices.flat)


def reference(rewards, group, included, correct, groups, normalise):
    """The rules once more, row by row, in float64."""
    included = included.copy()
    for g in range(groups):
        mine = group == g
        if mine.sum() >= 2 and (mine & included).sum() < 2:
            included &= ~mine
    out, rate = np.zeros(len(rewards)), np.full(groups, np.nan)
    for i in np.flatnonzero(included):
        mine = included & (group == group[i])
        unit = included if normalise == 'batch' else mine
        kept, r = rewards[unit], rewards[i]
        if normalise == 'raw':
            out[i] = r
        elif np.ptp(kept) == 0:
            out[i] = 0
        elif normalise == 'rloo':
            mine[i] = False
            out[i] = r - rewards[mine].mean()
        else:
            out[i] = r - kept.mean()
            if normalise != 'reinforce++-baseline':
                out[i] /= kept.std() + 1e-6
    if normalise == 'reinforce++-baseline' and included.any():
        out /= out[included].std() + 1e-6
    for g in range(groups):
        kept = (group == g) & included
        if kept.any():
            rate[g] = correct[kept].mean()
    return out, included, rate


VALUES = st.one_of(st.sampled_from([0.0, 1.0, -0.1, 0.64, 0.96]), st.floats(-3, 3, width=16))
ROW = st.tuples(VALUES, st.integers(0, 5), st.sampled_from([True, True, True, False]), st.booleans())


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=24),
    dead=st.sets(st.integers(0, 5), max_size=3),
    shaping=st.booleans(),
    penalty=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_against_float64(rows, dead, shaping, penalty):
    """1,000 cases, 200 sets of rows under five rules: ids in any order, masked rows, groups of one, dead groups."""
    rewards, group, included, correct = (np.array(column) for column in zip(*rows, strict=True))
    rewards = np.float32(rewards).astype(np.float64)
    for g in dead:
        rewards[group == g] = np.float32(0.1)
    for normalise in RULES:  # padded to one shape, so each is compiled twice
        got = score(
            rewards, group, included=included, correct=correct, groups=6, normalise=normalise, shaping=shaping,
            penalty=penalty,
        )  # fmt: skip
        want, kept, rate = reference(rewards, group, included, correct, 6, normalise)
        np.testing.assert_allclose(got.advantage, want, rtol=2e-4, atol=2e-4, err_msg=normalise)
        np.testing.assert_array_equal(got.is_included, kept)
        np.testing.assert_array_equal(got.is_scored, ~np.isnan(rate))
        np.testing.assert_allclose(got.solve_rate, np.nan_to_num(rate), rtol=1e-6)
        np.testing.assert_array_equal(got.is_frontier, (rate > 0) & (rate < 1))
        is_dead = [(group[kept] == g).any() and not want[kept & (group == g)].any() for g in range(6)]
        if normalise != 'batch':  # there, a row may stand at the mean of a step that lives
            np.testing.assert_array_equal(got.is_dead, is_dead)
        bell = np.where((rate > 0) & (rate < 1), 4 * rate * (1 - rate), -penalty) if shaping else 1 - rate
        np.testing.assert_allclose(got.frontier_reward, np.where(np.isnan(rate), 0, bell), rtol=1e-5, atol=1e-6)
