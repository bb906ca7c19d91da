"""Scripted players of the lab: they give the scale of what is possible, and the text that `tiny` is trained on.

A player sees the world only as a person with its habits would: the naive solver knows relation words, the keyed one the
key words, the card reader the cards in its prompt, the challenger the types of things. All of them really search.
Transcripts are lists of segments, so that prompt, actions and observations are encoded apart, as in a rollout.

`play` makes the stream that `tiny` learns from. Its draws are the recipe of the shipped weights: a draw more or less, and
nobody makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sesa_jax.records import Document, Search, Target
from sesa_jax.rollout import episode
from sesa_jax.selfplay import prompts
from sesa_jax.skills import priming
from sesa_jax.worlds import lab
from sesa_jax.worlds.lab import World, ask, words
from sesa_jax.worlds.search import Corpus

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


# --- the stream -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What the stream is made of."""

    world_size: float = 0.35
    challenger_share: float = 0.2
    no_card_share: float = 0.18
    easy_card_share: float = 0.7
    """How often a hop of an easy relation has a card of its own."""
    invented_share: float = 0.75
    """How often the template of such a card is made up, so that following it is all there is to learn."""
    one_hop_share: float = 0.4
    """Share of chains cut to one hop: short rows, more copying a token."""
    follow_pointer: float = 0.3
    """How often the solver of the demonstrations follows a pointer: what a policy without cards can get better at."""


@dataclass(frozen=True)
class Demonstration:
    """A transcript with what was read after each search."""

    user: str
    segments: tuple[tuple[str, str | Search], ...]  # kind 'think' or 'act' and its text, or 'observation'

    def text(self) -> list[str]:
        return [self.user, *(episode.observation(s) if isinstance(s, Search) else s for _, s in self.segments)]


def play(world_seed: int, rng: np.random.Generator, mix: Mix, hops: int, count: int) -> list[Demonstration]:
    """`count` demonstrations of up to `hops` hops in one fresh world of the warm half."""
    world = lab.build(world_seed, pool='warm', size=mix.world_size, made_up_relations=bool(rng.random() < 0.6))
    corpus = Corpus(world.documents)
    engine = lambda query: corpus.search([query], 2)[0]  # noqa: E731
    chains = {h: world.chains('train', h) + world.chains('held_out', h) for h in range(1, hops + 1)}
    hard = {h: [c for c in chains[h] if any(world.relations[n].is_hard for n in c[1])] for h in chains}
    handwritten = [card.shown() for card in priming.handwritten()]
    made: list[Demonstration] = []
    while len(made) < count:
        kind = rng.random()
        depth = 1 if rng.random() < mix.one_hop_share else int(rng.integers(1, hops + 1))
        if kind < mix.challenger_share:
            transcript = _challenger(world, engine, depth, rng)
        else:
            pick = hard[depth] if rng.random() < 0.6 else chains[depth]
            chain = pick[int(rng.integers(len(pick)))]
            transcript = _solver(world, engine, chain, rng, mix, handwritten, with_cards=kind < 1 - mix.no_card_share)
        if transcript is not None:
            made.append(record(transcript))
    return made


def _challenger(world, engine, hops: int, rng) -> Transcript | None:
    names = list(world.backward)
    people = [n for n in names if world.types[n] == 'person']
    answer = str(rng.choice(people if rng.random() < 0.5 else names))
    user = prompts.challenger(Target(answer, hops=hops), (), 'short')
    transcript, chain = challenge(world, engine, answer, hops, rng, user=user)
    return transcript if chain is not None else None


def _solver(world, engine, chain, rng, mix: Mix, handwritten: Sequence[str], *, with_cards: bool):
    start, nouns, _ = chain
    question = lab.ask(world, start, nouns, rng)
    cards: list[ShownCard] = []
    if with_cards:
        for noun in nouns:
            relation = world.relations[noun]
            if relation.is_hard and rng.random() < 0.75:
                template = '{entity} ' + ' '.join(relation.keys)
                cards.append(make_card(noun, template, rng))
            elif not relation.is_hard and rng.random() < mix.easy_card_share:
                is_invented = rng.random() < mix.invented_share
                template = invent_template(rng) if is_invented else f'{{entity}} {noun}'
                cards.append(make_card(noun, template, rng))
        cards = cards[:3]
        others = [n for n in world.relations if n not in nouns]
        while len(cards) < 3 and rng.random() < 0.93:
            if rng.random() < 0.25:
                cards.append(ShownCard('', '', str(rng.choice(handwritten))))
            else:
                noun = str(rng.choice(others))
                keys = world.relations[noun].keys
                template = f'{{entity}} {noun}' if keys is None else '{entity} ' + ' '.join(keys)
                template = invent_template(rng) if rng.random() < 0.2 else template
                cards.append(make_card(noun, template, rng))
        cards = [cards[i] for i in rng.permutation(len(cards))]
    user = prompts.solver(question, [c.text for c in cards], 'short')
    transcript, answer = solve(
        world,
        engine,
        start,
        nouns,
        question,
        rng,
        user=user,
        cards=cards,
        follow_pointer=mix.follow_pointer,
        vary=0.08,
    )
    return transcript if answer else None


def record(transcript: Transcript) -> Demonstration:
    found: Iterator[Sequence[Document]] = iter(transcript.documents)
    segments: list[tuple[str, str | Search]] = []
    for kind, text in transcript.segments:
        if kind == 'search':
            documents = tuple(next(found))
            segments.append(('observation', Search(text, documents, 'ok' if documents else 'empty', 0.0)))
        else:
            segments.append((kind, text))
    return Demonstration(transcript.user, tuple(segments))


def encode(
    demonstration: Demonstration, tokenizer: Any, weight_of: Mapping[str, float], observation: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[T] and loss weights f32[T] of a demonstration, encoded in the pieces that a rollout has.

    weight_of: of 'context' (the prompt), 'observation', 'think' and 'act'. observation: most tokens of one block.
    """
    ids = list(tokenizer.chat(None, demonstration.user))
    weights = [weight_of['context']] * len(ids)
    for kind, segment in demonstration.segments:
        if isinstance(segment, Search):
            piece = episode.encode_observation(tokenizer.encode, segment, observation)
        else:
            piece = tokenizer.encode(segment)
        ids += piece
        weights += [weight_of[kind]] * len(piece)
    return np.asarray(ids, np.int32), np.asarray(weights, np.float32)
