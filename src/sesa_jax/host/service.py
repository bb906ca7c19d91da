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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sesa_jax import config
from sesa_jax.config import Run
from sesa_jax.host import judge
from sesa_jax.host.schema import endpoint, fields, many, text, whole
from sesa_jax.host.search import Corpus
from sesa_jax.records import Document

CLOSE_SECONDS = 1.5  # for the bank's transaction in flight
T = TypeVar('T')


def documents_of(run: Run) -> tuple[Document, ...]:
    """The passages of the world that a run plays in."""
    match run.world.name:
        case 'lab':
            from sesa_jax.worlds import lab

            return lab.build(run.seed, pointer_share=run.world.pointer_share).documents
    raise config.ConfigError(f'there is no world named {run.world.name!r}')


class Service:
    """The endpoints of one run. Made before the event loop runs; `close` when it ends.

    Raises config.ConfigError, or what the world raises, for a config that it cannot serve.
    """

    def __init__(self, data: Mapping[str, Any], run_dir: Path):
        self._run = config.from_json(data)
        self._path = run_dir / 'bank.db'
        self._corpus = Corpus(documents_of(self._run))
        self._bank_thread = concurrent.futures.ThreadPoolExecutor(1, 'bank')
        self._pool = concurrent.futures.ThreadPoolExecutor(2, 'work')

    async def close(self) -> None:
        """Let the bank finish what it is doing, and close it."""

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

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
