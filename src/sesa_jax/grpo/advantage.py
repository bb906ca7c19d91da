"""The score kernel: rewards of a step's rows -> advantages, solve rates and the challenger's frontier reward.

One jitted function, `kernel`, behind one door, `scores`, that checks its arguments and pads them so that a run compiles
a handful of shapes. Groups are named by ids and never by position, so permuting rows permutes the result. Left out on
purpose: what a reward is (`selfplay/reward.py`) and which rows are left out (outage and unjudged rows: the caller says).

The rules, exactly:

* `group` (GRPO): (r - mean) / (std + 1e-6) over the rows of one group, population std. All rewards equal -> exactly 0.
* `batch` (REINFORCE++, arXiv 2501.03262): the same over all rows of the call, for a role whose groups have one member.
* `reinforce++-baseline` (the same paper's variant for several rollouts a prompt; verl's reinforce_plus_plus_baseline):
  (r - mean of its group) / (std of all these differences in the call + 1e-6). A hard and an easy group keep their own
  sizes of surprise, where `group` makes them equal. Rows weigh alike here; verl weighs each by its tokens.
* `rloo` (leave-one-out, arXiv 2402.14740): r - mean of the *other* rows of its group, no std.
* `raw`: the reward itself.
* A row alone in its group has nothing to be compared with: 0 in `group`, `reinforce++-baseline` and `rloo` (verl gives
  it the raw reward in `rloo`); the config refuses them for a role whose groups have one member.
* Rows that are left out take no part in any mean, std or rate. A group that began with two rows or more and has fewer
  than two left is dropped: its last row is left out too.
* solve rate p = correct / included. Frontier reward: -penalty at p = 0 and p = 1, else 4p(1 - p) (SESA's and SSP's
  bell with bounds 0 and 1); without frontier shaping 1 - p (SSP's main run).
"""

from __future__ import annotations

import functools
import typing
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax.config import Advantage

EPSILON = 1e-6


class GroupScores(NamedTuple):
    """Scores of N rows in M groups."""

    advantage: np.ndarray  # f32[N]; 0 where not is_included
    is_included: np.ndarray  # bool[N]; what takes part in the update: the caller's rows minus those of dropped groups
    solve_rate: np.ndarray  # f32[M]; 0 where not is_scored
    frontier_reward: np.ndarray  # f32[M]; 0 where not is_scored
    is_scored: np.ndarray  # bool[M]; False: no row is left, so nothing may be concluded and the challenger is not paid
    is_dead: np.ndarray  # bool[M]; scored, but the rule above gives every row of it advantage 0
    is_frontier: np.ndarray  # bool[M]; scored, with 0 < p < 1


def scores(
    rewards: np.ndarray,
    group: np.ndarray,
    is_included: np.ndarray,
    is_correct: np.ndarray,
    *,
    groups: int,
    penalty: float,
    frontier_shaping: bool,
    normalise: Advantage,
) -> GroupScores:
    """Scores the N rows of one role in one step.

    Args:
      rewards: f32[N]; whatever stands at a left-out row (NaN too) is never read.
      group: i32[N], the group of each row, in 0..groups-1; a group may have no row.
      is_included: bool[N], False for rows that are left out (outage, unjudged).
      is_correct: bool[N], the rows that count as solved.
      groups: M.
      penalty: lambda, paid (negative) at p = 0 and p = 1.
      frontier_shaping: False pays 1 - p to every scored group.
      normalise: see the module's docstring.

    Returns:
      GroupScores of host arrays.

    Raises:
      ValueError: shapes differ, a group id is out of range, an included reward is not finite, or `normalise` is unknown.
    """
    rewards = np.asarray(rewards, np.float32)
    group = np.asarray(group, np.int32)
    is_included, is_correct = np.asarray(is_included, bool), np.asarray(is_correct, bool)
    rows = rewards.shape[0] if rewards.ndim == 1 else -1
    for name, array in (('group', group), ('is_included', is_included), ('is_correct', is_correct)):
        if array.shape != (rows,):
            raise ValueError(f'scores: {name} has shape {array.shape}, rewards {rewards.shape}; both must be [N]')
    if normalise not in typing.get_args(Advantage):
        raise ValueError(f'scores: normalise is {normalise!r}; it must be one of {typing.get_args(Advantage)}')
    if rows and (group.min() < 0 or group.max() >= groups):
        raise ValueError(f'scores: group ids span {group.min()}..{group.max()}, but there are {groups} groups')
    if not np.isfinite(rewards[is_included]).all():
        raise ValueError(
            f'scores: rewards of rows {np.flatnonzero(is_included & ~np.isfinite(rewards))} are not finite'
        )

    # Powers of two, with a spare group for the padding rows: the number of valid questions differs from step to step.
    padded_groups = _power_of_two(groups + 1, least=8)
    padding = _power_of_two(rows, least=32) - rows
    result = kernel(
        np.pad(rewards, (0, padding)),
        np.pad(group, (0, padding), constant_values=groups),
        np.pad(is_included, (0, padding)),
        np.pad(is_correct, (0, padding)),
        np.float32(penalty),
        groups=padded_groups,
        frontier_shaping=frontier_shaping,
        normalise=normalise,
    )
    advantage, included, *per_group = (np.asarray(array) for array in result)
    return GroupScores(advantage[:rows], included[:rows], *(array[:groups] for array in per_group))


