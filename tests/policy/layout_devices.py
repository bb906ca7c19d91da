"""Run by test_sharding.py on eight fake devices: logits of every layout against one device, as one JSON line."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract, shapes

# 28 query and 4 kv heads, as Qwen2.5-7B; 8 and 8, so that TP8 is allowed; 4 and 2, the heads of tiny.
HEADS = {'28/4': (28, 4, (1, 2, 4, 0)), '8/8': (8, 8, (8, 4, 0)), '4/2': (4, 2, (2, 0))}
GROUPS, GROUP_SIZE, PROMPT, TOKENS = 8, 2, 4, 9
ROWS = GROUPS * GROUP_SIZE


def logits_of(arch, params, host_ids, prompts, lengths, mesh):
    """Logits of the last of each row's lengths i32[R] tokens: f32[R, V], in the layout of `mesh`.

    A group's first prompts i32[Q] tokens are computed by prefill, those up to the last two by extend, which every other
    row has, and these two by decode, with a merge between them.
    """
    layered = jax.jit(
        lambda tree: transformer.unstack(tree, arch),
        out_shardings=sharding.unstacked(sharding.shardings(abstract(arch), sharding.DECODE, mesh), arch.layers),
    )(params)

    @jax.jit
    def run(layered, ids, prompts, lengths):
        pin = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: jax.lax.with_sharding_constraint(x, sharding.cache(mesh)), tree
        )
        slots = transformer.init_slots(arch, GROUPS, GROUP_SIZE, PROMPT, (2, 6))
        prompt = transformer.prefill(layered, arch, ids[::GROUP_SIZE, :PROMPT], prompts)
        slots = pin(dataclasses.replace(slots, prompt=prompt))
        behind, zeros = jnp.repeat(prompts, GROUP_SIZE), jnp.zeros(ROWS, jnp.int32)
        count = lengths - behind - 2
        own = jnp.take_along_axis(ids, jnp.minimum(behind[:, None] + jnp.arange(TOKENS), TOKENS - 1), axis=1)
        half = jnp.arange(ROWS)[::-2]
        _, slots = transformer.extend(layered, arch, slots, half, own[half], behind[half], zeros[half], count[half])
        slots = pin(slots)
        for begin in (count, count + 1):
            last = jnp.take_along_axis(own, begin[:, None], axis=1)[:, 0]
            staging = pin(transformer.init_cache(arch, ROWS, 2))
            hidden, staging = transformer.decode_step(layered, arch, slots, staging, 0, last, prompts, begin)
            slots = pin(transformer.merge(slots, staging, begin, zeros + 1))
        return transformer.logits(layered, arch, hidden)

    text = run.lower(layered, host_ids, prompts, lengths).compile().as_text()
    collectives = sorted({name for name in re.findall(r'(all-reduce|all-gather|all-to-all|collective-permute)', text)})
    query = layered['layers'][0]['query']
    return np.asarray(run(layered, host_ids, prompts, lengths)), query.addressable_shards[0].data.shape, collectives


def main():
    result = {}
    for name, (heads, kv_heads, ways) in HEADS.items():
        arch = Architecture(160, 2, 64, 96, heads, kv_heads, 8, 1e4, 1e-6, tied=False, max_positions=64)
        rng = np.random.default_rng(0)
        host = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype('float32'), shapes(arch, 'float32'))  # noqa: B023
        ids = rng.integers(0, 160, (ROWS, TOKENS)).astype(np.int32)
        prompts = np.asarray([4, 0, 3, 1, 4, 2, 4, 3], np.int32)
        for row, shared in zip(range(1, ROWS, 2), prompts, strict=True):
            ids[row, :shared] = ids[row - 1, :shared]
        lengths = np.asarray([6, 9, 2, 5, 5, 9, 3, 6, 6, 8, 4, 6, 6, 9, 5, 7], np.int32)
        one = sharding.make_mesh(1)
        alone, _, _ = logits_of(arch, jax.device_put(host, sharding.replicated(one)), ids, prompts, lengths, one)
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
            found, query, collectives = logits_of(arch, placed, ids, prompts, lengths, mesh)
            result[f'{name} TP{model or "auto"}'] = {
                'mesh': dict(mesh.shape),
                'difference': float(np.abs(found - alone).max()),
                'query': query,
                'collectives': collectives,
            }
    print(json.dumps(result))


if __name__ == '__main__':
    main()
