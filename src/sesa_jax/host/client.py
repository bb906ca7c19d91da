"""The trainer's side of the host process: typed, synchronous calls.

One background thread runs the event loop and the one HTTP session of a client. Every call is safe to send again: it
reads, or it carries a key under which the host carries it out once. So a connection that breaks, and a host that died
or hangs, are mended here: the process is replaced, the bank opened again where it was, the step's snapshot taken again,
and the call sent again. What the host refuses is raised at once.

Where several processes train as one, each has a client, and they make the same calls in the same order; process 0's asks
its host, and all get the reply.

`with HostProcess.start(run_dir, config) as process, HostClient(process) as host: ...`
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import json
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import aiohttp

from sesa_jax import records
from sesa_jax.host.process import HostError, HostProcess, HostStartError
from sesa_jax.host.schema import (
    BankState,
    Consolidation,
    Hit,
    JudgeItem,
    SnapshotInfo,
    StepCommit,
    Verification,
    VerifyItem,
)
from sesa_jax.records import Failure, Search
from sesa_jax.run.clock import SYSTEM, Clock
from sesa_jax.skills import card as cards
from sesa_jax.skills.card import Card, DraftCard

__all__ = [
    'BankState',
    'Consolidation',
    'Hit',
    'HostClient',
    'HostConflict',
    'HostError',
    'HostFailure',
    'HostProcess',
    'HostRefusal',
    'HostStartError',
    'JudgeItem',
    'SnapshotInfo',
    'StepCommit',
    'Verification',
    'VerifyItem',
]

PING_AFTER = 5.0  # seconds without a reply after which the host is asked whether it lives
PING_SECONDS = 8.0  # for the answer; then it counts as hanging
SLICE_CHARACTERS = 4 << 20  # of one request about many things that do not depend on each other
NEWEST = {'at_seq': None, 'chain_hash': None, 'readonly': False}
T = TypeVar('T')
Share = Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]
"""Lets process 0 do the work and gives every process its result, or its exception (`run/distributed.py: shared`)."""


class HostRefusal(HostError):
    """The host did not take the request (status 400): a fault in the call, named in the message."""


class HostConflict(HostError):
    """The request does not fit the host's state (status 409): no bank is open, or another snapshot is."""


class HostFailure(HostError):
    """The host tried and failed. `kind` is the type of its exception, such as 'CorruptBank'."""

    def __init__(self, kind: str, message: str):
        super().__init__(f'{kind}: {message}')
        self.kind = kind


class _Broken(Exception):
    """The connection failed, which says nothing about whether the call was carried out."""


class _SharedFuture(concurrent.futures.Future[T]):
    """An answer that travels to the other processes when it is asked for: in the same order on all."""

    def __init__(self, finish: Callable[[], T]):
        super().__init__()
        self._finish = finish

    def result(self, timeout: float | None = None) -> T:
        """The answer, waiting for it as long as it takes."""
        if not self.done():
            try:
                self.set_result(self._finish())
            except Exception as error:
                self.set_exception(error)
        return super().result()


