import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_toy import (
    FAMILIES,
    decode_rows,
    decode_step,
    difference,
    extend,
    full_logits,
    hidden,
    logits,
    tokens,
    unstack,
)

from sesa_jax.config import ConfigError
from sesa_jax.policy import attention, transformer
from sesa_jax.policy.arch import abstract, leaves


@functools.partial(jax.jit, static_argnums=1, static_argnames=('remat', 'dtype'))
def gradient(params, arch, ids, lengths, **options):
    """Of the mean square of the logits."""
    return jax.grad(lambda p: jnp.square(full_logits(p, arch, ids, lengths, **options)).mean())(params)


@pytest.fixture(scope='module')
def small(make_arch, random_params):
    arch = make_arch(layers=2)
    return arch, random_params(arch)


# --- the training forward ---------------------------------------------------------------------------------------------


def test_padding_changes_no_real_position(small):
    arch, params = small
    ids, lengths = tokens(arch, 2, 70), jnp.array([66, 3])
    a, b = (hidden(params, arch, x, lengths) for x in (ids, ids.at[0, 66:].set(0).at[1, 3:].set(0)))
    assert difference(a, b) == 0


def test_hidden_is_zero_behind_the_length(small):
    arch, params = small
    states = hidden(params, arch, tokens(arch, 2, 70), jnp.array([5, 0]))
    assert (states[0, 5:] == 0).all() and (states[1] == 0).all()
    assert (jnp.abs(states[0, :5]).max(-1) > 0).all()


def test_a_token_is_blind_to_later_ones(small):
    arch, params = small
    ids = tokens(arch, 2, 70)
    changed = ids.at[0, 66].set((ids[0, 66] + 1) % arch.vocab)
    a, b = (hidden(params, arch, x, jnp.array([70, 70])) for x in (ids, changed))
    assert difference(a[0, :66], b[0, :66]) == 0
    assert (jnp.abs(a - b)[0, 66:].max(-1) > 0).all()


@pytest.mark.parametrize('wanted', [65, 130])
def test_blocks_of_queries_equal_one_block(small, monkeypatch, wanted):
    arch, params = small
    ids, lengths = tokens(arch, 1, wanted), jnp.array([wanted])
    blocked = hidden(params, arch, ids, lengths)
    monkeypatch.setattr(attention, 'QUERY_BLOCK', 128)
    monkeypatch.setattr(attention, 'LONGEST_BLOCK', 1000)
    whole = jax.jit(lambda params: transformer.hidden(params, arch, ids, lengths))(params)
    assert difference(blocked, whole) <= 1e-5


@pytest.mark.parametrize('policy', [True, 'projections'])
def test_remat_changes_no_gradient(small, policy):
    arch, params = small
    ids, lengths = tokens(arch, 3, 12), jnp.array([12, 7, 1])
    plain, again = (gradient(params, arch, ids, lengths, remat=remat) for remat in (False, policy))
    worst = jax.tree.map(lambda a, b: difference(a, b) / (1 + float(jnp.abs(a).max())), plain, again)
    assert max(jax.tree.leaves(worst)) <= 1e-5


def test_remat_keeps_what_its_policy_says(small):
    arch, params = small
    ids, lengths = jnp.zeros((2, 7), jnp.int32), jnp.array([7, 7])

    def kept(remat):
        """Elements that the forward pass leaves for the backward pass."""
        back = jax.eval_shape(
            lambda p: jax.vjp(lambda p: transformer.hidden(p, arch, ids, lengths, remat=remat), p)[1], params
        )
        return sum(x.size for x in jax.tree.leaves(back))

    # All but the last matrix, whose product is only added to the stream.
    products = (arch.heads + 2 * arch.kv_heads) * arch.head_size + arch.width + 2 * arch.hidden
    assert kept('projections') - kept(True) == arch.layers * ids.size * products
    assert kept(False) > kept('projections')


def test_an_unknown_remat_policy_is_refused(small):
    arch, params = small
    with pytest.raises(ConfigError, match="remat 'everything' is no policy; there are nothing, projections"):
        transformer.hidden(params, arch, jnp.zeros((1, 3), jnp.int32), jnp.array([3]), remat='everything')


