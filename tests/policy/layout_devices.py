"""Run by test_sharding.py on eight fake devices: logits of every layout against one device, as one JSON line."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract, shapes

# 28 query and 4 kv heads, as Qwen2.5-7B; 8 and 8, so that TP8 is allowed; 4 and 2, the heads of tiny.
HEADS = {'28/4': (28, 4, (1, 2, 4, 0)), '8/8': (8, 8, (8, 4, 0)), '4/2': (4, 2, (2, 0))}
ROWS, TOKENS = 8, 9


def logits_of(arch, params, host_ids, lengths, mesh):
    """Prefill of all but the last token and one decode step: f32[B, V], in the layout of `mesh`."""
    layered = jax.jit(
        lambda tree: transformer.unstack(tree, arch),
        out_shardings=sharding.unstacked(sharding.shardings(abstract(arch), sharding.DECODE, mesh), arch.layers),
    )(params)

    @jax.jit
    def run(layered, ids, lengths):
        pin = lambda cache: jax.tree.map(  # noqa: E731
            lambda x: jax.lax.with_sharding_constraint(x, sharding.cache(mesh)), cache
        )
        cache = pin(transformer.init_cache(arch, ROWS, 16))
        start = jnp.zeros(ROWS, jnp.int32)
        _, cache = transformer.extend(layered, arch, cache, ids, start, lengths - 1)
        staging = pin(transformer.init_staging(arch, ROWS, 2))
        last = jnp.take_along_axis(ids, lengths[:, None] - 1, axis=1)[:, 0]
        hidden, _ = transformer.decode_step(layered, arch, pin(cache), staging, jnp.int32(0), last, lengths - 1)
        return transformer.logits(layered, arch, hidden)

    text = run.lower(layered, host_ids, lengths).compile().as_text()
    collectives = sorted({name for name in re.findall(r'(all-reduce|all-gather|all-to-all|collective-permute)', text)})
    query = layered['layers'][0]['query']
    return np.asarray(run(layered, host_ids, lengths)), query.addressable_shards[0].data.shape, collectives


def main():
    result = {}
    for name, (heads, kv_heads, ways) in HEADS.items():
        arch = Architecture(160, 2, 64, 96, heads, kv_heads, 8, 1e4, 1e-6, tied=False, max_positions=64)
        rng = np.random.default_rng(0)
        host = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype('float32'), shapes(arch, 'float32'))  # noqa: B023
        ids = rng.integers(0, 160, (ROWS, TOKENS)).astype(np.int32)
        lengths = np.asarray([9, 2, 5, 7, 9, 3, 4, 8], np.int32)
        one = sharding.make_mesh(1)
        alone, _, _ = logits_of(arch, jax.device_put(host, sharding.replicated(one)), ids, lengths, one)
        train = sharding.make_mesh(8)
        placed = jax.device_put(host, sharding.shardings(abstract(arch), sharding.TRAIN, train))

        def forward(params, ids, lengths):
            states = transformer.hidden(params, arch, ids, lengths, rows_sharding=sharding.rows(train))  # noqa: B023
            last = jnp.take_along_axis(states, lengths[:, None, None] - 1, axis=1)[:, 0]
            return transformer.logits(params, arch, last)  # noqa: B023

        rows = sharding.rows(train)
        fsdp = jax.jit(forward)(placed, jax.device_put(ids, rows), jax.device_put(lengths, rows))
        result[f'{name} FSDP8'] = {'difference': float(np.abs(np.asarray(fsdp) - alone).max())}
        for model in ways:
            mesh = sharding.decode_mesh(arch, 8, model)
            found, query, collectives = logits_of(arch, placed, ids, lengths, mesh)
            result[f'{name} TP{model or "auto"}'] = {
                'mesh': dict(mesh.shape),
                'difference': float(np.abs(found - alone).max()),
                'query': query,
                'collectives': collectives,
            }
    print(json.dumps(result))


if __name__ == '__main__':
    main()
