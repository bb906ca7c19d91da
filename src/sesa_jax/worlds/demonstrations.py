"""Scripted players of the lab: they give the scale of what is possible, and the text that `tiny` is trained on.

A player sees the world only as a person with its habits would: the naive solver knows relation words, the keyed one the
key words, the card reader the cards in its prompt, the challenger the types of things. All of them really search.
Transcripts are lists of segments, so that prompt, actions and observations are encoded apart, as in a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sesa_jax.records import Document
from sesa_jax.worlds.lab import World, ask, words

SearchDocuments = Callable[[str], Sequence[Document]]
Segment = tuple[Literal['think', 'act', 'search'], str]

TRIGGERS = (
    'a question asks for the {noun}',
    'the {noun} is asked for',
    'the question wants the {noun} of something',
    'you look for the {noun}',
    'asked who or what the {noun} is',
    'the {noun} of {{entity}} is needed',
    'a hop needs the {noun} of {{entity}}',
    'a {noun} is wanted',
)
AVOIDS = ('', '', '', '{{entity}} {noun}', 'do not trust hearsay', 'searching {{entity}} {noun} again')
TEMPLATES = (
    '{{entity}} {a} {b}',
    '{{entity}} {a} {b}',
    '{{entity}} {a} {b}',
    '{{entity}} {a}',
    '{{entity}} {a} {b} {c}',
)


@dataclass
class Transcript:
    """One demonstration: the prompt's user text, then segments; a `search` segment holds what was searched."""

    user: str
    role: Literal['solver', 'challenger']
    segments: list[Segment] = field(default_factory=list)
    documents: list[Sequence[Document]] = field(default_factory=list)  # one an item of kind 'search', in order

    def turn(self, think: str, tag: str, content: str) -> None:
        self.segments.append(('think', f'<think> {think} </think>'))
        self.segments.append(('act', f'\n<{tag}> {content} </{tag}>'))

    def search(self, think: str, query: str, engine: SearchDocuments) -> Sequence[Document]:
        self.turn(think, 'search', query)
        found = engine(query)
        self.segments.append(('search', query))
        self.documents.append(found)
        return found


@dataclass(frozen=True)
class ShownCard:
    """A card as a transcript needs it: what it is about, and the text that the solver reads."""

    noun: str
    template: str
    text: str


def make_card(noun: str, template: str, rng: np.random.Generator) -> ShownCard:
    """A card for a relation in one of many wordings. Format: `skills.card.Card.shown`."""
    trigger = str(rng.choice(TRIGGERS)).format(noun=noun)
    avoid = str(rng.choice(AVOIDS)).format(noun=noun)
    text = f'when {trigger}: search {template}' + (f' | avoid: {avoid}' if avoid else '')
    return ShownCard(noun, template, text)


def invent_template(rng: np.random.Generator, pool: Literal['warm', 'play'] = 'warm') -> str:
    a, b, c = rng.choice(words(pool), 3, replace=False)
    return str(rng.choice(TEMPLATES)).format(a=a, b=b, c=c)


def read_fact(world: World, documents: Sequence[Document], subject: str, noun: str) -> str | None:
    """The object that the documents state for (subject, noun), true or by hearsay; the record before the hearsay."""
    relation = world.relations[noun]
    hearsay = None
    for document in documents:
        tokens = document.text.replace('.', '').replace(',', '').split()
        names = [t for t in tokens if t in world.types and t != subject]
        if not names:
            continue
        if not relation.is_hard and document.title == subject and noun in document.text.replace(':', '').split():
            return world.forward[subject][noun]
        if relation.is_hard and document.title == ' '.join(relation.keys or ()) and subject in tokens:
            return world.forward[subject][noun]
        if relation.is_hard and document.title == f'{subject} {noun}':
            hearsay = names[0]
    return hearsay


