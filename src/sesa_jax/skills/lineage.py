"""Where cards come from: drafts become cards with their sources, rejections name their reason, and `trace` tells all.

Left out: the rules that admit or reject (`consolidate.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sesa_jax import records
from sesa_jax.records import Failure
from sesa_jax.skills.card import Card, DraftCard, to_json
from sesa_jax.skills.consolidate import Verdict
from sesa_jax.skills.state import COUNTERS


@dataclasses.dataclass(frozen=True)
class Use:
    """What one step did to a card's counters."""

    step: int
    retrieved: int
    helpful: int
    hurt: int


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Where a card came from and what became of it."""

    card: Card
    failures: tuple[Failure, ...]  # that it was distilled from; () for cards of the priming
    uses: tuple[Use, ...]  # the steps in which it was shown
    failed_rollouts: tuple[str, ...]  # queued failures that had been shown it
    children: tuple[str, ...]  # cards that were distilled from failures that had been shown it


def trace(card_id: str, cards: Sequence[Card], events: Iterable[Mapping[str, Any]], path: Path) -> Lineage:
    """The lineage of a card, from all cards of its bank and all events."""
    card = next((card for card in cards if card.id == card_id), None)
    if card is None:
        raise KeyError(f'{path} has no card {card_id}; its {len(cards)} cards are named c00001 and so on')
    sources: dict[str, Failure] = {}
    uses, failed = [], []
    for event in events:
        if event['kind'] != 'step':
            continue
        counts = [event[name].get(card_id, 0) for name in COUNTERS]
        if any(counts):
            uses.append(Use(event['step'], *counts))
        for data in event['failures']:
            if data['rollout_id'] in card.rollout_ids:
                sources[data['rollout_id']] = records.failure_from_json(data)
            if card_id in data['card_ids']:
                failed.append(data['rollout_id'])
    failures = tuple(sources[rollout_id] for rollout_id in card.rollout_ids if rollout_id in sources)
    children = tuple(other.id for other in cards if card_id in other.parents)
    return Lineage(card, failures, tuple(uses), tuple(failed), children)


def new_card(draft: DraftCard, number: int, **meta: Any) -> Card:
    """The card of an admitted draft. `number`: how many cards this bank ever had, with this one."""
    # Only a draft's fields: the card of another bank may be given, and its counters stay behind.
    fields = {field.name: getattr(draft, field.name) for field in dataclasses.fields(DraftCard)}
    if not draft.source_question_hashes and draft.source_question_hash:  # from a writer that names the first one only
        fields['source_question_hashes'] = (draft.source_question_hash,)
    return Card(**{**fields, **meta}, id=f'c{number:05d}')


def distilled_card(draft: DraftCard, number: int, step: int, sources: Mapping[str, Failure]) -> Card:
    """The card of an admitted draft, committed behind `step`. `sources`: the failures of its consolidation, by id."""
    failures = [sources[rollout_id] for rollout_id in draft.rollout_ids]
    return new_card(
        draft,
        number,
        born_step=step,
        source_question_hashes=tuple(sorted({failure.question_hash for failure in failures})),
        bank_version=max(failure.bank_version for failure in failures),
        parents=tuple(sorted({card_id for failure in failures for card_id in failure.card_ids})),
    )


def rejection(verdict: Verdict, known: Sequence[Card], drafts: Sequence[DraftCard]) -> dict[str, Any]:
    """A rejected draft with its reason and, for a duplicate, what it repeats."""
    data = {'draft': to_json(verdict.draft), 'reason': verdict.reason, 'detail': verdict.detail}
    if verdict.reason == 'duplicate':
        i = verdict.nearest - len(known)
        data['repeats'] = known[verdict.nearest].id if i < 0 else f'draft {i}: {drafts[i].trigger}'
        # Rounded: the last bits may differ between machines, and this goes into the hash.
        data['cosine'] = round(verdict.cosine, 4) if math.isfinite(verdict.cosine) else None
    return data


def source_fault(draft: DraftCard, sources: Mapping[str, Failure]) -> str:
    """Why a draft's lineage cannot be right; '' if it can."""
    if not draft.rollout_ids:
        return 'names no rollout that it came from'
    if strangers := [rollout_id for rollout_id in draft.rollout_ids if rollout_id not in sources]:
        return f'names {strangers[0]}, which this consolidation did not take'
    if draft.source_question_hash not in {sources[rollout_id].question_hash for rollout_id in draft.rollout_ids}:
        return 'its question hash is not that of one of its rollouts'
    return ''
