"""What a bank is, as the fold of its events.

Left out: what may happen next, which `bank.py` and `consolidate.py` decide, and where events are kept (`log.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sesa_jax import records
from sesa_jax.records import Failure
from sesa_jax.skills.card import Card, card_from_json, to_json

COUNTERS = ('retrieved', 'helpful', 'hurt')


@dataclasses.dataclass(frozen=True)
class Job:
    """A consolidation that was started and not finished."""

    step: int  # the boundary at which it started
    failures: tuple[Failure, ...]  # most urgent first


@dataclasses.dataclass
class State:
    """What the events add up to. `apply` is the only thing that changes it."""

    step: int = 0  # last committed step
    cards: dict[str, Card] = dataclasses.field(default_factory=dict)  # active
    tombstones: dict[str, Card] = dataclasses.field(default_factory=dict)  # evicted
    queue: dict[str, Failure] = dataclasses.field(default_factory=dict)  # by rollout id, oldest first
    first_failed: dict[str, int] = dataclasses.field(default_factory=dict)  # target hash -> step
    job: tuple[int, tuple[str, ...]] | None = None  # start step and rollout ids of the consolidation under way
    totals: Counter[str] = dataclasses.field(default_factory=Counter)
    done: dict[str, int] = dataclasses.field(default_factory=dict)  # "<kind> <step>" -> seq

    def apply(self, seq: int, event: Mapping[str, Any]) -> None:
        """Take in one event, as it was read back from the log."""
        kind, step = event['kind'], event['step']
        self.done[f'{kind} {step}'] = seq
        if kind == 'step':
            self.step = step
            self._credit(event)
            self._collect(event)
        elif kind == 'started':
            self.job = (step, tuple(event['taken']))
        elif kind == 'finished':
            assert self.job is not None
            if event['error'] is None:
                for rollout_id in self.job[1]:
                    del self.queue[rollout_id]
                self.totals['consolidated'] += len(self.job[1])
            self.job = None
        for data in event.get('admitted', ()):
            self.cards[data['id']] = card_from_json(data)
            self.totals['drafts'] += 1
            self.totals['admitted'] += 1
        for rejected in event.get('rejected', ()):
            self.totals['drafts'] += 1
            self.totals[f'rejected.{rejected["reason"]}'] += 1
        for card_id, reason in event.get('evicted', {}).items():
            card = self.cards.pop(card_id)
            self.tombstones[card_id] = dataclasses.replace(card, evicted_step=step, evicted_reason=reason)
            self.totals[f'evicted.{reason}'] += 1

    def _credit(self, event: Mapping[str, Any]) -> None:
        for card_id in {card_id for name in COUNTERS for card_id in event[name]}:
            where = self.cards if card_id in self.cards else self.tombstones
            where[card_id] = credited(where[card_id], event)

    def _collect(self, event: Mapping[str, Any]) -> None:
        for data in event['failures']:
            failure = records.failure_from_json(data)
            self.queue[failure.rollout_id] = failure
            self.first_failed.setdefault(failure.target.hash, failure.step)
        for turned_away in event['turned_away']:
            self.first_failed.setdefault(turned_away['target_hash'], event['step'])
        for rollout_id in event['dropped']:
            del self.queue[rollout_id]
        self.totals['failures'] += len(event['failures']) + len(event['turned_away'])
        self.totals['dropped'] += len(event['dropped']) + len(event['turned_away'])

    def as_json(self) -> dict[str, Any]:
        cards = {**self.cards, **self.tombstones}
        return {
            'step': self.step,
            'cards': [to_json(cards[card_id]) for card_id in sorted(cards)],
            'queue': [records.to_json(failure) for failure in self.queue.values()],
            'first_failed': self.first_failed,
            'job': self.job,
            'totals': self.totals,
        }


def credited(card: Card, counts: Mapping[str, Mapping[str, int]]) -> Card:
    """The card with its counters moved on. `counts`: counter -> card id -> increment."""
    return dataclasses.replace(card, **{name: getattr(card, name) + counts[name].get(card.id, 0) for name in COUNTERS})
