"""One step of the game, as data: targets -> problems -> rollouts -> outcomes -> scores -> two updates -> a ledger.

Everything that a step changes is in its result; the caller commits it. Randomness comes from (seed, step) alone, so a
step that is played again from the same states and the same bank snapshot gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sesa_jax.grpo import learner
from sesa_jax.grpo.advantage import GroupScores
from sesa_jax.grpo.learner import TrainState
from sesa_jax.grpo.microbatch import Sample
from sesa_jax.policy import sharding
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Failure, Problem, Role, Target, Trajectory
from sesa_jax.run import distributed
from sesa_jax.run.clock import Laps
from sesa_jax.selfplay import challenger, reward, solver
from sesa_jax.selfplay.challenger import Posed, ReusePool
from sesa_jax.selfplay.game import Game
from sesa_jax.selfplay.solver import Solved

States = Mapping[Role, TrainState]
NOTHING_POSED = Posed((), (), (), ())


@dataclass(frozen=True)
class Ledger:
    """What a step did. The bank takes `retrieved`, `helpful`, `hurt` and `failures`; the rest is for the record."""

    step: int
    posed: Posed
    solved: Solved
    scores: GroupScores  # the solver's
    pool: ReusePool
    retrieved: Counter[str]
    helpful: Counter[str]
    hurt: Counter[str]
    failures: tuple[Failure, ...]
    metrics: dict[str, Any]


def step(
    game: Game, states: States, references: Mapping[Role, Params], pool: ReusePool, number: int, laps: Laps
) -> tuple[States, Ledger]:
    """Play and learn step `number` (from 1) from the bank snapshot that the host holds.

    references: frozen initial parameters of each role, for the KL term.
    """
    run = game.run
    before = Counter(game.engine.counters)
    posed = NOTHING_POSED
    if run.self_play:
        with laps('challenger rollouts'):
            targets = game.world.targets(run.problems, number, run.seed)
            posed = challenger.pose(
                game, states['challenger'].params, targets, step=number, weights_version=int(states['challenger'].step)
            )
        problems = posed.problems
        if run.challenger.reuse:
            problems = tuple(sorted(problems + pool.fill(posed, step=number, seed=run.seed), key=lambda p: p.slot))
    else:
        problems = dataset_problems(game, number)
    distributed.agree(0, problems, 'set of problems')  # they decide which programs run next, and how often

    with laps('solver rollouts'):
        solved = solver.solve(
            game, states['solver'].params, problems, step=number, weights_version=int(states['solver'].step)
        )
    scores = reward.score_solver(run, solved)
    retrieved, helpful, hurt = solver.utility(solved)
    failures = solver.failures(solved, scores.is_frontier, step=number) if run.failure_distillation else ()

    new_states: dict[Role, TrainState] = dict(states)
    updates: dict[str, dict[str, Any]] = {}
    with laps('solver update'):
        new_states['solver'], updates['solver'] = _update(
            game, states['solver'], references['solver'], solved.trajectories, scores, solved.group,
            temperature=run.solver.temperature, mini_batch=run.grpo.mini_batch,
        )  # fmt: skip
    challenger_rewards = np.zeros(0, np.float32)
    if run.self_play:
        challenger_rewards, challenger_scores = reward.score_challenger(run, posed, solved, scores)
        if not run.freeze_challenger:
            with laps('challenger update'):
                rows = list(range(len(posed.trajectories)))
                new_states['challenger'], updates['challenger'] = _update(
                    game, states['challenger'], references['challenger'], posed.trajectories, challenger_scores, rows,
                    temperature=run.challenger.temperature, mini_batch=None,
                )  # fmt: skip

    metrics = {
        'step': number,
        'challenger': _challenger_metrics(posed, problems, challenger_rewards) if run.self_play else None,
        'solver': _solver_metrics(solved, scores, run.solver.rollouts),
        'update': updates,
        'tokens': {k: v for k, v in (game.engine.counters - before).items() if k != 'compilations'},
    }
    pool = pool.after(posed, step=number, clear_every=run.challenger.pool_clear_every)
    return new_states, Ledger(number, posed, solved, scores, pool, retrieved, helpful, hurt, failures, metrics)


def _update(
    game: Game,
    state: TrainState,
    reference: Params,
    rows: Sequence[Trajectory],
    scores: GroupScores,
    group: Sequence[int],
    *,
    temperature: float,
    mini_batch: int | None,
) -> tuple[TrainState, dict[str, Any]]:
    """One role's GRPO update. The state that comes in is used up."""
    run, engine = game.run, game.engine
    state = sharding.onload(state)
    samples = [
        Sample(row, float(scores.advantage[i]), bool(scores.is_included[i]), bool(scores.is_dead[group[i]]))
        for i, row in enumerate(rows)
    ]
    state, metrics = learner.update(
        state,
        reference,
        samples,
        arch=engine.arch,
        grpo=run.grpo,
        optimizer=run.optimizer,
        temperature=temperature,
        allowed=game.tokenizer.vocab_size,
        response_length=run.lengths.response,
        mini_batch=mini_batch,
        mesh=game.mesh,
        dtype=engine.dtype,
    )
    return sharding.offload(state) if run.offload else state, metrics


def dataset_problems(game: Game, number: int) -> tuple[Problem, ...]:
    """The step's questions for methods without self-play: a fixed order of the training questions, drawn by seed."""
    questions = game.training_questions
    epoch_size = len(questions)
    problems = []
    for slot in range(game.run.problems):
        epoch, place = divmod((number - 1) * game.run.problems + slot, epoch_size)
        order = np.random.default_rng([game.run.seed, epoch, 41]).permutation(epoch_size)
        question = questions[order[place]]
        target = Target(question.answers[0], question.answers[1:], question.hops, source=question.id)
        problems.append(Problem(challenger.problem_id(number, slot), slot, question.text, target))
    return tuple(problems)


def _challenger_metrics(posed: Posed, problems: tuple[Problem, ...], rewards: np.ndarray) -> dict[str, Any]:
    rejected = Counter(reject.reason for reject in posed.rejected)
    reused = sum(problem.reused for problem in problems)
    rows = posed.trajectories
    return {
        'issued': len(rows),
        'valid': len(posed.problems),
        'rejected': dict(sorted(rejected.items())),
        'reused': reused,
        'empty': len(rows) - len(problems),
        'reward_mean': float(rewards.mean()) if len(rewards) else 0.0,
        'searches_mean': float(np.mean([len(row.searches) for row in rows])) if rows else 0.0,
    }


def _solver_metrics(solved: Solved, scores: GroupScores, rollouts: int) -> dict[str, Any]:
    kinds = Counter(outcome.kind for outcome in solved.outcomes)
    correct = np.zeros(len(solved.problems), int)
    np.add.at(correct, solved.group, [outcome.kind == 'correct' for outcome in solved.outcomes])
    judged = [o.reward for o in solved.outcomes if o.kind not in reward.LEFT_OUT]
    return {
        'issued': len(solved.outcomes),
        **{kind: kinds[kind] for kind in ('correct', 'wrong', 'malformed', 'unjudged', 'outage')},
        'p_histogram': np.bincount(correct, minlength=rollouts + 1).tolist(),
        'reward_mean': float(np.mean(judged)) if judged else 0.0,
        'frontier': int(scores.is_frontier.sum()),
        'dead': int(scores.is_dead.sum()),
        'stops': dict(sorted(Counter(row.stop_reason for row in solved.trajectories).items())),
        'searches_mean': float(np.mean([len(row.searches) for row in solved.trajectories])) if judged else 0.0,
    }
