"""Exact values and gradients of the objective's parts, and of the whole against float64 on small batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sesa_jax.config import Grpo
from sesa_jax.grpo import loss as L

CLIP = {'low': 0.2, 'high': 0.2, 'dual': 3.0}
LOSSES, AGGREGATIONS = ('ppo', 'gspo', 'cispo'), ('token', 'sequence', 'constant')
every_loss = pytest.mark.parametrize('kind', LOSSES)
every_aggregation = pytest.mark.parametrize('aggregation', AGGREGATIONS)


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


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'weight'),
    [(1.5, +1, 1.2), (0.5, +1, 0.8), (1.1, +2, 1.1), (1.5, -1, 1.2), (0.5, -1, 0.8), (1e30, +1, 1.2), (1.0, -3, 1.0)],
)
def test_cispo_weighs_the_logprob_and_spares_no_token(ratio, advantage, weight):
    """Value clip(r) A log-prob, gradient clip(r) A: never 0, and nothing through the weight."""
    old = jnp.float32(-1.0)
    at = jnp.log(jnp.float32(ratio)) - 1.0
    value = lambda x: L.weighted_logprob(x, old, jnp.float32(advantage), low=0.2, high=0.2)[0]  # noqa: E731
    np.testing.assert_allclose(jax.value_and_grad(value)(at), (weight * advantage * at, weight * advantage), rtol=1e-5)


@jax.jit
def gspo(new, n, advantage):
    """Objective and flags of one row [1, 4] whose first n places are actions, and the gradient of the actions' mean."""
    is_action = jnp.arange(4)[None] < n

    def mean(x):
        value, flags = L.sequence_surrogate(x, jnp.zeros((1, 4)), is_action, advantage, low=0.1, high=0.1)
        return jnp.where(is_action, value, 0).sum() / n, (value[0], flags[0])

    (_, parts), gradient = jax.value_and_grad(mean, has_aux=True)(new)
    return *parts, gradient[0]


@pytest.mark.parametrize(
    ('log_ratios', 'advantage', 'value', 'gradient'),
    [
        ((0.2, -0.1), 2.0, 2 * np.exp(0.05), np.exp(0.05)),  # s = exp(mean) = 1.051; s A / 2 at both tokens
        ((0.3, -0.1, 0.1, 0.1), 2.0, 2.0 * 1.1, 0.0),  # s = exp(0.1) > 1.1: the whole row, also the token below 1
        ((0.3, -0.1, 0.1, 0.1), -2.0, -2 * np.exp(0.1), -2 * np.exp(0.1) / 4),
        ((-0.4,), -1.0, -0.9, 0.0),
        ((-0.4,), 1.0, np.exp(-0.4), np.exp(-0.4)),
        ((5.0, -5.0), 1.0, 1.0, 0.5),  # each token is far behind any clip, the row is not
        ((2.0,), -1.0, -np.exp(2.0), -np.exp(2.0)),  # no dual clip
    ],
)
def test_gspo_has_one_ratio_a_row(log_ratios, advantage, value, gradient):
    n = len(log_ratios)
    got, flags, slope = gspo(jnp.array([log_ratios + (9.0,) * (4 - n)]), n, jnp.full((1, 1), advantage))
    np.testing.assert_allclose(got, [value] * 4, rtol=1e-6)
    np.testing.assert_allclose(slope, [gradient] * n + [0.0] * (4 - n), rtol=1e-6)
    assert flags.tolist() == [gradient == 0] * 4


@every_loss
def test_each_loss_has_its_own_clip_unless_told(kind):
    want = {'ppo': (0.2, 0.285), 'gspo': (3e-4, 4e-4), 'cispo': (1.0, 4.0)}[kind]
    assert L.clips(Grpo(loss=kind)) == want
    assert L.clips(Grpo(loss=kind, clip_low=0.0)) == (0.0, want[1])
    assert L.clips(Grpo(loss=kind, clip_high=0.5)) == (want[0], 0.5)


