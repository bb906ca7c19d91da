"""One of several processes, run by test_distributed.py: logits of a sharded model as one JSON line of process 0."""

import json
import sys

import jax
import numpy as np

from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract, shapes
from sesa_jax.run import distributed


def main(coordinator, process, processes):
    if processes > 1:
        distributed.join(coordinator, process, processes, seconds=60)
    arch = Architecture(160, 2, 64, 96, 8, 4, 8, 1e4, 1e-6, tied=False, max_positions=64)
    mesh = sharding.make_mesh()
    rng = np.random.default_rng(0)
    host = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype('float32'), shapes(arch, 'float32'))
    params = jax.device_put(host, sharding.shardings(abstract(arch), sharding.TRAIN, mesh))
    rows = sharding.rows(mesh)
    ids = rng.integers(0, 160, (8, 9)).astype(np.int32)
    lengths = np.asarray([9, 2, 5, 7, 9, 3, 4, 8], np.int32)

    def forward(params, ids, lengths):
        states = transformer.hidden(params, arch, ids, lengths, rows_sharding=rows)
        return transformer.logits(params, arch, states)

    out = jax.jit(forward, out_shardings=sharding.replicated(mesh))(
        params, jax.device_put(ids, rows), jax.device_put(lengths, rows)
    )
    if process == 0:
        print(
            json.dumps(
                {'devices': jax.device_count(), 'local': jax.local_device_count(), 'logits': np.asarray(out).tolist()}
            )
        )


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
