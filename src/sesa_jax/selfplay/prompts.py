"""What each role reads before its first token, as plain text; the chat scaffold is the tokenizer's business.

Two styles. `full` explains the protocol to a language model that has never seen it. `short` is the few words that the
packaged `tiny` policy was trained on: a 1,024-piece vocabulary and a laptop have no room for an instruction. In both,
the question is what follows the last `Question: `.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sesa_jax.records import Target

Style = Literal['full', 'short']

SOLVER = """\
Answer the question at the end. Think inside <think> and </think> first, and again whenever you receive something new.
If you lack knowledge, search: write <search> query </search>, and the top results are given to you between
<information> and </information>. Search as often as you need. When you know enough, write only the answer, without an
explanation, as <answer> answer </answer>.
"""
CARDS = """\
Notes from earlier practice, most relevant first. Use one where its condition fits; a word in braces is a slot to fill.
"""
CHALLENGER = """\
You write questions for a research assistant who can search. You are given a target answer and a number of hops.
Write one question whose only correct answer is the target and which needs that many searches in a row.

Work backwards. Search for facts that lead to the target; take the fact just before it as the new target, and go on
until the chain is long enough. Start the question from the end of the chain. Think inside <think> and </think> whenever
you receive something new; search with <search> query </search>, and results come between <information> and
</information>. When you are done, write <question> question </question> and nothing after it.

The question must rest on facts that you found, must not mention the target or a step in between, must have exactly one
answer, must not repeat a search, and must be one clear sentence of at least ten words.
"""


def solver(question: str, cards: Sequence[str], style: Style) -> str:
    """The solver's user message.

    Args:
      question: The question, as posed.
      cards: Shown text of the retrieved cards, best first; may be empty.
      style: See the module.
    """
    lines = ''.join(f'- {card}\n' for card in cards)
    if style == 'short':
        return f'{lines}Question: {question}'
    notes = f'\n{CARDS}{lines}' if cards else ''
    return f'{SOLVER}{notes}\nQuestion: {question}'


def challenger(target: Target, cards: Sequence[str], style: Style) -> str:
    """The challenger's user message. `cards` is empty but under `--challenger-sees-skills`, the leak to study."""
    lines = ''.join(f'- {card}\n' for card in cards)
    if style == 'short':
        return f'{lines}Target: {target.answer}\nHops: {target.hops}'
    notes = f'{CARDS}{lines}\n' if cards else ''
    return f'{notes}{CHALLENGER}\nTarget answer: {target.answer}\nHops: {target.hops}'
