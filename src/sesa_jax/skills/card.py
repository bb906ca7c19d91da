"""Skill cards: what the solver reads, what the encoder embeds, and where a card came from.

A `DraftCard` is what a distiller (or a person) writes; the bank turns an admitted draft into a `Card` with an id,
counters and lineage. Card text comes from models and files, so `problems` refuses whatever could act as markup, as a
link or as a control sequence where the card is shown. Left out: whether a card is any good. The counters tell.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LIMITS = {'description': 400, 'trigger': 160, 'masked_question': 300, 'avoid': 160, 'queries': 120, 'evidence': 400}
"""Longest field, in characters; for `queries`, of one template."""
MAX_QUERIES = 3

SLOT = re.compile(r'\{[a-z][a-z0-9_]*\}')
_URL = re.compile(r'(?i)\b[a-z][a-z0-9+.-]*://|\bwww\.')
# Angle brackets make tags and chat control tokens, the bar separates the parts of a shown card.
_RESERVED = frozenset('<>|')
# Control, format (zero width, bidi), surrogate, line and paragraph separator: a shown card is one visible line.
_CONTROL = frozenset({'Cc', 'Cf', 'Cs', 'Zl', 'Zp'})


@dataclass(frozen=True, kw_only=True)
class DraftCard:
    """A card before admission. Templates name what to fill in with slots in braces, such as `{entity}`."""

    description: str  # the lesson in a sentence (u in the paper)
    trigger: str  # when it applies (c); completes "when ..."
    queries: tuple[str, ...]  # one to three query templates (z), each with a slot
    avoid: str = ''  # the anti-pattern (a)
    masked_question: str = ''  # the question it came from, its entities replaced by slots
    evidence: str = ''  # what tells the right passage from a distractor

    source_question_hash: str = ''  # `records.text_hash` of the first question it came from
    source_question_hashes: tuple[str, ...] = ()  # of all that it came from; it is retrieved for none of these
    source_target_hash: str = ''
    rollout_ids: tuple[str, ...] = ()
    distiller: str = ''
    prompt_hash: str = ''

    @property
    def text(self) -> str:
        """What an encoder embeds: description, trigger, masked question, avoid, queries."""
        parts = (self.description, self.trigger, self.masked_question, self.avoid, *self.queries)
        return '\n'.join(part for part in parts if part)

    def shown(self) -> str:
        """What the solver reads: one short line. `tiny` was trained on this very form."""
        return f'when {self.trigger}: search {self.queries[0]}' + (f' | avoid: {self.avoid}' if self.avoid else '')


@dataclass(frozen=True, kw_only=True)
class Card(DraftCard):
    """A card of the bank. Counters: `retrieved` counts problems, `helpful` and `hurt` count rollouts."""

    id: str  # never used twice in a bank
    is_seed: bool = False  # seeds are never evicted
    born_step: int = 0  # the boundary at which it entered; it can be retrieved from the next step on
    bank_version: int = 0  # the newest bank snapshot among the failures that it came from
    parents: tuple[str, ...] = ()  # cards that those failures had been shown
    retrieved: int = 0
    helpful: int = 0
    hurt: int = 0
    evicted_step: int = -1  # -1: active; otherwise a tombstone, which only the duplicate check reads
    evicted_reason: str = ''

    @property
    def score(self) -> int:
        return self.helpful - self.hurt


def to_json(card: DraftCard) -> dict[str, Any]:
    """A card or draft as JSON-ready data; `card_from_json` and `draft_from_json` are the inverses."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(card).items()}


def card_from_json(data: Mapping[str, Any]) -> Card:
    return Card(**_tuples(data))


def draft_from_json(data: Mapping[str, Any]) -> DraftCard:
    return DraftCard(**_tuples(data))


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def problems(draft: DraftCard) -> list[str]:
    """Why a draft cannot become a card; empty if it can. Each entry starts with the field's name."""
    found = [f'{field}: {why}' for field, text in _fields(draft) for why in _faults(field, text)]
    found += [f'{field}: empty' for field in ('description', 'trigger') if not getattr(draft, field)]
    if not 1 <= len(draft.queries) <= MAX_QUERIES:
        found.append(f'queries: {len(draft.queries)} templates, not 1 to {MAX_QUERIES}')
    found += [f'queries: no slot in {query!r}' for query in draft.queries if not SLOT.search(query)]
    return found


def _fields(draft: DraftCard) -> Iterator[tuple[str, str]]:
    for field in LIMITS:
        value = getattr(draft, field)
        for text in value if field == 'queries' else (value,):
            yield field, text


def _faults(field: str, text: str) -> Iterator[str]:
    if len(text) > LIMITS[field]:
        yield f'{len(text)} characters, more than {LIMITS[field]}'
    if text != text.strip():
        yield 'starts or ends with a space'
    if _RESERVED & set(text):
        yield 'holds one of < > |'
    if any(unicodedata.category(character) in _CONTROL for character in text):
        yield 'holds a control character or line break'
    if _URL.search(text):
        yield 'holds a URL'
    if set('{}') & set(SLOT.sub('', text)):
        yield 'has braces that are no slot such as {entity}'
