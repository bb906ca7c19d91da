"""The solver's half of a step: problems -> cards -> rollouts -> outcomes, and what they say about the cards.

Left out: how outcomes become advantages (`grpo/advantage.py`) and how cards are found (the host process).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sesa_jax.host.client import Hit, HostClient, JudgeItem
from sesa_jax.policy.lora import Policy
from sesa_jax.records import Document, Failure, Outcome, Problem, Trajectory
from sesa_jax.rollout.row import Request
from sesa_jax.selfplay.game import Game


@dataclass(frozen=True)
class Solved:
    """What the solver did in one step. Row r answers problem r // G, sample r % G."""

    problems: tuple[Problem, ...]
    cards: tuple[tuple[Hit, ...], ...]  # of each problem, as they were shown
    trajectories: tuple[Trajectory, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def group(self) -> list[int]:
        """Index into `problems` of each row, by the problem's id."""
        place = {problem.id: index for index, problem in enumerate(self.problems)}
        return [place[row.problem_id] for row in self.trajectories]


def solve(game: Game, params: Policy, problems: Sequence[Problem], *, step: int, weights_version: int) -> Solved:
    """G rollouts for each problem, with the cards that the bank's snapshot has for its question.

    Where the prompt has no room for all of them, the best ones are shown.
    """
    run = game.run
    found: list[tuple[Hit, ...]] = [() for _ in problems]
    if run.skill_memory and problems:
        found = game.host.retrieve([problem.question for problem in problems], run.bank.retrieved)
    requests, cards = [], []
    for problem, hits in zip(problems, found, strict=True):
        prompt, shown = game.fitted(functools.partial(game.solver_prompt, problem.question), hits)
        cards.append(shown)
        requests += [
            Request(
                role='solver',
                problem_id=problem.id,
                problem=problem.slot,
                sample=sample,
                prompt=prompt,
                temperature=run.solver.temperature,
                max_turns=run.solver.max_turns,
                card_ids=tuple(hit.id for hit in shown),
            )
            for sample in range(run.solver.rollouts)
        ]
    rows = game.rollout(params, requests, 'solver', step=step, weights_version=weights_version, purpose='solver search')
    golds = {problem.id: (problem.question, problem.target.golds) for problem in problems}
    outcomes = judge(game.host, rows, [golds[row.problem_id] for row in rows])
    return Solved(tuple(problems), tuple(cards), tuple(rows), tuple(outcomes))


def judge(
    host: HostClient, rows: Sequence[Trajectory], asked: Sequence[tuple[str, tuple[str, ...]]]
) -> list[Outcome]:
    """What each rollout is worth. `asked`: question and gold answers of each row.

    Only what was sampled is read: the last complete answer tag. A row without one is malformed and gets 0; a row whose
    search failed for good is an outage, and one that no judge could read is unjudged: both are left out of everything.
    """
    outcomes: list[Outcome | None] = [None] * len(rows)
    items, places = [], []
    for place, (row, (question, golds)) in enumerate(zip(rows, asked, strict=True)):
        if row.stop_reason == 'outage':
            outcomes[place] = Outcome('outage', 0.0, '')
        elif row.final is None:
            outcomes[place] = Outcome('malformed', 0.0, '')
        else:
            items.append(JudgeItem(question, row.final, golds))
            places.append(place)
    for place, item, verdict in zip(places, items, host.judge(items) if items else [], strict=True):
        outcomes[place] = Outcome(verdict, float(verdict == 'correct'), item.prediction)
    return [outcome for outcome in outcomes if outcome is not None]


def utility(solved: Solved) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """(retrieved, helpful, hurt) of each card in one step.

    Retrieved counts problems; helpful and hurt count rollouts that were right or substantively wrong. Malformed rows
    and rows that are left out say nothing about a card.
    """
    retrieved = Counter(hit.id for hits in solved.cards for hit in hits)
    credit: dict[str, Counter[str]] = {'correct': Counter(), 'wrong': Counter()}
    for row, outcome in zip(solved.trajectories, solved.outcomes, strict=True):
        if outcome.kind in credit:
            credit[outcome.kind].update(row.card_ids)
    return retrieved, credit['correct'], credit['wrong']


def failures(solved: Solved, is_frontier: Sequence[bool], *, step: int) -> tuple[Failure, ...]:
    """The rollouts that are worth a lesson: substantively wrong, on a new question that others of its group solved."""
    found = []
    for row, outcome, group in zip(solved.trajectories, solved.outcomes, solved.group, strict=True):
        problem = solved.problems[group]
        if outcome.kind == 'wrong' and is_frontier[group] and not problem.reused:
            found.append(record(row, outcome, problem, step))
    return tuple(found)


def record(row: Trajectory, outcome: Outcome, problem: Problem, step: int) -> Failure:
    """A rollout as a distiller sees it: with the evidence of all its turns, in order, each passage once."""
    seen: dict[str, Document] = {d.id: d for search in row.searches for d in search.documents}
    return Failure(
        rollout_id=row.rollout_id,
        step=step,
        question=problem.question,
        target=problem.target,
        prediction=outcome.prediction,
        evidence=tuple(seen.values()),
        queries=tuple(search.query for search in row.searches),
        card_ids=row.card_ids,
        bank_version=row.bank_version,
    )
