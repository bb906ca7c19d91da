"""The rollout engine: prompts in, trajectories out, token in / token out.

All rows of a batch go through their turns together: append what the rows have not read yet (the prompt, later an
observation), decode until every row's turn has ended, make the searches of the turn in one call, go on with the rows
that searched. Decoding runs in chunks of a fixed number of steps on the device; a row stops there by itself, by an
automaton over the bytes of its tokens (a closing tag), by an end id, or by its budget. The ids that were sampled are
the ids of the trajectory; nothing is decoded and encoded again. Keys are folded per row and position, so a row's
tokens do not depend on its neighbours, its place or the shape it was padded to.

The cache holds every token but the newest, which is the next one to be fed; so neither prompt nor observation needs
logits.

Left out: rows of one batch wait for the slowest at the end of each turn (no continuous batching, no search while others
decode), and the whole batch must fit into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sesa_jax.config import ConfigError, Lengths
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Role, Search, StopReason, Trajectory, Turn
from sesa_jax.rollout import episode, sampling
from sesa_jax.rollout.cache import LENGTH_BUCKETS, ROW_BUCKETS, RowCache, Shapes, bucket
from sesa_jax.rollout.decode import CHUNK, CUT, RUNNING, Inputs, append, chunk_uniforms, decode

APPEND_ROWS = 16  # rows that append together: few shapes, little padding, and their scores stay close to the cache
MAX_SCORES = 2**28  # attention scores of one append, over rows and heads: 1 GiB in float32; fewer rows beyond that

SearchFunction = Callable[[list[str]], list[Search]]


@dataclass(frozen=True)
class Request:
    """One row to roll out. `role`, `problem` and `sample` choose its random numbers."""

    role: Role
    problem_id: str
    problem: int
    sample: int
    prompt: list[int]
    temperature: float  # 0: greedy
    max_turns: int
    card_ids: tuple[str, ...] = ()
    turn_tokens: int | None = None  # sampled tokens of one turn; None: lengths.turn


@dataclass
class _Row:
    """A trajectory in the making. The newest id is the one that the cache does not hold yet."""

    request: Request
    key: np.ndarray  # u32[2]
    ids: list[int]
    is_action: list[bool]
    logprobs: list[float]
    cached: int = 0  # ids whose keys and values are in the cache
    state: int = 0  # of the stop automaton, in this turn
    ending: int = RUNNING  # of this turn
    turn_start: int = 0
    turns: list[Turn] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    stop: StopReason | None = None

    @property
    def pending(self) -> list[int]:
        """What the cache must still take in before the row can decode."""
        return self.ids[self.cached : -1]

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Sampled ids with their log-probs, or an observation."""
        self.ids += ids
        self.is_action += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


row_keys = jax.jit(sampling.row_keys)


