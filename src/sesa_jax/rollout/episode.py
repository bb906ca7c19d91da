"""The tag protocol as pure functions: what a turn means, what an observation looks like, where sampling stops.

A row is one unbroken assistant message. The policy writes text and ends a turn with `</search>`, `</answer>` or
`</question>`; a search is answered by an `<information>` block that is put behind it. The text of a turn is the
concatenation of the bytes of its ids, cut behind the first closing tag; nothing else is ever parsed, so what stands in
a retrieved document cannot act. The tags are ordinary text to the tokenizer. Left out: everything that knows arrays on
a device (engine.py) or whether an answer is right (selfplay, evals).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from sesa_jax.records import Role, Search, StopReason

TurnKind = Literal['search', 'answer', 'question', 'malformed']

# The one table of tags: name -> (opening, closing).
TAGS: dict[str, tuple[str, str]] = {
    name: (f'<{name}>', f'</{name}>') for name in ('search', 'answer', 'question', 'information')
}
# The tags that may end a turn. All of them stop every role: one that is not the role's own makes the turn malformed.
STOPS: tuple[str, ...] = tuple(TAGS[name][1] for name in ('search', 'answer', 'question'))
ROLE_TAGS: dict[Role, tuple[TurnKind, ...]] = {'solver': ('search', 'answer'), 'challenger': ('search', 'question')}

NO_RESULTS = 'No results found.'
NO_SEARCH = 'The search is not available.'

_FIRST_STOP = re.compile('|'.join(re.escape(stop) for stop in STOPS))
# A protocol tag in any dress: spaces and slashes before the name, any case, attributes, or never closed.
_ANY_TAG = re.compile(rf'<([\s/]*(?:{"|".join(TAGS)})\b[^<>]*)(>?)', re.IGNORECASE)
# Categories Cc (but tab and newline) and Cs, and the invisible ones of Cf. U+200C and U+200D stay: scripts need them.
_CONTROL = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f'
    '\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]'
)


def parse_turn(text: str, role: Role) -> tuple[TurnKind, str]:
    """Kind and stripped content of one turn.

    Text behind the first closing tag is not looked at. The content begins behind the last opening tag of the same name
    before it. A closing tag without an opening one, a tag that is not the role's, no closing tag, and a search without
    a query are `('malformed', '')`. An empty answer is an answer: it is wrong, not malformed.
    """
    stop = _FIRST_STOP.search(text)
    if stop is None:
        return 'malformed', ''
    for kind in ROLE_TAGS[role]:
        opening, closing = TAGS[kind]
        start = text.rfind(opening, 0, stop.start())
        if stop.group() == closing and start >= 0:
            content = text[start + len(opening) : stop.start()].strip()
            return (kind, content) if content or kind != 'search' else ('malformed', '')
    return 'malformed', ''


def after_turn(kind: TurnKind, *, is_cut: bool, is_last: bool) -> StopReason | None:
    """Why the row ends with this turn; None: its search is made and it goes on.

    `is_cut`: a token budget ended the turn. A tag that was complete before the cut counts.
    """
    if kind == 'malformed':
        return 'length' if is_cut else 'malformed'
    if kind == 'search':
        return 'turns' if is_last else None
    return kind


def neutralise(text: str) -> str:
    """Text from outside, made harmless: protocol tags lose their angle brackets to U+2039 and U+203A, and control
    characters are removed (first, so that none can hide a tag). Idempotent; time is linear in the length."""
    return _ANY_TAG.sub(lambda tag: f'‹{tag[1]}{"›" if tag[2] else ""}', _CONTROL.sub('', text))


def observation_parts(search: Search) -> tuple[str, str, str]:
    """Opening, body and closing of the block that answers a search. Titles and texts are neutralised here, and only
    here; the record keeps the original documents."""
    opening, closing = TAGS['information']
    if search.outcome == 'outage':
        body = NO_SEARCH
    elif search.outcome == 'empty' or not search.documents:
        body = NO_RESULTS
    else:
        body = '\n'.join(
            f'Doc {number} (Title: {" ".join(neutralise(document.title).split())})\n{neutralise(document.text).strip()}'
            for number, document in enumerate(search.documents, start=1)
        )
    return f'\n{opening}\n', body, f'\n{closing}\n\n'


def observation(search: Search) -> str:
    """The whole block: '\\n<information>\\nDoc 1 (Title: ...)\\n...\\n</information>\\n\\n'."""
    return ''.join(observation_parts(search))


def encode_observation(encode: Callable[[str], list[int]], search: Search, limit: int) -> list[int]:
    """The block as at most `limit` ids: a body that is too long is cut on a token boundary, the wrapper stays whole.

    `encode` must be the tokenizer's untrusted one, which has no control tokens. The three parts are encoded apart, so
    that a cut changes no id before it. A limit below the length of the wrapper is a ValueError.
    """
    head, body, tail = (encode(part) for part in observation_parts(search))
    room = limit - len(head) - len(tail)
    if room < 0:
        raise ValueError(
            f'lengths.observation is {limit} tokens, but the <information> wrapper alone has {len(head) + len(tail)}; '
            'raise it'
        )
    return head + body[:room] + tail


def text_of(ids: Sequence[int], token_bytes: Sequence[bytes]) -> str:
    """The text of sampled ids; special ids have none, and bytes that are not UTF-8 become U+FFFD."""
    return b''.join(token_bytes[i] for i in ids).decode('utf-8', errors='replace')


def stop_table(token_bytes: Sequence[bytes], stops: Sequence[str] = STOPS) -> tuple[np.ndarray, np.ndarray]:
    """An automaton over token ids that accepts as soon as any of `stops` has occurred in the bytes of the ids.

    Aho-Corasick over bytes, composed with the bytes of every token, so a stop that spans tokens, or ends inside one, is
    found exactly; in a vocabulary of 150,000 some 270 tokens can complete a closing tag. Start in state 0; accepting is
    absorbing; a token without bytes leaves the state as it is.

    Returns:
      table: u8[states, V] (u16 beyond 256 states), the next state.
      accept: bool[states].
    """
    patterns = [stop.encode() for stop in stops]
    state_of = _states(stops)
    prefixes = list(state_of)
    accept = np.array([any(pattern in prefix for pattern in patterns) for prefix in prefixes])
    by_byte = np.zeros((len(prefixes), 256), dtype=np.uint8 if len(prefixes) <= 256 else np.uint16)
    for prefix, state in state_of.items():
        for byte in range(256):
            seen = prefix + bytes([byte])
            # The longest suffix of what was seen that is still the beginning of a stop.
            following = next(state_of[seen[n:]] for n in range(len(seen) + 1) if seen[n:] in state_of)
            by_byte[state, byte] = state if accept[state] else following

    lengths = np.array([len(piece) for piece in token_bytes])
    table = np.repeat(np.arange(len(prefixes), dtype=by_byte.dtype)[:, None], len(token_bytes), axis=1)
    for column in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > column)
        byte = np.array([token_bytes[i][column] for i in longer])
        table[:, longer] = by_byte[table[:, longer], byte]
    return table, accept


def stop_state(stop: str, stops: Sequence[str] = STOPS) -> int:
    """The state in which the automaton of `stop_table` has seen `stop`, before any other of `stops`."""
    return _states(stops)[stop.encode()]


def _states(stops: Sequence[str]) -> dict[bytes, int]:
    """The states of the automaton: one for each beginning of a stop, the empty one first."""
    prefixes = {stop.encode()[:n] for stop in stops for n in range(len(stop.encode()) + 1)}
    return {prefix: state for state, prefix in enumerate(sorted(prefixes, key=lambda p: (len(p), p)))}
