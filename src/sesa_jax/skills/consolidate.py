"""The rules of the memory as pure functions: when cards are made, from which failures, who enters, who leaves.

`bank.py` asks these rules and records what they say. Nothing here touches a file, a clock or a random number. Left out:
which rollouts count as failures and whom they credit, which `selfplay/solver.py` decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from sesa_jax.config import Bank
from sesa_jax.records import Failure
from sesa_jax.skills.card import Card, DraftCard, problems
from sesa_jax.skills.encoder import Encoder

TIE = 1e-6
"""A cosine this little above the threshold still counts as equal to it: float noise must not decide."""
EVICT_AFTER = 3
"""Retrievals before a card may be evicted as harmful (paper)."""


def is_due(step: int, pending: int, config: Bank, *, freeze_bank: bool, failure_distillation: bool) -> bool:
    """Whether a consolidation starts at the boundary behind `step`; a slot that is missed waits for the next."""
    return (
        failure_distillation
        and not freeze_bank
        and step > 0
        and step % config.every == 0
        and pending >= max(1, config.at_least)
    )


def commit_boundary(start_step: int, config: Bank) -> int:
    """The step behind which the cards of a consolidation enter; solvers see them from the next step on."""
    return start_step + config.commit_lag


def urgency(failure: Failure, first_failed: Mapping[str, int]) -> tuple[bool, bool]:
    """Failures on a target that failed in an earlier step come first, then failures that had guidance.

    Args:
      first_failed: Target hash -> the first step with a failure on that target.
    """
    repeated = first_failed.get(failure.target.hash, failure.step) < failure.step
    return repeated, bool(failure.card_ids)


def take(queue: Sequence[Failure], first_failed: Mapping[str, int], at_most: int) -> list[Failure]:
    """The failures of the next consolidation, most urgent first, newest first among equals.

    Args:
      queue: Oldest first; within a step in order of arrival.
    """
    newest_first = list(reversed(queue))
    return sorted(newest_first, key=lambda failure: urgency(failure, first_failed), reverse=True)[:at_most]


def overflow(
    queue: Sequence[Failure], first_failed: Mapping[str, int], bound: int, taken: Collection[str] = ()
) -> list[Failure]:
    """The failures that a queue of at most `bound` must drop: the oldest of the lowest urgency.

    Args:
      queue: Oldest first.
      taken: Rollout ids of a consolidation under way; these stay.
    """
    loose = [failure for failure in queue if failure.rollout_id not in taken]
    surplus = max(0, len(queue) - bound)
    return sorted(loose, key=lambda failure: urgency(failure, first_failed))[:surplus]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a draft. `reason` is '' for an admitted one."""

    draft: DraftCard
    reason: str = ''  # 'source', 'invalid' or 'duplicate'
    detail: str = ''
    nearest: int = -1  # index into the known cards, then into the drafts; -1: compared with nothing
    cosine: float | None = None  # with the nearest


def admit(
    drafts: Sequence[DraftCard],
    known: Sequence[DraftCard],
    encoder: Encoder,
    threshold: float | None,
    source_faults: Sequence[str] = (),
) -> list[Verdict]:
    """A verdict for each draft, in order.

    A draft enters iff its largest cosine with the known cards (tombstones included) and with the drafts admitted before
    it in this round is at most the threshold. A draft with the text of a known or admitted card never enters.

    Args:
      threshold: None for the encoder's own.
      source_faults: For each draft, why its sources cannot be right, or ''; () for drafts that need no source.
    """
    threshold = encoder.threshold if threshold is None else threshold
    faults = [
        ('source', fault) if fault else ('invalid', '; '.join(problems(draft)))
        for draft, fault in zip(drafts, source_faults or [''] * len(drafts), strict=True)
    ]
    valid = [i for i, (_, fault) in enumerate(faults) if not fault]
    cosines = np.full((len(drafts), len(known) + len(drafts)), -np.inf)
    columns = [*range(len(known)), *(len(known) + i for i in valid)]
    cosines[np.ix_(valid, columns)] = encoder.similarity([drafts[i] for i in valid], known)
    rivals = list(range(len(known)))
    texts = {card.text for card in known}
    verdicts = []
    for i, draft in enumerate(drafts):
        if faults[i][1]:
            verdicts.append(Verdict(draft, *faults[i]))
            continue
        nearest = max(rivals, key=lambda j: cosines[i, j], default=-1)
        cosine = float(cosines[i, nearest]) if rivals else None
        # Written so that a cosine that is not a number keeps the draft out.
        if draft.text not in texts and (cosine is None or cosine <= threshold + TIE):
            rivals.append(len(known) + i)
            texts.add(draft.text)
            verdicts.append(Verdict(draft, '', '', nearest, cosine))
        else:
            verdicts.append(Verdict(draft, 'duplicate', '', nearest, cosine))
    return verdicts


def evictions(cards: Sequence[Card], step: int, config: Bank) -> dict[str, str]:
    """Card id -> 'harmful' or 'capacity', for the cards that leave at the boundary behind `step`.

    Harmful: retrieved at least 3 times and helpful - hurt below 0. Over capacity: lowest helpful - hurt first, ties
    oldest first; cards younger than `grace_steps` go only when no other can. Seeds never leave.
    """
    leaving = {
        card.id: 'harmful' for card in cards if not card.is_seed and card.retrieved >= EVICT_AFTER and card.score < 0
    }
    candidates = [card for card in cards if not card.is_seed and card.id not in leaving]
    surplus = max(0, len(cards) - len(leaving) - config.capacity)

    def rank(card: Card) -> tuple[bool, int, int, str]:
        return step - card.born_step < config.grace_steps, card.score, card.born_step, card.id

    leaving |= {card.id: 'capacity' for card in sorted(candidates, key=rank)[:surplus]}
    return leaving
