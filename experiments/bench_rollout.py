"""What `experiments.bench rollout` measures: the contenders, what they must agree on, and the figures.

* `ours`: the engine of the main job, called as the trainer calls it, log-probs included.
* `plain`: what one writes in an afternoon: every row has its own copy of the prompt, one cache of full length, and one
  `while_loop` until the last row has ended, with `jax.random.categorical`.
* `transformers`: `generate` with its default cache, float32, as many threads as there are cores, without log-probs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax import config
from sesa_jax.policy import backbones, hf, sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.records import Document, Search
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Request

Say = Callable[[str], None]
TURN = 32  # tokens of a turn that ends with a search, on average
IDLE = ('idle_stopped', 'idle_waiting', 'idle_empty')  # the engine's counters of row-steps that sampled nothing
UNIFORM = 1e6  # a temperature at which every token is as likely as any other


class Disagreement(Exception):
    """Contenders that do not compute the same."""


class Silent:
    """The real tokenizer's sizes, with tokens that neither end a turn nor spell a tag; rows then have a known length."""

    def __init__(self, real: Tokenizer) -> None:
        self.encode, self.vocab_size, self.pad_id = real.encode, real.vocab_size, real.pad_id
        self.end_ids: frozenset[int] = frozenset()
        self.token_bytes = [b''] * real.vocab_size


class Searching(Silent):
    """One token in `every` spells a whole search: with uniform sampling, turns have that mean length."""

    def __init__(self, real: Tokenizer, every: int) -> None:
        super().__init__(real)
        self.token_bytes = [b'' if i % every else b'<search>x</search>' for i in range(real.vocab_size)]


@dataclasses.dataclass(frozen=True)
class Model:
    folder: Any
    arch: Architecture  # as the decode copy has it
    tokenizer: Tokenizer
    params: Any  # the decode copy
    mesh: Any

    @classmethod
    def load(cls, name: str) -> Model:
        folder = backbones.resolve(name)
        tokenizer = Tokenizer(folder, template=backbones.template_of(name))
        mesh = sharding.make_mesh(1)
        arch = hf.load_architecture(folder)
        params = hf.load_params(folder, arch, sharding.shardings(abstract(arch), sharding.TRAIN, mesh))
        arch = sharding.decode_arch(arch, mesh)
        return cls(folder, arch, tokenizer, jax.jit(transformer.unstack, static_argnums=1)(params, arch), mesh)

    def engine(self, tokenizer: Any, groups: int, group: int, prompt: int, response: int, **lengths: int) -> Engine:
        sizes = config.Lengths(prompt=prompt, response=response, **{'turn': response, 'observation': 128, **lengths})
        places = config.Rollout(rows=groups * group, single=groups, long=0, batch=min(config.Rollout.batch, groups))
        return Engine(self.arch, tokenizer, self.mesh, sizes, places=places, group_size=group)


def measure(flags: Any, interleaved: Callable[..., dict[str, Any]], say: Say) -> dict[str, Any]:
    """Every figure of the benchmark; `say` is told each as it is found."""
    model = Model.load(flags.model)
    found: dict[str, Any] = {'calls': {}, 'turns': [], 'growth': {}}
    sizes = [(flags.prompts, flags.group), (flags.prompts, 1), (1, 1)] if flags.calls else []
    for prompts, group in dict.fromkeys(sizes):
        name = f'{prompts} x {group}'
        found['calls'][name] = one_call(model, flags, prompts, group, interleaved, lambda s, n=name: say(f'{n}: {s}'))
    if flags.growth:
        found['growth'] = growth(model, flags, say)
    if flags.turns:
        found['turns'] = with_searches(model, flags, say)
    return found


# --- one turn of known length -----------------------------------------------------------------------------------------


