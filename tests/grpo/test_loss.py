"""Exact values and gradients of the objective's parts, and of the whole on one small batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sesa_jax.config import Grpo
from sesa_jax.grpo import loss as L

CLIP = {'low': 0.2, 'high': 0.2, 'dual': 3.0}


def clipped(ratio, advantage, **clip):
    """The objective and its derivative by the log-prob, at one token."""

    def value(logprob):
        return L.surrogate(logprob, jnp.float32(-1.0), jnp.float32(advantage), **(CLIP | clip))[0]

    return jax.value_and_grad(value)(jnp.log(jnp.float32(ratio)) - 1.0)


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'value', 'gradient'),
    [
        (1.5, +1, 1.2, 0.0),
        (0.5, +1, 0.5, 0.5),
        (1.5, -1, -1.5, -1.5),
        (0.5, -1, -0.8, 0.0),
        (1.0, +2, 2.0, 2.0),
        (1.0, -2, -2.0, -2.0),
        (5.0, -1, -3.0, 0.0),  # dual clip: never below 3 A
        (2.9, -1, -2.9, -2.9),
        (5.0, +1, 1.2, 0.0),  # and it knows nothing of A > 0
        (1e30, +1, 1.2, 0.0),
        (1e30, -1, -3.0, 0.0),
        (1e-30, +1, 0.0, 0.0),
        (1.5, 0, 0.0, 0.0),
    ],
)
def test_surrogate_takes_the_right_branch(ratio, advantage, value, gradient):
    got = clipped(ratio, advantage)
    np.testing.assert_allclose(got, (value, gradient), rtol=1e-5, atol=1e-7)


def test_upper_clip_is_its_own():
    np.testing.assert_allclose(clipped(1.5, +1, high=0.285)[0], 1.285, rtol=1e-6)
    np.testing.assert_allclose(clipped(0.5, -1, high=0.285)[0], -0.8, rtol=1e-6)


def test_clipped_tokens_are_those_without_a_gradient():
    ratio = jnp.array([1.5, 0.5, 1.0, 1.5, 0.5, 5.0])
    advantage = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    flags = L.surrogate(jnp.log(ratio), jnp.zeros(6), advantage, **CLIP)[1]
    assert flags.tolist() == [True, False, False, False, True, True]


def test_k3_value_and_operands():
    np.testing.assert_allclose(L.k3(jnp.float32(-1), jnp.float32(-2)), np.exp(-1), rtol=1e-6)
    np.testing.assert_allclose(L.k3(jnp.float32(-2), jnp.float32(-1)), np.e - 2, rtol=1e-6)


@pytest.mark.parametrize('logprob', [0.0, -1.0, -7.3, -30.0])
def test_k3_of_equal_policies_is_zero_with_zero_gradient(logprob):
    value, gradient = jax.value_and_grad(L.k3)(jnp.float32(logprob), jnp.float32(logprob))
    assert value == 0 and gradient == 0


def test_k3_gradient_depends_on_the_reference():
    at = lambda reference: float(jax.grad(L.k3)(jnp.float32(-1), jnp.float32(reference)))  # noqa: E731
    np.testing.assert_allclose([at(-2), at(-1.5), at(-0.5)], 1 - np.exp([-1, -0.5, 0.5]), rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.floats(-30, 0, width=32), st.floats(-(2**-10), 2**-10, width=32))
def test_k3_is_never_negative(logprob, difference):
    logprob = np.float32(logprob)
    assert L.k3(jnp.float32(logprob), jnp.float32(logprob + np.float32(difference))) >= 0


def two_rows(pad=0):
    """Lengths 1 and 3, token losses [3] and [1, 1, 1]."""
    values, mask = np.full((2, 4 + pad), np.nan, np.float32), np.zeros((2, 4 + pad), bool)
    values[0, 2], mask[0, 2] = 3, True
    values[1, [1, 2, 3]], mask[1, [1, 2, 3]] = 1, True
    return jnp.array(values), jnp.array(mask)


@pytest.mark.parametrize('pad', [0, 100])
@pytest.mark.parametrize(('aggregation', 'want'), [('token', 1.5), ('sequence', 2.0), ('constant', 0.75)])
def test_aggregation(aggregation, want, pad):
    values, mask = two_rows(pad)
    got = L.aggregate(values, mask, jnp.array([True, True]), aggregation=aggregation, constant_length=4)
    assert got.sum / got.count == want


@pytest.mark.parametrize(('aggregation', 'want'), [('token', 1.0), ('sequence', 1.0), ('constant', 0.75)])
def test_rows_that_do_not_count_are_in_no_denominator(aggregation, want):
    values, mask = two_rows()
    got = L.aggregate(values, mask, jnp.array([False, True]), aggregation=aggregation, constant_length=4)
    assert got.sum / got.count == want


def test_unknown_aggregation_is_named():
    values, mask = two_rows()
    with pytest.raises(ValueError, match="'mean' is unknown"):
        L.aggregate(values, mask, jnp.array([True, True]), aggregation='mean', constant_length=4)


def test_length_counts_actions_only():
    mask = jnp.array([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]], bool)
    got = L.aggregate(jnp.ones((1, 15)), mask, jnp.array([True]), aggregation='token', constant_length=1)
    assert got.count == 9


def batch(seed=0, rows=3, tokens=7):
    rng = np.random.default_rng(seed)
    draw = lambda scale: jnp.array(rng.normal(-2, scale, (rows, tokens)), jnp.float32)  # noqa: E731
    is_action = jnp.array(rng.random((rows, tokens)) < 0.6).at[:, 0].set(False).at[:, -1].set(True)
    old = draw(0.3)
    return L.Tokens(
        logprobs=old + 0.3 * draw(0.3),
        entropy=-draw(0.1),
        old=old,
        sampler=old + 0.01 * draw(0.3),
        reference=draw(0.5),
        is_action=is_action,
        advantage=jnp.array(rng.normal(size=rows), jnp.float32),
        is_counted=jnp.ones(rows, bool),
    )


def loss_of(tokens, grpo=None, *, constant_length=8, use_importance=False):
    loss, means, maxima = L.objective(
        tokens, grpo or Grpo(), constant_length=constant_length, use_importance=use_importance
    )
    return loss.sum / loss.count, {k: float(v.sum / v.count) for k, v in means.items()}, maxima


def gradient_of(tokens, grpo=None, **options):
    return jax.grad(lambda x: loss_of(tokens._replace(logprobs=x), grpo, **options)[0])(tokens.logprobs)


def expected(tokens, grpo, use_importance=False):
    """The objective in float64, one token after the other; only 'token' aggregation."""
    x = {k: np.asarray(v, np.float64) for k, v in tokens._asdict().items()}
    losses = []
    for b, t in np.argwhere((x['is_action'] > 0) & (x['is_counted'] > 0)[:, None]):
        ratio, a = np.exp(x['logprobs'][b, t] - x['old'][b, t]), x['advantage'][b]
        gain = min(ratio * a, np.clip(ratio, 1 - grpo.clip_low, 1 + grpo.clip_high) * a)
        gain = max(gain, grpo.clip_dual * a) if a < 0 else gain
        if use_importance:
            gain *= min(np.exp(x['old'][b, t] - x['sampler'][b, t]), grpo.importance_cap)
        d = x['reference'][b, t] - x['logprobs'][b, t]
        losses.append(-gain + grpo.kl * (np.exp(d) - 1 - d) - grpo.entropy * x['entropy'][b, t])
    return np.mean(losses)


@pytest.mark.parametrize('use_importance', [False, True])
@pytest.mark.parametrize('seed', range(3))
def test_whole_objective(seed, use_importance):
    tokens, grpo = batch(seed), Grpo(kl=0.3, entropy=0.05, importance_cap=0.995)
    got = loss_of(tokens, grpo, use_importance=use_importance)[0]
    np.testing.assert_allclose(got, expected(tokens, grpo, use_importance), rtol=1e-5)


def test_gradient_on_the_first_pass_is_the_policy_gradient():
    tokens = batch()
    tokens = tokens._replace(logprobs=tokens.old, reference=tokens.old)
    want = -tokens.advantage[:, None] * tokens.is_action / tokens.is_action.sum()
    np.testing.assert_allclose(gradient_of(tokens), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('aggregation', ['token', 'sequence', 'constant'])
@pytest.mark.parametrize('junk', [5.0, -1e9, np.nan, np.inf, -np.inf])
def test_what_stands_off_the_actions_changes_nothing(aggregation, junk):
    tokens, grpo = batch(), Grpo(aggregation=aggregation, kl=0.2, entropy=0.1)
    fill = lambda x: jnp.where(tokens.is_action, x, junk)  # noqa: E731
    spoiled = tokens._replace(
        **{k: fill(getattr(tokens, k)) for k in ('logprobs', 'entropy', 'old', 'sampler', 'reference')}
    )
    plain, dirty = loss_of(tokens, grpo), loss_of(spoiled, grpo)
    assert plain[0] == dirty[0] and plain[1] == dirty[1]
    np.testing.assert_array_equal(gradient_of(tokens, grpo), gradient_of(spoiled, grpo))
    assert (np.asarray(gradient_of(spoiled, grpo))[~np.asarray(tokens.is_action)] == 0).all()


@pytest.mark.parametrize('aggregation', ['token', 'sequence', 'constant'])
def test_a_row_that_does_not_count_is_as_good_as_absent(aggregation):
    tokens, grpo = batch(rows=4), Grpo(aggregation=aggregation)
    masked = tokens._replace(
        is_counted=jnp.array([True, True, True, False]), advantage=tokens.advantage.at[3].set(jnp.nan)
    )
    absent = jax.tree.map(lambda x: x[:3], tokens)
    np.testing.assert_allclose(loss_of(masked, grpo)[0], loss_of(absent, grpo)[0], rtol=1e-6)
    assert (gradient_of(masked, grpo)[3] == 0).all()


def test_dead_rows_stay_in_the_denominator():
    tokens = batch()
    dead = tokens._replace(advantage=tokens.advantage.at[1].set(0.0))
    alone = jax.tree.map(lambda x: x[jnp.array([0, 2])], dead)
    grpo = Grpo(kl=0.0)
    share = alone.is_action.sum() / dead.is_action.sum()
    np.testing.assert_allclose(loss_of(dead, grpo)[0], loss_of(alone, grpo)[0] * share, rtol=1e-5)


def test_sums_of_halves_are_the_whole():
    tokens, grpo = batch(rows=4), Grpo(aggregation='sequence')
    parts = [
        L.objective(jax.tree.map(lambda x, s=s: x[s], tokens), grpo, constant_length=8, use_importance=False)[0]
        for s in (slice(0, 1), slice(1, 4))
    ]
    total = jax.tree.map(lambda *x: sum(x), *parts)
    np.testing.assert_allclose(total.sum / total.count, loss_of(tokens, grpo)[0], rtol=1e-6)


def test_importance_weights_carry_no_gradient_and_are_capped():
    weight = L.importance(jnp.array([0.0, 0.0, 0.0, 100.0]), jnp.array([-5.0, 0.0, 1.0, 0.0]), 2.0)
    np.testing.assert_allclose(weight, [2.0, 1.0, np.exp(-1), 2.0], rtol=1e-6)
    assert jax.grad(lambda x: L.importance(x, jnp.float32(0), 2.0))(jnp.float32(0.1)) == 0


def test_importance_weights_are_used_only_when_asked_for():
    tokens = batch()._replace(sampler=batch().old - 3.0)
    tokens = tokens._replace(logprobs=tokens.old)
    grpo = dataclasses.replace(Grpo(), kl=0.0, importance_cap=2.0)
    np.testing.assert_allclose(loss_of(tokens, grpo, use_importance=True)[0], 2 * loss_of(tokens, grpo)[0], rtol=1e-5)


def test_metrics():
    tokens = batch()
    _, means, maxima = loss_of(tokens)
    mask = np.asarray(tokens.is_action)
    difference = np.abs(np.asarray(tokens.old - tokens.sampler))[mask]
    np.testing.assert_allclose(means['sampler_difference'], difference.mean(), rtol=1e-5)
    np.testing.assert_allclose(maxima['sampler_difference_max'], difference.max(), rtol=1e-6)
    d = np.asarray(tokens.reference - tokens.logprobs)[mask]
    np.testing.assert_allclose(means['kl'], (np.exp(d) - 1 - d).mean(), rtol=1e-5)
    np.testing.assert_allclose(means['entropy'], np.asarray(tokens.entropy)[mask].mean(), rtol=1e-5)
