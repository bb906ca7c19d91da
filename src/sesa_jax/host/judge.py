"""Judging without a model: exact match for answers, a reader for questions, and the strict parser of a judge's words.

`judge` decides what an answer is worth. `verify` asks whether a question can be answered from the passages that its
challenger found, when they lie among passages that other challengers found: a stand-in for letting a model read them.
`parse_verdict` reads the reply of a judge that is a model; it would rather not know than guess, since a lenient parser
finds 'correct' in 'incorrect'.

Left out: the model behind a URL, its prompt and its retries.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from sesa_jax.evals.score import exact
from sesa_jax.host.schema import Verification
from sesa_jax.worlds.search import Ranking, words

READ_SENTENCES = 3  # the reader looks at this many sentences of the ranking
CLOSING = '.!,;。！ \t'  # a question mark or a colon leaves the matter open
REASONING = re.compile(r'\A\s*<think>.*?</think>', re.DOTALL)
# Not after an initial or a two-letter title ('J. Vel', 'St. Mary'): a name that is cut could never be read.
SENTENCE_END = re.compile(r'(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)(?<=[.!?])\s+|\n+')


def parse_verdict(reply: str | None, is_cut: bool = False) -> bool | None:
    """True for correct, False for wrong, None (unjudged) for anything else.

    A verdict is a first line that equals 'correct', 'wrong' or 'incorrect' but for case, spaces and closing
    punctuation, or a whole reply that is a JSON object with a boolean `correct`. A finished block of reasoning before
    it is dropped unread. `is_cut`: the reply ended at its token limit, so its last line may be half of something.
    """
    text = REASONING.sub('', reply or '').strip()
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        first, is_whole, _ = text.partition('\n')
        if is_cut and not is_whole:
            return None
        return {'correct': True, 'wrong': False, 'incorrect': False}.get(first.rstrip(CLOSING).strip().lower())
    is_correct = data.get('correct') if isinstance(data, dict) else None
    return is_correct if isinstance(is_correct, bool) else None


def judge(prediction: str, golds: Sequence[str]) -> Literal['correct', 'wrong']:
    """The offline judge: normalised exact match with any of the golds, so it never leaves an answer unjudged.

    Raises ValueError without golds: there is nothing to compare with.
    """
    return 'correct' if exact(prediction, golds) else 'wrong'


def occurs(answer: str, text: str) -> bool:
    """Whether the words of `answer` stand in `text` one after another ('9' does not occur in '1969')."""
    wanted = words(answer)
    return bool(wanted) and f' {" ".join(wanted)} ' in f' {" ".join(words(text))} '


def sentences(blocks: Sequence[str]) -> list[str]:
    """The sentences of all blocks in order; one that was found twice is read once."""
    cut = (sentence.strip() for block in blocks for sentence in SENTENCE_END.split(block))
    return [sentence for sentence in dict.fromkeys(cut) if words(sentence)]


def verify(
    question: str, golds: Sequence[str], materials: Sequence[str], noise: Sequence[str], seed: int
) -> Verification:
    """The reader: accepts a question whose target can be read off the passages that it was made from.

    The target, or an alias, must occur at word boundaries in the challenger's own materials; and a BM25 ranking of the
    sentences of all blocks, with the question as query, must have a sentence with it among its first three. The own
    materials are one block, each text of `noise` (what another challenger found) is one more; `seed` shuffles them,
    so that their order carries nothing.
    """
    if not any(occurs(gold, text) for gold in golds for text in materials):
        return Verification('reject', 'target-not-in-materials')
    blocks = ['\n\n'.join(materials), *noise]
    random.Random(seed).shuffle(blocks)
    candidates = sentences(blocks)
    read = [candidates[i] for i in Ranking(candidates).top(question, READ_SENTENCES)]
    if not any(occurs(gold, sentence) for gold in golds for sentence in read):
        return Verification('reject', 'target-not-read')
    return Verification('accept')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different; two verdicts in one reply are none."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError('a key is given twice')
    return dict(pairs)
