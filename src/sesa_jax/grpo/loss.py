"""The GRPO objective on per-token log-probs: three surrogates, three KL estimators, three ways to aggregate.

Every quantity is a `Ratio` (sum, count), so that micro-batches and devices add up first and divide once. The mask is
`is_action` and nothing else: prompts, observations and padding carry no loss, KL, entropy or length. Arrays in, sums
out; which surrogate, estimator and aggregation is a value of the config (`Grpo`).

Two ratios, never one: policy / old is what the surrogates clip (1 on the first pass over a batch), learner / sampler is
what the importance weights correct (1 where both compute the same log-probs). Left out on purpose: weights that reject
rows or tokens instead of capping them, and adaptive KL weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from sesa_jax.config import Grpo

# exp(20) is far behind every clip, so the bound changes no value; without it, exp could overflow in the branch that
# the minimum does not take, and inf * 0 would still reach the gradient as NaN.
LARGEST_LOG_RATIO = 20.0

Importance = Literal['off', 'token', 'sequence']
CLIPS = {'ppo': (0.2, 0.285), 'gspo': (3e-4, 4e-4), 'cispo': (1.0, 4.0)}
"""(low, high) of each loss: ratios are clipped to [1 - low, 1 + high]. They are not of one magnitude. ppo: SSP's. gspo: a
mean over a whole row moves far less than one token's log-ratio (arXiv 2507.18071, section 5.1). cispo: no lower bound, as
in MiniMax-M1 (arXiv 2506.13585), which tuned the upper one and does not give it: 4 is ours."""


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
    logprobs: jax.Array, old: jax.Array, advantage: jax.Array, *, low: float, high: float, dual: float | None
) -> tuple[jax.Array, jax.Array]:
    """Clipped objective per token, to be maximised (PPO; upper clip apart as in DAPO; dual clip for A < 0).

    min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never below dual * A; None: no such bound.

    Returns:
      The objective, and whether a clip replaced r A (the token then has no gradient); both of the broadcast shape.
    """
    ratio = _ratio(logprobs - old)
    plain = ratio * advantage
    objective = jnp.minimum(plain, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None:
        objective = jnp.where(advantage < 0, jnp.maximum(objective, dual * advantage), objective)
    return objective, objective != plain


def sequence_surrogate(
    logprobs: jax.Array, old: jax.Array, is_action: jax.Array, advantage: jax.Array, *, low: float, high: float
) -> tuple[jax.Array, jax.Array]:
    """GSPO (arXiv 2507.18071, equations 5-7): one ratio a row, s = exp(mean over action tokens of policy - old).

    min(s A, clip(s, 1 - low, 1 + high) A) stands at every token of the row, so that any aggregation applies; `sequence`
    is the paper's. The gradient goes through s: s A / |row| at each action token where the clip does not hold, none at
    the whole row where it does. The paper has no dual clip.

    Returns:
      As `surrogate`, of shape [B, T]; arguments are [B, T] and the advantage [B, 1].
    """
    log_ratio = jnp.where(is_action, logprobs - old, 0.0).sum(axis=1, keepdims=True)
    lengths = jnp.maximum(is_action.sum(axis=1, keepdims=True), 1)
    pair = surrogate(log_ratio / lengths, jnp.zeros(()), advantage, low=low, high=high, dual=None)
    return tuple(jnp.broadcast_to(x, logprobs.shape) for x in pair)


def weighted_logprob(
    logprobs: jax.Array, old: jax.Array, advantage: jax.Array, *, low: float, high: float
) -> tuple[jax.Array, jax.Array]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): sg(clip(r, 1 - low, 1 + high)) A log-prob, per token.

    The clip bounds a weight and not the objective, so that no token loses its gradient, which is clip(r) A. The value
    itself means little: it is not 0 where the advantages add up to 0.

    Returns:
      The objective, and whether the clip changed the weight.
    """
    ratio = jax.lax.stop_gradient(_ratio(logprobs - old))
    weight = jnp.clip(ratio, 1 - low, 1 + high)
    return weight * advantage * logprobs, weight != ratio


def clips(grpo: Grpo) -> tuple[float, float]:
    """(low, high) of the config, or the loss's own. ValueError for an unknown loss."""
    if grpo.loss not in CLIPS:
        raise ValueError(f'loss {grpo.loss!r} is unknown; it must be ppo, gspo or cispo')
    low, high = CLIPS[grpo.loss]
    return (low if grpo.clip_low is None else grpo.clip_low), (high if grpo.clip_high is None else grpo.clip_high)


