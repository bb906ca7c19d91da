"""Where a name stands in a text: as whole words, whatever the case and the punctuation around them.

One rule for all worlds: a question of training must not name what only measurement may ask about.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from sesa_jax.worlds.search import words


class Phrases:
    """Many names at once; a look-up costs the length of the text, not the number of names."""

    def __init__(self, names: Iterable[str]):
        self._names: dict[tuple[str, ...], str] = {}
        for name in names:
            if phrase := tuple(words(name)):
                self._names.setdefault(phrase, name)
        self._lengths = sorted({len(phrase) for phrase in self._names}, reverse=True)

    def at(self, tokens: Sequence[str], start: int) -> tuple[str, int] | None:
        """The longest name whose words begin at a token, and its number of words."""
        for length in self._lengths:
            name = self._names.get(tuple(tokens[start : start + length]))
            if name is not None and start + length <= len(tokens):
                return name, length
        return None

    def first_in(self, text: str) -> str | None:
        """The first name in a text, or None."""
        tokens = words(text)
        found = (self.at(tokens, start) for start in range(len(tokens)))
        return next((hit[0] for hit in found if hit is not None), None)


@functools.lru_cache(maxsize=4)
def _phrases(names: frozenset[str]) -> Phrases:
    return Phrases(names)


def names_one_of(text: str, names: frozenset[str]) -> bool:
    """Whether any of the names stands in the text ('Velmar' in "VELMAR's", not in 'Velmark')."""
    return bool(names) and _phrases(names).first_in(text) is not None
