"""A toy policy and toy rows for the learner's tests."""

import jax
import numpy as np

from sesa_jax.policy import transformer
from sesa_jax.policy.arch import Architecture
from sesa_jax.records import Trajectory

ALLOWED = 29  # of 32 rows in the vocabulary


def toy_arch(**changes):
    values = {
        'vocab': 32, 'layers': 2, 'width': 16, 'hidden': 32, 'heads': 2, 'kv_heads': 1, 'head_size': 8,
        'rope_theta': 1e4, 'eps': 1e-6, 'tied': True, 'max_positions': 512,
    }  # fmt: skip
    return Architecture(**(values | changes))


def toy_params(arch, seed=0, scale=8.0):
    """Random parameters, far enough from the initial ones that the distributions are not flat."""
    params = transformer.init(arch, jax.random.key(seed))
    return params | {'embed': params['embed'] * scale}


def toy_row(rng, problem='p0', sample=0, *, length=None, prompt=4):
    """prompt, actions, an observation, actions."""
    length = int(rng.integers(prompt + 6, 40)) if length is None else length
    is_action = np.arange(length) >= prompt
    middle = (prompt + length) // 2
    is_action[middle : middle + 3] = False
    return Trajectory(
        role='solver',
        problem_id=problem,
        sample=sample,
        ids=rng.integers(0, ALLOWED, length).astype(np.int32),
        is_action=is_action,
        logprobs=np.where(is_action, -3.0, 0.0).astype(np.float32),
        prompt_length=prompt,
        turns=(),
        searches=(),
        card_ids=(),
        stop_reason='answer',
        weights_version=0,
        bank_version=0,
    )
