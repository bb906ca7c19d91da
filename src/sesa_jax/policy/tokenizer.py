"""Text to ids and back, with two encoders: one for the chat scaffold, one for everything that came from outside.

Instructions, questions, retrieved documents, card texts and target answers are data. They pass through `encode`, a
tokenizer without any control token, so that a page that spells one out yields ordinary ids. Only the scaffold of the
chat template passes through `encode_trusted`. Prompts are put together from ids, never from text.

`chat` makes the beginning of a row, once. What follows is ids in, ids out: what was sampled, then `encode` of what was
found, and so on within one assistant message. No template is applied again, so the ids after a turn are a prefix of the
ids after the next one, also where the template would cut the thoughts of earlier turns out of the text (Qwen3's does).

Left out: tokenizers that are not byte-level BPE (stopping and parsing rely on an exact `token_bytes`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from sesa_jax.policy.arch import ModelError
from sesa_jax.policy.hf import read_json

TODAY = '26 Jul 2024'
"""What a template takes for today; Llama-3.1's own default. With the real date, prompts would change over night."""
CLOCK = f'{{% macro strftime_now(format) %}}{TODAY}{{% endmacro %}}'  # in place of the function of transformers
SWITCH = 'enable_thinking'  # the variable by which a template lets its caller choose


class Tokenizer:
    """The tokenizer of a model folder. It reads the folder once and keeps nothing open.

    thinking: where the template has the switch, whether an answer may open with a think block; asking for it where
      there is no switch is a ModelError.
    template: the chat template for a folder that ships none, as many base models do; a folder's own comes first.
    """

    def __init__(self, folder: Path, *, thinking: bool = False, template: str | None = None) -> None:
        folder = Path(folder)
        where = folder / 'tokenizer.json'
        if not where.is_file():
            raise ModelError(f'{where} is missing')
        try:
            # This class and no other: it runs no code of the folder and builds on tokenizer.json alone.
            self._chat = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the Rust side raises bare Exceptions
            raise ModelError(f'{where} cannot be read: {error}') from None
        self._where = where
        self._template: str | None = self._chat.chat_template or template
        self._thinking = thinking
        if thinking and SWITCH not in (self._template or ''):
            raise ModelError(f'{folder}: its chat template has no switch for thinking; leave --thinking out')
        self._trusted: FastTokenizer = self._chat.backend_tokenizer
        self._trusted.no_padding()
        self._trusted.no_truncation()
        self._control = {token.content: i for i, token in self._trusted.get_added_tokens_decoder().items()}
        self._control_ids = frozenset(self._control.values())
        self._untrusted = _without_control_tokens(self._trusted, self._control, where)
        self.vocab_size: int = max(self._trusted.get_vocab(with_added_tokens=True).values()) + 1
        """Ids below this one have a text; the model's embedding may have more rows."""
        config = read_json(folder / 'config.json') if (folder / 'config.json').is_file() else {}
        generation = folder / 'generation_config.json'
        generation_config = read_json(generation) if generation.is_file() else {}
        rows = config.get('vocab_size')
        if rows is not None and rows < self.vocab_size:
            raise ModelError(f'{where} has {self.vocab_size} ids, but the embedding of config.json has {rows} rows')
        ends = (self._chat.eos_token_id, config.get('eos_token_id'), generation_config.get('eos_token_id'))
        self.end_ids: frozenset[int] = frozenset(i for source in (*ends, self._turn_end()) for i in _as_ids(source))
        """Every id that ends a text: from the three files that name one, and what the template puts behind an answer
        (a base model's files name the end of a document alone)."""
        if not self.end_ids:
            raise ModelError(f'{folder}: neither the tokenizer nor config.json nor generation_config.json names an end')
        if stray := [i for i in self.end_ids if not 0 <= i < self.vocab_size]:
            raise ModelError(f'{folder}: end ids {stray} are outside the {self.vocab_size} ids of the tokenizer')
        pads = (self._chat.pad_token_id, config.get('pad_token_id'), min(self.end_ids))
        self.pad_id: int = next(i for i in pads if i is not None)

    def encode(self, text: str) -> list[int]:
        """Ids of text from outside; never a control token, whatever the text spells."""
        ids = self._untrusted.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise ModelError(f'{self._where}: a control token came out of untrusted text')
        return ids

    def encode_trusted(self, text: str) -> list[int]:
        """Ids of the chat scaffold, control tokens included. Never call it with text that someone else wrote."""
        return self._trusted.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return self._trusted.decode(list(map(int, ids)), skip_special_tokens=False)

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id below `vocab_size`; b'' for control tokens and unused ids."""
        table = _byte_of_character()
        pieces: list[bytes] = []
        for i in range(self.vocab_size):
            piece = None if i in self._control_ids else self._trusted.id_to_token(i)
            try:
                pieces.append(bytes(table[character] for character in piece or ''))
            except KeyError:
                raise ModelError(f'{self._where}: token {i} ({piece!r}) is not made of byte-level characters') from None
        return pieces

    def chat(self, system: str | None, user: str) -> list[int]:
        """Ids of a prompt: the folder's chat template around the contents, up to where the assistant starts.

        The template is rendered around placeholders, its own text is encoded as trusted, and the contents are encoded
        as data and put in between.
        """
        contents = [user] if system is None else [system, user]
        roles = ('user',) if system is None else ('system', 'user')
        *pieces, tail = self._scaffold(roles)
        ids: list[int] = []
        for piece, content in zip(pieces, contents, strict=True):
            ids += [*piece, *self.encode(content)]
        return ids + tail

    @functools.cache  # noqa: B019  (a tokenizer lives as long as its run)
    def _scaffold(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Trusted ids before, between and after the contents."""
        return [self.encode_trusted(piece) for piece in self._around(roles, add_generation_prompt=True)]

    def _turn_end(self) -> int | None:
        """The control token that the template puts right behind an answer, if it does."""
        try:
            text = self._around(('user', 'assistant'), add_generation_prompt=False)[-1]
        except ModelError:  # no template, or one for prompts alone
            return None
        ids = self.encode_trusted(text.lstrip())
        return ids[0] if ids and ids[0] in self._control_ids else None

    def _around(self, roles: tuple[str, ...], *, add_generation_prompt: bool) -> list[str]:
        """The template's own text before, between and after one message of each role."""
        if not self._template:
            raise ModelError(
                f'{self._where.parent} has no chat template; put its chat_template.jinja into the folder (a base '
                'model can do with plain text: {{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %})'
            )
        marks = [f'CONTENT{i}PLACEHOLDER' for i in range(len(roles))]
        messages = [{'role': role, 'content': mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            rest: str = self._chat.apply_chat_template(
                messages,
                chat_template=CLOCK + self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_variables(self._thinking),
            )
        except (TemplateError, TypeError, ValueError) as error:  # also what a template raises itself
            raise ModelError(f'{self._where.parent}: the chat template cannot be rendered: {error}') from None
        pieces = []
        for mark in marks:
            if rest.count(mark) != 1:
                raise ModelError(f'{self._where.parent}: the chat template does not show each message exactly once')
            before, rest = rest.split(mark)
            pieces.append(before)
        return [*pieces, rest]


def template_variables(thinking: bool) -> dict[str, Any]:
    """What every template is given beside the messages: the switch, and a day that does not change."""
    return {SWITCH: thinking, 'date_string': TODAY}


def _without_control_tokens(trusted: FastTokenizer, control: dict[str, int], where: Path) -> FastTokenizer:
    """The same tokenizer with no added token left, neither in the list nor in the model's vocabulary."""
    data: dict[str, Any] = json.loads(trusted.to_str())
    steps = [data.get('decoder') or {}]
    steps += steps[0].get('decoders', [])
    if data['model']['type'] != 'BPE' or not any(step.get('type') == 'ByteLevel' for step in steps):
        raise ModelError(f'{where} is not a byte-level BPE tokenizer; no other kind is supported')
    data['added_tokens'] = []
    data['post_processor'] = None
    for token in control:
        data['model']['vocab'].pop(token, None)
    data['model']['unk_token'] = None
    return FastTokenizer.from_str(json.dumps(data))


def _as_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: printable Latin-1 bytes stand for themselves, the others, in order,
    for the characters from U+0100 on."""
    printable = {*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