def solve(
    world: World,
    engine: SearchDocuments,
    start: str,
    nouns: Sequence[str],
    question: str,
    rng: np.random.Generator,
    *,
    user: str,
    cards: Sequence[ShownCard] = (),
    knows_keys: bool = False,
    follow_pointer: float = 0.0,
    vary: float = 0.0,
) -> tuple[Transcript, str]:
    """A solver that goes hop by hop. Returns the transcript and its answer ('' where it found nothing).

    Args:
      start, nouns: The chain behind `question`; the player knows how to read English, which is all this stands for.
      user: The rendered user message.
      cards: The cards in the message; a hop follows the first card about its relation.
      knows_keys: Searches hard relations by their key words (the oracle).
      follow_pointer: Probability of searching again where a pointer was seen.
      vary: Probability of another wording of a naive query.
    """
    script = Transcript(user, 'solver')
    at, known = start, ''
    for noun in nouns:
        relation = world.relations[noun]
        card = next((c for c in cards if c.noun == noun), None)
        if card is not None:
            think, query = f'{noun} of {at}, card {card.template}', card.template.replace('{entity}', at)
        elif knows_keys and relation.is_hard:
            query = f'{at} {" ".join(relation.keys or ())}'
            think = f'{noun} of {at}'
        else:
            query = f'{noun} {at}' if rng.random() < vary else f'{at} {noun}'
            think = f'{noun} of {at}'
        documents = script.search(f'{known}{think}', query, engine)
        keys = ' '.join(relation.keys or ('',))
        seen = relation.is_hard and any(d.title == at and keys in d.text for d in documents)
        if seen and card is None and not knows_keys and rng.random() < follow_pointer:
            documents = script.search(f'{noun} of {at} in {keys}', f'{at} {keys}', engine)
        found = read_fact(world, documents, at, noun)
        if found is None:
            # An honest end: the reader gives the last name that it has rather than nothing.
            script.turn(f'{noun} of {at} not found', 'answer', at)
            return script, ''
        known = f'{noun} of {at} is {found}. '
        at = found
    script.turn(known.strip(' .'), 'answer', at)
    return script, at


def challenge(
    world: World, engine: SearchDocuments, answer: str, hops: int, rng: np.random.Generator, *, user: str
) -> tuple[Transcript, tuple[str, tuple[str, ...]] | None]:
    """A challenger that works backwards from `answer`; returns the transcript and its (start, nouns), if it got one."""
    script = Transcript(user, 'challenger')
    at, nouns, known = answer, [], ''
    used: set[str] = {answer}
    while len(nouns) < hops:
        step = _back(world, engine, script, at, nouns, used, known, rng)
        if step is None:
            break
        fact = step
        known = f'{fact.relation} of {fact.subject} is {fact.object}. '
        nouns.insert(0, fact.relation)
        at = fact.subject
        used.add(at)
    if not nouns:
        return script, None
    question = ask(world, at, nouns, rng)
    script.turn(f'{known}ask', 'question', question)
    return script, (at, tuple(nouns))


def _back(world, engine, script, at, nouns, used, known, rng):
    """One step backwards: search for `at` with the word of a relation that leads to such a thing; None if none shows."""
    kind = world.types[at]
    has_hard = any(world.relations[n].is_hard for n in nouns)
    options = [r for r in world.relations.values() if r.object == kind and not (r.is_hard and has_hard)]
    if kind == 'person':
        # The occupation of a person stands in the own passage; it says which relation leads to them.
        own = script.search(f'{known}look at {at}', at, engine)
        job = next((r for r in options for d in own if d.title == at and f' {r.noun} ' in d.text[: len(at) + 30]), None)
        if job is None:
            return None
        options, known = [job], f'{at} is {job.noun}. '
    for relation in [options[i] for i in rng.permutation(len(options))[:2]]:
        word = relation.verb or relation.noun
        documents = script.search(f'{known}{word} {at}', f'{at} {word}', engine)
        titles = {d.title for d in documents} | {t for d in documents for t in d.text.replace('.', '').split()}
        facts = [f for f in world.backward.get(at, ()) if f.relation == relation.noun and f.subject not in used]
        shown = [f for f in facts if f.subject in titles and _states(world, documents, f)]
        if shown:
            return shown[int(rng.integers(len(shown)))]
        known = ''
    return None


def _states(world: World, documents: Sequence[Document], fact) -> bool:
    return read_fact(world, documents, fact.subject, fact.relation) == fact.object and any(
        fact.object in d.text and d.title != f'{fact.subject} {fact.relation}' for d in documents
    )
