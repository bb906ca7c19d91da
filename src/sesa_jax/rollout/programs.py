"""Compiled programs by name and sizes: only those of a table that is written down beforehand, each compiled once.

What is compiled is bounded by the length of the table; a shape that is not in it is an error, and never a compilation
in the middle of a run. Each entry is compiled when it is first needed, and held.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import jax

log = logging.getLogger(__name__)

Key = tuple[Any, ...]


class Programs:
    """`run` executes the program of a key with arguments of the shapes that the key stands for."""

    def __init__(self, table: Iterable[Key]) -> None:
        self.table = frozenset(table)
        self.held: dict[Key, jax.stages.Compiled] = {}

    def run(self, key: Key, function: Any, *arguments: Any, **static: Any) -> Any:
        """`function` is jitted; `static` are its static arguments. KeyError for a key that is not in the table."""
        if key not in self.held:
            if key not in self.table:
                raise KeyError(f'no program of the table has the shape {key}')
            log.info('compiling %s (%d of at most %d)', key, len(self.held) + 1, len(self.table))
            self.held[key] = function.lower(*arguments, **static).compile()
        return self.held[key](*arguments)