def test_unknown_values_are_named():
    with pytest.raises(ValueError, match="loss 'reinforce' is unknown"):
        L.clips(Grpo(loss='reinforce'))
    with pytest.raises(ValueError, match="importance weights 'on' are unknown"):
        L.importance(*[jnp.zeros((1, 1))] * 2, jnp.ones((1, 1), bool), level='on', cap=2.0)


@pytest.mark.parametrize(('name', 'value'), [('k1', 1.0), ('k2', 0.5), ('k3', np.exp(-1))])
def test_kl_estimators_and_their_operands(name, value):
    """Policy -1, reference -2; the other way round k1 changes its sign and k3 is e - 2."""
    estimator = L.ESTIMATORS[name]
    np.testing.assert_allclose(estimator(jnp.float32(-1), jnp.float32(-2)), value, rtol=1e-6)
    swapped = {'k1': -1.0, 'k2': 0.5, 'k3': np.e - 2}[name]
    np.testing.assert_allclose(estimator(jnp.float32(-2), jnp.float32(-1)), swapped, rtol=1e-6)


@pytest.mark.parametrize('logprob', [0.0, -1.0, -7.3, -30.0])
@pytest.mark.parametrize('name', ['k1', 'k2', 'k3'])
def test_kl_of_equal_policies_is_zero_with_zero_gradient_but_for_k1(name, logprob):
    value, gradient = jax.value_and_grad(L.ESTIMATORS[name])(jnp.float32(logprob), jnp.float32(logprob))
    assert value == 0 and gradient == (name == 'k1')


@pytest.mark.parametrize(
    ('name', 'want'), [('k1', [1, 1, 1]), ('k2', [1, 0.5, -0.5]), ('k3', 1 - np.exp([-1, -0.5, 0.5]))]
)
def test_kl_gradient_depends_on_the_reference_but_for_k1(name, want):
    at = lambda reference: float(jax.grad(L.ESTIMATORS[name])(jnp.float32(-1), jnp.float32(reference)))  # noqa: E731
    np.testing.assert_allclose([at(-2), at(-1.5), at(-0.5)], want, rtol=1e-6)


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
    with pytest.raises(ValueError, match="loss aggregation 'mean' is unknown"):
        L.aggregate(values, mask, jnp.array([True, True]), aggregation='mean', constant_length=4)


def test_length_counts_actions_only():
    mask = jnp.array([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]], bool)
    got = L.aggregate(jnp.ones((1, 15)), mask, jnp.array([True]), aggregation='token', constant_length=1)
    assert got.count == 9


def batch(seed=0, rows=6, tokens=7):
    """Rows of different lengths whose ratios lie on both sides of every clip and cap."""
    rng = np.random.default_rng(seed)
    near = lambda x, scale: jnp.asarray(x + rng.normal(0, scale, (rows, tokens)), jnp.float32)  # noqa: E731
    is_action = jnp.array(rng.random((rows, tokens)) < 0.6).at[:, 0].set(False).at[:, -1].set(True)
    old = near(-2.0, 0.3)
    return L.Tokens(
        logprobs=near(old, 0.4),
        entropy=near(2.0, 0.1),
        old=old,
        sampler=near(old, 0.3),
        reference=near(old, 0.5),
        is_action=is_action,
        advantage=jnp.array(rng.permutation(np.linspace(-1.5, 2, rows)), jnp.float32),
        is_counted=jnp.ones(rows, bool),
    )


@functools.partial(jax.jit, static_argnames=('grpo', 'level'))
def sums_of(tokens, grpo, level):
    """Sums of all metrics, maxima, and the gradient of the loss."""

    def loss(x):
        total, means, maxima = L.objective(tokens._replace(logprobs=x), grpo, constant_length=8, importance_level=level)
        return total.sum / total.count, (means, maxima)

    gradient, parts = jax.grad(loss, has_aux=True)(tokens.logprobs)
    return *parts, gradient


def result_of(tokens, grpo=None, level='off'):
    """(metrics, gradient) as host values."""
    means, maxima, gradient = sums_of(tokens, grpo or Grpo(), level)
    return {k: float(v) for k, v in (L.divided(means) | maxima).items()}, np.asarray(gradient)


