"""Bandits whose optimum is known: every loss reaches it, with every aggregation and every rule of advantages.

The policy is a table of logits: rows of one action, and rows of two whose second action is drawn from a table of its own;
paid is the share of actions that are the right one. Each batch is used twice, so that ratios leave 1 and clips are at
work. One test goes the whole way through `learner.update`. The last ones follow the exact gradient with a KL term to the
optimum that is known in closed form.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_toy import ALLOWED, toy_arch, toy_params, toy_row

from sesa_jax.config import Grpo, Optimizer
from sesa_jax.grpo import advantage
from sesa_jax.grpo import loss as L
from sesa_jax.grpo.learner import init_state, update
from sesa_jax.grpo.microbatch import Sample
from sesa_jax.policy import transformer

RIGHT, ARMS, ROWS, GROUPS, STEPS = 3, 8, 64, 8, 80
ADAM = optax.adam(0.1)


@functools.partial(jax.jit, static_argnames=('grpo', 'rule'))
def learned(grpo, rule):
    """Probability of the right arm in both tables f32[2] after STEPS batches, and the clip fraction of second passes."""
    group = jnp.arange(ROWS) % GROUPS
    is_action = jnp.stack([jnp.ones(ROWS, bool), group % 2 == 1], axis=1)  # two actions in every other group
    everyone = jnp.ones(ROWS, bool)

    def chosen(logits, actions):
        return jnp.take_along_axis(jax.nn.log_softmax(logits)[None], actions[..., None], axis=-1)[..., 0]

    def step(carry, key):
        logits, moments = carry
        actions = jax.random.categorical(key, logits, shape=(ROWS, 2))
        right = jnp.where(is_action, actions == RIGHT, 0).sum(axis=1)
        rewards = right / is_action.sum(axis=1)
        scores = advantage.kernel(
            rewards, group, everyone, rewards == 1, jnp.float32(0.1), groups=GROUPS, frontier_shaping=True,
            normalise=rule,
        )  # fmt: skip
        old = chosen(logits, actions)

        def objective(logits):
            tokens = L.Tokens(
                chosen(logits, actions), jnp.zeros_like(old), old, old, old, is_action, scores.advantage, everyone
            )
            total, means, _ = L.objective(tokens, grpo, constant_length=2, importance_level='off')
            return total.sum / total.count, means['clip_fraction']

        def one_pass(carry, _):
            logits, moments = carry
            gradient, clipped = jax.grad(objective, has_aux=True)(logits)
            change, moments = ADAM.update(gradient, moments)
            return (logits + change, moments), clipped.sum / clipped.count

        carry, clipped = jax.lax.scan(one_pass, (logits, moments), None, length=2)
        return carry, clipped[1]

    logits = jnp.zeros((2, ARMS))
    (logits, _), clipped = jax.lax.scan(step, (logits, ADAM.init(logits)), jax.random.split(jax.random.key(0), STEPS))
    return jax.nn.softmax(logits)[:, RIGHT], clipped.mean()


@pytest.mark.parametrize('aggregation', ['token', 'sequence', 'constant'])
@pytest.mark.parametrize('kind', ['ppo', 'gspo', 'cispo'])
def test_every_loss_reaches_the_optimum(kind, aggregation):
    clip = None if kind == 'gspo' else 0.05  # the defaults are wider than two passes go
    right, clipped = learned(Grpo(loss=kind, aggregation=aggregation, kl=0.0, clip_low=clip, clip_high=clip), 'group')
    assert right.min() >= 0.99, right
    assert clipped > 0.01


@pytest.mark.parametrize('rule', ['batch', 'raw', 'reinforce++-baseline', 'rloo'])
def test_every_rule_of_advantages_reaches_the_optimum(rule):
    right, _ = learned(Grpo(kl=0.0), rule)
    assert right.min() >= 0.99, right


# --- through the learner ----------------------------------------------------------------------------------------------

ARCH, PROMPT = toy_arch(layers=1), 4


@jax.jit
def tables(params, ids):
    """Probabilities [N, 2, ALLOWED] of the first and the second action; the second one given the first."""
    x = transformer.hidden(params, ARCH, ids, jnp.full(len(ids), ids.shape[1]))
    return jax.nn.softmax(transformer.logits(params, ARCH, x)[:, PROMPT - 1 : PROMPT + 1, :ALLOWED])


def play(params, rng):
    """32 samples in four groups of eight: one action after the first prompt, two after the second."""
    group = np.arange(32) // 8
    prompt = group % 2
    ids = np.zeros((32, PROMPT + 2), np.int32)
    ids[:, :PROMPT] = np.where(prompt[:, None], [11, 12, 13, 14], [21, 22, 23, 24])
    for i in range(2):
        table = np.asarray(tables(params, ids), np.float64)[:, i].cumsum(axis=1)
        ids[:, PROMPT + i] = (table / table[:, -1:] > rng.random((32, 1))).argmax(axis=1)
    lengths = PROMPT + 1 + prompt
    rewards = np.array([(row[PROMPT:n] == RIGHT).mean() for row, n in zip(ids, lengths, strict=True)])
    scores = advantage.scores(
        rewards, group, np.ones(32, bool), rewards == 1, groups=4, penalty=0.1, frontier_shaping=True, normalise='group'
    )
    samples = []
    for i, n in enumerate(lengths):
        row = dataclasses.replace(
            toy_row(rng, f'p{group[i]}', i, length=10), ids=ids[i, :n], is_action=np.arange(n) >= PROMPT,
            logprobs=np.zeros(n, np.float32),
        )  # fmt: skip
        samples.append(Sample(row, float(scores.advantage[i])))
    return samples


@pytest.mark.parametrize(('kind', 'aggregation'), [('ppo', 'token'), ('gspo', 'sequence'), ('cispo', 'constant')])
def test_the_learner_reaches_the_optimum_in_40_steps(kind, aggregation):
    """Two optimizer steps each, the second one at ratios that are not 1."""
    grpo = Grpo(loss=kind, aggregation=aggregation, kl=0.0, micro_batch_tokens=16 * 128)
    optimizer = Optimizer(learning_rate=2e-2, warmup_steps=0, weight_decay=0.0)
    params = toy_params(ARCH, scale=1.0)
    state, rng = init_state(params, optimizer), np.random.default_rng(0)
    for _ in range(40):
        state, _ = update(
            state, params, play(state.params, rng), arch=ARCH, grpo=grpo, optimizer=optimizer, temperature=1.0,
            allowed=ALLOWED, response_length=2, mini_batch=2,
        )  # fmt: skip
    ids = np.array([[21, 22, 23, 24, RIGHT, 0], [11, 12, 13, 14, RIGHT, 0]], np.int32)
    (one, _), (first, second) = np.asarray(tables(state.params, ids))[:, :, RIGHT]
    assert min(one, first * second) >= 0.99


# --- the KL term ------------------------------------------------------------------------------------------------------

PAID = jnp.array([0.0, 0.2, 0.5, 0.9, 1.0])
BETA = 0.4


@functools.partial(jax.jit, static_argnames='estimator')
def settled(reference, estimator):
    """The policy f32[5] where the exact gradient of the objective ends, every arm in proportion to its probability."""

    def slope(logits):
        logprobs = jax.nn.log_softmax(logits)[:, None]

        def loss(logprobs):
            still = jax.lax.stop_gradient(logprobs)
            tokens = L.Tokens(
                logprobs, still, still, still, jnp.log(reference)[:, None], jnp.ones((5, 1), bool), PAID,
                jnp.ones(5, bool),
            )  # fmt: skip
            grpo = Grpo(kl=BETA, kl_estimator=estimator)
            return L.objective(tokens, grpo, constant_length=1, importance_level='off')[0].sum

        weights = jnp.exp(logprobs) * jax.grad(loss)(logprobs)
        return jax.vjp(lambda x: jax.nn.log_softmax(x)[:, None], logits)[1](weights)[0]

    return jax.nn.softmax(jax.lax.fori_loop(0, 4000, lambda _, x: x - 0.5 * slope(x), jnp.zeros(5)))


REFERENCES = [np.array([0.4, 0.3, 0.1, 0.1, 0.1]), np.array([0.1, 0.1, 0.2, 0.3, 0.3])]


@pytest.mark.parametrize('reference', REFERENCES)
def test_k2_ends_at_the_tilted_reference(reference):
    """max E r - beta KL(policy, reference): the reference times e^(r / beta)."""
    want = reference * np.exp(np.asarray(PAID) / BETA)
    np.testing.assert_allclose(settled(jnp.asarray(reference), 'k2'), want / want.sum(), rtol=1e-3)


@pytest.mark.parametrize('reference', REFERENCES)
def test_k3_ends_where_the_other_divergence_does(reference):
    """max E r - beta KL(reference, policy): beta * reference / (c - r), with the c that makes it a distribution."""
    low, high = 1.0 + 1e-9, 1.0 + BETA
    for _ in range(100):
        c = (low + high) / 2
        want = BETA * reference / (c - np.asarray(PAID, np.float64))
        low, high = (c, high) if want.sum() > 1 else (low, c)
    np.testing.assert_allclose(settled(jnp.asarray(reference), 'k3'), want, rtol=1e-3)


def test_k1_ends_at_the_best_arm_whatever_the_reference():
    first, second = (np.asarray(settled(jnp.asarray(reference), 'k1')) for reference in REFERENCES)
    assert first[4] >= 0.99
    np.testing.assert_allclose(first, second, rtol=1e-3)
