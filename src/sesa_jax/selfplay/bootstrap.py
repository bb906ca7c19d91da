"""The seed bank: handwritten cards, and cards mined from an early phase of play without updates and without
cards (the paper's priming).

Left out: which of the mined cards are new (`skills/priming.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from sesa_jax.config import ConfigError, Run
from sesa_jax.policy.lora import Policy
from sesa_jax.records import Failure, Target
from sesa_jax.selfplay import challenger, solver
from sesa_jax.selfplay.game import Game
from sesa_jax.selfplay.step import dataset_problems
from sesa_jax.skills import distill, priming
from sesa_jax.skills.card import DraftCard
from sesa_jax.worlds import World

FIRST_STEP = 900_000
"""Random numbers of the bootstrap's batches are those of steps from here on, which no run reaches."""


def targets(run: Run, world: World) -> Iterator[Target]:
    """Every target that a run will draw, of the bootstrap and of all its steps; none without self-play."""
    if run.self_play:
        mining = range(FIRST_STEP, FIRST_STEP + run.bank.bootstrap_steps) if run.memory_priming else ()
        for step in (*mining, *range(1, run.steps + 1)):
            yield from world.targets(run.problems, step, run.seed)


def seed_cards(game: Game, policies: dict[str, Policy]) -> tuple[list[DraftCard], list[DraftCard]]:
    """The cards that a run starts with: (handwritten, mined).

    policies: initial parameters by role. ConfigError if the handwritten cards alone are more than the bank holds.
    """
    run = game.run
    if not run.memory_priming:
        return [], []
    game = dataclasses.replace(game, run=dataclasses.replace(run, skill_memory=False, challenger_sees_skills=False))
    handwritten = priming.handwritten()
    if len(handwritten) > run.bank.capacity:
        raise ConfigError(
            f'--bank.capacity {run.bank.capacity} is less than the {len(handwritten)} handwritten cards; '
            'raise it or use --no-memory-priming'
        )
    wrong: list[Failure] = []
    right: list[Failure] = []
    for batch in range(run.bank.bootstrap_steps):
        step = FIRST_STEP + batch
        if run.self_play:
            targets = game.world.targets(run.problems, step, run.seed)
            posed = challenger.pose(game, policies['challenger'], targets, step=step, weights_version=0)
            problems = posed.problems
        else:
            problems = dataset_problems(game, step)
        solved = solver.solve(game, policies['solver'], problems, step=step, weights_version=0)
        for row, outcome, group in zip(solved.trajectories, solved.outcomes, solved.group, strict=True):
            if outcome.kind in ('correct', 'wrong'):
                kept = right if outcome.kind == 'correct' else wrong
                kept.append(solver.record(row, outcome, solved.problems[group], 0))
    mined = distill.distill(wrong) + distill.mine(right)
    return handwritten, priming.seeds(handwritten, mined, run.bank)[len(handwritten) :]
