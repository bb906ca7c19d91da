"""Run by test_learner_devices.py in a process with eight fake devices: prints one JSON object of what it saw."""

import json

import jax
import numpy as np
from grpo_toy import ALLOWED, toy_arch, toy_params, toy_row

from sesa_jax import config
from sesa_jax.grpo.learner import init_state, update
from sesa_jax.grpo.microbatch import Sample
from sesa_jax.policy import lora, sharding
from sesa_jax.policy.arch import abstract

ARCH = toy_arch()
OPTIMIZER = config.Optimizer(learning_rate=1e-3, warmup_steps=0)


def steps(mesh, rank=0):
    """Two steps on 7 rows, so that one device holds a padding row only; of adapters where they have a rank."""
    params, reference = toy_params(ARCH, seed=0), toy_params(ARCH, seed=1)
    if mesh is not None:
        places = sharding.shardings(abstract(ARCH), sharding.TRAIN, mesh)
        params, reference = jax.device_put(params, places), jax.device_put(reference, places)
    if rank:
        params = lora.init(ARCH, config.Lora(rank), [0], mesh or sharding.make_mesh(1))
    state = init_state(params, OPTIMIZER)
    rng = np.random.default_rng(0)
    reports = []
    for _ in range(2):
        rows = [Sample(toy_row(rng, f'p{i % 4}', i // 4), float(rng.normal())) for i in range(7)]
        state, metrics = update(
            state, reference, rows, arch=ARCH, grpo=config.Grpo(kl=0.1, micro_batch_tokens=8 * 128),
            optimizer=OPTIMIZER, temperature=1.0, allowed=ALLOWED, response_length=64, mesh=mesh,
        )  # fmt: skip
        reports.append(metrics)
    return state, reports


one, one_reports = steps(None)
many, many_reports = steps(sharding.make_mesh(8))
few, few_reports = steps(None, rank=2)
spread, spread_reports = steps(sharding.make_mesh(8), rank=2)


def largest_difference(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


embed = many.params['embed'].sharding
print(
    json.dumps(
        {
            'devices': len(jax.devices()),
            'one': one_reports,
            'many': many_reports,
            'largest_parameter_difference': largest_difference(one, many),
            'one_adapters': few_reports,
            'many_adapters': spread_reports,
            'largest_adapter_difference': largest_difference(few, spread),
            'adapter': str(spread.params.a['up'].sharding.spec),
            'embed': str(embed.spec),
            'moments_lie_like_params': all(
                jax.tree.leaves(jax.tree.map(lambda p, m: p.sharding == m.sharding, many.params, tree))
                for tree in (many.moments[0].mu, many.moments[0].nu)
            ),
        }
    )
)
