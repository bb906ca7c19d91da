"""The rollout engine: prompts in, trajectories out, token in / token out.

The engine owns what is on the device: pools of slots, and the few programs that work on them. `driver.py` decides which
rows they work on. Decoding runs in chunks of a fixed number of steps; a row stops there by itself, by an automaton over
the bytes of its tokens (a closing tag), by an end id, or by its budget. Keys are folded per row and position, so a
row's tokens do not depend on its neighbours, its place, its pool or the length of a chunk.

The slots hold every token but the newest, which is the next one to be fed; so neither prompt nor observation needs
logits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sesa_jax.config import ConfigError, Lengths, Rollout
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.policy.transformer import Params, Slots
from sesa_jax.records import Trajectory
from sesa_jax.rollout import decode, episode, sampling
from sesa_jax.rollout.cache import Pool, observation_sizes, pool_shapes, prompt_sizes
from sesa_jax.rollout.driver import Driver, SearchFunction
from sesa_jax.rollout.programs import Programs
from sesa_jax.rollout.row import Request, Row, Rules

log = logging.getLogger(__name__)

KEYS = 128  # rows whose keys are made together

row_keys = jax.jit(sampling.row_keys)


class Engine:
    """Samples trajectories of either role; the weights are arguments, so both share what is compiled.

    `counters` adds up, over all calls: rollouts, prompt tokens (asked for and computed), action and observation tokens,
    searches, decode steps, row-steps that sampled nothing by cause (`idle_stopped`: within a chunk, `idle_waiting`: for a
    search or a long place, `idle_empty`: no row), and programs compiled. `seconds` adds up wall time: `device`
    (something was computing), `host` (from the end of a chunk to the launch of the next, waiting for searches not
    counted), `waited` and `stalled` (for searches, while some row could have decoded and while none could), `search`
    (latencies of all batches of searches) and `search_hidden` (the part of it during which the device computed).

    The device computes from the first launch of prompts, observations or a chunk until that chunk is read. A wait for a
    search begins this anew: of prompts launched before it nobody knows when they were done, and they count as nothing.
    """

    def __init__(
        self,
        arch: Architecture,
        tokenizer: Tokenizer,
        mesh: Mesh,
        lengths: Lengths,
        dtype: Any = jnp.float32,
        *,
        places: Rollout | None = None,
        group_size: int = 1,
    ) -> None:
        self.arch, self.tokenizer, self.mesh, self.lengths, self.dtype = arch, tokenizer, mesh, lengths, dtype
        self.places = places or Rollout()
        self.counters: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.reader = ThreadPoolExecutor(1, 'observations')  # encodes what searches find while the device computes
        needed = lengths.prompt + lengths.response
        if needed > arch.max_positions:
            raise ConfigError(
                f'lengths.prompt {lengths.prompt} + lengths.response {lengths.response} is more than the '
                f'{arch.max_positions} positions of the model; lower one of them'
            )
        self.rules = Rules.make(tokenizer, lengths)
        self.shapes = pool_shapes(self.places, lengths, group_size, mesh)
        self.prompt_sizes, self.observation_sizes = prompt_sizes(lengths), observation_sizes(lengths)
        self.programs = Programs(self._table())
        pieces = tokenizer.token_bytes + [b''] * (arch.vocab - len(tokenizer.token_bytes))
        table, accept = episode.stop_table(pieces)
        is_end = np.isin(np.arange(arch.vocab), list(tokenizer.end_ids))
        self._stops = jax.device_put((table, accept, is_end), sharding.replicated(mesh))
        log.info(self.summary)

    @property
    def summary(self) -> str:
        """What is known before anything runs: places, memory, programs."""
        size = sum(shape.nbytes(self.arch, jnp.dtype(self.dtype).itemsize) for shape in self.shapes.values())
        rows = ', '.join(f'{shape.rows} {name} rows' for name, shape in self.shapes.items())
        programs = sum(not (key[0] == 'decode' and key[3]) for key in self.programs.table)
        return f'rollouts: {rows}; {size / 1e6:.0f} MB of keys and values over {self.mesh.size} devices; {programs} programs'

    def _table(self) -> list[tuple[Any, ...]]:
        """Every program that this engine may ever ask for; those with a model in them come first."""
        table: list[tuple[Any, ...]] = []
        for name, shape in self.shapes.items():
            levels = range(1, len(shape.blocks) + 1)
            if name != 'long':  # rows only move there
                table += [('prefill', name, size) for size in self.prompt_sizes]
            table += [('append', name, size) for size in self.observation_sizes]
            table += [('decode', name, level, is_filtered) for level in levels for is_filtered in (False, True)]
            table += [('empty', name), ('uniforms', name)]
        table += [('move', 'shared', 'single'), ('row_keys',)]
        if 'long' in self.shapes:
            table += [('move', 'shared', 'long'), ('move', 'single', 'long')]
        return table

    def rollout(
        self,
        layered_params: Params,
        requests: Sequence[Request],
        search: SearchFunction,
        *,
        seed: int,
        step: int,
        weights_version: int,
        bank_version: int,
    ) -> list[Trajectory]:
        """Roll out all requests, in request order.

        `layered_params` come from `transformer.unstack`. `search` gets queries and returns a future of one record each.
        Neighbours with the same prompt share its keys and values. Raises ValueError for a prompt that is too long or
        empty, FloatingPointError when the policy gives no number, and whatever a search raised.
        """
        for request in requests:
            self.rules.check(request)
        rows = self._new_rows(requests, seed, step)
        Driver(self, layered_params, rows, search).play()
        self.counters['compilations'] = len(self.programs.held)
        return [row.trajectory(weights_version, bank_version) for row in rows]

    def _new_rows(self, requests: Sequence[Request], seed: int, step: int) -> list[Row]:
        rows: list[Row] = []
        for begin in range(0, len(requests), KEYS):
            part = requests[begin : begin + KEYS]
            path = np.zeros((3, KEYS), np.int32)
            path[:, : len(part)] = np.transpose([(sampling.ROLES[r.role], r.problem, r.sample) for r in part])
            keys = self._keys(path, seed, step)
            rows += [
                Row(request, begin + i, self.rules, key)
                for i, (request, key) in enumerate(zip(part, keys, strict=False))
            ]
        self.counters['rollouts'] += len(rows)
        self.counters['prompt_tokens'] += sum(len(row.ids) for row in rows)
        return rows

    def _keys(self, path: np.ndarray, seed: int, step: int) -> np.ndarray:
        """u32[KEYS, 2] for path i32[3, KEYS]: roles, problems, samples."""
        return np.asarray(self.programs.run(('row_keys',), row_keys, np.int32(seed), np.int32(step), *path))

    def warm_up(self, params: Params) -> None:
        """Compile every program of the table but the filtered ones, so that none is compiled in the middle of a run.

        Each runs once on nothing: prompts of no group, observations of no row, a chunk without an active row.
        """
        self._keys(np.zeros((3, KEYS), np.int32), 0, 0)
        pools: dict[str, Pool] = {}
        for name, shape in self.shapes.items():
            pool = pools[name] = self.open(name)
            if name != 'long':
                for tokens in self.prompt_sizes:
                    self._prefill(params, pool, [], tokens)
            for tokens in self.observation_sizes:
                self._append(params, pool, [], tokens)
            for level in range(1, len(shape.blocks) + 1):
                self._decode(params, pool, [], level)
        for _, source, target in (key for key in self.programs.table if key[0] == 'move'):
            self.move(pools[source], pools[target], [])

    # --- what runs on the device --------------------------------------------------------------------------------------

    def open(self, name: str) -> Pool:
        """A pool without rows."""
        shape = self.shapes[name]
        slots = self.programs.run(
            ('empty', name), decode.empty, shape=shape, arch=self.arch, mesh=self.mesh, dtype=self.dtype
        )
        return Pool(shape, slots)

    def prefill(self, params: Params, pool: Pool, groups: Sequence[int]) -> None:
        """Compute the prompts of groups that have just been settled."""
        size, batch = pool.shape.group_size, self.places.batch
        for begin in range(0, len(groups), batch):
            part = groups[begin : begin + batch]
            longest = max(pool.rows[group * size].prompt_length for group in part)
            self._prefill(params, pool, part, next(tokens for tokens in self.prompt_sizes if tokens >= longest))
        for group in groups:
            for row in pool.rows[group * size : (group + 1) * size]:
                if row is not None:
                    row.cached = row.prompt_length

    def _prefill(self, params: Params, pool: Pool, groups: Sequence[int], tokens: int) -> None:
        ids = np.zeros((self.places.batch, tokens), np.int32)
        lengths, index = np.zeros(len(ids), np.int32), np.full(len(ids), pool.shape.groups, np.int32)
        for i, group in enumerate(groups):
            row = pool.rows[group * pool.shape.group_size]
            index[i], lengths[i] = group, row.prompt_length
            ids[i, : lengths[i]] = row.ids[: lengths[i]]
        prompt = self.programs.run(
            ('prefill', pool.shape.name, tokens), decode.prefill,
            params, pool.slots.prompt, ids, lengths, index, arch=self.arch, mesh=self.mesh,
        )  # fmt: skip
        pool.slots = Slots(prompt, pool.slots.own)
        self.counters['prefill_tokens'] += int(lengths.sum())
        self.counters['prefill_padding'] += ids.size - int(lengths.sum())

    def append(self, params: Params, pool: Pool, places: Sequence[int]) -> None:
        """Take in the pending tokens of the rows in `places`, those with about as many together."""
        batch = self.places.batch
        places = sorted(places, key=lambda place: len(pool.rows[place].pending))
        for begin in range(0, len(places), batch):
            part = places[begin : begin + batch]
            longest = len(pool.rows[part[-1]].pending)
            self._append(params, pool, part, next(tokens for tokens in self.observation_sizes if tokens >= longest))

    def _append(self, params: Params, pool: Pool, places: Sequence[int], tokens: int) -> None:
        ids = np.zeros((self.places.batch, tokens), np.int32)
        index = np.full(len(ids), pool.shape.rows, np.int32)
        prompt, start, count = (np.zeros(len(ids), np.int32) for _ in range(3))
        index[: len(places)], prompt[: len(places)] = places, pool.prompts_of(places)
        for i, place in enumerate(places):
            row = pool.rows[place]
            start[i], count[i] = row.own, len(row.pending)
            ids[i, : count[i]] = row.pending
            row.cached = len(row.ids) - 1
        own = self.programs.run(
            ('append', pool.shape.name, tokens), decode.append,
            params, pool.slots.prompt, pool.slots.own, index, ids, prompt, start, count, arch=self.arch, mesh=self.mesh,
        )  # fmt: skip
        pool.slots = Slots(pool.slots.prompt, own)
        self.counters['append_tokens'] += int(count.sum())
        self.counters['append_padding'] += ids.size - int(count.sum())

    def decode(self, params: Params, pool: Pool, places: Sequence[int]) -> decode.Outputs:
        """Launch a chunk for the rows in `places`; nothing waits for it here."""
        rows = [pool.rows[place] for place in places]
        return self._decode(
            params, pool, places,
            pool.shape.level(max(row.own + min(self.places.chunk, row.room) for row in rows)),
            is_filtered=any(row.request.top_k or row.request.top_p < 1 for row in rows),
        )  # fmt: skip

    def _decode(
        self, params: Params, pool: Pool, places: Sequence[int], level: int, is_filtered: bool = False
    ) -> decode.Outputs:
        rows = [pool.rows[place] for place in places]

        def column(values: Any, dtype: Any = np.int32, shape: tuple[int, ...] = (), fill: Any = 0) -> np.ndarray:
            array = np.full((pool.shape.rows, *shape), fill, dtype)
            if rows:
                array[np.asarray(places)] = values
            return array

        uniforms = self.programs.run(
            ('uniforms', pool.shape.name), decode.chunk_uniforms,
            column([row.key for row in rows], np.uint32, (2,)), column([row.cached + 1 for row in rows]),
            chunk=self.places.chunk, mesh=self.mesh,
        )  # fmt: skip
        inputs = decode.Inputs(
            prompt_length=pool.prompt_length.copy(),  # a program that still runs may read the array itself
            token=column([row.ids[-1] for row in rows]),
            start=column([row.own for row in rows]),
            state=column([row.state for row in rows]),
            budget=column([row.room for row in rows]),
            uniforms=uniforms,
            temperature=column([row.request.temperature for row in rows], np.float32),
            top_k=column([row.request.top_k for row in rows]),
            top_p=column([row.request.top_p for row in rows], np.float32, fill=1.0),
        )
        own, outputs = self.programs.run(
            ('decode', pool.shape.name, level, is_filtered), decode.decode,
            params, pool.slots.prompt, pool.slots.own[:level], inputs, self._stops,
            arch=self.arch, mesh=self.mesh, allowed=self.tokenizer.vocab_size, is_filtered=is_filtered,
        )  # fmt: skip
        pool.slots = Slots(pool.slots.prompt, (*own, *pool.slots.own[level:]))
        return outputs

    def move(self, source: Pool, target: Pool, places: Sequence[int]) -> None:
        """Rows from `places` of the source to free places of the target, where each has its prompt for itself."""
        rows = np.full(target.shape.rows, source.shape.rows, np.int32)
        index = np.full(target.shape.rows, target.shape.rows, np.int32)
        for i, (place, free) in enumerate(zip(places, target.free_groups(), strict=False)):
            rows[i], index[i] = place, free
            target.settle(free, [source.rows[place]])
            source.rows[place] = None
        target.slots = self.programs.run(
            ('move', source.shape.name, target.shape.name), decode.move,
            source.slots, target.slots, rows, index, mesh=self.mesh,
        )  # fmt: skip
