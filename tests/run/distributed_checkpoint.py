"""One of several processes, run by test_distributed.py: saves a sharded state, restores what others saved.

Arguments: coordinator, process, processes, folder of checkpoints, step to save, step to restore or -1. Process 0 prints
the digests of what it saved and of what it restored, the second from the bytes of the leaves.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sesa_jax.policy import sharding
from sesa_jax.run import checkpoint, distributed


def state(mesh):
    """Leaves that are split along either axis, held by all, or in host memory, of three types."""
    rng = np.random.default_rng(3)
    places = {'wide': PartitionSpec(None, 'data'), 'tall': PartitionSpec('data'), 'norm': PartitionSpec()}
    tree = {
        name: sharding.placed(rng.normal(size=(8, 12)).astype(np.float32), NamedSharding(mesh, spec))
        for name, spec in places.items()
    }
    tree['half'] = jax.jit(lambda x: x.astype(jnp.bfloat16))(tree['tall'])
    tree['away'] = sharding.offload(jax.jit(lambda x: x + 1)(tree['wide']))
    tree['step'] = sharding.placed(np.int32(7), sharding.replicated(mesh))
    return tree


def main(coordinator, process, processes, folder, saved, restored):
    if processes > 1:
        distributed.join(coordinator, process, processes, seconds=60)
    tree = state(sharding.make_mesh())
    folder = pathlib.Path(folder)
    said = {'saved': checkpoint.save(folder, saved, tree)}
    if restored >= 0:
        back = checkpoint.restore(folder, restored, tree)
        assert all(back[name].sharding == leaf.sharding for name, leaf in tree.items())
        said['restored'] = checkpoint.save(folder, 100 + saved, back)
    if process == 0:
        print(json.dumps(said))


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
