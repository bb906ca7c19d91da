"""Run by test_head_devices.py in a process with eight fake devices: prints one JSON object of what it saw.

The gradient of the log-probs in many chunks, for a tied and an untied head, and for one that eight devices cannot split: how
far its numbers are from those of one device, and what the compiled program sends for the head.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from grpo_toy import ALLOWED, toy_arch, toy_params

from sesa_jax.grpo import logprob
from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import abstract
from sesa_jax.run import plan

TOKENS = 20


@functools.partial(jax.jit, static_argnames=('arch', 'dtype', 'rows'))
def gradient(params, arch, dtype, rows, ids, lengths, is_action, weight):
    def value(params):
        logprobs, entropy = logprob.token_logprobs(
            params, arch, ids, lengths, is_action, temperature=0.7, allowed=ALLOWED, entropy='gradient', rows=rows,
            chunk=4, dtype=dtype,
        )  # fmt: skip
        return (weight * (logprobs + 0.1 * entropy)).sum(), logprobs

    found, logprobs = jax.grad(value, has_aux=True)(params)
    if rows is not None:
        found = jax.tree.map(jax.lax.with_sharding_constraint, found, places(arch, rows))
    return found, logprobs


def places(arch, rows):
    return sharding.shardings(abstract(arch), sharding.TRAIN, rows.mesh)


def collectives(text, vocab):
    """Those of arrays with the vocabulary as an axis: [collective, whether outside of every loop, dtype, shape]."""
    found, computation = [], ''
    for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
        if begins := re.match(r'(ENTRY )?%?[\w.\-]+ \(.*\{$', line):
            computation = begins.group(1)
        called = re.search(rf'= (\(?[^=()]*\)?) ({"|".join(plan.COLLECTIVES)})(?:-start)?\(', line)
        for kind, shape in re.findall(r'(\w+)\[([0-9,]+)\]', called.group(1)) if called else ():
            shape = [int(n) for n in shape.split(',')]
            if vocab in shape:
                found.append([called.group(2), computation == 'ENTRY ', kind, shape])
    return found


def largest(tree):
    return max(float(np.abs(np.asarray(x)).max()) for x in jax.tree.leaves(tree))


def main():
    # Only the head is of interest, and layers compile slowly: a model without them.
    transformer.hidden = lambda params, arch, ids, lengths, **_: params['embed'][ids] * params['final_norm']
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, TOKENS + 1, 8).astype(np.int32)
    inside = np.arange(TOKENS) < lengths[:, None]
    ids = np.where(inside, rng.integers(0, ALLOWED, inside.shape), 0).astype(np.int32)
    is_action = inside & (rng.random(inside.shape) < 0.6)
    is_action[:, 0] = False
    is_action[3] = False  # one device has nothing to do
    batch = (ids, lengths, is_action, rng.normal(size=inside.shape).astype(np.float32))
    rows = sharding.rows(sharding.make_mesh(8))
    seen = {}
    for name, dtype, changes in (
        ('tied', jnp.float32, {}),
        ('untied', jnp.bfloat16, {'tied': False}),
        ('whole', jnp.float32, {'tied': False, 'width': 12}),
    ):
        arch = toy_arch(layers=1, **changes)
        params = jax.jit(toy_params, static_argnums=0)(arch)
        one = gradient(params, arch, dtype, None, *batch)
        spread = jax.device_put((params, *batch), (places(arch, rows), *[rows] * len(batch)))
        lowered = gradient.lower(spread[0], arch, dtype, rows, *spread[1:])
        asked = re.findall(
            r'stablehlo\.(all_gather|reduce_scatter)"?\(.*?-> tensor<(\w+)>', lowered.as_text(), re.DOTALL
        )
        step = lowered.compile()
        many = step(spread[0], *spread[1:])
        seen[name] = {
            'logprobs': largest(np.asarray(one[1]) - np.asarray(many[1])),
            'gradient': {
                key: [largest(np.asarray(one[0][key]) - np.asarray(many[0][key])), largest(one[0][key])]
                for key in {'embed', 'final_norm', 'head'} & set(params)
            },
            'asked': asked,
            'collectives': collectives(step.as_text(), arch.vocab),
        }
    print(json.dumps(seen | {'devices': len(jax.devices())}))


if __name__ == '__main__':
    main()