def test_gradients_are_finite_with_empty_rows(small):
    arch, params = small
    ids, lengths = tokens(arch, 3, 12), jnp.array([12, 1, 0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient(params, arch, ids, lengths)))


def test_bfloat16_stays_near_float32_and_keeps_the_gradients_type(small):
    arch, params = small
    ids, lengths = tokens(arch, 3, 12), jnp.array([12, 12, 12])
    exact = hidden(params, arch, ids, lengths)
    rough = hidden(params, arch, ids, lengths, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    assert 0 < float(jnp.abs(exact - rough).mean()) < 0.05
    slopes = gradient(params, arch, ids, lengths, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(slopes)} == {jnp.dtype('float32')}


def test_eps_counts_where_activations_are_small():
    x = jnp.full((1, 4), 1e-3)
    for eps in (1e-6, 1e-5):
        np.testing.assert_allclose(transformer.rms_norm(x, jnp.ones(4), eps), 1e-3 / np.sqrt(1e-6 + eps), rtol=1e-5)


def test_query_and_key_norms_are_per_head(small):
    arch, params = small
    ids, lengths = tokens(arch, 1, 9), jnp.array([9])
    scaled = params['layers']['query'].at[:, :, : arch.head_size].multiply(10.0)  # the first head of each layer
    changed = {**params, 'layers': {**params['layers'], 'query': scaled}}
    before, after = (full_logits(p, arch, ids, lengths) for p in (params, changed))
    assert difference(before, after) <= 1e-4


@pytest.mark.parametrize('family', FAMILIES)
def test_init_follows_the_specs(make_arch, family):
    arch = make_arch(**{**FAMILIES[family], 'vocab': 512, 'width': 64, 'hidden': 128})
    params = transformer.init(arch, jax.random.key(0))
    for path, spec in leaves(abstract(arch)):
        value = functools.reduce(lambda tree, key: tree[key], path, params)
        assert value.shape == spec.shape
        if spec.init == 'normal':
            assert abs(float(value.std()) / spec.std - 1) < 0.05
        else:
            assert (value == {'ones': 1, 'zeros': 0}[spec.init]).all()
    assert difference(params['layers']['query'][0], params['layers']['query'][1]) > 0.01


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_row_is_the_same_alone_and_among_others(small):
    arch, params = small
    ids = tokens(arch, 3, 24)
    plan = {'first': (5, 2, 7), 'observed': (3, 3, 3), 'second': (4, 4, 4), 'slots': 24, 'chunk': 3}
    together, lengths, _ = decode_rows(params, arch, ids, prompts=(8, 3, 5), **plan)
    mine = {key: value[1:2] if isinstance(value, tuple) else value for key, value in plan.items()}
    alone, _, _ = decode_rows(params, arch, ids[1:2], prompts=(3,), **mine)
    assert difference(together[1, : lengths[1]], alone[0, : lengths[1]]) <= 1e-5


def test_extend_reads_only_the_slots_within_reach(small):
    arch, params = small
    layered, ids = unstack(params, arch), tokens(arch, 2, 6)
    cache = transformer.init_cache(arch, 2, 50)
    start, count = jnp.array([0, 0]), jnp.array([6, 4])
    whole, _ = extend(layered, arch, cache, ids, start, count)
    short, _ = extend(layered, arch, cache, ids, start, count, reach=6)
    assert difference(whole[0], short[0]) <= 1e-5 and difference(whole[1, :4], short[1, :4]) <= 1e-5
    blind, _ = extend(layered, arch, cache, ids, start, count, reach=2)
    assert difference(whole[0], blind[0]) > 1e-2


def test_writes_behind_the_count_are_dropped(small):
    arch, params = small
    layered = unstack(params, arch)
    old = jax.tree.map(lambda x: x + 7.0, transformer.init_cache(arch, 2, 8))
    _, new = extend(layered, arch, old, tokens(arch, 2, 5), jnp.array([2, 0]), jnp.array([3, 0]))
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert (before[0, :, :2] == after[0, :, :2]).all() and (before[0, :, 5:] == after[0, :, 5:]).all()
        assert (before[0, :, 2:5] != after[0, :, 2:5]).any(-1).all()
        assert (before[1] == after[1]).all()


def test_writes_past_the_end_are_dropped_never_moved(small):
    arch, params = small
    layered = unstack(params, arch)
    old = jax.tree.map(lambda x: x + 7.0, transformer.init_cache(arch, 1, 8))
    _, new = extend(layered, arch, old, tokens(arch, 1, 5), jnp.array([6]), jnp.array([5]))
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert (before[:, :, :6] == after[:, :, :6]).all()
        assert (before[:, :, 6:] != after[:, :, 6:]).any(-1).all()


def test_merge_takes_the_counted_columns_and_drops_what_is_past_the_end(make_arch):
    arch = make_arch(layers=1)
    cache = transformer.init_cache(arch, 3, 6)
    columns = jnp.arange(1.0, 5.0)[None, None, :, None]
    staging = jax.tree.map(lambda x: x + columns, transformer.init_staging(arch, 3, 4))
    merged = transformer.merge(cache, staging, jnp.array([1, 4, 2]), jnp.array([3, 4, 0]))
    slots = merged.k[0][:, 0, :, 0]
    np.testing.assert_array_equal(slots, [[0, 1, 2, 3, 0, 0], [0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 0]])


def test_stale_slots_are_never_seen(small):
    arch, params = small
    layered = unstack(params, arch)
    clean = transformer.init_cache(arch, 1, 12)
    dirty = jax.tree.map(lambda x: x + 1e3, clean)
    ids, start = tokens(arch, 1, 4), jnp.array([0])
    outputs = []
    for empty in (clean, dirty):
        _, cache = extend(layered, arch, empty, ids, start, jnp.array([3]))
        staging = jax.tree.map(lambda x, c=cache: x + c.k[0][0, 0, 11, 0], transformer.init_staging(arch, 1, 3))
        outputs.append(decode_step(layered, arch, cache, staging, 0, ids[:, 3], jnp.array([3]))[0])
    assert difference(*outputs) == 0


def test_a_chunk_copies_no_cache(make_arch):
    arch = make_arch(layers=2, vocab=128, width=64, heads=4, kv_heads=2, head_size=32)
    rows, slots, steps = 16, 512, 8
    layered = jax.eval_shape(lambda: transformer.unstack(transformer.init(arch, jax.random.key(0)), arch))
    cache, staging = (
        jax.eval_shape(functools.partial(transformer.init_cache, arch, rows, size)) for size in (slots, steps)
    )

    def chunk(layered, cache, staging, ids, start):
        def body(step, carry):
            staging, ids = carry
            states, staging = transformer.decode_step(layered, arch, cache, staging, step, ids, start)
            return staging, jnp.argmax(logits(layered, arch, states), -1).astype(jnp.int32)

        staging, ids = jax.lax.fori_loop(0, steps, body, (staging, ids))
        return transformer.merge(cache, staging, start, jnp.full_like(start, steps)), ids

    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    memory = jax.jit(chunk, donate_argnums=1).lower(layered, cache, staging, row, row).compile().memory_analysis()
    one_layer = 2 * rows * arch.kv_heads * slots * arch.head_size * 4
    assert memory.alias_size_in_bytes == arch.layers * one_layer  # the cache is updated in place
    assert memory.temp_size_in_bytes < one_layer / 2  # scores and staging, not a copy of a layer's cache


def test_unstack_gives_each_layer_and_casts(small):
    arch, params = small
    layered = unstack(params, arch, jnp.bfloat16)
    assert len(layered['layers']) == arch.layers
    assert {x.dtype for x in jax.tree.leaves(layered)} == {jnp.dtype('bfloat16')}
    assert difference(layered['layers'][1]['up'], params['layers']['up'][1].astype(jnp.bfloat16)) == 0
