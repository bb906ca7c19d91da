"""The challenger's half of a step: targets -> trajectories -> problems, or the reason why there is none.

Left out: what the challenger is paid (`reward.py`; it hangs on how the solver does) and how it learns (grpo/).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sesa_jax.host.client import Hit, VerifyItem
from sesa_jax.policy.lora import Policy
from sesa_jax.records import Problem, Rejected, Target, Trajectory
from sesa_jax.rollout.row import Request
from sesa_jax.selfplay import checks
from sesa_jax.selfplay.game import Game


@dataclass(frozen=True)
class Posed:
    """What the challenger did in one step. Row i belongs to target i and to slot i of the step's batch."""

    targets: tuple[Target, ...]
    trajectories: tuple[Trajectory, ...]
    problems: tuple[Problem, ...]  # the valid ones, by slot
    rejected: tuple[Rejected, ...]


def pose(game: Game, params: Policy, targets: Sequence[Target], *, step: int, weights_version: int) -> Posed:
    """One rollout a target, then the checks in order, then verification of what passed them.

    The challenger never sees a card, but under `challenger_sees_skills`: there, cards for its target.
    """
    run = game.run
    cards: list[tuple[Hit, ...]] = [() for _ in targets]
    if run.challenger_sees_skills:
        cards = game.host.retrieve([target.answer for target in targets], run.bank.retrieved)
    requests = [
        Request(
            role='challenger',
            problem_id=problem_id(step, slot),
            problem=slot,
            sample=0,
            prompt=game.fitted(functools.partial(game.challenger_prompt, target), hits)[0],
            temperature=run.challenger.temperature,
            max_turns=run.challenger.max_turns,
        )
        for slot, (target, hits) in enumerate(zip(targets, cards, strict=True))
    ]
    rows = game.rollout(
        params, requests, 'challenger', step=step, weights_version=weights_version, purpose='challenger search'
    )
    return _extract(game, targets, rows, step)


def problem_id(step: int, slot: int) -> str:
    return f's{step:05d}-p{slot:03d}'


def _extract(game: Game, targets: Sequence[Target], rows: Sequence[Trajectory], step: int) -> Posed:
    run, held_out = game.run, game.world.held_out_names
    reasons = [
        checks.fault(row, target, run.challenger, held_out, game.fits)
        for row, target in zip(rows, targets, strict=True)
    ]
    passed = [slot for slot, reason in enumerate(reasons) if reason is None]
    if run.verification and run.challenger.verifier == 'judge':
        rng = np.random.default_rng([run.seed, step, 31])
        items = [_verify_item(targets, rows, slot, run.challenger.noise_blocks, rng) for slot in passed]
        for slot, verdict in zip(passed, game.host.verify(items) if items else [], strict=True):
            if verdict.outcome != 'accept':
                reasons[slot] = 'not verified' if verdict.outcome == 'reject' else 'outage'
    problems = [
        Problem(
            id=problem_id(step, slot),
            slot=slot,
            question=rows[slot].final or '',
            target=targets[slot],
            materials=_materials(rows[slot]),
            challenger_row=slot,
        )
        for slot, reason in enumerate(reasons)
        if reason is None
    ]
    rejected = [Rejected(reason, slot, rows[slot].final or '') for slot, reason in enumerate(reasons) if reason]
    return Posed(tuple(targets), tuple(rows), tuple(problems), tuple(rejected))


def _materials(row: Trajectory) -> tuple[str, ...]:
    return tuple(search.text for search in row.searches if search.outcome == 'ok')


def _verify_item(
    targets: Sequence[Target], rows: Sequence[Trajectory], slot: int, blocks: int, rng: np.random.Generator
) -> VerifyItem:
    """The question with its own materials, and as noise the joined materials of other rows of the step."""
    others = [other for other, row in enumerate(rows) if other != slot and _materials(row)]
    picked = rng.permutation(len(others))[:blocks]
    noise = tuple('\n\n'.join(_materials(rows[others[i]])) for i in picked)
    question = rows[slot].final or ''
    return VerifyItem(question, targets[slot], _materials(rows[slot]), noise, int(rng.integers(2**31)))


@dataclass(frozen=True)
class ReusePool:
    """Earlier valid problems, from which invalid slots are filled (SSP's `reuse`). A value: adding makes a new one."""

    problems: tuple[Problem, ...] = ()

    def fill(self, posed: Posed, *, step: int, seed: int) -> tuple[Problem, ...]:
        """One problem for each slot that has none; a slot stays empty while the pool is."""
        if not self.problems:
            return ()
        rng = np.random.default_rng([seed, step, 37])
        taken = {problem.slot for problem in posed.problems}
        empty = [slot for slot in range(len(posed.targets)) if slot not in taken]
        draws = rng.integers(len(self.problems), size=len(empty))
        return tuple(
            dataclasses.replace(
                self.problems[draw], id=problem_id(step, slot), slot=slot, challenger_row=-1, reused=True
            )
            for slot, draw in zip(empty, draws, strict=True)
        )

    def after(self, posed: Posed, *, step: int, clear_every: int) -> ReusePool:
        """The pool behind a step: with its new problems, or empty where it is due to be cleared."""
        return ReusePool() if step % clear_every == 0 else ReusePool(self.problems + posed.problems)
