"""What the host does, without the HTTP around it: search, judging, the bank of the run, and consolidation.

Three kinds of work, so that none waits for another: one thread owns the bank (SQLite has one writer, and so the order
of events is the order of calls), a small pool searches, judges and retrieves, and one thread distils. A consolidation
takes its failures at one boundary and enters its cards at another; what happens between is nobody's wait. If this
process is replaced meanwhile, the bank still names the failures, and opening it starts the same distillation again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import importlib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sesa_jax import config, records, worlds
from sesa_jax.host import judge
from sesa_jax.host.schema import (
    Conflict,
    SnapshotInfo,
    counts,
    endpoint,
    fields,
    flag,
    many,
    optional,
    record,
    text,
    whole,
)
from sesa_jax.records import Failure
from sesa_jax.run.folder import RunFolder
from sesa_jax.skills import card as cards
from sesa_jax.skills.card import DraftCard
from sesa_jax.skills.log import BankError, CorruptBank, canonical
from sesa_jax.worlds.search import Corpus

if TYPE_CHECKING:  # its import takes a second, which the start of the process need not wait for
    from sesa_jax.skills.bank import Bank, Snapshot

CLOSE_SECONDS = 1.5  # for the bank's transaction in flight
T = TypeVar('T')
CARD = record(cards.draft_from_json, cards.to_json, 'card')
FAILURE = record(records.failure_from_json, records.to_json, 'failure')


class Service:
    """The endpoints of one run. Made before the event loop runs; `close` when it ends.

    Raises config.ConfigError, or what the world raises, for a config that it cannot serve.
    """

    def __init__(self, data: Mapping[str, Any], run_dir: Path):
        self._run = config.from_json(data)
        self._path = RunFolder(run_dir).bank
        self._corpus = Corpus(worlds.build(self._run).documents)
        self._bank: Bank | None = None
        self._snapshot: Snapshot | None = None
        self._job: tuple[int, asyncio.Future[tuple[list[DraftCard], str | None]]] | None = None
        self._bank_thread = concurrent.futures.ThreadPoolExecutor(1, 'bank')
        self._distiller = concurrent.futures.ThreadPoolExecutor(1, 'distiller')
        self._pool = concurrent.futures.ThreadPoolExecutor(2, 'work')
        if self._run.skill_memory:
            self._bank_thread.submit(importlib.import_module, 'sesa_jax.skills.bank')

    async def close(self) -> None:
        """Let the bank finish what it is doing, and close it."""
        for executor in (self._pool, self._distiller):
            executor.shutdown(wait=False, cancel_futures=True)
        closing = asyncio.get_running_loop().run_in_executor(self._bank_thread, self._close_bank)
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        self._bank_thread.shutdown(wait=False)

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _with_bank(self, function: Callable[[Bank], T]) -> T:
        """Run on the bank's thread. Conflict if none is open, or if this bank cannot follow the request."""

        def work() -> T:
            if self._bank is None:
                raise Conflict('no bank is open')
            return function(self._bank)

        return await self._on_bank_thread(work)

    async def _on_bank_thread(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._bank_thread, function)
        except CorruptBank:
            raise
        except BankError as error:
            raise Conflict(str(error)) from error

    @endpoint()
    async def ping(self) -> dict[str, Any]:
        return {}

    @endpoint(queries=many(text), k=whole(1, 100))
    async def search(self, queries: list[str], k: int) -> dict[str, Any]:
        found = await self._work(self._corpus.search, queries, k)
        results = [
            {'documents': [dataclasses.asdict(d) for d in documents], 'outcome': 'ok' if documents else 'empty'}
            for documents in found
        ]
        return {'results': results, 'calls': {'search': len(queries)}}

    @endpoint(items=many(fields(question=text, prediction=text, golds=many(text, 1))))
    async def judge(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        outcomes = await self._work(lambda: [judge.judge(item['prediction'], item['golds']) for item in items])
        return {'outcomes': outcomes, 'calls': {'judging': len(items)}}

    @endpoint(
        items=many(
            fields(question=text, golds=many(text, 1), materials=many(text), noise=many(text), seed=whole(0)),
        )
    )
    async def verify(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        found = await self._work(lambda: [judge.verify(**item) for item in items])
        return {'verifications': [dataclasses.asdict(v) for v in found], 'calls': {'verification': len(items)}}

    # The bank.

    @endpoint(mutating=True, seeds=many(CARD))
    async def create_bank(self, seeds: list[DraftCard]) -> dict[str, Any]:
        """A bank that already exists must have these seeds; it goes back to its beginning, the rest is orphaned."""

        def create(bank: type[Bank], **options: Any) -> Bank:
            if not self._path.exists():
                return bank.create(self._path, seeds, **options)
            with bank.open(self._path, at_seq=1, readonly=True) as old:
                if not _was_created_with(old, seeds):
                    raise Conflict(f'{self._path} was created with other seed cards')
            return bank.open(self._path, at_seq=1, **options)

        return await self._open(create)

    @endpoint(mutating=True, at_seq=optional(whole(0)), chain_hash=optional(text), readonly=flag)
    async def open_bank(self, readonly: bool, **where: Any) -> dict[str, Any]:
        return await self._open(
            lambda bank, **options: bank.open(self._path, readonly=readonly, **where, **options),
            begin_again=not readonly,
        )

    @endpoint(version=whole(0))
    async def snapshot(self, version: int) -> dict[str, Any]:
        self._snapshot = await self._with_bank(lambda bank: bank.snapshot(version))
        return dataclasses.asdict(SnapshotInfo(version, self._snapshot.hash, len(self._snapshot.cards)))

    @endpoint(questions=many(text), k=whole(0, 100), hash=text)
    async def retrieve(self, questions: list[str], k: int, hash: str) -> dict[str, Any]:
        snapshot = self._snapshot
        if snapshot is None or snapshot.hash != hash:
            held = 'none' if snapshot is None else f'{snapshot.hash[:12]} of version {snapshot.version}'
            raise Conflict(f'snapshot {hash[:12]} is not the one that is held ({held}); take it again')
        hits = await self._work(_retrieve, snapshot, questions, k)
        return {'hits': hits, 'calls': {'retrieval': len(questions)}}

    @endpoint(
        mutating=True,
        step=whole(1),
        retrieved=counts,
        helpful=counts,
        hurt=counts,
        failures=many(FAILURE),
    )
    async def commit_step(self, **ledger: Any) -> dict[str, Any]:
        def commit(bank: Bank) -> dict[str, Any]:
            event = bank.commit_step(**ledger)
            return {
                'queued': len(event['failures']),
                'dropped': len(event['dropped']) + len(event['turned_away']),
                'evicted': event['evicted'],
                'state': _state(bank),
            }

        return await self._with_bank(commit)

    @endpoint(mutating=True, step=whole(1))
    async def start_consolidation(self, step: int) -> dict[str, Any]:
        failures = await self._with_bank(lambda bank: bank.start_consolidation(step))
        if failures:
            self._distil(step, failures)
        return {'failures': len(failures), 'state': await self._with_bank(_state)}

    @endpoint(mutating=True, step=whole(1))
    async def finish_consolidation(self, step: int) -> dict[str, Any]:
        if self._job is None:
            # Sent again after this process was replaced, it may have been carried out by the one before.
            event = await self._with_bank(lambda bank: _finished(bank, step))
            if event is None:
                raise Conflict(f'no consolidation is under way at step {step}')
        else:
            drafts, error = await asyncio.shield(self._job[1])
            event = await self._with_bank(lambda bank: bank.finish_consolidation(step, drafts, error))
            self._job = None
        return {
            'started': event['started'],
            'failures': await self._with_bank(lambda bank: _taken(bank, event['started'])),
            'admitted': [card['id'] for card in event['admitted']],
            'rejected': _reasons(event),
            'evicted': event['evicted'],
            'error': event['error'],
            'state': await self._with_bank(_state),
            'calls': {'distilling': 1},
        }

    @endpoint()
    async def state(self) -> dict[str, Any]:
        return {'state': await self._with_bank(_state)}

    @endpoint()
    async def cards(self) -> dict[str, Any]:
        return {'cards': [cards.to_json(card) for card in await self._with_bank(lambda bank: bank.active())]}

    async def _open(self, opened: Callable[..., Bank], *, begin_again: bool = True) -> dict[str, Any]:
        def work() -> None:
            from sesa_jax.skills.bank import Bank

            self._close_bank()
            self._bank = opened(
                Bank,
                config=self._run.bank,
                freeze_bank=self._run.freeze_bank,
                failure_distillation=self._run.failure_distillation,
            )

        self._snapshot = self._job = None
        await self._on_bank_thread(work)
        job = await self._with_bank(lambda bank: bank.pending_consolidation())
        if job is not None and begin_again:
            self._distil(job.step, job.failures)
        return {'state': await self._with_bank(_state)}

    def _close_bank(self) -> None:
        if self._bank is not None:
            self._bank.close()
            self._bank = None

    def _distil(self, step: int, failures: Sequence[Failure]) -> None:
        """Begin to distil, unless that was begun."""
        if self._job is None or self._job[0] != step:
            self._job = step, asyncio.get_running_loop().run_in_executor(self._distiller, _drafts, tuple(failures))


def _drafts(failures: Sequence[Failure]) -> tuple[list[DraftCard], str | None]:
    """What the distiller makes of the failures, or why it failed: a name that is the same in every run."""
    try:
        from sesa_jax.skills.distill import distill

        return distill(failures), None
    except Exception as error:
        traceback.print_exc()
        return [], type(error).__name__


def _retrieve(snapshot: Snapshot, questions: Sequence[str], k: int) -> list[list[dict[str, Any]]]:
    return [
        [
            {'id': card.id, 'text': card.shown(), 'similarity': float(similarity)}
            for card, similarity in snapshot.index.retrieve(question, k)
        ]
        for question in questions
    ]


def _was_created_with(bank: Bank, seeds: Sequence[DraftCard]) -> bool:
    """Whether a bank was created from these cards, of which it may have left out some."""
    created = next(bank.history())
    # Banks of older versions have no more than the first source question of a card, and nothing else hangs on the rest.
    fields = {field.name for field in dataclasses.fields(DraftCard)} - {'source_question_hashes'}

    def known(drafts: Sequence[Mapping[str, Any]]) -> list[bytes]:
        return sorted(canonical({name: draft[name] for name in fields}) for draft in drafts)

    drafts = [*created['admitted'], *(rejection['draft'] for rejection in created['rejected'])]
    return known(drafts) == known([cards.to_json(seed) for seed in seeds])


def _state(bank: Bank) -> dict[str, Any]:
    job = bank.pending_consolidation()
    return {
        'seq': bank.seq,
        'chain_hash': bank.chain_hash,
        'queue_hash': bank.queue_hash,
        'step': bank.step,
        'consolidating': None if job is None else job.step,
        'counts': bank.counts(),
    }


def _finished(bank: Bank, step: int) -> dict[str, Any] | None:
    """The event of the consolidation that was committed at this boundary."""
    return next((e for e in bank.history() if e['kind'] == 'finished' and e['step'] == step), None)


def _taken(bank: Bank, step: int) -> int:
    """How many failures the consolidation took that started at this boundary."""
    return next(len(e['taken']) for e in bank.history() if e['kind'] == 'started' and e['step'] == step)


def _reasons(event: Mapping[str, Any]) -> dict[str, int]:
    return dict(Counter(rejected['reason'] for rejected in event['rejected']))
