"""Run by test_head_devices.py in a process with eight fake devices: prints one JSON object of what it saw.

The update of Qwen3-8B, a row of 12,288 tokens a device, compiled without any array: what it sends for the head.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
from head_devices import collectives

from sesa_jax import config
from sesa_jax.grpo import learner
from sesa_jax.policy import backbones, sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.run import plan

RUN = config.Run(model='qwen3-8b')


def main():
    arch = Architecture.from_config(backbones.architecture_of(RUN.model), RUN.model)
    mesh = sharding.make_mesh(8)
    shape = plan.micro_batch_shape(RUN, mesh)
    seen = {'devices': len(jax.devices()), 'micro_batch': shape, 'layers': arch.layers}
    for name, kl in (('plain', 0.0), ('with a KL term', 0.001)):
        programs = learner.lowered(
            plan.trained(RUN, arch, mesh), plan.frozen(arch, mesh), shape, arch=arch,
            grpo=dataclasses.replace(RUN.grpo, kl=kl), optimizer=RUN.optimizer, mesh=mesh,
            response_length=RUN.lengths.response, dtype=jnp.bfloat16,
        )  # fmt: skip
        text = programs['update, one micro-batch'][0]().compile().as_text()
        kinds = '|'.join(plan.COLLECTIVES)
        seen[name] = {
            'vocabulary': collectives(text, arch.vocab),
            'head': re.findall(rf' ({kinds})(?:-start)?\(.*op_name="[^"]*/head/', text),
        }
    print(json.dumps(seen))


if __name__ == '__main__':
    main()