def one_call(
    model: Model, flags: Any, prompts: int, group: int, interleaved: Callable[..., dict[str, Any]], say: Say
) -> dict[str, Any]:
    """Ratios of a whole call, and of decoding alone (a call less one that samples a single token)."""
    ids = np.random.default_rng(0).integers(10, model.tokenizer.vocab_size, (prompts, flags.prompt_tokens))
    contenders = {'plain': Plain(model, ids, group)}
    if (theirs := Transformers.load(model, ids, group)) is not None:
        contenders['transformers'] = theirs
    ours = Ours(model, ids, group, flags.new_tokens)
    expected = ours(flags.new_tokens, 0.0)
    for name, other in contenders.items():
        if not np.array_equal(other(flags.new_tokens, 0.0), expected):
            raise Disagreement(f'{name} has other greedy tokens than ours for {prompts} prompts')
    say(f'{flags.new_tokens} greedy tokens of each prompt are equal: ours, {", ".join(contenders)}')
    ratios = {}
    for what, tokens in (('whole call', flags.new_tokens), ('one token', 1)):
        others = {name: functools.partial(other, tokens, 1.0) for name, other in contenders.items()}
        ratios[what] = interleaved(functools.partial(ours, tokens, 1.0), others, flags.pairs)
    result: dict[str, Any] = {}
    for name in contenders:
        whole, one = ratios['whole call'][name], ratios['one token'][name]
        decoding = (whole.least_seconds_other - one.least_seconds_other) / (whole.least_seconds - one.least_seconds)
        result[name] = {
            'whole_call': dataclasses.asdict(whole), 'one_token': dataclasses.asdict(one), 'decoding_alone': decoding,
        }  # fmt: skip
        say(f'{name}: whole call {whole}, decoding alone {decoding:.2f}x (of the least times)')
    return result


class Ours:
    def __init__(self, model: Model, ids: np.ndarray, group: int, new_tokens: int) -> None:
        self.model, self.ids, self.group = model, ids, group
        self.engine = model.engine(Silent(model.tokenizer), len(ids), group, ids.shape[1], new_tokens)

    def __call__(self, tokens: int, temperature: float) -> np.ndarray:
        """i32[rows, tokens]"""
        requests = [
            Request('solver', str(i), i, sample, row.tolist(), temperature, 1, turn_tokens=tokens)
            for i, row in enumerate(self.ids)
            for sample in range(self.group)
        ]
        rows = rollout(self.engine, self.model, requests, scripted(0.0))
        return np.array([row.ids[row.prompt_length :] for row in rows])


def rollout(engine: Engine, model: Model, requests: Sequence[Request], search: Any) -> Any:
    return engine.rollout(model.params, requests, search, seed=0, step=0, weights_version=0, bank_version=0)


class Plain:
    def __init__(self, model: Model, ids: np.ndarray, group: int) -> None:
        self.model, self.ids = model, jnp.asarray(np.repeat(ids, group, axis=0), jnp.int32)

    def __call__(self, tokens: int, temperature: float) -> np.ndarray:
        sampled = plain(
            self.model.params, self.ids, temperature, arch=self.model.arch, tokens=tokens,
            allowed=self.model.tokenizer.vocab_size,
        )  # fmt: skip
        return np.asarray(sampled[0])


@functools.partial(jax.jit, static_argnames=('arch', 'tokens', 'allowed'))
def plain(
    params: Any, ids: jax.Array, temperature: jax.Array, *, arch: Architecture, tokens: int, allowed: int
) -> tuple[jax.Array, jax.Array]:
    """(tokens i32[R, tokens], their log-probs) behind prompts ids i32[R, T] of one length."""
    rows, length = ids.shape
    prompt = transformer.prefill(params, arch, ids[:, :-1], jnp.full(rows, length - 1))
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, tokens), (0, 0))), prompt)
    slots = transformer.Slots(transformer.init_cache(arch, rows, 1), (cache,))  # no shared prompt
    none = jnp.zeros(rows, jnp.int32)

    def body(state: Any) -> Any:
        step, slots, token, key, sampled, logprobs = state
        start = none + length - 1 + step
        staging = transformer.init_cache(arch, rows, 1)
        hidden, staging = transformer.decode_step(params, arch, slots, staging, jnp.int32(0), token, none, start)
        slots = transformer.merge(slots, staging, start, none + 1)
        logits = jnp.where(jnp.arange(arch.vocab) < allowed, transformer.logits(params, arch, hidden), -jnp.inf)
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
        key, now = jax.random.split(key)
        token = jnp.where(temperature > 0, jax.random.categorical(now, scaled), jnp.argmax(logits, axis=-1))
        logprob = jnp.take_along_axis(jax.nn.log_softmax(scaled), token[:, None], axis=1)[:, 0]
        return step + 1, slots, token, key, sampled.at[:, step].set(token), logprobs.at[:, step].set(logprob)

    empty = (jnp.zeros((rows, tokens), jnp.int32), jnp.zeros((rows, tokens)))
    state = (jnp.int32(0), slots, ids[:, -1], jax.random.key(0), *empty)
    return jax.lax.while_loop(lambda state: state[0] < tokens, body, state)[-2:]