class HostClient:
    """Calls to one host process. Methods may be called from any thread, but not from a coroutine of its own loop.

    With `share`, several processes make the same calls in the same order, from one thread; `process` is None on all but
    process 0.

    Attributes:
      calls: calls per purpose ('search', 'retrieval', 'judging', 'verification', 'distilling'), counted once for each
        reply that was used, however often it was sent. `take_calls` reads and resets.
    """

    def __init__(self, process: HostProcess | None, *, share: Share | None = None, clock: Clock = SYSTEM):
        self._process = process
        self._share = share
        self._clock = clock
        self._counting = threading.Lock()
        self._calls: collections.Counter[str] = collections.Counter()
        self._opening = ''  # key of the call that opened the bank
        self._reopening: dict[str, Any] = {}  # how to open it again
        self._snapshot: SnapshotInfo | None = None
        if process is None:
            return
        self._generation = process.restarts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name='host-client', daemon=True)
        self._thread.start()
        self._on_loop(self._connect())

    def __enter__(self) -> HostClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session and the thread; calls in flight are cancelled. The process is not stopped."""
        if self._process is None or self._loop.is_closed():
            return
        self._on_loop(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # What the world and the judges answer.

    def search(self, queries: Sequence[str], k: int, *, purpose: str = 'search') -> list[Search]:
        """At most k documents for each query, in query order; 'empty' where nothing shares a word with it."""
        return self.submit_search(queries, k, purpose=purpose).result()

    def submit_search(
        self, queries: Sequence[str], k: int, *, purpose: str = 'search'
    ) -> concurrent.futures.Future[list[Search]]:
        """`search` without waiting. `purpose` names the counter that the queries go to."""
        queries = list(queries)
        if self._share is None:
            return self._submit(self._search(queries, k, purpose))
        asked = self._submit(self._ask(queries, k)) if self._process else None
        share = self._share
        return _SharedFuture(lambda: self._found(queries, purpose, share(lambda: asked.result())))

    def judge(self, items: Sequence[JudgeItem]) -> list[Literal['correct', 'wrong', 'unjudged', 'outage']]:
        """What each answer is worth, in order."""
        return self._call_in_slices('judge', [dataclasses.asdict(item) for item in items], 'outcomes')

    def verify(self, items: Sequence[VerifyItem]) -> list[Verification]:
        """Whether each question can be answered from its materials among the noise, in order."""
        body = [
            {
                'question': item.question,
                'golds': list(item.target.golds),
                'materials': list(item.materials),
                'noise': list(item.noise),
                'seed': item.seed,
            }
            for item in items
        ]
        return [Verification(**data) for data in self._call_in_slices('verify', body, 'verifications')]

    # The memory.

    def create_bank(self, seeds: Sequence[DraftCard]) -> BankState:
        """Make the run's bank with its first cards (`priming.seeds`).

        If the run has one from the same cards (it was killed before its first commit), that one goes back to its
        beginning. HostConflict if its seeds are others, or are more than the bank holds.
        """
        return self._opened('create_bank', {'seeds': [cards.to_json(seed) for seed in seeds]}, NEWEST)

    def open_bank(
        self, at_seq: int | None = None, chain_hash: str | None = None, *, readonly: bool = False
    ) -> BankState:
        """Open the run's bank as it was after event `at_seq` (None: the newest); what came later is orphaned.

        A consolidation that was under way then is begun again. With `readonly` a private copy is read, and the bank
        stays as it is, byte for byte; calls that would change it fail. HostFailure ('CorruptBank') if the file is damaged, or
        the chain hash there is not `chain_hash`.
        """
        body = {'at_seq': at_seq, 'chain_hash': chain_hash, 'readonly': readonly}
        # Opened for writing, the newest event is where it will have got to; a second cut would undo steps.
        return self._opened('open_bank', body, body if readonly else NEWEST)

    def snapshot(self, version: int) -> SnapshotInfo:
        """Freeze the bank behind the boundary of step `version` (0: the seed bank) for `retrieve`, until the next one.

        Take it when all is done at that boundary. HostConflict if the step is not committed.
        """
        self._snapshot = SnapshotInfo(**self._call('snapshot', {'version': version}))
        return self._snapshot

    def retrieve(self, questions: Sequence[str], k: int) -> list[tuple[Hit, ...]]:
        """At most k cards of the snapshot for each question, best first; never one that came from that question."""
        if self._snapshot is None:
            raise HostConflict('retrieve: take a snapshot first')
        body = {'questions': list(questions), 'k': k, 'hash': self._snapshot.hash}
        hits = _as_many(self._call('retrieve', body)['hits'], questions, 'retrieve')
        return [tuple(Hit(**hit) for hit in row) for row in hits]

    def commit_step(
        self,
        step: int,
        retrieved: Mapping[str, int],
        helpful: Mapping[str, int],
        hurt: Mapping[str, int],
        failures: Sequence[Failure],
    ) -> StepCommit:
        """Enter a step's ledger in one transaction: counter increments by card id, and failures for the queue."""
        body = {
            'step': step,
            'retrieved': dict(retrieved),
            'helpful': dict(helpful),
            'hurt': dict(hurt),
            'failures': [records.to_json(failure) for failure in failures],
        }
        reply = self._call('commit_step', body, key=self._key(step, 'commit_step'))
        return StepCommit(**{**reply, 'state': BankState(**reply['state'])})

    def start_consolidation(self, step: int) -> int:
        """If a consolidation is due at the boundary behind `step`, begin it; does not wait.

        Returns how many failures it took; 0 if none was due.
        """
        return self._call('start_consolidation', {'step': step}, key=self._key(step, 'start_consolidation'))['failures']

    def finish_consolidation(self, step: int) -> Consolidation:
        """Wait for the consolidation under way and commit it at the boundary behind `step`.

        HostConflict if none is under way (`state().consolidating` tells).
        """
        reply = self._call('finish_consolidation', {'step': step}, key=self._key(step, 'finish_consolidation'))
        return Consolidation(**{**reply, 'state': BankState(**reply['state']), 'admitted': tuple(reply['admitted'])})

    def state(self) -> BankState:
        """Where the bank stands. HostConflict if none is open."""
        return BankState(**self._call('state', {})['state'])

    def cards(self) -> list[Card]:
        """The active cards of the bank as it is now, by id."""
        return [cards.card_from_json(data) for data in self._call('cards', {})['cards']]

    def take_calls(self) -> dict[str, int]:
        """The calls per purpose since the last time that they were taken."""
        with self._counting:
            calls, self._calls = dict(self._calls), collections.Counter()
        return calls

    # How a call is made.

    def _opened(self, name: str, body: dict[str, Any], again: dict[str, Any]) -> BankState:
        self._snapshot = None
        key = self._once()
        reply = self._call(name, body, key=key)
        self._opening, self._reopening = key, again
        return BankState(**reply['state'])

    def _key(self, step: int, name: str) -> str:
        """The key of what happens once a step, in this run as it was opened."""
        return f'{self._opening}/{step}/{name}'

    def _once(self) -> str:
        """A key for this call and no other."""
        return f'{self._process.run if self._process else ""}/{uuid.uuid4().hex}'

    def _count(self, calls: Mapping[str, int], purpose: str = '') -> None:
        with self._counting:
            for name, number in calls.items():
                self._calls[purpose or name] += number

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop.is_closed():
            work.close()
            raise HostError('this client was closed')
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    def _call(self, name: str, body: dict[str, Any], *, key: str = '') -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            return self._on_loop(self._request(name, {**body, 'key': key} if key else body))

        reply = ask() if self._share is None else self._share(ask)
        self._count(reply.pop('calls', {}))
        return reply

    def _call_in_slices(self, name: str, items: Sequence[dict[str, Any]], answers: str) -> list[Any]:
        """The answers to independent items, in order. A step's items hold whole documents; no request holds them all."""
        found = []
        for part in _slices(items):
            found += _as_many(self._call(name, {'items': part})[answers], part, name)
        return found

    async def _search(self, queries: list[str], k: int, purpose: str) -> list[Search]:
        return self._found(queries, purpose, await self._ask(queries, k))

    async def _ask(self, queries: list[str], k: int) -> dict[str, Any]:
        """The host's reply to a search, with the `latency` in seconds."""
        begin = self._clock.monotonic()
        reply = await self._request('search', {'queries': queries, 'k': k})
        return {**reply, 'latency': self._clock.monotonic() - begin}

    def _found(self, queries: list[str], purpose: str, reply: dict[str, Any]) -> list[Search]:
        self._count(reply['calls'], purpose)
        found = _as_many(reply['results'], queries, 'search')
        return [
            Search(
                query, tuple(map(records.document_from_json, result['documents'])), result['outcome'], reply['latency']
            )
            for query, result in zip(queries, found, strict=True)
        ]

    async def _request(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a call, however often it has to be sent."""
        # In UTF-8 a character has at most 4 bytes, its escape up to 12. Half a surrogate pair is the host's to refuse.
        raw = json.dumps(body, ensure_ascii=False).encode(errors='surrogatepass')
        is_second = False
        while True:
            async with self._mending:
                generation, session = self._generation, self._session
            try:
                return await self._send(session, name, raw)
            except _Broken as fault:
                # The first time, it may only be an idle connection that the host closed just then.
                if is_second or isinstance(fault.__cause__, TimeoutError):
                    await self._mend(generation, f'{name}: {fault}')
                    is_second = False
                else:
                    is_second = True

    async def _send(self, session: aiohttp.ClientSession, name: str, raw: bytes) -> dict[str, Any]:
        """One attempt. While it takes long, the host is asked whether it lives."""
        call = asyncio.ensure_future(self._post(session, name, raw))
        try:
            while not (await asyncio.wait({call}, timeout=PING_AFTER))[0]:
                async with asyncio.timeout(PING_SECONDS):
                    await self._post(session, 'ping', b'{}')
            return call.result()
        except TimeoutError as error:
            raise _Broken(f'no sign of life within {PING_AFTER + PING_SECONDS:.0f} s') from error
        finally:
            if not call.cancel() and not call.cancelled():
                call.exception()  # both it and the ping may have failed; one of them is told

    async def _post(self, session: aiohttp.ClientSession, name: str, raw: bytes) -> dict[str, Any]:
        try:
            async with session.post(f'http://host/{name}', data=raw) as response:
                status, reply = response.status, json.loads(await response.read())
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:  # RuntimeError: the session was closed
            raise _Broken(f'{type(error).__name__}: {error}') from error
        match status:
            case 200:
                return reply
            case 400 | 404 | 413:
                raise HostRefusal(reply['message'])
            case 409:
                raise HostConflict(reply['message'])
            case _:
                raise HostFailure(reply['error'], reply['message'])

    async def _connect(self) -> None:
        self._mending = asyncio.Lock()
        self._session = self._open_session()

    def _open_session(self) -> aiohttp.ClientSession:
        # No total time limit: a call may take as long as the host answers pings.
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._process.socket, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def _disconnect(self) -> None:
        calls = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._session.close()

    async def _mend(self, seen: int, reason: str) -> None:
        """Replace the process unless that was done since `seen`, and bring the new one to where the old one was."""
        async with self._mending:
            if self._generation != seen:
                return
            while True:
                await self._session.close()
                self._generation = await asyncio.to_thread(self._process.replace, self._generation, reason)
                self._session = self._open_session()
                try:
                    await self._reopen()
                    return
                except _Broken as fault:
                    reason = f'opening the bank again: {fault}'

    async def _reopen(self) -> None:
        if not self._opening:
            return
        await self._send(self._session, 'open_bank', json.dumps({**self._reopening, 'key': self._once()}).encode())
        if self._snapshot is not None:
            # `retrieve` names the snapshot by its hash: should the bank have moved on, it is refused.
            await self._send(self._session, 'snapshot', json.dumps({'version': self._snapshot.version}).encode())


def _slices(items: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The items in order, in lists of at most SLICE_CHARACTERS of text, or of one item that has more; at least one list."""
    part: list[dict[str, Any]] = []
    size = 0
    for item in items:
        own = len(str(item))
        if part and size + own > SLICE_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(item)
        size += own
    yield part


def _as_many(answers: list[Any], questions: Sequence[Any], name: str) -> list[Any]:
    if len(answers) != len(questions):
        raise HostFailure('Miscount', f'{name}: {len(questions)} were asked and {len(answers)} answered')
    return answers
