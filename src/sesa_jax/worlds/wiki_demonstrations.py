"""Scripted players on real text: what a policy that has never seen the protocol is shown before it plays on `wiki`.

The solver searches for the article that a question names, reads in it the name that fits the description, and goes on
from there. The challenger works backwards: it searches for its target, finds an article that names it, and asks with
what the first sentences of the passages say that things are. Both really search, and a demonstration is only kept where
each name that it uses stands in a passage that it was shown. Everything comes from the training part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from sesa_jax.config import Challenger
from sesa_jax.evals.score import normalise
from sesa_jax.records import Document, Target
from sesa_jax.selfplay import prompts
from sesa_jax.skills import priming
from sesa_jax.worlds.demonstrations import Demonstration, SearchDocuments, Transcript, record
from sesa_jax.worlds.naming import names_one_of
from sesa_jax.worlds.search import Corpus
from sesa_jax.worlds.wiki import HOPS, World

CHALLENGER_SHARE = 0.35
CARDS_SHARE = 0.5  # of the solver's prompts hold three of the handwritten cards, as they do in a run
LOOKS = ('I look for {name}.', 'The article about {name} should say it.', 'First I need {name}.')
ASKS = ('I know the way now.', 'This makes a chain.', 'Now I can ask.')


class Players:
    """The players of one world."""

    def __init__(self, world: World, documents: int):
        """documents: passages a search."""
        corpus = Corpus(world.documents)
        self._world = world
        self._engine: SearchDocuments = lambda query: corpus.search([query], documents)[0]
        self._handwritten = [card.shown() for card in priming.handwritten()]
        # By number of hops and answer: a country that everything names would fill the stream otherwise.
        self._chains: dict[int, dict[str, list[tuple[str, ...]]]] = {}
        for hops in HOPS:
            self._chains[hops] = {}
            for chain in world.chains('train', hops):
                self._chains[hops].setdefault(chain[-1], []).append(chain)

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One demonstration, of either role, with one or two hops."""
        while True:
            hops = int(rng.choice(HOPS))
            names = list(self._chains[hops])
            answer = names[int(rng.integers(len(names)))]
            if rng.random() < CHALLENGER_SHARE:
                script = self.challenge(answer, hops, rng)
            else:
                chains = self._chains[hops][answer]
                script = self.solve(chains[int(rng.integers(len(chains)))], rng)
            if script is not None:
                return record(script)

    def solve(self, chain: Sequence[str], rng: np.random.Generator) -> Transcript | None:
        """A question about a chain and its solution; None where the search does not bring what the way needs."""
        by = str(rng.choice(['description', 'predicate']))
        question = self._world.ask(chain, rng, by=by)
        if question is None or names_one_of(question, self._world.held_out_names):
            return None
        cards = []
        if rng.random() < CARDS_SHARE:
            cards = [self._handwritten[i] for i in rng.permutation(len(self._handwritten))[:3]]
        script = Transcript(prompts.solver(question, cards, 'full'), 'solver')
        think = _pick(LOOKS, rng).format(name=chain[0])
        for at, name in itertools.pairwise(chain):
            found = script.search(think, at, self._engine)
            if not any(document.title == at and _holds(document, name) for document in found):
                return None
            think = f'The article about {at} names {name}, {self._world.called(name, at, by=by)}.'
        script.turn(think, 'answer', chain[-1])
        return script

    def challenge(self, answer: str, hops: int, rng: np.random.Generator) -> Transcript | None:
        """A question whose answer is `answer`, found backwards; None where the search shows no way."""
        world = self._world
        target = Target(answer, world.aliases(answer), hops)
        script = Transcript(prompts.challenger(target, (), 'full'), 'challenger')
        chain, think = [answer], _pick(LOOKS, rng).format(name=answer)
        while len(chain) <= hops:
            at = chain[0]
            found = script.search(think, at, self._engine)
            if not self._shows(found, at):
                return None
            links = world.linked_from.get(at, ())
            named = {d.title for d in found if d.title in links and d.title not in chain and _holds(d, at)}
            options = [d for d in dict.fromkeys(d.title for d in found) if d in named]
            if not options:
                return None
            chain.insert(0, options[int(rng.integers(len(options)))])
            think = f'{at} is {_article(world.articles[at].predicate)}. The article about {chain[0]} names it.'
        found = script.search(think, chain[0], self._engine)
        if not any(document.title == chain[0] and _holds(document, chain[1]) for document in found):
            return None
        question = world.ask(chain, rng, by='predicate')
        if question is None or names_one_of(question, world.held_out_names):
            return None
        if len(question.split()) < Challenger().min_words:
            return None
        script.turn(_pick(ASKS, rng), 'question', question)
        return script

    def _shows(self, documents: Sequence[Document], title: str) -> bool:
        """Whether the documents say what a thing is: the sentence of its own article."""
        predicate = self._world.articles[title].predicate
        return bool(predicate) and any(d.title == title and predicate in d.text for d in documents)


def stream(players: Players, seed: int, step: int) -> Iterator[Demonstration]:
    """The demonstrations of one training step, without end: a pure function of seed and step."""
    rng = np.random.default_rng([seed, 43, step])
    while True:
        yield players.play(rng)


def _holds(document: Document, name: str) -> bool:
    return f' {normalise(name)} ' in f' {normalise(document.text)} '


def _article(noun: str) -> str:
    return f'an {noun}' if noun[0].lower() in 'aeiou' else f'a {noun}'


def _pick(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]
