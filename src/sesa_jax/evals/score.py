"""Was the answer right? Exact match and token F1 after the normalisation that open-domain question answering uses.

The order matters and is fixed: lower-case, NFC, strip punctuation (ASCII and Unicode), drop a/an/the, collapse spaces.
As in SQuAD a decimal point is punctuation, so 3.14 equals 314. Left out: judging by meaning (`host/judge.py`).
"""

from __future__ import annotations

import collections
import string
import unicodedata
from collections.abc import Sequence

_ASCII = frozenset(string.punctuation)  # more than Unicode's P*: also $ + < = > ^ ` | ~
_ARTICLES = frozenset({'a', 'an', 'the'})


def normalise(text: str, *, drop_articles: bool = True) -> str:
    """`text` in the form in which answers are compared."""
    text = unicodedata.normalize('NFC', text.lower())
    text = ''.join(c for c in text if c not in _ASCII and not unicodedata.category(c).startswith('P'))
    return ' '.join(word for word in text.split() if not (drop_articles and word in _ARTICLES))


def is_blank(prediction: str) -> bool:
    """Whether nothing but spaces and punctuation was said: scored 0 without asking a judge."""
    return not normalise(prediction, drop_articles=False)


def exact(prediction: str, golds: Sequence[str]) -> bool:
    """Whether `prediction` equals one of `golds` after normalisation.

    A gold that normalises to nothing (the band `The The`) is compared with its articles. ValueError without any gold.
    """
    return any(ours == gold and ours != '' for ours, gold in _pairs(prediction, golds))


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Largest F1 over `golds` of the normalised words as bags, in [0, 1]; never below `exact`.

    ValueError if `golds` is empty.
    """
    return max(_bag_f1(ours.split(), gold.split()) for ours, gold in _pairs(prediction, golds))


def _pairs(prediction: str, golds: Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(golds, str) or not golds:
        raise ValueError(f'a question needs a list with at least one gold answer, not {golds!r}')
    pairs = []
    for gold in golds:
        keep_articles = not normalise(gold)
        pairs.append(tuple(normalise(text, drop_articles=not keep_articles) for text in (prediction, gold)))
    return pairs


def _bag_f1(ours: list[str], gold: list[str]) -> float:
    common = sum((collections.Counter(ours) & collections.Counter(gold)).values())
    return 2 * common / (len(ours) + len(gold)) if common else 0.0
