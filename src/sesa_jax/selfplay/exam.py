"""Asking a policy held-out questions: greedy, one rollout a question, with or without the bank's cards.

Used by the validation during a run and by the final evaluation. It reads the bank's snapshot and changes nothing; without
cards it asks the bank for nothing at all. Left out: rates and intervals (evals/).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from sesa_jax.policy.lora import Policy
from sesa_jax.records import Question
from sesa_jax.rollout.row import Request
from sesa_jax.selfplay.game import Game
from sesa_jax.selfplay.solver import judge

VERDICTS = {'correct': True, 'wrong': False, 'malformed': False, 'unjudged': None, 'outage': None}


def sit(
    game: Game, params: Policy, questions: Sequence[Question], *, with_cards: bool, step: int, weights_version: int
) -> dict[str, bool | None]:
    """Question id -> right, wrong, or None where there is no verdict."""
    run = game.run
    hits = [()] * len(questions)
    if with_cards and questions:
        hits = game.host.retrieve([question.text for question in questions], run.bank.retrieved)
    fitted = [
        game.fitted(functools.partial(game.solver_prompt, question.text), cards)
        for question, cards in zip(questions, hits, strict=True)
    ]
    requests = [
        Request(
            role='solver',
            problem_id=question.id,
            problem=index,
            sample=0,
            prompt=prompt,
            temperature=0.0,
            max_turns=run.solver.max_turns,
            card_ids=tuple(hit.id for hit in shown),
        )
        for index, (question, (prompt, shown)) in enumerate(zip(questions, fitted, strict=True))
    ]
    rows = game.rollout(params, requests, 'solver', step=step, weights_version=weights_version, purpose='exam search')
    outcomes = judge(game.host, rows, [(question.text, question.answers) for question in questions])
    return {question.id: VERDICTS[outcome.kind] for question, outcome in zip(questions, outcomes, strict=True)}