def options(kind, aggregation):
    """Of every loss and aggregation, so that each can be told from the others; every KL estimator occurs, too."""
    estimator = {'token': 'k3', 'sequence': 'k2', 'constant': 'k1'}[aggregation]
    return Grpo(
        loss=kind, aggregation=aggregation, kl=0.3, kl_estimator=estimator, entropy=0.05, importance_cap=1.2,
        clip_low=0.1, clip_high=0.15, clip_dual=1.4,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames='level')
def _every(tokens, level):  # one program for all nine: they are small, and compiling is what takes time here
    return {
        f'{kind} {aggregation}': sums_of(tokens, options(kind, aggregation), level)
        for kind in LOSSES
        for aggregation in AGGREGATIONS
    }


def every(kind, aggregation, tokens, level='sequence'):
    means, maxima, gradient = _every(tokens, level)[f'{kind} {aggregation}']
    return {k: float(v) for k, v in (L.divided(means) | maxima).items()}, np.asarray(gradient)


def plain(tokens, grpo, level, low, high):
    """The objective and its gradient once more, in float64, one row after the other."""
    x = {k: np.asarray(v, np.float64) for k, v in tokens._asdict().items()}
    rows = [b for b in range(len(x['advantage'])) if x['is_counted'][b] and x['is_action'][b].any()]
    loss, gradient = 0.0, np.zeros_like(x['logprobs'])
    for b in rows:
        at = np.flatnonzero(x['is_action'][b])
        new, old, sampler, reference, entropy = (
            x[k][b, at] for k in ('logprobs', 'old', 'sampler', 'reference', 'entropy')
        )
        a, ratio = x['advantage'][b], np.exp(new - old)
        if grpo.loss == 'gspo':
            ratio = np.full(len(at), np.exp(np.mean(new - old)))
        if grpo.loss == 'cispo':
            slope = np.clip(ratio, 1 - low, 1 + high) * a
            gain = slope * new
        else:
            gain, slope = ratio * a, ratio * a
            behind = (ratio > 1 + high) if a > 0 else (ratio < 1 - low)
            gain[behind], slope[behind] = (1 + high if a > 0 else 1 - low) * a, 0
            if grpo.loss == 'ppo' and a < 0:
                gain[ratio > grpo.clip_dual], slope[ratio > grpo.clip_dual] = grpo.clip_dual * a, 0
        if level != 'off':
            weight = np.exp(old - sampler) if level == 'token' else np.exp(np.sum(old - sampler))
            gain, slope = (y * np.minimum(weight, grpo.importance_cap) for y in (gain, slope))
        if grpo.loss == 'gspo':  # each token moves the ratio that stands at all of them
            slope = np.full(len(at), np.mean(slope))
        d = new - reference
        kl, pull = {'k1': (d, 1), 'k2': (d**2 / 2, d), 'k3': (np.exp(-d) - 1 + d, 1 - np.exp(-d))}[grpo.kl_estimator]
        share = {
            'token': 1 / sum(x['is_action'][row].sum() for row in rows),
            'sequence': 1 / len(rows) / len(at),
            'constant': 1 / len(rows) / 8,
        }[grpo.aggregation]
        loss += share * np.sum(-gain + grpo.kl * kl - grpo.entropy * entropy)
        gradient[b, at] = share * (-slope + grpo.kl * pull)
    return loss, gradient


@pytest.mark.parametrize('level', ['off', 'token', 'sequence'])
@every_aggregation
@every_loss
def test_whole_objective(kind, aggregation, level):
    shares = []
    for seed in range(3):
        tokens = batch(seed)
        tokens = tokens._replace(is_counted=tokens.is_counted.at[seed].set(False))
        metrics, gradient = every(kind, aggregation, tokens, level)
        want, slope = plain(tokens, options(kind, aggregation), level, 0.1, 0.15)
        np.testing.assert_allclose(metrics['loss'], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)
        shares.append([metrics['clip_fraction'], metrics.get('importance_capped', 0.5)])
    assert (np.mean(shares, axis=0) > 0).all() and (np.mean(shares, axis=0) < 1).all()