class Transformers:
    def __init__(self, torch: Any, model: Any, ids: np.ndarray, group: int) -> None:
        self.torch, self.model, self.ids, self.group = torch, model, torch.tensor(ids), group

    @classmethod
    def load(cls, model: Model, ids: np.ndarray, group: int) -> Transformers | None:
        """None without torch."""
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            return None
        torch.set_num_threads(os.cpu_count() or 1)
        loaded = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, local_files_only=True)
        return cls(torch, loaded.eval(), ids, group)

    def __call__(self, tokens: int, temperature: float) -> np.ndarray:
        sampling: dict[str, Any] = {'do_sample': False}
        if temperature > 0:
            sampling = {'do_sample': True, 'temperature': temperature, 'top_k': 0, 'top_p': 1.0}
        ids = self.ids
        if temperature > 0:
            sampling['num_return_sequences'] = self.group
        else:
            ids = ids.repeat_interleave(self.group, dim=0)
        with self.torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                eos_token_id=None, pad_token_id=0, **sampling,
            )  # fmt: skip
        return out[:, self.ids.shape[1] :].numpy()


def growth(model: Model, flags: Any, say: Say) -> dict[str, list[dict[str, float]]]:
    """How our time grows with rows, prompt length and turns: least seconds of some calls, against the smallest size."""
    found: dict[str, list[dict[str, float]]] = {'rows': [], 'prompt_tokens': []}
    cases = [('rows', rows, flags.prompt_tokens) for rows in (1, 2, 4, 8)]
    cases += [('prompt_tokens', flags.prompts, length) for length in (64, 128, 256, 512)]
    for axis, prompts, length in cases:
        ids = np.random.default_rng(0).integers(10, model.tokenizer.vocab_size, (prompts, length))
        call = functools.partial(Ours(model, ids, flags.group, flags.new_tokens), flags.new_tokens, 1.0)
        size = prompts * flags.group if axis == 'rows' else length
        call()  # compiles
        found[axis].append({'size': size, 'seconds': least_seconds(call, flags.pairs)})
        first = found[axis][0]
        say(f'{axis} {size}: {found[axis][-1]["seconds"] / first["seconds"]:.2f}x the time of {first["size"]}')
    engine, found['turns'] = searching_engine(model, flags, 4), []
    for turns in (1, 2, 4):
        requests = searching_requests(model, flags, flags.prompts, turns)
        engine.counters.clear()
        search = scripted(0.0, flags.observation_tokens)
        call = functools.partial(rollout, engine, model, requests, search)
        seconds = least_seconds(call, flags.pairs)
        tokens = engine.counters['action_tokens'] // flags.pairs
        found['turns'].append({'size': turns, 'seconds': seconds, 'action_tokens': tokens})
        first = found['turns'][0]
        say(
            f'turns {turns}: {seconds / first["seconds"]:.2f}x the time of {first["size"]} for '
            f'{tokens / first["action_tokens"]:.2f}x the sampled tokens'
        )
    return found


def least_seconds(call: Callable[[], Any], calls: int) -> float:
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


# --- several turns ----------------------------------------------------------------------------------------------------


