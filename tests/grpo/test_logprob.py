"""Log-probs of action tokens: exact values, masks, chunks, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_toy import ALLOWED, toy_arch, toy_params

from sesa_jax.grpo.logprob import token_logprobs
from sesa_jax.policy import transformer

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


def plain_gradient(params, ids, is_action, weight, with_entropy):
    def value(params):
        table = jax.nn.log_softmax(all_logits(params, ARCH, ids)[:, :-1, :ALLOWED])
        chosen = jnp.take_along_axis(table, jnp.array(ids)[:, 1:, None], -1)[..., 0]
        entropy = -(jnp.exp(table) * table).sum(-1) * with_entropy
        return (jnp.where(is_action[:, 1:], chosen + entropy, 0.0) * weight[:, 1:]).sum()

    return jax.jit(jax.grad(value))(params)


@pytest.mark.parametrize(('chunk', 'entropy', 'remat'), [(7, 'value', False), (1024, 'gradient', True)])
def test_gradients_equal_those_of_the_whole_head(chunk, entropy, remat):
    params, (ids, is_action) = toy_params(ARCH), rows()
    weight = np.random.default_rng(1).normal(size=ids.shape).astype(np.float32)
    got = gradient(params, ids, is_action, weight, chunk=chunk, entropy=entropy, remat=remat)
    want = plain_gradient(params, ids, is_action, weight, float(entropy == 'gradient'))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, want)


def test_bfloat16_chunks_add_up_in_float32(monkeypatch):
    # Only the head is of interest, and bfloat16 compiles slowly on a CPU: a model without layers.
    monkeypatch.setattr(transformer, 'hidden', lambda params, arch, ids, lengths, **_: params['embed'][ids] * 0.1)
    params, (ids, is_action) = toy_params(ARCH), rows()
    weight = np.ones(ids.shape, np.float32)
    one, many = (
        gradient(params, ids, is_action, weight, dtype=jnp.bfloat16, chunk=chunk)['embed'] for chunk in (80, 2)
    )
    assert one.dtype == jnp.float32
    np.testing.assert_allclose(one, many, atol=0.02 * float(jnp.abs(one).max()))
