"""Run by test_plan.py in a process with fake devices: prints one JSON object of what it saw.

Temporary bytes of the update of a model whose weights dominate, at two depths: the compiler's, and the planner's.
"""

import json

import jax
import jax.numpy as jnp

from sesa_jax import config
from sesa_jax.grpo import learner
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.run import plan

TEMPORARY = ('gradients of a micro-batch', 'activations', 'logits chunk')
# Without the KL term: of its bfloat16 reference a CPU makes a float32 copy.
RUN = config.Run(
    lengths=config.Lengths(prompt=64, response=64), grpo=config.Grpo(kl=0.0, remat='nothing', micro_batch_tokens=128)
)


def temporaries(layers: int, mesh: sharding.Mesh) -> dict[str, int]:
    arch = Architecture(
        vocab=64, layers=layers, width=512, hidden=1536, heads=8, kv_heads=8, head_size=64, rope_theta=1e4, eps=1e-6,
        tied=False, max_positions=512,
    )  # fmt: skip
    programs = learner.lowered(
        plan.trained(RUN, arch, mesh), plan.frozen(arch, mesh), plan.micro_batch_shape(RUN, mesh), arch=arch,
        grpo=RUN.grpo, optimizer=RUN.optimizer, mesh=mesh, response_length=RUN.lengths.response, dtype=jnp.bfloat16,
    )  # fmt: skip
    memory = programs['update, one micro-batch'][0]().compile().memory_analysis()
    decode = sharding.decode_mesh(arch, mesh.size)
    table = [part for part in plan.parts(RUN, arch, mesh, decode) if part.name.startswith(TEMPORARY)]
    return {
        'masters': plan.tree_bytes(plan.trained(RUN, arch, mesh)),
        'compiler': memory.temp_size_in_bytes,
        'table': sum(part.size for part in table if part.update),
    }


def main():
    devices = len(jax.devices())
    mesh = sharding.make_mesh(devices)
    print(json.dumps({'devices': devices, 'depths': [temporaries(layers, mesh) for layers in (4, 12)]}))


if __name__ == '__main__':
    main()
