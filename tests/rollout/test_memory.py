"""Programs and memory: a table of programs, slots that are updated in place, and what a decode step moves."""

import dataclasses
import functools
import logging
import math
import re

import jax
import jax.numpy as jnp
import pytest
from rollout_toy import ARCH, TOKENIZER, World, at_once, engine, play, policy, requests, tokens

from sesa_jax.config import Lengths
from sesa_jax.policy import transformer
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.sharding import make_mesh
from sesa_jax.rollout import decode
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.programs import Programs


def test_a_second_call_compiles_nothing(caplog):
    sampler = engine()
    play(requests(7, 2))
    held = set(sampler.programs.held)
    assert sampler.counters['compilations'] == len(held) <= len(sampler.programs.table)
    params = transformer.unstack(policy(), ARCH)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        sampler.rollout(params, requests(7, 2), at_once(World()), seed=0, step=0, weights_version=0, bank_version=0)
    assert not [record for record in caplog.records if 'Compiling' in record.getMessage()]
    assert set(sampler.programs.held) == held


def test_a_warm_engine_compiles_nothing_whatever_it_plays():
    sampler = engine(short=80, long=2)
    params = transformer.unstack(policy(), ARCH)
    sampler.warm_up(params)
    held = set(sampler.programs.held)
    assert f'; {len(held)} programs' in sampler.summary
    assert held == {key for key in sampler.programs.table if key[0] != 'decode' or not key[3]}
    for count, group, turns in ((1, 1, 1), (7, 2, 4), (20, 2, 9), (3, 5, 2), (13, 1, 6)):
        rows = play(requests(count, group, max_turns=turns), on=sampler)
        assert tokens(rows) == tokens(play(requests(count, group, max_turns=turns)))
    assert set(sampler.programs.held) == held


def test_a_shape_that_is_not_in_the_table_is_an_error():
    programs = Programs([('double', 2)])
    double = jax.jit(lambda x: 2 * x)
    assert programs.run(('double', 2), double, jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(KeyError, match=r"no program of the table has the shape \('double', 3\)"):
        programs.run(('double', 3), double, jnp.ones(3))


def test_the_memory_of_the_slots_is_said_beforehand():
    sampler = engine(short=80, long=2)
    pools = [sampler.open(name) for name in sampler.shapes]
    size = sum(leaf.nbytes for pool in pools for leaf in jax.tree.leaves(pool.slots))
    assert sampler.summary.startswith(
        f'rollouts: 16 shared rows, 8 single rows, 2 long rows; {size / 1e6:.0f} MB of keys and values over 1 devices'
    )


def test_the_default_places_need_few_programs():
    """Those that hold the model: at most 18, for both roles and the evaluation together."""
    lengths = Lengths()
    arch = dataclasses.replace(ARCH, max_positions=lengths.prompt + lengths.response)
    table = Engine(arch, TOKENIZER, make_mesh(1), lengths, group_size=5).programs.table
    model = [key for key in table if key[0] in ('prefill', 'append', 'decode', 'move') and key[-1] is not True]
    assert len(model) <= 18


# --- a decode chunk ---------------------------------------------------------------------------------------------------

# Widths, heads and vocabulary of SmolLM2-135M in two layers: what a chunk moves beside them weighs more than it does there.
SMOL = Architecture(
    family='llama', vocab=49_152, layers=2, width=576, hidden=1536, heads=9, kv_heads=3, head_size=64, rope_theta=1e5,
    eps=1e-5, qk_norm=False, tied=True, max_positions=8192,
)  # fmt: skip
CHUNK, ROWS, GROUPS = 8, 40, 8


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def compiled_chunk():
    """(the compiled decode chunk of 40 rows in 8 groups with prompts of 256, the weights, the slots); nothing is run."""
    layered = jax.eval_shape(lambda: transformer.unstack(transformer.init(SMOL, jax.random.key(0)), SMOL))
    slots = jax.eval_shape(lambda: transformer.init_slots(SMOL, GROUPS, ROWS // GROUPS, 256, (128,)))

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, real = array(ROWS), array(ROWS, dtype=jnp.float32)
    uniforms = array(CHUNK, ROWS, 2, dtype=jnp.float32)
    inputs = decode.Inputs(array(GROUPS), rows, rows, rows, rows, uniforms, real, rows, real)
    stops = (array(26, SMOL.vocab, dtype=jnp.uint8), array(26, dtype=jnp.bool), array(SMOL.vocab, dtype=jnp.bool))
    lowered = decode.decode.lower(
        layered, slots.prompt, slots.own, inputs, stops, arch=SMOL, mesh=make_mesh(1), allowed=SMOL.vocab
    )
    return lowered.compile(), layered, slots


def logits_bytes():
    return 4 * ROWS * SMOL.vocab


def test_a_chunk_updates_the_slots_in_place_and_needs_little_beside_them():
    """Own tokens are donated whole; temporaries are the chunk's staging and the logits, plus a fifth at most."""
    compiled, _, slots = compiled_chunk()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(slots.own)
    staging = 2 * 4 * SMOL.layers * ROWS * SMOL.kv_heads * CHUNK * SMOL.head_size
    assert memory.temp_size_in_bytes <= 1.2 * (staging + logits_bytes())


def test_nothing_large_is_copied_or_transposed_in_a_chunk():
    compiled, _, slots = compiled_chunk()
    assert min(nbytes(leaf) for leaf in jax.tree.leaves(slots)) >= 2**20, 'or a copy of it would not be seen'
    for kind, size in moved(compiled.as_text()):
        assert size < 2**20, kind


def test_a_step_reads_little_but_weights_keys_values_and_logits():
    """As XLA counts the body of the loop: without the merge behind it and the lookup of 40 rows, which it counts as if
    the whole blocks and the whole embedding were read."""
    compiled, layered, slots = compiled_chunk()
    staging = jax.eval_shape(lambda: transformer.init_cache(SMOL, ROWS, CHUNK))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    merge = jax.jit(transformer.merge, donate_argnums=0).lower(slots, staging, rows, rows).compile()
    counted = compiled.cost_analysis()['bytes accessed'] - merge.cost_analysis()['bytes accessed']
    needed = nbytes(layered) + nbytes(slots) + logits_bytes()
    assert needed < counted - nbytes(layered['embed']) <= 1.35 * needed


def moved(text):
    """(what, bytes) of every copy and transpose of float32 in an HLO module."""
    for shape, kind in re.findall(r'= f32\[([0-9,]+)\]\S* (copy|transpose)\(', text):
        yield kind, 4 * math.prod(int(n) for n in shape.split(','))
