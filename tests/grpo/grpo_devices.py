"""Run by test_learner_devices.py in a process with eight fake devices: prints one JSON object of what it saw.

Arguments: files for the gradient of the first step, and for that of a step with adapters.
"""

import dataclasses
import json
import sys

import jax
import numpy as np
from grpo_toy import ARCH, ONE_STEP, gradient, toy_params, toy_samples

from sesa_jax.config import Lora
from sesa_jax.grpo import learner
from sesa_jax.grpo.learner import init_state, update
from sesa_jax.policy import lora, sharding
from sesa_jax.policy.arch import abstract

mesh = sharding.make_mesh(8)
places = sharding.shardings(abstract(ARCH), sharding.TRAIN, mesh)
params, reference = (jax.device_put(toy_params(ARCH, seed), places) for seed in (0, 1))


def step(state, rows):
    return update(state, reference, rows, mesh=mesh, donate=False, **ONE_STEP)


first, metrics = step(init_state(params, ONE_STEP['optimizer']), toy_samples())
np.savez(sys.argv[1], *jax.tree.leaves(gradient(first)))
second, _ = step(first, toy_samples(1))
overflow = [dataclasses.replace(row, advantage=3e38 if i == 5 else row.advantage) for i, row in enumerate(toy_samples())]
third, skipped = step(second, overflow)
programs = learner._accumulate._cache_size()
adapted, adapter_metrics = step(init_state(lora.init(ARCH, Lora(2), [0], mesh), ONE_STEP['optimizer']), toy_samples())
np.savez(sys.argv[2], *jax.tree.leaves(gradient(adapted)))
print(
    json.dumps(
        {
            'devices': len(jax.devices()),
            'metrics': metrics,
            'adapter_metrics': adapter_metrics,
            'adapter': str(adapted.params.a['up'].sharding.spec),
            'skipped': skipped,
            'skipped_bits': all(map(np.array_equal, jax.tree.leaves(second), jax.tree.leaves(third))),
            'moved': not np.array_equal(first.params['embed'], second.params['embed']),
            'programs': programs,
            'embed': str(second.params['embed'].sharding.spec),
            'moments_lie_like_params': all(
                jax.tree.leaves(jax.tree.map(lambda p, m: p.sharding == m.sharding, second.params, tree))
                for tree in (second.moments[0].mu, second.moments[0].nu)
            ),
        }
    )
)