def scripted(seconds: float, tokens: int = 0) -> Any:
    """A search that answers after `seconds` with a fixed text of `tokens` or more, for all queries of a call at once."""
    pool = concurrent.futures.ThreadPoolExecutor(64)
    sentence = 'The river rises in the hills and reaches the sea at the old harbour. '  # of 13 words
    document = Document('d', 'A page', sentence * (1 + tokens // 13))

    def search(queries: list[str]) -> list[Search]:
        time.sleep(seconds)
        return [Search(query, (document,), 'ok', seconds) for query in queries]

    return lambda queries: pool.submit(search, list(queries))


def searching_engine(model: Model, flags: Any, turns: int) -> Engine:
    """Its rows search after TURN tokens on average, and nearly all have room for so many turns; results are taken in as
    they come. Everything is compiled."""
    tokenizer, observation = Searching(model.tokenizer, TURN), flags.observation_tokens
    engine = model.engine(
        tokenizer, flags.prompts, flags.group, flags.prompt_tokens, turns * (2 * TURN + observation),
        turn=8 * TURN, observation=observation,
    )  # fmt: skip
    engine.places = dataclasses.replace(engine.places, deterministic=False)
    engine.warm_up(model.params)
    return engine


def searching_requests(model: Model, flags: Any, groups: int, turns: int) -> list[Request]:
    ids = np.random.default_rng(0).integers(10, model.tokenizer.vocab_size, (groups, flags.prompt_tokens))
    return [
        Request('solver', str(i), i, sample, row.tolist(), UNIFORM, turns)
        for i, row in enumerate(ids)
        for sample in range(flags.group)
    ]


def with_searches(model: Model, flags: Any, say: Say) -> list[dict[str, float]]:
    """Throughput under each latency, against the mean of two runs under the first one, before and behind the others; and
    the counters of the engine. Results are taken in as they come."""
    engine = searching_engine(model, flags, flags.turns)
    rollout(engine, model, searching_requests(model, flags, flags.prompts, 1), scripted(0.0))  # touches all memory
    requests = searching_requests(model, flags, flags.rounds * flags.prompts, flags.turns)
    found = []
    for milliseconds in (*flags.latencies, flags.latencies[0]):
        found.append(one_latency(engine, model, flags, requests, milliseconds))
        say(
            f'{flags.turns} turns, search {milliseconds} ms: {found[-1]["seconds"]:.0f} s, '
            f'{found[-1]["share_hidden"]:.2f} of the latency hidden; '
            + ', '.join(f'{found[-1][f"share_{cause}"]:.2f} {cause}' for cause in IDLE)
        )
    first = statistics.mean(entry['tokens_a_second'] for entry in (found[0], found[-1]))
    for entry in found:
        entry['throughput_kept'] = entry['tokens_a_second'] / first
        say(f'search {entry["milliseconds"]} ms: {entry["throughput_kept"]:.2f} of the throughput at {flags.latencies[0]} ms')
    return found


def one_latency(
    engine: Engine, model: Model, flags: Any, requests: Sequence[Request], milliseconds: float
) -> dict[str, float]:
    engine.counters.clear()
    engine.seconds.clear()
    search = scripted(milliseconds / 1000, flags.observation_tokens)
    began = time.perf_counter()
    rollout(engine, model, requests, search)
    seconds = time.perf_counter() - began
    counters = engine.counters
    row_steps = sum(counters[name] for name in ('action_tokens', *IDLE))
    prompt_tokens = sum(len(row.prompt) - 1 for row in requests[:: flags.group])
    return {
        'milliseconds': milliseconds,
        'seconds': seconds,
        'tokens_a_second': counters['action_tokens'] / seconds,
        'action_tokens': counters['action_tokens'],
        'observation_tokens': counters['observation_tokens'],
        'searches': counters['searches'],
        'share_hidden': engine.seconds['search_hidden'] / max(engine.seconds['search'], 1e-9),
        'prefill_recompute': counters['prefill_tokens'] / prompt_tokens,
        **{f'share_{name}': counters[name] / row_steps for name in IDLE},
    }
