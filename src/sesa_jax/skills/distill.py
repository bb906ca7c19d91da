"""The offline distiller: rules that turn failure records into card drafts, without a model and without the world.

It reads what a person would read: the question, the target, the passages that the rollout saw. Two things are worth a
card. A *pointer*: a passage about something in the question says where the asked-for fact is kept, and nobody looked
there. A *source*: a passage that does state the target has a title which is no name, so the title is a place to look.
Whatever else went wrong (a miscopied name, a wrong hop) holds no lesson for other questions, and makes no card.

Left out: judging the lesson. Admission, counters and eviction do that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from sesa_jax.records import Document, Failure, text_hash
from sesa_jax.skills.card import DraftCard

NAME = 'rules'
VERSION = text_hash('pointer and source rules, 1')
"""Changes with the rules, as a model's prompt hash changes with its prompt."""

WORD = re.compile(r'[^\W\d_]+')
SENTENCE = re.compile(r'[^.!?\n]+')
# Words that open a place to look, and the words in front of which a noun phrase ends.
FUNCTION = ENGLISH_STOP_WORDS | {'said', 'called', 'name', 'tell'}
DETERMINERS = frozenset({'the', 'a', 'an', 'this', 'that', 'its', 'their', 'in', 'under', 'from', 'at', 'see'})
MAX_KEYS = 2  # a place to look is a noun phrase of one or two words


def distill(failures: Sequence[Failure]) -> list[DraftCard]:
    """Drafts, one per lesson: (relation word, query template), in the order in which they were first seen.

    Equal lessons are merged, with all their rollouts as provenance; the first failure gives the source question.
    """
    return _drafts((failure, lesson) for failure in failures for lesson in _lessons(failure))


def mine(successes: Sequence[Failure]) -> list[DraftCard]:
    """Drafts from rollouts that were right, for priming: the query that worked, for questions of one relation.

    The records have the form of failures; their prediction is right.
    """
    found = []
    for record in successes:
        asked = _asked(record.question)
        names = _names(record.question)
        if len(asked) != 1 or len(names) != 1 or not record.queries:
            continue
        query = record.queries[-1]
        rest = [word for word in WORD.findall(query) if word != names[0]]
        if names[0] in query and rest and not any(word[0].isupper() for word in rest):
            found.append((record, (asked[0], '{entity} ' + ' '.join(rest))))
    return _drafts(found)


def _drafts(pairs: Iterable[tuple[Failure, tuple[str, str]]]) -> list[DraftCard]:
    merged: dict[tuple[str, str], list[Failure]] = {}
    for failure, lesson in pairs:
        merged.setdefault(lesson, []).append(failure)
    return [draft(noun, template, sources) for (noun, template), sources in merged.items()]


def draft(noun: str, template: str, sources: Sequence[Failure] = ()) -> DraftCard:
    """The card that says: the `noun` of something is found with `template`. `sources`: the rollouts that showed it."""
    place = template.removeprefix('{entity} ')
    is_naive = place == noun
    return DraftCard(
        description=f'The {noun} of something is found with the words {place}.',
        trigger=f'a question asks for the {noun}',
        masked_question=f'Who or what is the {noun} of {{entity}}?',
        queries=(template,),
        avoid='' if is_naive else f'{{entity}} {noun}',
        evidence='' if is_naive else f'The passage about {place} states it plainly; others only tell of it.',
        source_question_hash=sources[0].question_hash if sources else '',
        source_question_hashes=tuple(sorted({f.question_hash for f in sources})),
        source_target_hash=sources[0].target.hash if sources else '',
        rollout_ids=tuple(dict.fromkeys(f.rollout_id for f in sources)),
        distiller=NAME,
        prompt_hash=VERSION,
    )


def _lessons(failure: Failure) -> Iterator[tuple[str, str]]:
    """(relation word, template) for each lesson of a failure; the pointers first."""
    asked = _asked(failure.question)
    tried = {word for query in failure.queries for word in WORD.findall(query.lower())}
    for document in failure.evidence:
        for sentence in SENTENCE.findall(document.text):
            words = WORD.findall(sentence)
            noun = next((w for w in asked if w in words), None)
            others = [w for w in words if w[0].isupper() and w not in document.title.split()]
            if noun is None or others[1:] or (others and words[0] != others[0]):
                continue  # it speaks of other names: it states something, or tells of it
            keys = _place(words, set(asked))
            if keys and not set(keys) <= tried:
                yield noun, '{entity} ' + ' '.join(keys)
    yield from _sources(failure, asked)


def _place(words: Sequence[str], asked: set[str]) -> list[str]:
    """The noun phrase of a sentence that is neither asked for nor a name: after a determiner, at most two words."""
    best: list[str] = []
    for i, word in enumerate(words):
        if word.lower() not in DETERMINERS:
            continue
        run: list[str] = []
        for following in words[i + 1 :]:
            plain = following.lower()
            if plain in FUNCTION or plain in asked or following[0].isupper() or len(run) == MAX_KEYS:
                break
            run.append(plain)
        if len(run) > len(best):
            best = run
    return best if len(best) == MAX_KEYS else []


def _sources(failure: Failure, asked: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The titles of passages that state the target, where a title is a place and not a name."""
    if len(asked) != 1:
        return  # with several hops, nothing says which of them the passage answers
    for document in failure.evidence:
        title = WORD.findall(document.title)
        is_place = title and not any(word[0].isupper() or word in asked for word in title)
        if is_place and any(_states(document, gold) for gold in failure.target.golds):
            yield asked[0], '{entity} ' + ' '.join(title[: MAX_KEYS + 1])


def _states(document: Document, gold: str) -> bool:
    return re.search(rf'(?<!\w){re.escape(gold)}(?!\w)', document.text) is not None


def _names(question: str) -> list[str]:
    """The capitalised words of a question, the first word aside."""
    return [word for word in WORD.findall(question)[1:] if word[0].isupper()]


def _asked(question: str) -> list[str]:
    """The content words of a question that are no names: its relations, in order."""
    words = WORD.findall(question)[1:]
    return list(dict.fromkeys(w for w in words if w[0].islower() and w not in FUNCTION))