@functools.partial(jax.jit, static_argnames=('groups', 'frontier_shaping', 'normalise'))
def kernel(
    rewards: jax.Array,  # f32[N]
    group: jax.Array,  # i32[N]
    is_included: jax.Array,  # bool[N]
    is_correct: jax.Array,  # bool[N]
    penalty: jax.Array,  # f32[]
    *,
    groups: int,
    frontier_shaping: bool,
    normalise: Advantage,
) -> GroupScores:
    """`scores` on device arrays, unchecked; every rule above is in these lines."""
    chex.assert_rank([rewards, group, is_included, is_correct], 1)
    chex.assert_equal_shape([rewards, group, is_included, is_correct])

    def per_group(values: jax.Array) -> jax.Array:  # [N] -> f32[M]
        return jax.ops.segment_sum(values.astype(jnp.float32), group, groups)

    began, left = per_group(jnp.ones_like(rewards)), per_group(is_included)
    is_dropped = (began >= 2) & (left < 2)
    is_included = is_included & ~is_dropped[group]
    count = per_group(is_included)
    is_scored = count > 0
    rewards = jnp.where(is_included, rewards, 0.0)  # what a left-out row carries must not reach a sum

    correct = per_group(is_correct & is_included)
    solve_rate = correct / jnp.maximum(count, 1)
    is_frontier = (correct > 0) & (correct < count)
    bell = jnp.where(is_frontier, 4 * solve_rate * (1 - solve_rate), -penalty)
    frontier_reward = jnp.where(is_scored, bell if frontier_shaping else 1 - solve_rate, 0.0)

    if normalise == 'raw':
        advantage = rewards
        is_dead = per_group(rewards != 0) == 0
    else:
        # The whole call is one group under 'batch'. Rewards are measured from the group's least one, so that a common
        # offset costs no digits; equality is asked of max and min, because a mean of equal floats may differ from them.
        unit = jnp.zeros_like(group) if normalise == 'batch' else group
        units = 1 if normalise == 'batch' else groups
        total = functools.partial(jax.ops.segment_sum, segment_ids=unit, num_segments=units)
        low = jax.ops.segment_min(jnp.where(is_included, rewards, jnp.inf), unit, units)
        high = jax.ops.segment_max(jnp.where(is_included, rewards, -jnp.inf), unit, units)
        members = jnp.maximum(total(is_included.astype(jnp.float32)), 1)
        above = jnp.where(is_included, rewards - low[unit], 0.0)
        is_flat = ~(high > low)
        centred = jnp.where(is_included & ~is_flat[unit], above - (total(above) / members)[unit], 0.0)
        if normalise == 'rloo':  # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
            advantage = centred * (members / jnp.maximum(members - 1, 1))[unit]
        elif normalise == 'reinforce++-baseline':  # the differences have mean 0 already
            std = jnp.sqrt(jnp.sum(centred**2) / jnp.maximum(is_included.sum(), 1))
            advantage = centred / (std + EPSILON)
        else:
            std = jnp.sqrt(total(centred**2) / members)
            advantage = centred / (std[unit] + EPSILON)
        is_dead = jnp.broadcast_to(is_flat, (groups,))
    return GroupScores(
        advantage=advantage,
        is_included=is_included,
        solve_rate=jnp.where(is_scored, solve_rate, 0.0),
        frontier_reward=frontier_reward,
        is_scored=is_scored,
        is_dead=is_dead & is_scored,
        is_frontier=is_frontier & is_scored,
    )


def _power_of_two(count: int, least: int) -> int:
    return 1 << (max(count, least) - 1).bit_length()
