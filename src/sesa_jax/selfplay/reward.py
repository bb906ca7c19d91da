"""Outcomes of a step -> scores of both roles: a thin layer between the game's records and the score kernel.

Left out: the formulas, which stand in `grpo/advantage.py`.
"""

from __future__ import annotations

import numpy as np

from sesa_jax.config import Run
from sesa_jax.grpo.advantage import GroupScores, scores
from sesa_jax.selfplay.challenger import Posed
from sesa_jax.selfplay.solver import Solved

LEFT_OUT = ('outage', 'unjudged')


def score_solver(run: Run, solved: Solved) -> GroupScores:
    """Advantages, solve rate and frontier reward of each problem."""
    kinds = [outcome.kind for outcome in solved.outcomes]
    return scores(
        np.array([outcome.reward for outcome in solved.outcomes], np.float32),
        np.array(solved.group, np.int32),
        np.array([kind not in LEFT_OUT for kind in kinds], bool),
        np.array([kind == 'correct' for kind in kinds], bool),
        groups=len(solved.problems),
        penalty=run.challenger.penalty,
        frontier_shaping=run.frontier_shaping,
        normalise=run.solver.advantage,
    )


def score_challenger(run: Run, posed: Posed, solved: Solved, solver: GroupScores) -> tuple[np.ndarray, GroupScores]:
    """(rewards f32[N], scores) of the challenger's rows.

    An invalid question is paid -lambda, a valid one by the solve rate of its own group. A row is left out where a
    search or the verifier failed, and where no solver row was left to score it.
    """
    rewards = np.full(len(posed.trajectories), -run.challenger.penalty, np.float32)
    is_included = np.ones(len(rewards), bool)
    for reject in posed.rejected:
        is_included[reject.row] = reject.reason != 'outage'
    for index, problem in enumerate(solved.problems):
        if problem.challenger_row >= 0:
            rewards[problem.challenger_row] = solver.frontier_reward[index]
            is_included[problem.challenger_row] = solver.is_scored[index]
    result = scores(
        rewards,
        np.arange(len(rewards), dtype=np.int32),
        is_included,
        np.zeros(len(rewards), bool),
        groups=len(rewards),
        penalty=run.challenger.penalty,
        frontier_shaping=run.frontier_shaping,
        normalise=run.challenger.advantage,
    )
    return rewards, result