@every_loss
def test_gradient_on_the_first_pass_is_the_policy_gradient(kind):
    """Of every loss: they differ in what they do about a ratio that is not 1."""
    tokens = batch()
    tokens = tokens._replace(logprobs=tokens.old, reference=tokens.old)
    want = -tokens.advantage[:, None] * tokens.is_action / tokens.is_action.sum()
    np.testing.assert_allclose(result_of(tokens, Grpo(loss=kind))[1], want, rtol=1e-6, atol=1e-9)


@every_aggregation
@every_loss
def test_what_stands_off_the_actions_changes_nothing(kind, aggregation):
    tokens = batch()
    junk = jnp.resize(jnp.array([5.0, -1e9, np.nan, np.inf, -np.inf]), tokens.logprobs.shape)
    names = ('logprobs', 'entropy', 'old', 'sampler', 'reference')
    spoiled = tokens._replace(**{k: jnp.where(tokens.is_action, getattr(tokens, k), junk) for k in names})
    clean, dirty = (every(kind, aggregation, x) for x in (tokens, spoiled))
    assert clean[0] == dirty[0]
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert (dirty[1][~np.asarray(tokens.is_action)] == 0).all()


@every_aggregation
@every_loss
def test_padding_columns_change_nothing(kind, aggregation):
    tokens = batch()
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 100))) if x.ndim == 2 else x, tokens)
    short, long = (every(kind, aggregation, x) for x in (tokens, wide))
    assert long[0] == pytest.approx(short[0], rel=1e-5)
    np.testing.assert_allclose(long[1][:, :7], short[1], rtol=1e-5, atol=1e-8)
    assert (long[1][:, 7:] == 0).all()


@every_aggregation
@every_loss
def test_permuting_rows_permutes_the_gradient(kind, aggregation):
    tokens, order = batch(), np.array([3, 0, 5, 1, 4, 2])
    ordered, shuffled = (every(kind, aggregation, x) for x in (tokens, jax.tree.map(lambda x: x[order], tokens)))
    assert shuffled[0] == pytest.approx(ordered[0], rel=1e-5)
    np.testing.assert_allclose(shuffled[1], ordered[1][order], rtol=1e-5, atol=1e-8)


@every_aggregation
@every_loss
def test_sums_of_halves_are_the_whole(kind, aggregation):
    tokens = batch()
    first, second = (
        _every(jax.tree.map(lambda x, s=s: x[s], tokens), 'sequence')[f'{kind} {aggregation}'][0]
        for s in (slice(0, 3), slice(3, 6))
    )
    added = {k: float(v) for k, v in L.divided(jax.tree.map(jnp.add, first, second)).items()}
    whole = every(kind, aggregation, tokens)[0]
    assert added == pytest.approx({k: whole[k] for k in added}, rel=1e-5)


@every_aggregation
@every_loss
def test_a_row_that_does_not_count_is_as_good_as_absent(kind, aggregation):
    tokens = batch()
    masked = tokens._replace(is_counted=jnp.arange(6) < 3, advantage=tokens.advantage.at[3:].set(jnp.nan))
    absent, left_out = (every(kind, aggregation, x) for x in (jax.tree.map(lambda x: x[:3], tokens), masked))
    assert left_out[0] == pytest.approx(absent[0], rel=1e-5)
    np.testing.assert_allclose(left_out[1][:3], absent[1], rtol=1e-5, atol=1e-8)
    assert (left_out[1][3:] == 0).all()


@every_aggregation
@every_loss
def test_dead_rows_stay_in_the_denominator(kind, aggregation):
    tokens = batch()
    dead = tokens._replace(advantage=tokens.advantage.at[3:].set(0.0))
    live = jax.tree.map(lambda x: x[:3], dead)
    share = live.is_action.sum() / dead.is_action.sum() if aggregation == 'token' else 1 / 2
    alone, whole = (every(kind, aggregation, x)[0]['policy_loss'] for x in (live, dead))
    np.testing.assert_allclose(whole, alone * share, rtol=1e-5)


# --- the sampler and the learner --------------------------------------------------------------------------------------