def k1(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """policy - reference: unbiased as a value. As a loss it is no anchor: its gradient is 1, whatever the reference.

    Over samples of the policy that gradient is 0 in the mean: noise, and no pull. It is there to be compared with.
    """
    return logprobs - reference


def k2(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """(policy - reference)^2 / 2. Its gradient, policy - reference, is in the mean that of KL(policy, reference)."""
    return jnp.square(logprobs - reference) / 2


def k3(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(policy, reference) from samples of the policy: e^d - 1 - d, d = reference - policy.

    Never negative, 0 for equal policies, unbiased as a value. As a loss its gradient by the policy's log-prob is
    1 - e^d: it pulls towards the reference, in the mean as KL(reference, policy) does.
    """
    difference = reference - logprobs
    return jnp.expm1(difference) - difference  # expm1: e^d - 1 - d would lose every digit where the policies agree


ESTIMATORS = {'k1': k1, 'k2': k2, 'k3': k3}  # http://joschu.net/blog/kl-approx.html


def importance(
    old: jax.Array, sampler: jax.Array, is_action: jax.Array, *, level: Importance, cap: float
) -> tuple[jax.Array, jax.Array]:
    """Truncated importance weights min(learner / sampler, cap), without a gradient.

    token: of each token by itself; cheap in variance, and biased where earlier tokens drifted. sequence: the product
    over the row's action tokens, the same at each of them; unbiased but for the cap, and soon at the cap or near 0 for
    long rows that disagree.

    Returns:
      f32[B, T] weights, and bool[B, T] whether the cap replaced them.
    """
    difference = jnp.where(is_action, old - sampler, 0.0)
    if level == 'sequence':
        difference = jnp.broadcast_to(difference.sum(axis=1, keepdims=True), difference.shape)
    elif level != 'token':
        raise ValueError(f'importance weights {level!r} are unknown; they must be token or sequence')
    weight = jax.lax.stop_gradient(_ratio(difference))
    return jnp.minimum(weight, cap), weight > cap


def _ratio(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


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
    tokens: Tokens, grpo: Grpo, *, constant_length: int, importance_level: Importance
) -> tuple[Ratio, dict[str, Ratio], dict[str, jax.Array]]:
    """The loss of B rows as (sum, count), with what a person wants to know about it.

    loss = -surrogate * importance + kl * estimator - entropy * H per action token, aggregated as `grpo.aggregation` says.

    Args:
      tokens: see `Tokens`.
      grpo: which surrogate and estimator, weights, clips and aggregation.
      constant_length: the divisor of `constant` aggregation: the response budget in tokens.
      importance_level: multiply the surrogate with truncated importance weights between learner and sampler (`off`: no).

    Returns:
      The loss; sums for `divided`; and maxima (`sampler_difference_max`).
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
    low, high = clips(grpo)
    if grpo.loss == 'gspo':
        gain, is_clipped = sequence_surrogate(logprobs, old, mask, advantage, low=low, high=high)
    elif grpo.loss == 'cispo':
        gain, is_clipped = weighted_logprob(logprobs, old, advantage, low=low, high=high)
    else:
        gain, is_clipped = surrogate(logprobs, old, advantage, low=low, high=high, dual=grpo.clip_dual)

    def total(values: jax.Array, aggregation: str) -> Ratio:
        return aggregate(values, mask, tokens.is_counted, aggregation=aggregation, constant_length=constant_length)

    weights = {}
    if importance_level != 'off':
        weight, is_capped = importance(old, sampler, mask, level=importance_level, cap=grpo.importance_cap)
        gain = gain * weight
        shares = {'weight': weight, 'square': jnp.square(weight), 'capped': is_capped.astype(jnp.float32)}
        weights = {f'importance_{name}': total(values, importance_level) for name, values in shares.items()}
    divergence = ESTIMATORS[grpo.kl_estimator](logprobs, reference)
    difference = jax.lax.stop_gradient(old - sampler)
    loss = total(-gain + grpo.kl * divergence - grpo.entropy * entropy, grpo.aggregation)
    means = {
        'loss': loss,
        'policy_loss': total(-gain, grpo.aggregation),
        'kl': total(divergence, 'token'),
        'entropy': total(entropy, 'token'),
        'clip_fraction': total(is_clipped.astype(jnp.float32), 'token'),
        'sampler_difference': total(jnp.abs(difference), 'token'),
        'sampler_kl': total(k3(jnp.zeros(()), jnp.minimum(difference, LARGEST_LOG_RATIO)), 'token'),
        **weights,
    }
    maxima = {'sampler_difference_max': jnp.abs(difference).max()}
    return loss, jax.lax.stop_gradient(means), maxima


def divided(sums: Mapping[str, Ratio]) -> dict[str, Any]:
    """The metrics of `objective`, from its sums over all micro-batches.

    Returns:
      `loss` and `policy_loss` as aggregated. Means over action tokens: `kl` (the estimator of the loss), `entropy` in
      nats, `clip_fraction`, `sampler_difference` (|learner - sampler| log-prob) and `sampler_kl` (k3 estimate of
      KL(sampler, learner); the rows are samples of the former). With importance weights, over tokens or rows as these
      go: `importance_weight` (mean), `importance_capped` (share at the cap) and `importance_ess`, Kish's effective
      sample size (sum w)^2 / sum w^2 as a share of all: 1 for equal weights.
    """
    means: dict[str, Any] = {name: total.sum / total.count for name, total in sums.items()}
    if 'importance_square' in means:  # a square of sums is no sum: it can only be taken here
        means['importance_ess'] = means['importance_weight'] ** 2 / max(means.pop('importance_square'), 1e-30)
    return means
