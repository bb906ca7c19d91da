"""From requests to finished rows: who is admitted when, which rows decode, and what is done about their searches.

The searches that a chunk produced go out in one call, and the next chunk starts at once: rows that wait for theirs are
parked in their places while the others decode. Deterministic (the default), the results of a chunk's searches are taken
in behind the following chunk, however early they come, and are waited for there; so no arrival time reaches a batch, and
equal runs have equal bits. Otherwise they are taken in as they come. Rows have the same tokens either way, because
nothing that is sampled depends on neighbours; only the last bits of log-probs may differ.

    admit new groups -> take in results -> move rows -> append observations -> launch a chunk -> read it
                                            while it runs: read the turns that ended in the one before, search

What the next launch needs of a chunk is entered at once: its tokens, and which rows are over or want to search, which
the stop automaton knows. Turns are read as text, searches sent, and results encoded as they come, while chunks run;
only where no row can decode, or the host waits for a search anyway, turns are read before the launch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
    found: concurrent.futures.Future[list[Search]]
    chunk: int  # number of the chunk that produced it, from 1 on, so that busy[chunk:] are those behind it
    sent: float
    come: float = 0.0  # when the results came
    read: concurrent.futures.Future[list[tuple[Search, list[int]]]] = field(default_factory=concurrent.futures.Future)
    """The results, each with the ids of its observation."""

    def take(self, encode: Callable[[Search], list[int]]) -> None:
        """Fill `read` from what was found, with the error where there is one."""
        try:
            self.read.set_result([(result, encode(result)) for result in self.found.result()])
        except BaseException as error:
            self.read.set_exception(error)


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
        self.ended: list[Row] = []  # rows with a turn that ended in the newest chunk and was not read yet
        self.closed: list[Row] = []  # those whose turn was read; which of them are over is not seen yet
        self.chunks = 0
        self.busy: list[tuple[float, float]] = []  # when the device computed, chunk by chunk
        # Of the chunk to come:
        self.began: float | None = None  # the first launch that no wait for a search follows
        self.waited = 0.0  # seconds, for searches

    def play(self) -> None:
        """Until every row has ended."""
        while any(self.units.values()) or any(pool.living for pool in self.pools.values()):
            self._admit()
            self._make_room()
            self._receive()
            self._make_room()
            self._append()
            running = [(pool, places) for pool in self.pools.values() if (places := self._ready(pool))]
            if not running:
                continue
            began = self._launching()
            launched = [(pool, places, self.engine.decode(self.params, pool, places)) for pool, places in running]
            if self.busy:
                self.engine.seconds['host'] += time.monotonic() - self.busy[-1][1] - self.waited
            self._close_turns()
            read = [(pool, places, jax.device_get(outputs)) for pool, places, outputs in launched]
            self.busy.append((began, time.monotonic()))
            self.began, self.waited = None, 0.0
            self.engine.seconds['device'] += self.busy[-1][1] - began
            self.chunks += 1
            for pool, places, outputs in read:
                self._take_out(pool, places, outputs)
        self._close_turns()

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
            if settled:
                self._launching()
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

    def _read_turns(self) -> None:
        """Read the turns that ended in the newest chunk, and make their searches in one call. When this happens depends on
        when results come, so nothing that others could notice changes here: no place becomes free."""
        for row in self.ended:
            row.close_turn()
        if rows := sorted((row for row in self.ended if row.stop is None), key=lambda row: row.number):
            sent = time.monotonic()
            batch = _Batch(rows, self.search([row.turns[-1].content for row in rows]), self.chunks, sent)
            self.batches.append(batch)

            def come(_: concurrent.futures.Future[list[Search]]) -> None:
                batch.come = time.monotonic()
                self.engine.reader.submit(batch.take, self.engine.rules.observation)

            batch.found.add_done_callback(come)
        self.closed += self.ended
        self.ended = []

    def _close_turns(self) -> None:
        """Read the turns that were not read yet, and free the places of those that were no search after all."""
        self._read_turns()
        for row in self.closed:
            row.is_searching = row.stop is None
        self.closed = []
        self._forget_ended()

    def _receive(self) -> None:
        """Take in the results that are due, and wait for some where no row could decode otherwise."""
        if self.engine.places.deterministic:
            while self.batches and self.batches[0].chunk < self.chunks:
                if not self.batches[0].read.done():
                    self._read_turns()  # there is time for it now, and the next searches do not wait for these
                self._take_in(self.batches.popleft())
        else:
            self._take_in_all_that_came()
        if self._can_decode():
            return
        self._close_turns()  # no chunk will hide it
        while self.batches and not self._can_decode():
            if self.engine.places.deterministic:
                self._take_in(self.batches.popleft())
                continue
            with self._waiting():
                concurrent.futures.wait([batch.read for batch in self.batches], return_when='FIRST_COMPLETED')
            self._take_in_all_that_came()

    def _take_in_all_that_came(self) -> None:
        for batch in [batch for batch in self.batches if batch.read.done()]:
            self.batches.remove(batch)
            self._take_in(batch)

    def _launching(self) -> float:
        """Since when the device has had something to compute; now, if not before."""
        self.began = time.monotonic() if self.began is None else self.began
        return self.began

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """What happens inside is not the host's work, and not the device's: what was launched before may end at any time."""
        kind, began = 'waited' if self._can_decode() else 'stalled', time.monotonic()
        yield
        spent = time.monotonic() - began
        self.began, self.waited = None, self.waited + spent
        self.engine.seconds[kind] += spent

    def _can_decode(self) -> bool:
        return any(self._ready(pool) for pool in self.pools.values())

    def _take_in(self, batch: _Batch) -> None:
        if not batch.read.done():
            with self._waiting():
                batch.found.result()  # what several processes share comes only when this thread asks for it
                batch.read.result()
        found = batch.read.result()
        if len(found) != len(batch.rows):
            raise ValueError(f'search returned {len(found)} results for {len(batch.rows)} queries')
        for row, (result, ids) in zip(batch.rows, found, strict=True):
            self.engine.counters['searches'] += 1
            self.engine.counters['observation_tokens'] += row.observe(result, ids)
        self._forget_ended()
        hidden = sum(max(0.0, min(end, batch.come) - max(begin, batch.sent)) for begin, end in self.busy[batch.chunk :])
        self.engine.seconds['search'] += batch.come - batch.sent
        self.engine.seconds['search_hidden'] += hidden

    def _append(self) -> None:
        for name, pool in self.pools.items():
            places = [
                p
                for p in pool.living
                if pool.rows[p].pending and not pool.rows[p].is_searching and not self._outgrows(name, p)
            ]
            if places:
                self._launching()
                self.engine.append(self.params, pool, places)

    # --- what a chunk gave --------------------------------------------------------------------------------------------

    def _take_out(self, pool: Pool, places: list[int], out: Outputs) -> None:
        """Enter a chunk's tokens into its rows; places whose rows are over become free."""
        counters, steps = self.engine.counters, int(out.steps)
        total = 0
        for place in places:
            taken, row = int(out.count[place]), pool.rows[place]
            total += taken
            tokens, logprobs = out.tokens[:taken, place].tolist(), out.logprobs[:taken, place].tolist()
            row.sampled(tokens, logprobs, int(out.state[place]), int(out.ending[place]))
            if row.ending != RUNNING:
                self.ended.append(row)
        counters['decode_steps'] += steps
        counters['action_tokens'] += total
        counters['idle_stopped'] += steps * len(places) - total
        counters['idle_waiting'] += steps * (len(pool.living) - len(places))
        counters['idle_empty'] += steps * (pool.shape.rows - len(pool.living))
        self._forget_ended()

    def _forget_ended(self) -> None:
        for pool in self.pools.values():
            for place in pool.living:
                if pool.rows[place].is_over:
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
