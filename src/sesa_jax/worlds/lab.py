"""The embedded world: a made-up corpus in which the effect of a memory can be measured, as a pure function of a seed.

Eight types of entities hold nine *easy* relations, which `<entity> <relation word>` finds in the entity's own passage,
and eight *hard* ones (one a type), whose fact stands in a record passage that only the relation's two key words find;
the naive query brings a decoy that names somebody else. Key words are drawn from the seed. A share of the entity
passages names them in passing (a pointer), so they can be learned from evidence, and then serve every entity.

Names and key words have three syllables. Two disjoint sets of such words are drawn, once: `warm` words for making the
shipped policy, `play` words for runs. Both use every pair of syllables, so a tokenizer whose pieces are syllables cuts
unseen words as it cuts seen ones, and no pair of pieces tells them apart. Entities form two components without a fact
between them: `train`, from which targets and training questions are drawn, and `held_out`, which
only measurement may ask about.

Left out on purpose: numbers, dates, comparisons, ambiguous names, short forms of names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sesa_jax.records import Document, Question, Target

Pool = Literal['warm', 'play']
Part = Literal['train', 'held_out']


@dataclass(frozen=True)
class Relation:
    """A typed relation. `noun` is the word of questions and naive queries, `verb` the word of records."""

    noun: str
    subject: str  # entity type
    object: str  # entity type; hard relations lead to people whose occupation is the noun
    verb: str = ''
    keys: tuple[str, str] | None = None  # key words, for hard relations only

    @property
    def is_hard(self) -> bool:
        return self.keys is not None


@dataclass(frozen=True)
class Fact:
    subject: str
    relation: str  # the relation's noun
    object: str


EASY = (
    Relation('headquarters', 'company', 'city'),
    Relation('birthplace', 'person', 'city'),
    Relation('employer', 'person', 'company'),
    Relation('country', 'city', 'country'),
    Relation('capital', 'country', 'city'),
    Relation('mouth', 'river', 'city'),
    Relation('director', 'film', 'person'),
    Relation('campus', 'university', 'city'),
    Relation('author', 'book', 'person'),
)
HARD = (
    ('founder', 'company', 'begun'),
    ('planner', 'city', 'drawn'),
    ('patron', 'country', 'guarded'),
    ('surveyor', 'river', 'measured'),
    ('composer', 'film', 'scored'),
    ('rector', 'university', 'led'),
    ('illustrator', 'book', 'pictured'),
    ('mentor', 'person', 'taught'),
)
COUNTS = {
    'person': 270, 'company': 130, 'city': 130, 'country': 50, 'river': 80, 'film': 110, 'university': 70, 'book': 80,
}  # fmt: skip
HELD_OUT_SHARE = 0.4
RECORD_SHARE = 0.65  # entities with a hard fact, its decoy and its record

POINTERS = (
    'its {noun} is kept in the {keys}.',
    'see the {keys} for the {noun}.',
    'the {noun} stands in the {keys}.',
    'for the {noun} consult the {keys}.',
    'the {keys} names its {noun}.',
    'its {noun} is recorded in the {keys}.',
    'the {noun} is listed in the {keys}.',
    'the {noun} is written down in the {keys}.',
)
UNUSUAL_POINTERS = (
    'one finds the {noun} under {keys}.',
    'the {keys} gives the {noun}.',
    'ask the {keys} about its {noun}.',
    'in the {keys} you will meet its {noun}.',
)
FACTS = ('its {noun} is {object}.', 'the {noun} is {object}.', 'the {noun} of {subject} is {object}.')
DECOYS = (
    'some say {subject} was {verb} by {object}, the {noun} of {subject}.',
    'many hold that {subject} was {verb} by {object}, the {noun} of {subject}.',
    'it is told that {subject} was {verb} by {object}, the {noun} of {subject}.',
)
RECORDS = ('{subject} was {verb} by {object}.', 'here {subject} was {verb} by {object}.',
           'noted: {subject} was {verb} by {object}.')  # fmt: skip
FILLERS = ('it is old.', 'it is well known.', 'few have seen it.', 'it is near the sea.', 'it was rebuilt once.', '')
FRAMES = ('{who} is {chain}?', 'Name {chain}.', 'Tell me {chain}.', '{who} was {chain}?')


def _syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """80 start and 80 end syllables. Fixed for all seeds."""
    rng = np.random.default_rng(20260729)
    starts = [a + v + c for a, v, c in itertools.product('bdfgklmnprstvz', 'aeiou', 'lmnrs')]
    ends = [a + v + c for a, v, c in itertools.product('bdfgkmptvz', 'aeiou', ['n', 'x', 'k', 'th'])]
    return tuple(rng.permutation(starts)[:80].tolist()), tuple(rng.permutation(ends)[:80].tolist())


STARTS, ENDS = _syllables()


WORDS = 20_000  # of each half


@functools.cache
def words(pool: Pool) -> tuple[str, ...]:
    """The made-up words of one half, lower case: a start and two ends. The halves are disjoint samples of all triples.

    Three syllables, not two: with two, half of all pairs would be words of the play half alone, and a policy that has
    learned which pairs are words (80 by 80 are few) would hold every word of the play half to be impossible.
    """
    shape = (len(STARTS), len(ENDS), len(ENDS))
    codes = np.random.default_rng(1).choice(np.prod(shape), 2 * WORDS, replace=False)
    half = codes[:WORDS] if pool == 'warm' else codes[WORDS:]
    return tuple(STARTS[a] + ENDS[b] + ENDS[c] for a, b, c in zip(*np.unravel_index(half, shape), strict=True))


def syllables(word: str) -> tuple[str, str, str]:
    """The three syllables of a made-up word, in its own letter case."""
    cut = 6 if word[3:6].lower() in ENDS else 7
    return word[:3], word[3:cut], word[cut:]


@dataclass(frozen=True)
class World:
    """A built world. Tuples and dicts are in a fixed order; nothing is ever changed."""

    seed: int
    documents: tuple[Document, ...]
    relations: dict[str, Relation]  # by noun
    types: dict[str, str]  # entity -> type
    parts: dict[str, Part]  # entity -> component
    facts: tuple[Fact, ...]
    pointers: frozenset[str]  # entities whose passage names the key words

    @functools.cached_property
    def forward(self) -> dict[str, dict[str, str]]:
        """subject -> noun -> object."""
        table: dict[str, dict[str, str]] = {}
        for fact in self.facts:
            table.setdefault(fact.subject, {})[fact.relation] = fact.object
        return table

    @functools.cached_property
    def backward(self) -> dict[str, tuple[Fact, ...]]:
        """object -> the facts that lead to it."""
        table: dict[str, list[Fact]] = {}
        for fact in self.facts:
            table.setdefault(fact.object, []).append(fact)
        return {name: tuple(facts) for name, facts in table.items()}

    @functools.cached_property
    def held_out_names(self) -> frozenset[str]:
        return frozenset(name for name, part in self.parts.items() if part == 'held_out')

    def chains(self, part: Part, hops: int) -> list[tuple[str, tuple[str, ...], str]]:
        """All (start, nouns, end) of `hops` facts inside a component; no entity twice, at most one hard relation."""
        found: list[tuple[str, tuple[str, ...], str]] = []

        def walk(path: tuple[str, ...], nouns: tuple[str, ...]) -> None:
            if len(nouns) == hops:
                found.append((path[0], nouns, path[-1]))
                return
            for noun, target in self.forward.get(path[-1], {}).items():
                hard = self.relations[noun].is_hard and any(self.relations[n].is_hard for n in nouns)
                if target not in path and not hard:
                    walk((*path, target), (*nouns, noun))

        for name, where in self.parts.items():
            if where == part:
                walk((name,), ())
        return found

    def questions(self, part: Part, per_cell: int, seed: int) -> tuple[Question, ...]:
        """Up to `per_cell` questions a cell of {easy, hard} x {1, 2, 3 hops}, a balanced draw over relation chains."""
        rng = np.random.default_rng([self.seed, seed, 17, part == 'held_out'])
        drawn = []
        for hops in (1, 2, 3):
            chains = self.chains(part, hops)
            for kind in ('easy', 'hard'):
                cell = [c for c in chains if any(self.relations[n].is_hard for n in c[1]) == (kind == 'hard')]
                for start, nouns, end in _balanced(cell, per_cell, rng):
                    text = ask(self, start, nouns, rng)
                    drawn.append(
                        Question(f'{kind}{hops}-{len(drawn):05d}', text, (end,), kind, hops, self._tags(start, nouns))
                    )
        return tuple(drawn)

    def _tags(self, start: str, nouns: Sequence[str]) -> tuple[str, ...]:
        at = start
        for noun in nouns:
            if self.relations[noun].is_hard:
                return (noun, 'pointer' if at in self.pointers else 'no pointer')
            at = self.forward[at][noun]
        return ()

    def targets(self, count: int, step: int, seed: int) -> tuple[Target, ...]:
        """Target answers of one training step: people and cities of the train component that some fact leads to.

        Half of the draws are people that hard facts lead to. Companies and countries are left out, since their own
        passages crowd out the ones that name them (a scripted challenger gets back from .3 of them, from .8 of cities).
        One hop is asked for most often: the offline verifier reads single sentences, and a failed step back leaves
        decoys among them. So .6 of a scripted challenger's questions are valid.
        """
        rng = np.random.default_rng([self.seed, seed, 23, step])
        names = [n for n in self.backward if self.parts[n] == 'train' and self.types[n] in ('person', 'city')]
        hard = [n for n in names if any(self.relations[fact.relation].is_hard for fact in self.backward[n])]
        draw = [str(rng.choice(hard if rng.random() < 0.5 else names)) for _ in range(count)]
        return tuple(Target(n, hops=int(rng.choice(3, p=(0.6, 0.3, 0.1))) + 1, source='lab') for n in draw)


def _balanced(cell: list, count: int, rng: np.random.Generator) -> list:
    """`count` chains, going round the distinct noun chains so that no relation dominates."""
    by_nouns: dict[tuple[str, ...], list] = {}
    for index in rng.permutation(len(cell)):
        by_nouns.setdefault(cell[index][1], []).append(cell[index])
    rounds = itertools.zip_longest(*(by_nouns[k] for k in sorted(by_nouns)))
    return [chain for chain in itertools.chain.from_iterable(rounds) if chain is not None][:count]


def ask(world: World, start: str, nouns: Sequence[str], rng: np.random.Generator) -> str:
    """A question in plain English; `nouns` in the order of the hops, so the last one is named first."""
    chain = ''.join(f'the {noun} of ' for noun in reversed(nouns)) + start
    who = 'Who' if world.relations[nouns[-1]].object == 'person' else 'What'
    return str(rng.choice(FRAMES)).format(who=who, chain=chain)


def build(
    seed: int,
    *,
    pool: Pool = 'play',
    pointer_share: float = 0.25,
    pointer_wordings: Sequence[str] = POINTERS,
    size: float = 1.0,
    made_up_relations: bool = False,
) -> World:
    """The world of a seed.

    Args:
      seed: Any non-negative integer; equal seeds give equal worlds.
      pool: Half of the made-up words that names and key words come from.
      pointer_share: Share of the entities with a hard fact whose own passage names the key words, in [0, 1].
      pointer_wordings: Sentences with `{noun}` and `{keys}`.
      size: Scales the number of entities (1.0: 920 entities, about 2,100 passages).
      made_up_relations: Hard relations get made-up nouns and verbs too (for the warm start).
    """
    if not 0 <= pointer_share <= 1:
        raise ValueError(f'pointer_share is {pointer_share}; it must lie in [0, 1]')
    rng = np.random.default_rng([seed, 5, pool == 'play'])
    fresh = iter(rng.permutation(words(pool)).tolist())
    relations = {r.noun: r for r in EASY}
    for noun, subject, verb in HARD:
        if made_up_relations:
            noun, verb = next(fresh), next(fresh)
        relations[noun] = Relation(noun, subject, 'person', verb, (next(fresh), next(fresh)))
    hard = {r.subject: r for r in relations.values() if r.is_hard}

    types: dict[str, str] = {}
    parts: dict[str, Part] = {}
    members: dict[tuple[str, Part], list[str]] = {}
    for kind, count in COUNTS.items():
        total = max(12, round(count * size))
        for i in range(total):
            name = next(fresh).capitalize()
            part: Part = 'held_out' if i < total * HELD_OUT_SHARE else 'train'
            types[name], parts[name] = kind, part
            members.setdefault((kind, part), []).append(name)
    people = [*(r.noun for r in hard.values()), 'director', 'author']
    occupation = {
        name: people[i % len(people)]
        for part in ('train', 'held_out')
        for i, name in enumerate(members['person', part])
    }

    facts: list[Fact] = []
    decoys: dict[str, str] = {}
    for name, kind in types.items():
        part = parts[name]
        for relation in EASY:
            if relation.subject == kind:
                pick = _objects(relation, members[relation.object, part], occupation, name)
                facts.append(Fact(name, relation.noun, str(rng.choice(pick))))
        if rng.random() < RECORD_SHARE:
            pick = _objects(hard[kind], members['person', part], occupation, name)
            facts.append(Fact(name, hard[kind].noun, str(rng.choice(pick))))
            others = [p for p in members['person', part] if occupation[p] != hard[kind].noun and p != name]
            decoys[name] = str(rng.choice(others))
    pointers = frozenset(name for name in decoys if rng.random() < pointer_share)
    documents = _write(rng, relations, hard, types, occupation, facts, decoys, pointers, pointer_wordings)
    return World(seed, documents, relations, types, parts, tuple(facts), pointers)


def _article(noun: str) -> str:
    return f'an {noun}' if noun[0] in 'aeiou' else f'a {noun}'


def _objects(relation: Relation, candidates: list[str], occupation: dict[str, str], subject: str) -> list[str]:
    if relation.object != 'person':
        return [c for c in candidates if c != subject]
    return [c for c in candidates if occupation[c] == relation.noun and c != subject]


def _write(rng, relations, hard, types, occupation, facts, decoys, pointers, wordings) -> tuple[Document, ...]:
    """The passages: one an entity, then one record and one decoy a hard fact, in a shuffled order."""

    def say(sentences: Sequence[str], **slots: str) -> str:
        return str(rng.choice(sentences)).format(**slots)

    passages: list[tuple[str, str]] = []
    own: dict[str, list[str]] = {
        name: [f'{name} is {_article(occupation.get(name, kind))} {hard[kind].verb} long ago.']
        for name, kind in types.items()
    }
    for fact in facts:
        relation = relations[fact.relation]
        slots = {'subject': fact.subject, 'object': fact.object, 'noun': relation.noun, 'verb': relation.verb}
        if relation.keys is None:
            own[fact.subject].append(say(FACTS, **slots))
            continue
        keys = ' '.join(relation.keys)
        passages.append((keys, f'{say(RECORDS, **slots)} {say(FILLERS)}'.strip()))
        slots['object'] = decoys[fact.subject]
        passages.append((f'{fact.subject} {relation.noun}', say(DECOYS, **slots)))
        if fact.subject in pointers:
            own[fact.subject].append(say(wordings, noun=relation.noun, keys=keys))
    for name, sentences in own.items():
        filler = say(FILLERS)
        rest = [sentences[i] for i in 1 + rng.permutation(len(sentences) - 1)]
        passages.append((name, ' '.join([sentences[0], *rest, filler]).strip()))
    order = rng.permutation(len(passages))
    return tuple(Document(f'd{i:05d}', *passages[j]) for i, j in enumerate(order))
