"""Is a challenger's question one that may be asked? The ancestors' checks, in their order; the first that fails names it.

Left out: the last check, whether the question can be answered from its own search results among noise; the host process
makes it (`host/judge.py`), and `challenger.py` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

from sesa_jax.config import Challenger
from sesa_jax.evals.score import normalise
from sesa_jax.records import Target, Trajectory
from sesa_jax.worlds.naming import names_one_of

# In the order in which they are asked. 'outage' is no fault of the question: the row is left out, not punished.
REASONS = (
    'outage',
    'no question',
    'length',
    'answer leaks',
    'no evidence',
    'too few searches',
    'repeated search',
    'answer in search',
    'held out',
    'not verified',
)


def leaks(question: str, target: Target) -> bool:
    """Whether the answer or an alias stands in the question, as whole words after normalisation ('9' not in '1969')."""
    text = f' {normalise(question)} '
    return any(f' {words} ' in text for words in map(normalise, target.golds) if words)


def fault(
    trajectory: Trajectory,
    target: Target,
    limits: Challenger,
    held_out: frozenset[str] = frozenset(),
    fits: Callable[[str], bool] | None = None,
) -> str | None:
    """The first reason why the question of a challenger's rollout is not valid, or None.

    `held_out`: names that only measurement may ask about. `fits`: whether a solver's prompt has room for a question.
    """
    if trajectory.stop_reason == 'outage':
        return 'outage'
    question = trajectory.final
    if trajectory.stop_reason != 'question' or not question:
        return 'no question'
    words = question.split()
    if not limits.min_characters <= len(question) <= limits.max_characters or len(words) < limits.min_words:
        return 'length'
    if fits is not None and not fits(question):
        return 'length'
    if leaks(question, target):
        return 'answer leaks'
    if not any(search.outcome == 'ok' for search in trajectory.searches):
        return 'no evidence'
    queries = [search.query for search in trajectory.searches]
    if len(queries) < limits.min_searches:
        return 'too few searches'
    if len(set(queries)) < len(queries):
        return 'repeated search'
    if not limits.answer_in_search and any(leaks(query, target) for query in queries):
        return 'answer in search'
    if names_one_of(question, held_out):
        return 'held out'
    return None
