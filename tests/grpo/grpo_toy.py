"""A toy policy and toy rows for the learner's tests."""

import jax
import numpy as np

from sesa_jax import config
from sesa_jax.grpo.microbatch import Sample
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


def toy_samples(seed=0, rows=7):
    """An odd number of rows, so that one of two or eight devices holds a padding row; their advantages differ."""
    rng = np.random.default_rng(seed)
    return [Sample(toy_row(rng, f'p{i % 4}', i // 4), float(rng.normal())) for i in range(rows)]


ARCH = toy_arch()
B1 = 0.9
ONE_STEP = {
    'arch': ARCH, 'grpo': config.Grpo(kl=0.1, micro_batch_tokens=8 * 128), 'temperature': 0.7, 'allowed': ALLOWED,
    'optimizer': config.Optimizer(learning_rate=1e-3, warmup_steps=0, b1=B1, clip_norm=1e30), 'response_length': 64,
}  # fmt: skip
"""Arguments of one `update` without clipping, whose first moments tell the gradient."""


def gradient(state, read=np.asarray):
    """The gradient of the only step that a state took: Adam's first moment began at 0, and is (1 - b1) of it now."""
    return jax.tree.map(lambda mu: read(mu) / np.float32(1 - B1), state.moments[0].mu)


def distance(a, b):
    """|a - b| / |b| of two trees, each as one vector."""
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