class Engine:
    """Samples trajectories of either role; the weights are arguments, so both share what is compiled.

    `counters` adds up, over all calls: rollouts, prompt, action and observation tokens, searches, decode steps,
    row-steps that sampled nothing (`idle_row_steps`, padding included), and compilations.
    """

    def __init__(
        self,
        arch: Architecture,
        tokenizer: Tokenizer,
        mesh: Mesh,
        lengths: Lengths,
        dtype: Any = jnp.float32,
        *,
        row_buckets: Sequence[int] = ROW_BUCKETS,
    ) -> None:
        self.arch, self.tokenizer, self.mesh, self.lengths, self.dtype = arch, tokenizer, mesh, lengths, dtype
        self.row_buckets = sorted({sharding.padded_rows(size, mesh) for size in row_buckets})
        self.shapes = Shapes()
        self.counters: Counter[str] = Counter()
        needed = lengths.prompt + lengths.response
        if needed > arch.max_positions:
            raise ConfigError(
                f'lengths.prompt {lengths.prompt} + lengths.response {lengths.response} is more than the '
                f'{arch.max_positions} positions of the model; lower one of them'
            )
        nothing = Search('', (), 'empty', 0.0)
        self._wrapper = sum(len(tokenizer.encode(part)) for part in episode.observation_parts(nothing)[::2])
        if lengths.observation < self._wrapper:
            raise ConfigError(
                f'lengths.observation is {lengths.observation} tokens, but the wrapper of an observation alone has '
                f'{self._wrapper}; raise it'
            )
        pieces = tokenizer.token_bytes + [b''] * (arch.vocab - len(tokenizer.token_bytes))
        table, accept = episode.stop_table(pieces)
        is_end = np.isin(np.arange(arch.vocab), list(tokenizer.end_ids))
        self._stops = jax.device_put((table, accept, is_end), sharding.replicated(mesh))

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

        `layered_params` come from `transformer.unstack`. `search` gets the queries of one turn in row order and returns
        one record each. More requests than the largest row bucket are worked off in batches of nearly equal size.
        Raises ValueError for a prompt that is too long or empty, FloatingPointError when the policy gives no number.
        """
        for request in requests:
            if not 0 < len(request.prompt) <= self.lengths.prompt:
                raise ValueError(
                    f'the prompt of {request.role} {request.problem_id} has {len(request.prompt)} tokens; '
                    f'1 to lengths.prompt = {self.lengths.prompt} are allowed'
                )
            if request.max_turns < 1 or self._turn_tokens(request) < 1:
                raise ValueError(f'{request.problem_id} needs at least one turn of one token')
        batches = -(-len(requests) // self.row_buckets[-1])
        rows: list[_Row] = []
        for batch in range(batches):
            part = requests[batch * len(requests) // batches : (batch + 1) * len(requests) // batches]
            rows += self._batch(layered_params, part, search, seed, step)
        self.counters['compilations'] = len(self.shapes)
        return [self._trajectory(row, weights_version, bank_version) for row in rows]

    def _batch(
        self, params: Params, requests: Sequence[Request], search: SearchFunction, seed: int, step: int
    ) -> list[_Row]:
        rows = self._new_rows(requests, seed, step)
        cache = RowCache(
            len(rows), self.row_buckets, arch=self.arch, mesh=self.mesh, dtype=self.dtype, shapes=self.shapes
        )
        self._read_prompts(params, cache, rows)
        playing = list(range(len(rows)))
        while playing:
            self._decode_turn(params, cache, rows, playing)
            for i in playing:
                self._close_turn(rows[i])
            playing = [i for i in playing if rows[i].stop is None]
            if not playing:
                break
            found = search([rows[i].turns[-1].content for i in playing])
            if len(found) != len(playing):
                raise ValueError(f'search returned {len(found)} results for {len(playing)} queries')
            for i, result in zip(playing, found, strict=True):
                self._observe(rows[i], result)
            playing = [i for i in playing if rows[i].stop is None]
            self._read(params, cache, rows, playing)
        return rows

    def _new_rows(self, requests: Sequence[Request], seed: int, step: int) -> list[_Row]:
        path = np.zeros((3, bucket(len(requests), self.row_buckets)), np.int32)
        path[:, : len(requests)] = np.transpose([(sampling.ROLES[r.role], r.problem, r.sample) for r in requests])
        self.shapes.note('row_keys', path.shape[1])
        keys = np.asarray(row_keys(seed, step, *path))
        rows = []
        for request, key in zip(requests, keys, strict=False):
            row = _Row(request, key, [], [], [])
            row.append(request.prompt)
            row.turn_start = len(row.ids)
            rows.append(row)
        self.counters['rollouts'] += len(rows)
        self.counters['prompt_tokens'] += sum(len(row.ids) for row in rows)
        return rows

    # --- appending ----------------------------------------------------------------------------------------------------

    def _read_prompts(self, params: Params, cache: RowCache, rows: list[_Row]) -> None:
        """Each different prompt is computed once, in the first row that has it, and then copied to the others."""
        first: dict[tuple[int, ...], int] = {}
        source = np.zeros(cache.total, np.int32)
        source[: len(rows)] = [first.setdefault(tuple(row.ids), i) for i, row in enumerate(rows)]
        self._read(params, cache, rows, list(first.values()))
        if len(first) < len(rows):
            cache.spread(source)
        for row in rows:
            row.cached = len(row.ids) - 1

    def _read(self, params: Params, cache: RowCache, rows: list[_Row], playing: list[int]) -> None:
        """Append the pending tokens of the rows `playing` to their caches."""
        if not playing:
            return
        tokens = bucket(max(len(rows[i].pending) for i in playing), LENGTH_BUCKETS)
        slots = max(len(rows[i].ids) for i in playing) + CHUNK
        is_first = not any(rows[i].cached for i in playing)  # prompts: they see only themselves
        reach = tokens if is_first else bucket(slots, LENGTH_BUCKETS)
        most = min(APPEND_ROWS, MAX_SCORES // (tokens * reach * self.arch.heads))
        size = min(cache.total, max((b for b in self.row_buckets if b <= most), default=self.row_buckets[0]))
        for begin in range(0, len(playing), size):
            part = playing[begin : begin + size]
            cache.focus(part, slots, size)
            ids = np.zeros((size, tokens), np.int32)
            start, length = np.zeros(size, np.int32), np.zeros(size, np.int32)
            for place in np.flatnonzero(np.isin(cache.index, part)):
                row = rows[cache.index[place]]
                start[place], length[place] = row.cached, len(row.pending)
                ids[place, : length[place]] = row.pending
                row.cached = len(row.ids) - 1
            self.shapes.note('append', size, cache.work.slots, tokens, reach)
            cache.work = append(params, cache.work, ids, start, length, arch=self.arch, mesh=self.mesh, reach=reach)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _decode_turn(self, params: Params, cache: RowCache, rows: list[_Row], playing: list[int]) -> None:
        """Sample until the turn of every row has ended."""
        running = playing
        while running:
            cache.focus(running, max(len(rows[i].ids) for i in running) + CHUNK)
            places = np.flatnonzero(np.isin(cache.index, running))
            active = [rows[i] for i in cache.index[places]]
            # Leave early once the rest fits into a bucket of at most half the rows.
            floor = max((b for b in self.row_buckets if b <= len(cache.index) // 2), default=0)

            def column(values: Any, dtype: Any = np.int32, shape: tuple[int, ...] = (), places: Any = places) -> Any:
                array = np.zeros((len(cache.index), *shape), dtype)
                array[places] = values
                return array

            self.shapes.note('uniforms', len(cache.index))
            start = column([row.cached for row in active])
            inputs = Inputs(
                token=column([row.ids[-1] for row in active]),
                start=start,
                state=column([row.state for row in active]),
                budget=column([self._room(row) for row in active]),
                uniforms=chunk_uniforms(column([row.key for row in active], np.uint32, (2,)), start),
                temperature=column([row.request.temperature for row in active], np.float32),
            )
            self.shapes.note('decode', len(cache.index), cache.work.slots)
            cache.work, outputs = decode(
                params,
                cache.work,
                inputs,
                self._stops,
                floor,
                arch=self.arch,
                mesh=self.mesh,
                allowed=self.tokenizer.vocab_size,
            )
            out = jax.device_get(outputs)
            for place, row in zip(places, active, strict=True):
                taken = int(out.count[place])
                row.append(out.tokens[:taken, place].tolist(), out.logprobs[:taken, place].tolist())
                row.cached, row.state, row.ending = len(row.ids) - 1, int(out.state[place]), int(out.ending[place])
                if not np.isfinite(row.logprobs[-taken:]).all():
                    raise FloatingPointError(
                        f'the policy gave logits that are not numbers to {row.request.role} {row.request.problem_id}'
                    )
            sampled, steps = int(out.count.sum()), int(out.steps)
            self.counters['decode_steps'] += steps
            self.counters['action_tokens'] += sampled
            self.counters['idle_row_steps'] += steps * len(cache.index) - sampled
            running = [i for i in running if rows[i].ending == RUNNING]

    def _room(self, row: _Row) -> int:
        """Tokens that may still be sampled in this turn: what is left of the turn's budget and of the response's."""
        return min(self._turn_tokens(row.request) - (len(row.ids) - row.turn_start), self._left(row))

    def _turn_tokens(self, request: Request) -> int:
        return self.lengths.turn if request.turn_tokens is None else request.turn_tokens

    def _left(self, row: _Row) -> int:
        """Tokens left of the response budget."""
        return len(row.request.prompt) + self.lengths.response - len(row.ids)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def _close_turn(self, row: _Row) -> None:
        """Say what the turn was, and whether the row ends with it."""
        start, end = row.turn_start, len(row.ids)
        text = episode.text_of(row.ids[start:end], self.tokenizer.token_bytes)
        kind, content = episode.parse_turn(text, row.request.role)
        row.turns.append(Turn(kind, content, start, end))
        is_last = len(row.turns) == row.request.max_turns
        row.stop = episode.after_turn(kind, is_cut=row.ending == CUT, is_last=is_last)
        if row.stop is None and self._left(row) <= self._wrapper:
            row.stop = 'length'  # no result could be shown and answered: the search is not made
        row.state, row.ending = 0, RUNNING

    def _observe(self, row: _Row, result: Search) -> None:
        """Append the result of the row's search; the row ends when there was none, or no room is left to go on."""
        row.searches.append(result)
        self.counters['searches'] += 1
        if result.outcome == 'outage':
            row.stop = 'outage'
            return
        ids = episode.encode_observation(self.tokenizer.encode, result, self.lengths.observation)
        if len(ids) >= self._left(row):
            row.stop = 'length'
            return
        row.append(ids)
        row.turn_start = len(row.ids)
        self.counters['observation_tokens'] += len(ids)

    def _trajectory(self, row: _Row, weights_version: int, bank_version: int) -> Trajectory:
        assert row.stop is not None
        return Trajectory(
            role=row.request.role,
            problem_id=row.request.problem_id,
            sample=row.request.sample,
            ids=np.array(row.ids, np.int32),
            is_action=np.array(row.is_action, bool),
            logprobs=np.array(row.logprobs, np.float32),
            prompt_length=len(row.request.prompt),
            turns=tuple(row.turns),
            searches=tuple(row.searches),
            card_ids=row.request.card_ids,
            stop_reason=row.stop,
            weights_version=weights_version,
            bank_version=bank_version,
        )