OLD = jnp.array([[0.0, -1.0, -2.0, 0.0], [-1.0, -1.0, 0.0, 0.0]])
SAMPLER = jnp.array([[-5.0, -1.0, -1.0, 9.0], [-0.5, -1.3, 9.0, 9.0]])
ACTIONS = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


@pytest.mark.parametrize(
    ('level', 'want', 'capped'),
    [
        ('token', [2, 1, np.exp(-1), np.exp(-0.5), np.exp(0.3)], [1, 0, 0, 0, 0]),
        ('sequence', [2, 2, 2] + [np.exp(-0.2)] * 2, [1, 1, 1, 0, 0]),  # e^(5 + 0 - 1) is over the cap; e^(-0.5 + 0.3)
    ],
)
def test_importance_weights(level, want, capped):
    weight, hits = L.importance(OLD, SAMPLER, ACTIONS, level=level, cap=2.0)
    np.testing.assert_allclose(np.asarray(weight)[np.asarray(ACTIONS)], want, rtol=1e-6)
    assert np.asarray(hits)[np.asarray(ACTIONS)].tolist() == capped
    slope = jax.grad(lambda x: L.importance(x, SAMPLER, ACTIONS, level=level, cap=2.0)[0].sum())(OLD)
    assert (slope == 0).all()


@every_loss
@pytest.mark.parametrize(('level', 'factor'), [('token', np.exp(0.1)), ('sequence', 1.2)])
def test_importance_weights_multiply_the_surrogate_as_asked(kind, level, factor):
    """Every token is 0.1 likelier than the sampler had it; seven make 2, over the cap of 1.2."""
    tokens = batch()._replace(is_action=jnp.ones((6, 7), bool))
    tokens = tokens._replace(sampler=tokens.old - 0.1)
    without, weighted = (every(kind, 'token', tokens, x)[0]['policy_loss'] for x in ('off', level))
    np.testing.assert_allclose(weighted, factor * without, rtol=1e-5)


def agreement(level):
    zeros = jnp.zeros((2, 4))
    tokens = L.Tokens(OLD, zeros, OLD, SAMPLER, OLD, ACTIONS, jnp.ones(2), jnp.ones(2, bool))
    return result_of(tokens, Grpo(importance_cap=2.0), level)[0]


def test_agreement_with_the_sampler():
    means = agreement('off')
    d = np.array([5, 0, -1, -0.5, 0.3])
    np.testing.assert_allclose(means['sampler_difference'], 6.8 / 5, rtol=1e-6)
    np.testing.assert_allclose(means['sampler_kl'], (np.exp(d) - 1 - d).mean(), rtol=1e-6)
    assert means['sampler_difference_max'] == 5
    assert not [name for name in means if name.startswith('importance')]


@pytest.mark.parametrize(
    ('level', 'weights', 'capped'),
    [('token', [2, 1, np.exp(-1), np.exp(-0.5), np.exp(0.3)], 1 / 5), ('sequence', [2, np.exp(-0.2)], 1 / 2)],
)
def test_what_importance_weights_leave_of_the_batch(level, weights, capped):
    means = agreement(level)
    weights = np.array(weights)
    np.testing.assert_allclose(means['importance_weight'], weights.mean(), rtol=1e-6)
    np.testing.assert_allclose(means['importance_capped'], capped, rtol=1e-6)
    np.testing.assert_allclose(means['importance_ess'], weights.sum() ** 2 / (weights**2).sum() / len(weights), rtol=1e-6)
    assert 'importance_square' not in means


def test_metrics():
    tokens = batch()
    means = result_of(tokens)[0]
    mask = np.asarray(tokens.is_action)
    d = np.asarray(tokens.reference - tokens.logprobs)[mask]
    np.testing.assert_allclose(means['kl'], (np.exp(d) - 1 - d).mean(), rtol=1e-5)
    np.testing.assert_allclose(means['entropy'], np.asarray(tokens.entropy)[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(result_of(tokens, Grpo(kl_estimator='k2'))[0]['kl'], (d**2 / 2).mean(), rtol=1e-5)
