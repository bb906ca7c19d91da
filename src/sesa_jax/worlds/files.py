"""People's own text: a corpus to search, answers to ask about, questions to train on and to measure with.

Each is a file of JSON lines, or one JSON list. What a row may look like, so that the files that people have can be read
as they are:

    corpus      `id, contents` (Search-R1: the title in quotes, a new line, the text) · `title, text` ·
                `context` of [title, [sentence, ...]] (HotpotQA, 2Wiki) · `paragraphs` of {title, paragraph_text or text}
                (MuSiQue, PopQA); a paragraph that comes again is kept once
    answers     `answer, aliases, hops` · `ground_truth, search_turns` (SSP) · anything that may answer a question
    questions   `question` with `golden_answers`, `answers`, `possible_answers`, `answer` (with `answer_aliases` or `aliases`),
                `short_answers`, `ground_truth` or `reward_model`; text, list, list as text, or {value, aliases}

A row without its field is an error that names file, line and field; none is skipped. Hops come from `hops`, `search_turns`,
`question_decomposition` or the articles of `supporting_facts`, else 1; the class that results are split by from `dataset`
or `data_source`, else 'all'.

Two fifths of the questions are held out, by their answer, or as `split` says ('train', or any other word for held out).
A held-out answer is never a target, and no training question has or names one; 'yes', 'no' and bare numbers name nothing,
and names of fewer than four letters are only compared as answers.

Left out: an index on disk. Passages are held in memory, some 4 kB each with their index.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sesa_jax.config import ConfigError
from sesa_jax.evals.score import normalise
from sesa_jax.records import Document, Question, Target, text_hash
from sesa_jax.worlds import Part
from sesa_jax.worlds.naming import names_one_of

HELD_OUT_SHARE = 0.4
ANSWERS = ('golden_answers', 'answers', 'possible_answers', 'answer', 'short_answers', 'ground_truth', 'reward_model')
ALIASES = ('aliases', 'answer_aliases')
HOPS = ('hops', 'search_turns')
KINDS = ('dataset', 'data_source')
CLOSED = frozenset({'yes', 'no', 'true', 'false'})


@dataclass(frozen=True)
class Row:
    """One row and where it stands."""

    where: str
    fields: Mapping[str, Any]

    def fault(self, field: str, what: str) -> ConfigError:
        return ConfigError(f'{self.where}: `{field}` {what}')

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.fault(field, 'is missing' if value is None else f'must be text, and not empty: {_short(value)}')
        return value.strip()

    @property
    def golds(self) -> tuple[str, ...]:
        """The answers, the first one first, each once. ConfigError where there is none."""
        field = next((name for name in ANSWERS if self.fields.get(name) is not None), None)
        if field is None:
            raise ConfigError(f'{self.where}: has none of the fields {", ".join(f"`{name}`" for name in ANSWERS)}')
        found = self._texts(field, self.fields[field])
        for alias in ALIASES:
            found += self._texts(alias, self.fields.get(alias) or [])
        if not found:
            raise self.fault(field, 'holds no answer')
        return tuple(dict.fromkeys(found))

    def _texts(self, field: str, value: Any) -> list[str]:
        if isinstance(value, str) and value.lstrip().startswith('[') and value.rstrip().endswith(']'):
            value = _list_in(value)  # a list written as text: JSON, or Python's own
        if isinstance(value, Mapping):
            inner = next((k for k in ('value', 'target', 'ground_truth') if k in value), None)
            if inner is None:
                raise self.fault(field, f'is an object without `value` or `target`: {_short(value)}')
            return self._texts(field, value[inner]) + self._texts(field, value.get('aliases', []))
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, str | int | float) or not str(item).strip():
                raise self.fault(field, f'must hold text: {_short(item)}')
        return [str(item).strip() for item in values]

    @property
    def hops(self) -> int:
        for field in HOPS:
            if (value := self.fields.get(field)) is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
                    raise self.fault(field, f'must be a whole number of at least 1: {_short(value)}')
                return value
        parts = self.fields.get('question_decomposition')
        if isinstance(parts, list) and parts:
            return len(parts)
        facts = self.fields.get('supporting_facts')
        if isinstance(facts, Mapping):  # as `datasets` writes it
            titles = facts.get('title')
        else:
            titles = [fact[0] for fact in facts or [] if isinstance(fact, list) and fact]
        return max(1, len({str(title) for title in titles or []}))


@dataclass(frozen=True)
class World:
    """What the files hold. The split depends on the seed and the answers, not on the order of the rows."""

    seed: int
    documents: tuple[Document, ...]
    answers: tuple[Target, ...]
    asked: tuple[tuple[Question, str], ...]  # with the row's own `split`, '' where it has none

    @functools.cached_property
    def parts(self) -> tuple[tuple[Part, Question], ...]:
        """Each question with its part; what training may not use (see the module) is left out."""
        held_out = [question for question, split in self.asked if self._is_held_out(question, split)]
        golds = frozenset(normalise(gold) for question in held_out for gold in question.answers if not _is_closed(gold))
        names = _names(held_out)
        train = [
            question for question, split in self.asked
            if not self._is_held_out(question, split) and not names_one_of(question.text, names)
            and not any(normalise(gold) in golds for gold in question.answers)
        ]  # fmt: skip
        return (*(('held_out', question) for question in held_out), *(('train', question) for question in train))

    def _is_held_out(self, question: Question, split: str) -> bool:
        if split:
            return split != 'train'
        first = question.answers[0]
        key = text_hash(question.text) if _is_closed(first) else normalise(first)
        draw = int(hashlib.sha256(f'{self.seed}:{key}'.encode()).hexdigest()[:8], 16)
        return draw < HELD_OUT_SHARE * 16**8

    @functools.cached_property
    def held_out_names(self) -> frozenset[str]:
        return _names([question for part, question in self.parts if part == 'held_out'])

    def questions(self, part: Part, per_cell: int, seed: int) -> tuple[Question, ...]:
        """Up to `per_cell` questions of each class and number of hops, in the order of the file."""
        rng = np.random.default_rng([self.seed, seed, 17, part == 'held_out'])
        mine = [question for where, question in self.parts if where == part]
        left: dict[tuple[str, int], int] = {}
        kept = []
        for i in rng.permutation(len(mine)):
            cell = (mine[i].kind, mine[i].hops)
            left[cell] = left.get(cell, per_cell) - 1
            if left[cell] >= 0:
                kept.append(i)
        return tuple(mine[i] for i in sorted(kept))

    @functools.cached_property
    def _targets(self) -> tuple[Target, ...]:
        golds = {normalise(g) for part, q in self.parts if part == 'held_out' for g in q.answers if not _is_closed(g)}
        free = tuple(
            target for target in self.answers
            if not any(normalise(gold) in golds or names_one_of(gold, self.held_out_names) for gold in target.golds)
        )  # fmt: skip
        if self.answers and not free:
            raise ConfigError(
                f'each of the {len(self.answers)} rows of --answers is an answer of a held-out question, so none may be '
                'a training target; give other answers, or fewer held-out questions (`split`)'
            )
        return free

    def targets(self, count: int, step: int, seed: int) -> tuple[Target, ...]:
        """Rows of the answers, each at most once a step where there are enough."""
        rng = np.random.default_rng([self.seed, seed, 23, step])
        draw = rng.choice(len(self._targets), count, replace=count > len(self._targets))
        return tuple(self._targets[i] for i in draw)


def build(seed: int, corpus: str, answers: str = '', questions: str = '') -> World:
    """The world of three files, of which the last two may be missing. ConfigError names file, line and field."""
    world = World(
        seed,
        read_corpus(corpus),
        read_answers(answers) if answers else (),
        read_questions(questions) if questions else (),
    )
    if answers:
        world.targets(1, 1, 0)  # refuses a set that leaves nothing, before anything is made
    return world


def read_corpus(path: str | Path) -> tuple[Document, ...]:
    """The passages of a corpus, in order."""
    documents: dict[str, Document] = {}
    seen: set[tuple[str, str]] = set()
    for number, row in enumerate(rows(path)):
        if 'contents' in row.fields:
            title, _, text = row.text('contents').partition('\n')
            found = [(title.strip().strip('"'), text.strip()) if text.strip() else ('', title)]
        elif 'text' in row.fields:
            found = [(row.text('title'), row.text('text'))]
        elif 'context' in row.fields and not isinstance(row.fields['context'], str):
            found = list(_context(row))
        elif 'paragraphs' in row.fields:
            found = list(_paragraphs(row))
        else:
            raise ConfigError(
                f'{row.where}: has no passage (`contents`, `title` with `text`, `context` or `paragraphs`), so this file '
                f'cannot be a corpus; it has {", ".join(row.fields)}'
            )
        own = row.fields.get('id', row.fields.get('_id')) if len(found) == 1 else None
        for title, text in found:
            if len(found) > 1 and (title, text) in seen:
                continue
            seen.add((title, text))
            name = str(own) if own is not None else f'p{number}-{len(documents)}'
            if name in documents:
                raise row.fault('id', f'{name!r} was there before')
            documents[name] = Document(name, title, text)
    return tuple(documents.values())


def read_answers(path: str | Path) -> tuple[Target, ...]:
    """Target answers, each once (as answers are compared), with the aliases of all its rows."""
    found: dict[str, Target] = {}
    for row in rows(path):
        answer, *aliases = row.golds
        old = found.get(normalise(answer))
        if old is not None:
            answer, aliases = old.answer, [*old.aliases, *(a for a in (answer, *aliases) if a not in old.golds)]
        hops = row.hops if old is None else old.hops
        found[normalise(answer)] = Target(answer, tuple(aliases), hops, 'files')
    return tuple(found.values())


def read_questions(path: str | Path) -> tuple[tuple[Question, str], ...]:
    """Questions with their `split` ('' where the row has none); one that comes again adds its answers to the first."""
    found: dict[str, tuple[Question, str]] = {}
    for number, row in enumerate(rows(path)):
        text, golds, split = row.text('question'), row.golds, str(row.fields.get('split') or '')
        kind = next((str(row.fields[name]) for name in KINDS if row.fields.get(name)), 'all')
        own = next((str(row.fields[n]) for n in ('id', '_id', 'idx') if row.fields.get(n) is not None), '')
        key, name, hops = text_hash(text), f'q{number:06d}', row.hops
        if key in found:
            old, split = found[key]
            name, kind, hops, golds = old.id, old.kind, old.hops, tuple(dict.fromkeys((*old.answers, *golds)))
        found[key] = Question(name, text, golds, kind, hops, (own,) if own else ()), split
    return tuple(found.values())


def rows(path: str | Path) -> Iterator[Row]:
    """The objects of a file of JSON lines, or of one JSON list. ConfigError for anything else, and for none at all."""
    path = Path(path)
    try:
        raw = path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f'is not UTF-8 at byte {error.start}'
        raise ConfigError(f'{path}: {reason}') from error
    is_list = raw.lstrip().startswith('[')
    if is_list:
        items = [(f'{path}, row {n}', item) for n, item in enumerate(_parse(raw, str(path), raw), start=1)]
    else:
        lines = enumerate(raw.split('\n'), start=1)
        items = ((f'{path}, line {n}', _parse(line, f'{path}, line {n}', raw)) for n, line in lines if line.strip())
    count = 0
    for where, item in items:
        if not isinstance(item, dict):
            raise ConfigError(f'{where}: must be an object, not {_short(item)}')
        count += 1
        yield Row(where, item)
    if not count:
        raise ConfigError(f'{path}: has no rows')


def _parse(text: str, where: str, whole: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            data = json.loads(whole)
        except ValueError:
            raise ConfigError(f'{where}: is not JSON: {error}') from error
        raise ConfigError(
            f'{where.split(", line")[0]}: is one JSON object ({", ".join(data)}), not rows; JSON lines or a list are wanted'
        ) from error


def _context(row: Row) -> Iterator[tuple[str, str]]:
    """[[title, [sentence, ...]], ...], or {title: [...], sentences: [[...], ...]}."""
    value = row.fields['context']
    if isinstance(value, Mapping) and isinstance(value.get('title'), list) and isinstance(value.get('sentences'), list):
        value = list(map(list, zip(value['title'], value['sentences'], strict=False)))
    if not isinstance(value, list) or not value:
        raise row.fault('context', f'must be a list of [title, sentences]: {_short(value)}')
    for item in value:
        is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], list)
        if not is_pair or not all(isinstance(sentence, str) for sentence in item[1]):
            raise row.fault('context', f'must hold [title, [sentence, ...]]: {_short(item)}')
        text = ' '.join(' '.join(item[1]).split())
        if text:
            yield item[0].strip(), text


def _paragraphs(row: Row) -> Iterator[tuple[str, str]]:
    value = row.fields['paragraphs']
    if not isinstance(value, list) or not value:
        raise row.fault('paragraphs', f'must be a list of objects: {_short(value)}')
    for item in value:
        text = item.get('paragraph_text', item.get('text')) if isinstance(item, dict) else None
        if not isinstance(text, str) or not isinstance(item.get('title'), str):
            raise row.fault('paragraphs', f'must hold `title` and `paragraph_text` or `text`: {_short(item)}')
        if text.strip():
            yield item['title'].strip(), text.strip()


def _list_in(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def _is_closed(answer: str) -> bool:
    """Whether an answer names nothing: yes or no, or no letter in it."""
    return normalise(answer) in CLOSED or not any(c.isalpha() for c in answer)


def _names(questions: list[Question]) -> frozenset[str]:
    golds = (gold for question in questions for gold in question.answers if not _is_closed(gold))
    return frozenset(gold for gold in golds if sum(c.isalpha() for c in gold) >= 4)


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + '...'
