"""The GRPO objective on per-token log-probs: clipped surrogate, k3, three ways to aggregate. Arrays in, sums out.

Every quantity is a `Ratio` (sum, count), so that micro-batches and devices add up first and divide once. The mask is
`is_action` and nothing else: prompts, observations and padding carry no loss, KL, entropy or length. Left out on
purpose: other estimators than PPO-clip and k3, and sequence-level ratios.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from sesa_jax.config import Grpo

# exp(20) is far behind every clip, so the bound changes no value; without it, exp could overflow in the branch that
# the minimum does not take, and inf * 0 would still reach the gradient as NaN.
LARGEST_LOG_RATIO = 20.0


class Ratio(NamedTuple):
    """A mean that is not divided yet."""

    sum: jax.Array  # f32[]
    count: jax.Array  # f32[]


class Tokens(NamedTuple):
    """What the objective reads of B rows. Values off the action tokens are never used."""

    logprobs: jax.Array  # f32[B, T]; the policy's, differentiable
    entropy: jax.Array  # f32[B, T]; of the policy at each action token, in nats
    old: jax.Array  # f32[B, T]; the learner's own, at the weights before the step
    sampler: jax.Array  # f32[B, T]; the engine's
    reference: jax.Array  # f32[B, T]; of the frozen initial weights
    is_action: jax.Array  # bool[B, T]
    advantage: jax.Array  # f32[B]
    is_counted: jax.Array  # bool[B]; False: the row is left out (padding rows too), zero weight everywhere


def surrogate(
    logprobs: jax.Array, old: jax.Array, advantage: jax.Array, *, low: float, high: float, dual: float
) -> tuple[jax.Array, jax.Array]:
    """Clipped objective per token, to be maximised (PPO; upper clip apart as in DAPO; dual clip for A < 0).

    min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never below dual * A.

    Returns:
      The objective, and whether a clip replaced r A (the token then has no gradient); both of the broadcast shape.
    """
    ratio = jnp.exp(jnp.clip(logprobs - old, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    plain = ratio * advantage
    objective = jnp.minimum(plain, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
    objective = jnp.where(advantage < 0, jnp.maximum(objective, dual * advantage), objective)
    return objective, objective != plain


def k3(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(policy, reference) from samples of the policy: e^d - 1 - d, d = reference - policy.

    Never negative, 0 for equal policies. As a loss its gradient by the policy's log-prob is 1 - e^d: it pulls towards
    the reference, and unlike that of the plain difference (k1) it depends on it.
    """
    difference = reference - logprobs
    return jnp.expm1(difference) - difference  # expm1: e^d - 1 - d would lose every digit where the policies agree


def importance(old: jax.Array, sampler: jax.Array, cap: float) -> jax.Array:
    """Truncated importance weight min(learner / sampler, cap) per token, without a gradient."""
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.minimum(old - sampler, LARGEST_LOG_RATIO)), cap))


def aggregate(
    values: jax.Array, is_action: jax.Array, is_counted: jax.Array, *, aggregation: str, constant_length: int
) -> Ratio:
    """Sums per-token values [B, T] by the named rule.

    token: over all action tokens. sequence: the mean of each row, over the rows. constant (Dr. GRPO): the sum of each
    row over `constant_length` tokens, over the rows. Rows without an action token count nowhere.
    """
    weight = (is_action & is_counted[:, None]).astype(jnp.float32)
    values = jnp.where(weight > 0, values, 0.0)  # not weight * values: 0 * inf is NaN
    lengths = weight.sum(axis=1)
    rows = (lengths > 0).sum().astype(jnp.float32)
    if aggregation == 'token':
        return Ratio(values.sum(), weight.sum())
    if aggregation == 'sequence':
        return Ratio((values.sum(axis=1) / jnp.maximum(lengths, 1)).sum(), rows)
    if aggregation == 'constant':
        return Ratio(values.sum(), rows * constant_length)
    raise ValueError(f'loss aggregation {aggregation!r} is unknown; it must be token, sequence or constant')


def objective(
    tokens: Tokens, grpo: Grpo, *, constant_length: int, use_importance: bool
) -> tuple[Ratio, dict[str, Ratio], dict[str, jax.Array]]:
    """The loss of B rows as (sum, count), with what a person wants to know about it.

    loss = -surrogate * importance + kl * k3 - entropy * H per action token, aggregated as `grpo.aggregation` says.

    Args:
      tokens: see `Tokens`.
      grpo: weights, clips and aggregation.
      constant_length: the divisor of `constant` aggregation: the response budget in tokens.
      use_importance: multiply the surrogate with truncated importance weights between learner and sampler.

    Returns:
      The loss; means over action tokens (`kl`, `entropy`, `clip_fraction`, `sampler_difference`: |learner - sampler|
      log-prob) and `policy_loss` and `loss` as aggregated; and maxima (`sampler_difference_max`).
    """
    b, t = tokens.logprobs.shape
    chex.assert_shape([tokens.entropy, tokens.old, tokens.sampler, tokens.reference, tokens.is_action], (b, t))
    chex.assert_shape([tokens.advantage, tokens.is_counted], (b,))
    mask = tokens.is_action & tokens.is_counted[:, None]
    # Masked before every exp: what stands on a prompt, an observation or padding must not reach a gradient as inf * 0.
    logprobs, entropy, old, sampler, reference = (
        jnp.where(mask, x, 0.0) for x in (tokens.logprobs, tokens.entropy, tokens.old, tokens.sampler, tokens.reference)
    )
    advantage = jnp.where(tokens.is_counted, tokens.advantage, 0.0)[:, None]
    gain, is_clipped = surrogate(logprobs, old, advantage, low=grpo.clip_low, high=grpo.clip_high, dual=grpo.clip_dual)
    if use_importance:
        gain = gain * importance(old, sampler, grpo.importance_cap)
    divergence = k3(logprobs, reference)
    difference = jax.lax.stop_gradient(jnp.abs(old - sampler))

    def total(values: jax.Array, aggregation: str) -> Ratio:
        return aggregate(values, mask, tokens.is_counted, aggregation=aggregation, constant_length=constant_length)

    loss = total(-gain + grpo.kl * divergence - grpo.entropy * entropy, grpo.aggregation)
    means = {
        'loss': loss,
        'policy_loss': total(-gain, grpo.aggregation),
        'kl': total(divergence, 'token'),
        'entropy': total(entropy, 'token'),
        'clip_fraction': total(is_clipped.astype(jnp.float32), 'token'),
        'sampler_difference': total(difference, 'token'),
    }
    maxima = {'sampler_difference_max': difference.max()}
    return loss, jax.lax.stop_gradient(means), maxima
