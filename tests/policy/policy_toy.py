"""Small architectures of each family; the forward passes, compiled whole (op by op, most of a test's time would go into
compiling single operations); and rows that are decoded the way an engine does it."""

import dataclasses
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
prefill = jax.jit(transformer.prefill, static_argnums=1)
extend = jax.jit(transformer.extend, static_argnums=1)
decode_step = jax.jit(transformer.decode_step, static_argnums=1)
merge = jax.jit(transformer.merge)


@functools.partial(jax.jit, static_argnums=1, static_argnames=('remat', 'dtype'))
def full_logits(params, arch, ids, lengths, **options):
    return transformer.logits(params, arch, transformer.hidden(params, arch, ids, lengths, **options))


def tokens(arch, rows, count, seed=5):
    return jax.random.randint(jax.random.key(seed), (rows, count), 0, arch.vocab)


def grouped_tokens(arch, prompts, group_size, count, seed=5):
    """i32[R, count]: rows of a group begin with the same prompts[q] tokens and differ behind them."""
    ids = np.array(tokens(arch, len(prompts) * group_size, count, seed))
    for i, row in enumerate(ids):
        shared = prompts[i // group_size]
        row[:shared] = ids[i - i % group_size, :shared]
    return ids


def difference(a, b):
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def with_prompts(layered, arch, slots, ids, lengths):
    """The slots with a prompt for each group: ids i32[Q, T], lengths i32[Q]."""
    new = prefill(layered, arch, ids, lengths)
    prompt = jax.tree.map(lambda old, new: old.at[:, :, : new.shape[2]].set(new), slots.prompt, new)
    return dataclasses.replace(slots, prompt=prompt)


def decode_rows(params, arch, ids, *, prompts, first, observed, second, blocks, chunk, group_size=1):
    """Prompts, `first` decoded tokens, observations, `second` decoded tokens, all taken from `ids`, in the way an
    engine would do it: (hidden states at the places of the rows' own tokens, these places of each row, slots)."""
    ids, layered, rows = np.asarray(ids), unstack(params, arch), len(first)
    states = np.zeros((*ids.shape, arch.width), np.float32)
    lengths = np.asarray(prompts, np.int32)
    behind = np.repeat(lengths, group_size)
    own = np.zeros(rows, np.int32)  # never changed in place: a program that still runs may read the array itself
    slots = transformer.init_slots(arch, len(prompts), group_size, max(prompts) + 1, blocks)
    slots = with_prompts(layered, arch, slots, ids[::group_size, : max(prompts)], lengths)

    def upcoming(width):
        columns = np.minimum((behind + own)[:, None] + np.arange(width), ids.shape[1] - 1)
        return columns, np.take_along_axis(ids, columns, axis=1)

    def append(slots, counts):
        nonlocal own
        counts = np.asarray(counts, np.int32)
        index = np.append(np.flatnonzero(counts)[::-1], rows)  # in any order, and one for padding
        given = np.minimum(index, rows - 1)
        columns, piece = upcoming(max(counts))
        out, slots = extend(layered, arch, slots, index, piece[given], behind[given], own[given], counts[given])
        for row, new in zip(index[:-1], out, strict=False):
            states[row, columns[row, : counts[row]]] = new[: counts[row]]
        own = own + counts
        return slots

    def decode(slots, wanted):
        nonlocal own
        left = np.asarray(wanted, np.int32)
        while left.any():
            staging = transformer.init_cache(arch, rows, chunk)
            count = np.minimum(left, chunk)
            columns, piece = upcoming(chunk)
            for step in range(chunk):
                out, staging = decode_step(layered, arch, slots, staging, step, piece[:, step], lengths, own)
                for row in np.flatnonzero(step < count):
                    states[row, columns[row, step]] = out[row]
            slots = merge(slots, staging, own, count)
            own = own + count
            left = left - count
        return slots

    for stage, counts in ((decode, first), (append, observed), (decode, second)):
        slots = stage(slots, counts)
    return states, [slice(a, a + n) for a, n in zip(behind, own, strict=True)], slots
