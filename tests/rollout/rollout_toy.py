"""A policy that plays: a small transformer whose next token mostly follows a table of what may come after what.

The embedding is the identity and the head holds the table, so tags are likely; attention and MLP add noise that depends
on the whole context, so a wrong cache, mask or position shows in every log-probability.
"""

import concurrent.futures
import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax.config import Lengths, Rollout
from sesa_jax.policy import transformer
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.sharding import make_mesh
from sesa_jax.records import Document, Search
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Request, Rules

PIECES = ['<search>', '</sea', 'rch>', 'rch>\n', '<answer>', '</answer>', '<question>', '</question>']
PIECES += [' river', ' lake', ' red', ' blue', ' why', ' when', 'hm']
ID = {piece: 256 + i for i, piece in enumerate(PIECES)}
END = 256 + len(PIECES)
ARCH = Architecture(
    vocab=288, layers=2, width=288, hidden=32, heads=4, kv_heads=2, head_size=16, rope_theta=1e4, eps=1e-6, tied=False,
    max_positions=512,
)  # fmt: skip
LENGTHS = Lengths(prompt=40, response=300, observation=80, turn=24)

# What may follow each piece, with its weight; every other token (the bytes of prompts and observations) is 'start'.
PLAY = {
    'start': {'hm': 4, '<search>': 3, '<answer>': 1},
    'hm': {'hm': 3, '<search>': 3, '<answer>': 1, 'end': 0.1, '</answer>': 0.1},
    '<search>': {' river': 1, ' lake': 1},
    ' river': {' river': 1, ' lake': 1, '</sea': 2},
    ' lake': {' river': 1, ' lake': 1, '</sea': 2},
    '</sea': {'rch>': 1, 'rch>\n': 1},
    '<answer>': {' red': 1, ' blue': 1},
    ' red': {' blue': 1, '</answer>': 2},
    ' blue': {' red': 1, '</answer>': 2},
    '<question>': {' why': 1, ' when': 1},
    ' why': {' when': 1, '</question>': 2},
    ' when': {' why': 1, '</question>': 2},
}


class Bytes:
    """A tokenizer of single bytes and a few pieces that only a policy writes; the last id ends a text."""

    vocab_size = END + 1
    end_ids = frozenset({END})
    pad_id = END
    token_bytes = [bytes([i]) for i in range(256)] + [piece.encode() for piece in PIECES] + [b'']

    def encode(self, text):
        return list(text.encode())


TOKENIZER = Bytes()


def policy(play=PLAY, noise=1.0, seed=0):
    """Stacked parameters. noise 0: exactly the table."""
    params = transformer.init(ARCH, jax.random.key(seed))
    for name in ('output', 'down'):
        # The stream starts as a unit vector, what a layer adds has a norm of about 8.
        params['layers'][name] = params['layers'][name] * (0.03 * noise)
    table = np.full((ARCH.vocab, ARCH.vocab), -20.0, np.float32)
    names = {**ID, 'end': END}
    for before in range(ARCH.vocab):
        piece = PIECES[before - 256] if 256 <= before < END else 'start'
        for after, weight in play.get(piece, {'end': 1}).items():
            table[before, names[after]] = np.log(weight)
    params['embed'] = jnp.eye(ARCH.vocab)
    params['head'] = jnp.asarray(table) / np.sqrt(ARCH.width)  # the final norm makes a unit vector that long
    return params


def always(*pieces, end='end'):
    """A table that writes `pieces` from the start of every turn, then `end`; each piece once."""
    return {before: {after: 1} for before, after in zip(('start', *pieces), (*pieces, end), strict=True)}


SEARCH = always('<search>', ' river', '</sea', end='rch>\n')


class World:
    """A search that keeps what it was asked. Queries with 'lake' first find nothing; outages by choice."""

    def __init__(self, outage=(), text='It flows.'):
        self.calls, self.outage, self.text = [], outage, text

    def __call__(self, queries):
        self.calls.append(list(queries))
        return [self.one(query) for query in queries]

    def one(self, query):
        if query in self.outage:
            return Search(query, (), 'outage', 0.0)
        if query.startswith('lake'):
            return Search(query, (), 'empty', 0.0)
        return Search(query, (Document('d', f'On {query}', self.text),), 'ok', 0.5)


def requests(count, group=1, *, temperature=1.0, role='solver', max_turns=4, **changes):
    """`count` problems with prompts of different lengths, `group` samples each."""
    prompts = [list(f'Question {"x" * (3 * i % 11)} {i}?'.encode()) for i in range(count)]
    return [
        Request(role, f'p{i}', i, sample, prompts[i], temperature, max_turns, **changes)
        for i in range(count)
        for sample in range(group)
    ]


PLACES = Rollout(rows=16, single=8, long=0, blocks=2, chunk=8)


@functools.cache
def engine(lengths=LENGTHS, group_size=2, devices=1, model=1, **places):
    """The toy's engine: eight groups of two, eight single places; keywords change the places."""
    places = dataclasses.replace(PLACES, **places)
    return Engine(ARCH, TOKENIZER, make_mesh(devices, model), lengths, places=places, group_size=group_size)


def lengths(**changes):
    return dataclasses.replace(LENGTHS, **changes)


def budgeted(**changes):
    """The default engine, its places and programs, with other limits for what rows may write there."""
    sampler = copy.copy(engine())
    sampler.lengths = lengths(**changes)
    sampler.rules = Rules.make(TOKENIZER, sampler.lengths)
    return sampler


def at_once(search):
    """A search whose results are there when it returns."""

    def submit(queries):
        future = concurrent.futures.Future()
        future.set_result(search(queries))
        return future

    return submit


def play(rows, world=None, *, table=PLAY, noise=1.0, params=None, seed=0, step=0, on=None):
    """Trajectories of the real engine `on` (the default one) for `rows`, with the policy `table` or `params`."""
    return (on or engine()).rollout(
        transformer.unstack(policy(table, noise) if params is None else params, ARCH),
        rows,
        at_once(World() if world is None else world),
        seed=seed,
        step=step,
        weights_version=3,
        bank_version=4,
    )


@functools.partial(jax.jit, static_argnames='temperature')
def _full_forward(params, ids, lengths, temperature):
    logits = transformer.logits(params, ARCH, transformer.hidden(params, ARCH, ids, lengths))
    logprobs = jax.nn.log_softmax(logits[:, :-1, : TOKENIZER.vocab_size] / (temperature or 1.0))
    return jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=2)[:, :, 0]


def full_forward(params, trajectories, temperature=1.0):
    """Log-probs of every token of finished rows, from one pass of the training forward; one f32[T] a row, 0 at 0."""
    longest = max(len(row.ids) for row in trajectories)
    ids = np.zeros((16, 384 if longest <= 384 else ARCH.max_positions), np.int32)
    lengths = np.zeros(16, np.int32)
    for i, row in enumerate(trajectories):
        ids[i, : len(row.ids)], lengths[i] = row.ids, len(row.ids)
    result = np.asarray(_full_forward(params, ids, lengths, temperature))
    return [np.append(0, result[i, : len(row.ids) - 1]) for i, row in enumerate(trajectories)]


def assert_equal_to_full_forward(params, trajectories, temperature=1.0):
    for row, expected in zip(trajectories, full_forward(params, trajectories, temperature), strict=True):
        np.testing.assert_allclose(row.logprobs, np.where(row.is_action, expected, 0), atol=1e-4)


def tokens(trajectories):
    return {row.rollout_id: row.ids.tolist() for row in trajectories}
