"""What passes between trainer and host: the replies' records, and a parser for each field of each request.

Requests are checked before anything is done. `endpoint` declares a method of `service.Service` with its fields; a
request with a field missing, unknown or of another form is refused with the field's name. Parsers take JSON data and
return the value, or raise `BadRequest`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from sesa_jax.records import Target

Parser = Callable[[Any, str], Any]  # (JSON data, where it stood) -> value


class BadRequest(ValueError):
    """The request is not one that this endpoint takes: a fault of the caller."""


class Conflict(RuntimeError):
    """The request is well formed, but not now: no bank is open, or another snapshot is."""


@dataclasses.dataclass(frozen=True)
class Hit:
    """A retrieved card: what the solver reads, and how near its text was to the question."""

    id: str
    text: str
    similarity: float


@dataclasses.dataclass(frozen=True)
class BankState:
    """Where the bank stands; two banks with equal chain hashes are equal."""

    seq: int  # number of the newest event
    chain_hash: str  # of all events
    queue_hash: str  # of the failures that wait
    step: int  # the last step whose ledger is in
    consolidating: int | None  # the boundary at which the consolidation under way started
    counts: dict[str, int]  # `Bank.counts`: sizes, and totals since the start


@dataclasses.dataclass(frozen=True)
class StepCommit:
    """What a step's ledger did."""

    state: BankState
    queued: int  # failures that entered the queue
    dropped: int  # failures that found no place, or made room
    evicted: dict[str, str]  # card id -> reason


@dataclasses.dataclass(frozen=True)
class Consolidation:
    """What a consolidation did."""

    state: BankState
    started: int  # the boundary at which it started
    failures: int  # that it took
    admitted: tuple[str, ...]  # ids of the new cards
    rejected: dict[str, int]  # reason -> drafts
    evicted: dict[str, str]  # card id -> reason
    error: str | None  # why the distiller failed; then its failures wait for the next slot


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """Which bank `retrieve` reads."""

    version: int
    hash: str  # of the frozen cards
    size: int  # active cards


@dataclasses.dataclass(frozen=True)
class JudgeItem:
    """An answer to be judged."""

    question: str
    prediction: str
    golds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class VerifyItem:
    """A question to be verified."""

    question: str
    target: Target
    materials: tuple[str, ...]  # texts of the searches that its challenger made
    noise: tuple[str, ...]  # one block for each other challenger row whose materials are mixed in
    seed: int  # of the shuffle of the blocks


@dataclasses.dataclass(frozen=True)
class Verification:
    """Whether a question may be asked, and if not, why. 'outage': the verifier failed, which says nothing about it."""

    outcome: Literal['accept', 'reject', 'outage']
    reason: Literal['', 'target-not-in-materials', 'target-not-read'] = ''


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A method of the service that can be called from outside."""

    method: Callable[..., Awaitable[dict[str, Any]]]
    fields: Mapping[str, Parser]
    is_mutating: bool

    async def call(self, service: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Check `body` and carry out the call."""
        return await self.method(service, **parse(body, self.fields))


ENDPOINTS: dict[str, Endpoint] = {}


def endpoint(*, mutating: bool = False, **fields: Parser) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a method as an endpoint under its own name. A mutating one needs a key in every request."""

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        ENDPOINTS[method.__name__] = Endpoint(method, fields, mutating)
        return method

    return declare


def parse(body: Any, fields: Mapping[str, Parser], where: str = '') -> dict[str, Any]:
    """The values of an object that has exactly these fields."""
    if not isinstance(body, Mapping):
        raise BadRequest(f'{where or "the request"} must be an object, not {type(body).__name__}')
    prefix = f'{where}.' if where else ''
    for name in body:
        if name not in fields:
            raise BadRequest(f'{prefix}{name} is not a field here; the fields are {", ".join(fields) or "none"}')
    for name in fields:
        if name not in body:
            raise BadRequest(f'{prefix}{name} is missing')
    return {name: parser(body[name], prefix + name) for name, parser in fields.items()}


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f'{where} must be a text, not {type(value).__name__}')
    return value


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f'{where} must be true or false, not {str(value)[:40]}')
    return value


def whole(low: int, high: int = 2**63 - 1) -> Parser:
    """A whole number from `low` to `high`."""

    def parser(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadRequest(f'{where} must be a whole number from {low} to {high}, not {str(value)[:40]}')
        return value

    return parser


def optional(parser: Parser) -> Parser:
    """null, or what `parser` takes."""
    return lambda value, where: None if value is None else parser(value, where)


def many(parser: Parser, at_least: int = 0) -> Parser:
    """A list of what `parser` takes."""

    def parse_all(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise BadRequest(f'{where} must be a list, not {type(value).__name__}')
        if len(value) < at_least:
            raise BadRequest(f'{where} must hold at least {at_least}')
        return [parser(item, f'{where}[{i}]') for i, item in enumerate(value)]

    return parse_all


def counts(value: Any, where: str) -> dict[str, int]:
    """An object from text to whole numbers."""
    if not isinstance(value, Mapping):
        raise BadRequest(f'{where} must be an object, not {type(value).__name__}')
    return {text(name, where): whole(0)(count, f'{where}.{name}') for name, count in value.items()}


def fields(**parsers: Parser) -> Parser:
    """An object with exactly these fields."""
    return lambda value, where: parse(value, parsers, where)


def record(read: Callable[[Mapping[str, Any]], Any], write: Callable[[Any], Any], what: str) -> Parser:
    """A record, read by the inverse of what wrote it; whatever does not come out as it went in is refused."""

    def parser(value: Any, where: str) -> Any:
        try:
            found = read(value)
            is_whole = write(found) == value
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequest(f'{where} is not a {what}: {type(error).__name__}: {error}') from error
        if not is_whole:
            raise BadRequest(f'{where} is not a {what}: a field is unknown, or has another form')
        return found

    return parser
