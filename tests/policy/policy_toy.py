"""Small architectures of each family; the forward passes, compiled whole (op by op, most of a test's time would go into
compiling single operations); and rows that are decoded the way an engine does it."""

import functools
from typing import Any

import jax
import numpy as np

from sesa_jax.policy import transformer
from sesa_jax.policy.arch import Architecture, RopeScaling

FAMILIES = {
    'qwen3': {},
    'qwen2': {'family': 'qwen2', 'qkv_bias': True, 'qk_norm': False},
    'llama': {
        'family': 'llama', 'qk_norm': False, 'width': 48,  # transformers wants a Llama's width to be a multiple of N
        'rope_scaling': RopeScaling(8.0, 1.0, 4.0, 32),
    },
}  # fmt: skip
"""What `make_arch` has to change for each family. The Llama leaves its original context after 32 positions."""


def architecture(**changes: Any) -> Architecture:
    """Small, with a head size that is not D / N; keywords change fields."""
    values: dict[str, Any] = {
        'vocab': 97,
        'layers': 3,
        'width': 40,
        'hidden': 56,
        'heads': 6,
        'kv_heads': 2,
        'head_size': 12,
        'rope_theta': 1e4,
        'eps': 1e-6,
        'tied': True,
        'max_positions': 512,
    }
    return Architecture(**{**values, **changes})


hidden = jax.jit(transformer.hidden, static_argnums=1, static_argnames=('remat', 'dtype'))
logits = jax.jit(transformer.logits, static_argnums=1)
unstack = jax.jit(transformer.unstack, static_argnums=(1, 2))
extend = jax.jit(transformer.extend, static_argnums=1, static_argnames='reach')
decode_step = jax.jit(transformer.decode_step, static_argnums=1)
merge = jax.jit(transformer.merge)


@functools.partial(jax.jit, static_argnums=1, static_argnames=('remat', 'dtype'))
def full_logits(params, arch, ids, lengths, **options):
    return transformer.logits(params, arch, transformer.hidden(params, arch, ids, lengths, **options))


def tokens(arch, rows, count, seed=5):
    return jax.random.randint(jax.random.key(seed), (rows, count), 0, arch.vocab)


def difference(a, b):
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def decode_rows(params, arch, ids, *, prompts, first, observed, second, slots, chunk):
    """Prompts, `first` decoded tokens, observations, `second` decoded tokens, all taken from `ids`: the hidden states
    of every position of every row, in the way an engine would make them."""
    rows = len(prompts)
    layered = unstack(params, arch)
    states = np.zeros((rows, ids.shape[1], arch.width), np.float32)
    cache = transformer.init_cache(arch, rows, slots)
    done = np.zeros(rows, np.int32)  # never changed in place: a program that still runs may read the array itself

    def append(cache, counts):
        nonlocal done
        width = max(counts)
        columns = np.minimum(done[:, None] + np.arange(width), ids.shape[1] - 1)
        piece = np.take_along_axis(np.asarray(ids), columns, axis=1)
        out, cache = extend(layered, arch, cache, piece, done, np.asarray(counts))
        for row, count in enumerate(counts):
            states[row, done[row] : done[row] + count] = out[row, :count]
        done = done + np.asarray(counts, np.int32)
        return cache

    def decode(cache, wanted):
        nonlocal done
        left = np.asarray(wanted)
        while left.any():
            staging = transformer.init_staging(arch, rows, chunk)
            count = np.minimum(left, chunk)
            for step in range(chunk):
                column = np.minimum(done + step, ids.shape[1] - 1)
                out, staging = decode_step(layered, arch, cache, staging, step, ids[np.arange(rows), column], done)
                for row in np.flatnonzero(step < count):
                    states[row, column[row]] = out[row]
            cache = merge(cache, staging, done, count)
            done = done + count.astype(np.int32)
            left = left - count
        return cache

    for stage, counts in ((append, prompts), (decode, first), (append, observed), (decode, second)):
        cache = stage(cache, counts)
    return states, done, cache
