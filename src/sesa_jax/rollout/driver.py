"""From requests to finished rows: who is admitted when, which rows decode, and what is done about their searches.

The searches that a chunk produced go out in one call, and the next chunk starts at once: rows that wait for theirs are
parked in their places while the others decode. Deterministic (the default), the results of a chunk's searches are taken
in behind the following chunk, however early they come, and are waited for there; so no arrival time reaches a batch, and
equal runs have equal bits. Otherwise they are taken in as they come. Rows have the same tokens either way, because
nothing that is sampled depends on neighbours; only the last bits of log-probs may differ.

    admit new groups -> take in results -> move rows -> append observations -> decode a chunk -> close turns, search
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax

from sesa_jax.policy.transformer import Params
from sesa_jax.records import Search
from sesa_jax.rollout.cache import Pool
from sesa_jax.rollout.decode import Outputs
from sesa_jax.rollout.row import RUNNING, Row

if TYPE_CHECKING:
    from sesa_jax.rollout.engine import Engine

SearchFunction = Callable[[list[str]], 'concurrent.futures.Future[list[Search]]']


@dataclass(eq=False)
class _Batch:
    """The searches of one chunk."""

    rows: list[Row]
    future: concurrent.futures.Future[list[Search]]
    chunk: int  # number of the chunk that produced it
    sent: float
    come: list[float] = field(default_factory=list)  # when it came, written by the future's thread

    def __post_init__(self) -> None:
        self.future.add_done_callback(lambda _: self.come.append(time.monotonic()))


class Driver:
    """One call of `Engine.rollout`; its pools live as long as it does."""

    def __init__(self, engine: Engine, params: Params, rows: Sequence[Row], search: SearchFunction) -> None:
        self.engine, self.params, self.search = engine, params, search
        self.pools: dict[str, Pool] = {}
        self.units = {name: deque[list[Row]]() for name in ('shared', 'single')}
        most = engine.shapes['shared'].group_size
        for unit in _same_prompts(rows, most):
            self.units['shared' if len(unit) > 1 else 'single'].append(unit)
        self.batches: deque[_Batch] = deque()
        self.chunks = 0
        self.busy: list[tuple[float, float]] = []  # when the device computed, chunk by chunk

    def play(self) -> None:
        """Until every row has ended."""
        while any(self.units.values()) or any(pool.living for pool in self.pools.values()):
            began = time.monotonic()
            self._admit()
            self._make_room()
            self._receive()
            self._make_room()
            self._append()
            running = [(pool, places) for pool in self.pools.values() if (places := self._ready(pool))]
            if not running:
                continue
            launched = [(pool, places, self.engine.decode(self.params, pool, places)) for pool, places in running]
            read = [(pool, places, jax.device_get(outputs)) for pool, places, outputs in launched]
            self.busy.append((began, time.monotonic()))
            self.engine.seconds['device'] += self.busy[-1][1] - began
            self.chunks += 1
            self._send([row for pool, places, out in read for row in self._take_out(pool, places, out)])

    # --- coming and moving --------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> Pool:
        if name not in self.pools:
            self.pools[name] = self.engine.open(name)
        return self.pools[name]

    def _admit(self) -> None:
        """Settle waiting units in free groups and compute their prompts."""
        for name, waiting in self.units.items():
            if not waiting:
                continue
            pool, settled = self._pool(name), []
            for group in pool.free_groups():
                if not waiting:
                    break
                pool.settle(group, waiting.popleft())
                settled.append(group)
            self.engine.prefill(self.params, pool, settled)

    def _make_room(self) -> None:
        """Move rows that outgrow their place, and the last rows of groups to where fewer rows decode."""
        if 'long' in self.engine.shapes:
            for name in ('shared', 'single'):
                if name in self.pools and (grown := [p for p in self.pools[name].living if self._outgrows(name, p)]):
                    free = len(self._pool('long').free_groups())
                    if grown[:free]:
                        self.engine.move(self.pools[name], self.pools['long'], grown[:free])
        is_over = not any(self.units.values())
        if is_over and 'shared' in self.pools and (living := self.pools['shared'].living):
            smaller = self.engine.shapes['single'].rows
            taken = len(self.pools['single'].living) if 'single' in self.pools else 0
            if smaller < self.engine.shapes['shared'].rows and len(living) <= smaller - taken:
                self.engine.move(self.pools['shared'], self._pool('single'), living)

    def _outgrows(self, name: str, place: int) -> bool:
        """Whether the row cannot take in what is pending, or decode a chunk, where it lives."""
        row = self.pools[name].rows[place]
        ahead = len(row.pending) + (0 if row.is_searching else min(self.engine.places.chunk, row.room))
        return row.own + ahead > self.engine.shapes[name].capacity

    def _ready(self, pool: Pool) -> list[int]:
        """Places whose rows can decode now."""
        name = pool.shape.name
        return [p for p in pool.living if not pool.rows[p].is_searching and not self._outgrows(name, p)]

    # --- searches -----------------------------------------------------------------------------------------------------

    def _send(self, rows: list[Row]) -> None:
        """Make the searches of a chunk in one call."""
        if rows:
            rows.sort(key=lambda row: row.number)
            future = self.search([row.turns[-1].content for row in rows])
            self.batches.append(_Batch(rows, future, self.chunks, time.monotonic()))

    def _receive(self) -> None:
        """Take in the results that are due, and wait for some where no row could decode otherwise."""
        if self.engine.places.deterministic:
            while self.batches and (self.chunks > self.batches[0].chunk or not self._can_decode()):
                self._take_in(self.batches.popleft())
            return
        while self.batches:
            done = [batch for batch in self.batches if batch.future.done()]
            if not done and self._can_decode():
                return
            if not done:
                concurrent.futures.wait([b.future for b in self.batches], return_when='FIRST_COMPLETED')
            for batch in done:
                self.batches.remove(batch)
                self._take_in(batch)

    def _can_decode(self) -> bool:
        return any(self._ready(pool) for pool in self.pools.values())

    def _take_in(self, batch: _Batch) -> None:
        found = batch.future.result()
        if len(found) != len(batch.rows):
            raise ValueError(f'search returned {len(found)} results for {len(batch.rows)} queries')
        for row, result in zip(batch.rows, found, strict=True):
            self.engine.counters['searches'] += 1
            self.engine.counters['observation_tokens'] += row.observe(result)
        self._forget_ended()
        come = batch.come[0] if batch.come else time.monotonic()
        hidden = sum(max(0.0, min(end, come) - max(begin, batch.sent)) for begin, end in self.busy[batch.chunk :])
        self.engine.seconds['search'] += come - batch.sent
        self.engine.seconds['search_hidden'] += hidden

    def _append(self) -> None:
        for name, pool in self.pools.items():
            places = [
                p
                for p in pool.living
                if pool.rows[p].pending and not pool.rows[p].is_searching and not self._outgrows(name, p)
            ]
            self.engine.append(self.params, pool, places)

    # --- what a chunk gave --------------------------------------------------------------------------------------------

    def _take_out(self, pool: Pool, places: list[int], out: Outputs) -> list[Row]:
        """Enter a chunk's tokens into its rows, close the turns that ended; returns the rows that want to search."""
        counters, steps = self.engine.counters, int(out.steps)
        total = 0
        for place in places:
            taken, row = int(out.count[place]), pool.rows[place]
            total += taken
            tokens, logprobs = out.tokens[:taken, place].tolist(), out.logprobs[:taken, place].tolist()
            row.sampled(tokens, logprobs, int(out.state[place]), int(out.ending[place]))
            if row.ending != RUNNING:
                row.close_turn()
        counters['decode_steps'] += steps
        counters['action_tokens'] += total
        counters['idle_stopped'] += steps * len(places) - total
        counters['idle_waiting'] += steps * (len(pool.living) - len(places))
        counters['idle_empty'] += steps * (pool.shape.rows - len(pool.living))
        searching = [pool.rows[place] for place in places if pool.rows[place].is_searching]
        self._forget_ended()
        return searching

    def _forget_ended(self) -> None:
        for pool in self.pools.values():
            for place in pool.living:
                if pool.rows[place].stop is not None:
                    pool.rows[place] = None


def _same_prompts(rows: Sequence[Row], most: int) -> list[list[Row]]:
    """Neighbours with the same prompt, at most `most` together."""
    units: list[list[Row]] = []
    for row in rows:
        if units and len(units[-1]) < most and units[-1][0].request.prompt == row.request.prompt:
            units[-1].append(row)
        else:
            units.append([row])
    return units
