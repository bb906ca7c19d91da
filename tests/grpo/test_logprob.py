"""Log-probs of action tokens: exact values, masks, chunks, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_toy import ALLOWED, toy_arch, toy_params

from sesa_jax.grpo.logprob import token_logprobs
from sesa_jax.policy import transformer
from sesa_jax.policy.arch import shapes

ARCH = toy_arch()
jitted = jax.jit(token_logprobs, static_argnames=('arch', 'allowed', 'entropy', 'chunk', 'remat', 'dtype'))
LENGTHS = np.array([12, 7, 20, 16], np.int32)


def rows(pad=0, seed=0):
    rng = np.random.default_rng(seed)
    tokens = 20 + pad
    inside = np.arange(tokens) < LENGTHS[:, None]
    ids = np.where(inside, rng.integers(0, ALLOWED, (4, tokens)), 0).astype(np.int32)
    is_action = inside & (rng.random((4, tokens)) < 0.6)
    is_action[:, 0] = False
    is_action[np.arange(4), LENGTHS - 1] = True  # the sampled terminator
    if pad:
        ids[:, :20], is_action[:, :20] = rows(0, seed)[0], rows(0, seed)[1]
    return ids, is_action


def logprobs(params, ids, is_action, arch=ARCH, temperature=1.0, allowed=ALLOWED, **options):
    return jitted(
        params, arch, jnp.array(ids), jnp.array(LENGTHS), jnp.array(is_action),
        temperature=temperature, allowed=allowed, **options,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames='arch')
def all_logits(params, arch, ids):
    return transformer.logits(params, arch, transformer.hidden(params, arch, jnp.array(ids), jnp.array(LENGTHS)))


def expected(params, ids, is_action, arch=ARCH, temperature=1.0):
    """The whole vocabulary at every position, in float64."""
    logits = np.asarray(all_logits(params, arch, ids), np.float64)[:, :-1, :ALLOWED] / temperature
    logits -= logits.max(-1, keepdims=True)
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(table, np.minimum(ids, ALLOWED - 1)[:, 1:, None], -1)[..., 0]
    entropy = -(np.exp(table) * table).sum(-1)
    pad = ((0, 0), (1, 0))
    return np.where(is_action, np.pad(chosen, pad), 0), np.where(is_action, np.pad(entropy, pad), 0)


@pytest.mark.parametrize('temperature', [1.0, 0.5])
@pytest.mark.parametrize(('tied', 'chunk'), [(False, 5), (True, 16), (True, 1024)])
def test_values(tied, chunk, temperature):
    arch = toy_arch(tied=tied)
    params, (ids, is_action) = toy_params(arch), rows()
    got = logprobs(params, ids, is_action, arch, temperature, entropy='value', chunk=chunk)
    np.testing.assert_allclose(got[0], expected(params, ids, is_action, arch, temperature)[0], atol=2e-5)
    np.testing.assert_allclose(got[1], expected(params, ids, is_action, arch, temperature)[1], atol=2e-5)
    assert (np.asarray(got[0])[~is_action] == 0).all() and (np.asarray(got[1])[~is_action] == 0).all()


def test_temperature_scales_logits_not_logprobs(monkeypatch):
    """Logits [2, 0] at T = 0.5, token 0: -0.01815 (raw -0.12693, log-prob over T -0.25386)."""
    fixed = lambda params, arch, x, dtype: jnp.broadcast_to(jnp.array([2.0, 0.0]), (*x.shape[:-1], 2))  # noqa: E731
    monkeypatch.setattr(transformer, 'logits', fixed)
    ids, is_action = rows()
    got = logprobs(toy_params(ARCH), ids * 0, is_action, temperature=0.5, allowed=2)[0]
    np.testing.assert_allclose(np.asarray(got)[is_action], -0.01815, atol=1e-5)


def test_probabilities_of_the_allowed_ids_sum_to_one():
    params = toy_params(ARCH)
    params['embed'] = params['embed'].at[ALLOWED:].set(50.0)  # padded rows of the vocabulary with huge logits
    total = 0.0
    for last in range(ALLOWED):
        ids, _ = rows()
        ids[0, LENGTHS[0] - 1] = last
        only = np.zeros(ids.shape, bool)
        only[0, LENGTHS[0] - 1] = True
        total += np.exp(float(logprobs(params, ids, only)[0][0, LENGTHS[0] - 1]))
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_padding_columns_change_nothing():
    params = toy_params(ARCH)
    plain, wide = logprobs(params, *rows())[0], logprobs(params, *rows(pad=100))[0]
    np.testing.assert_allclose(np.asarray(wide)[:, :20], plain, atol=1e-5)
    assert (np.asarray(wide)[:, 20:] == 0).all()


def test_no_action_at_all():
    ids, is_action = rows()
    got = logprobs(toy_params(ARCH), ids, is_action & False, entropy='value')
    assert (np.asarray(got[0]) == 0).all() and (np.asarray(got[1]) == 0).all()


def test_an_observation_counts_as_context_but_has_no_logprob():
    params, (ids, is_action) = toy_params(ARCH), rows()
    ids = np.array(ids)
    is_action[2] = [False] * 8 + [True] * 4 + [False] * 4 + [True] * 4
    other = ids.copy()
    other[2, 12:16] = (other[2, 12:16] + 1) % ALLOWED
    before, after = (np.asarray(logprobs(params, x, is_action)[0][2]) for x in (ids, other))
    np.testing.assert_allclose(before[:12], after[:12], atol=1e-6)
    assert (before[12:16] == 0).all() and np.abs(before[16:] - after[16:]).min() > 1e-4


def gradient(params, ids, is_action, weight, **options):
    def value(params):
        got, entropy = logprobs(params, ids, is_action, **options)
        return (got * weight).sum() + (entropy * weight).sum()

    return jax.jit(jax.grad(value))(params)


def plain_gradient(params, arch, ids, is_action, weight, with_entropy):
    def value(params):
        table = jax.nn.log_softmax(all_logits(params, arch, ids)[:, :-1, :ALLOWED])
        chosen = jnp.take_along_axis(table, jnp.array(ids)[:, 1:, None], -1)[..., 0]
        entropy = -(jnp.exp(table) * table).sum(-1) * with_entropy
        return (jnp.where(is_action[:, 1:], chosen + entropy, 0.0) * weight[:, 1:]).sum()

    return jax.jit(jax.grad(value))(params)


@pytest.mark.parametrize(
    ('chunk', 'tied', 'entropy', 'remat'),
    [(7, True, 'value', 'none'), (1024, True, 'gradient', 'nothing'), (3, False, 'gradient', 'projections')],
)
def test_gradients_equal_those_of_the_whole_head(chunk, tied, entropy, remat):
    arch = toy_arch(tied=tied)
    params, (ids, is_action) = toy_params(arch), rows()
    weight = np.random.default_rng(1).normal(size=ids.shape).astype(np.float32)
    got = gradient(params, ids, is_action, weight, arch=arch, chunk=chunk, entropy=entropy, remat=remat)
    want = plain_gradient(params, arch, ids, is_action, weight, float(entropy == 'gradient'))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize('tied', [False, True])
def test_chunks_change_no_value(tied, monkeypatch):
    without_layers(monkeypatch)
    arch = toy_arch(tied=tied)
    params, (ids, is_action) = toy_params(arch), rows()
    whole, *chunked = (
        token_logprobs(
            params, arch, ids, LENGTHS, is_action, temperature=0.7, allowed=ALLOWED, entropy='value', chunk=chunk
        )
        for chunk in (1024, 1, 5, 16)
    )
    for found in chunked:
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6)


def without_layers(monkeypatch):
    """Only the head is of interest, and layers compile slowly: hidden states are the embeddings."""
    monkeypatch.setattr(transformer, 'hidden', lambda params, arch, ids, lengths, **_: params['embed'][ids] * 0.1)


def test_bfloat16_chunks_add_up_in_float32(monkeypatch):
    """The error against float32 is that of the products, whatever the number of chunks. Sums in bfloat16 are three times
    as far off with 64 chunks."""
    without_layers(monkeypatch)
    arch = toy_arch(tied=False)
    params, rng = toy_params(arch), np.random.default_rng(0)
    ids = rng.integers(0, ALLOWED, (4, 65)).astype(np.int32)
    is_action = np.arange(65) > np.zeros((4, 1))  # 256 tokens
    weight = 1 + 0.1 * rng.random(ids.shape).astype(np.float32)  # sums that grow, and stand still in bfloat16
    exact = gradient(params, ids, is_action, weight, arch=arch)['head']

    def error(chunk):
        found = gradient(params, ids, is_action, weight, arch=arch, dtype=jnp.bfloat16, chunk=chunk)['head']
        assert found.dtype == jnp.float32
        return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))

    one, *more = (error(256 // chunks) for chunks in (1, 4, 16, 64))
    assert one < 5e-3
    assert max(more) < 1.05 * one


@pytest.mark.parametrize(('actions', 'chunks'), [(0, 0), (8, 1), (9, 2), (79, 10)])
def test_the_work_follows_the_number_of_action_tokens(actions, chunks, monkeypatch):
    """Products of the head that ran, in chunks of 8: one forward, and one again backward."""
    without_layers(monkeypatch)
    ran, product = [], transformer.logits

    def counted(*arguments, **options):
        jax.debug.callback(lambda: ran.append(1))
        return product(*arguments, **options)

    monkeypatch.setattr(transformer, 'logits', counted)
    params, ids = toy_params(ARCH), np.ones((1, 80), np.int32)
    is_action = np.zeros((1, 80), bool)
    is_action[0, 1 + np.random.default_rng(0).permutation(79)[:actions]] = True

    def value(params):
        lengths = jnp.array([80])
        return token_logprobs(params, ARCH, ids, lengths, is_action, temperature=1.0, allowed=ALLOWED, chunk=8)[0].sum()

    jax.block_until_ready(jax.jit(jax.grad(value))(params))
    jax.effects_barrier()
    assert len(ran) == 2 * chunks


def test_memory_follows_the_chunk_and_not_the_tokens_times_the_vocabulary(monkeypatch):
    """Temporary bytes of value and gradient at Qwen3's vocabulary: 3 arrays of [chunk, V] and the head's gradient for any T,
    plus less than 1.5 kB a token at a width of 64."""
    without_layers(monkeypatch)
    vocab, width, chunk = 151_936, 64, 512
    arch = toy_arch(vocab=vocab, width=width, layers=1, tied=False)

    def temporary(tokens):
        array = jax.ShapeDtypeStruct

        def value(params, ids, lengths, is_action):
            options = {'temperature': 1.0, 'allowed': 151_669, 'entropy': 'value', 'chunk': chunk}
            return token_logprobs(params, arch, ids, lengths, is_action, **options)[0].sum()

        batch = array((1, tokens), jnp.int32), array((1,), jnp.int32), array((1, tokens), jnp.bool)
        lowered = jax.jit(jax.value_and_grad(value)).lower(shapes(arch, jnp.float32), *batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(8192)
    assert long - short < 7168 * 1500
    assert long < 4 * vocab * (3.1 * chunk + width) + 8192 * 1500
