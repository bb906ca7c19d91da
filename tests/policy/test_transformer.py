import dataclasses
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
    grouped_tokens,
    hidden,
    logits,
    merge,
    prefill,
    tokens,
    unstack,
    with_prompts,
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
    monkeypatch.setattr(attention, 'QUERY_BLOCK', 1000)
    whole = jax.jit(lambda params: transformer.hidden(params, arch, ids, lengths))(params)
    assert difference(blocked, whole) <= 1e-5


@pytest.mark.parametrize('policy', ['nothing', 'projections'])
def test_remat_changes_no_gradient(small, policy):
    arch, params = small
    ids, lengths = tokens(arch, 3, 12), jnp.array([12, 7, 1])
    plain, again = (gradient(params, arch, ids, lengths, remat=remat) for remat in ('none', policy))
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
    assert kept('projections') - kept('nothing') == arch.layers * ids.size * products
    assert kept('none') > kept('projections')


def test_an_unknown_remat_policy_is_refused(small):
    arch, params = small
    with pytest.raises(ConfigError, match="remat 'everything' is no policy; there are none, nothing, projections"):
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


# --- the slots --------------------------------------------------------------------------------------------------------


def written(block):
    """What the first layer's first head has at each place, as one number: f32[R, S]."""
    return block.k[0][:, 0, :, 0]


def changes(before, after):
    """bool[R, S]: whether a place of a block was written, which holds for keys and values of all layers alike."""
    all_of = [(a != b).any((1, 3)) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert all((one == all_of[0]).all() for one in all_of)
    return np.asarray(all_of[0])


def filled(arch, value, groups, group_size, prompt, blocks):
    return jax.tree.map(lambda x: x + value, transformer.init_slots(arch, groups, group_size, prompt, blocks))


@pytest.mark.parametrize('group_size', [1, 3])
def test_rows_of_a_group_see_one_prompt_and_their_own_tokens(small, group_size):
    """At every own token the states of a full pass; a group may be without a prompt, and a row without observations."""
    arch, params = small
    prompts, rows = (8, 0, 5), 3 * group_size
    plan = {'first': [5, 2, 7] * group_size, 'observed': [3, 6, 0] * group_size, 'second': [4] * rows}
    ids = grouped_tokens(arch, prompts, group_size, 24)
    states, own, _ = decode_rows(
        params, arch, ids, prompts=prompts, group_size=group_size, **plan, blocks=(3, 11), chunk=3
    )
    whole = hidden(params, arch, ids, jnp.full(rows, 24))
    for row, places in enumerate(own):
        assert places.stop - places.start == sum(counts[row] for counts in plan.values())
        assert difference(states[row, places], whole[row, places]) <= 1e-4


def test_a_row_is_the_same_alone_and_among_others(small):
    arch, params = small
    ids = grouped_tokens(arch, (8, 3), 3, 24)
    plan = {'first': (5, 2, 7, 1, 4, 3), 'observed': (3, 3, 0, 3, 2, 3), 'second': (4,) * 6}
    both = {'blocks': (6, 9), 'chunk': 3}
    together, own, _ = decode_rows(params, arch, ids, prompts=(8, 3), group_size=3, **plan, **both)
    mine = {key: value[4:5] for key, value in plan.items()}
    alone, (places,), _ = decode_rows(params, arch, ids[4:5], prompts=(3,), **mine, **both)
    assert places == own[4]
    assert difference(together[4, places], alone[0, places]) <= 1e-5


def test_a_prompt_reaches_the_rows_of_its_group_alone(small):
    arch, params = small
    layered, ids, prompt, own = unstack(params, arch), tokens(arch, 4, 3), jnp.array([4, 4]), jnp.zeros(4, jnp.int32)
    staging, outputs = transformer.init_cache(arch, 4, 2), []
    given = tokens(arch, 2, 4)
    for prompts in (given, given.at[1, 2].add(1)):
        slots = with_prompts(layered, arch, transformer.init_slots(arch, 2, 2, 5, (4,)), prompts, prompt)
        step, _ = decode_step(layered, arch, slots, staging, 0, ids[:, 0], prompt, own)
        more, _ = extend(layered, arch, slots, jnp.array([3, 1, 2]), ids[:3], jnp.full(3, 4), own[:3], jnp.full(3, 3))
        outputs.append((step, more))
    step, more = (np.abs(a - b).max(-1) for a, b in zip(*jax.device_get(outputs), strict=True))
    assert (step[:2] == 0).all() and (step[2:] > 1e-3).all()
    assert (more[1] == 0).all() and (more[[0, 2]] > 1e-3).all()


def test_prefill_gives_what_extend_writes(small):
    arch, params = small
    layered, ids, count = unstack(params, arch), tokens(arch, 2, 6), jnp.array([6, 4])
    zeros = jnp.zeros(2, jnp.int32)
    _, slots = extend(
        layered, arch, transformer.init_slots(arch, 2, 1, 3, (6,)), jnp.arange(2), ids, zeros, zeros, count
    )
    for a, b in zip(jax.tree.leaves(prefill(layered, arch, ids, count)), jax.tree.leaves(slots.own[0]), strict=True):
        assert difference(a[0], b[0]) <= 1e-5 and difference(a[1, :, :4], b[1, :, :4]) <= 1e-5


def test_only_the_blocks_in_use_need_to_be_passed(small):
    arch, params = small
    layered, ids, prompt, start = unstack(params, arch), tokens(arch, 2, 3), jnp.array([5, 4]), jnp.array([1, 3])
    staging, results = transformer.init_cache(arch, 2, 2), []
    slots = with_prompts(layered, arch, filled(arch, 7.0, 2, 1, 6, (2, 5, 9)), tokens(arch, 2, 5), prompt)
    rows, zeros, count = jnp.arange(2), jnp.zeros(2, jnp.int32), jnp.array([3, 2])
    _, slots = extend(layered, arch, slots, rows, tokens(arch, 2, 3, 6), prompt, zeros, start)
    for blocks in (3, 2, 1):
        passed = dataclasses.replace(slots, own=slots.own[:blocks])
        step, _ = decode_step(layered, arch, passed, staging, 0, ids[:, 0], prompt, start)
        more, new = extend(layered, arch, passed, rows, ids, prompt, start, count)
        results.append((step, more[0], more[1, :2], new.own[:2]))
    whole, fewer, too_few = results
    assert max(map(difference, jax.tree.leaves(whole), jax.tree.leaves(fewer))) <= 1e-5
    # Row 1 has a token in the second block, and misses it.
    assert difference(whole[0][1], too_few[0][1]) > 1e-2 and difference(whole[2], too_few[2]) > 1e-2
    assert difference(whole[0][0], too_few[0][0]) <= 1e-5


def test_extend_writes_the_counted_tokens_of_its_rows_and_nothing_else(small):
    """Row 3 gets three tokens that straddle the blocks, row 0 none; row 4 is padding."""
    arch, params = small
    old = filled(arch, 7.0, 2, 2, 3, (3, 5))
    rows, count = jnp.array([4, 3, 0, 5]), jnp.array([5, 3, 0, 4])
    _, new = extend(
        unstack(params, arch), arch, old, rows, tokens(arch, 4, 5), jnp.full(4, 2), jnp.array([0, 2, 1, 1]), count
    )
    assert not changes(old.prompt, new.prompt).any()
    (a, b), none = (changes(*both) for both in zip(old.own, new.own, strict=True)), [0] * 5
    np.testing.assert_array_equal(a, [none[:3], none[:3], none[:3], [0, 0, 1]])
    np.testing.assert_array_equal(b, [none, none, none, [1, 1, 0, 0, 0]])


def test_writes_past_the_end_are_dropped_never_moved(small):
    arch, params = small
    old = filled(arch, 7.0, 2, 1, 3, (3, 5))
    _, new = extend(
        unstack(params, arch), arch, old, jnp.arange(2), tokens(arch, 2, 5), jnp.full(2, 2), jnp.array([6, 9]),
        jnp.array([5, 5]),
    )  # fmt: skip
    a, b = (changes(*both) for both in zip(old.own, new.own, strict=True))
    assert not a.any()
    np.testing.assert_array_equal(b, [[0, 0, 0, 1, 1], [0] * 5])


def test_merge_takes_the_counted_columns_and_drops_what_is_past_the_end(make_arch):
    arch = make_arch(layers=1)
    columns = jnp.arange(1.0, 5.0)[None, None, :, None]
    staging = jax.tree.map(lambda x: x + columns, transformer.init_cache(arch, 4, 4))
    slots = transformer.init_slots(arch, 2, 2, 3, (2, 4))
    merged = merge(slots, staging, jnp.array([1, 4, 2, 0]), jnp.array([3, 4, 0, 1]))
    np.testing.assert_array_equal(written(merged.own[0]), [[0, 1], [0, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(written(merged.own[1]), [[2, 3, 0, 0], [0, 0, 1, 2], [0] * 4, [0] * 4])
    assert (written(merged.prompt) == 0).all()
    assert all((a == a[:, :1, :, :1]).all() for a in jax.tree.leaves(merged))


def test_what_lies_in_unused_places_is_never_seen(small):
    """Behind a prompt and in its padding, behind the own tokens, behind the observed, and in staging."""
    arch, params = small
    layered, given, lengths = unstack(params, arch), tokens(arch, 2, 5), jnp.array([3, 5])
    ids, rows = tokens(arch, 4, 4, 6), jnp.array([2, 4, 0])
    outputs = []
    for garbage in (0.0, 1e3):
        slots = filled(arch, garbage, 2, 2, 6, (2, 3, 4))
        slots = with_prompts(layered, arch, slots, given.at[0, 3:].set(garbage > 0), lengths)
        count = jnp.array([3, 2, 2])
        observed = ids[:3].at[2, 2:].set(garbage > 0)
        start = jnp.zeros(4, jnp.int32)
        more, slots = extend(layered, arch, slots, rows, observed, lengths[jnp.array([1, 0, 0])], start[:3], count)
        start = start.at[rows].set(count, mode='drop')
        staging = jax.tree.map(lambda x, g=garbage: x + g, transformer.init_cache(arch, 4, 3))
        first, staging = decode_step(layered, arch, slots, staging, 0, ids[:, 2], lengths, start)
        second, _ = decode_step(layered, arch, slots, staging, 1, ids[:, 3], lengths, start)
        outputs.append((more[0, :3], more[2, :2], first, second))
    assert max(map(difference, *outputs)) == 0


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_slots_keep_their_type_and_states_are_float32(small, dtype):
    arch, params = small
    row = jnp.zeros(2, jnp.int32)

    def passes(params):
        layered = transformer.unstack(params, arch, dtype)
        prompt = transformer.prefill(layered, arch, jnp.zeros((1, 3), jnp.int32), row[:1], dtype)
        slots = dataclasses.replace(transformer.init_slots(arch, 1, 2, 3, (4, 4), dtype), prompt=prompt)
        more, slots = transformer.extend(layered, arch, slots, row, jnp.zeros((2, 3), jnp.int32), row, row, row)
        staging = transformer.init_cache(arch, 2, 2, dtype)
        step, staging = transformer.decode_step(layered, arch, slots, staging, 0, row, row[:1], row)
        return (more, step), transformer.merge(slots, staging, row, row)

    states, slots = jax.eval_shape(passes, params)
    assert {x.dtype for x in states} == {jnp.dtype('float32')}
    assert {x.dtype for x in jax.tree.leaves(slots)} == {jnp.dtype(dtype)}


@pytest.fixture(scope='module')
def big(make_arch):
    """Shapes: (arch, layered, slots of 4 groups of 4 rows, bytes of a layer's prompts, bytes of its own tokens)."""
    arch = make_arch(layers=2, vocab=128, width=64, heads=4, kv_heads=2, head_size=32)
    layered = jax.eval_shape(lambda: transformer.unstack(transformer.init(arch, jax.random.key(0)), arch))
    slots = jax.eval_shape(lambda: transformer.init_slots(arch, 4, 4, 512, (256, 256)))
    prompt, own = (4 * sum(x.size for x in jax.tree.leaves(part)) // arch.layers for part in (slots.prompt, slots.own))
    return arch, layered, slots, prompt, own


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_a_chunk_copies_no_slots(big):
    arch, layered, slots, prompt_layer, own_layer = big
    steps = 8

    def chunk(layered, slots, ids, prompt_length, start):
        def body(step, carry):
            staging, ids = carry
            states, staging = transformer.decode_step(layered, arch, slots, staging, step, ids, prompt_length, start)
            return staging, jnp.argmax(logits(layered, arch, states), -1).astype(jnp.int32)

        staging, ids = jax.lax.fori_loop(0, steps, body, (transformer.init_cache(arch, 16, steps), ids))
        return transformer.merge(slots, staging, start, jnp.full_like(start, steps)), ids

    lowered = jax.jit(chunk, donate_argnums=1).lower(layered, slots, ints(16), ints(4), ints(16))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == arch.layers * (prompt_layer + own_layer)  # the slots are updated in place
    assert memory.temp_size_in_bytes < prompt_layer  # scores and staging, not a copy of anything


def test_extend_copies_its_own_rows_alone(big):
    arch, layered, slots, prompt_layer, own_layer = big

    def two_rows(layered, slots, rows, ids, prompt_length, start, count):
        return transformer.extend(layered, arch, slots, rows, ids, prompt_length, start, count)

    lowered = jax.jit(two_rows, donate_argnums=1).lower(layered, slots, ints(2), ints(2, 4), ints(2), ints(2), ints(2))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == arch.layers * (prompt_layer + own_layer)
    assert memory.temp_size_in_bytes < own_layer / 2


def test_unstack_gives_each_layer_and_casts(small):
    arch, params = small
    layered = unstack(params, arch, jnp.bfloat16)
    assert len(layered['layers']) == arch.layers
    assert {x.dtype for x in jax.tree.leaves(layered)} == {jnp.dtype('bfloat16')}
    assert difference(layered['layers'][1]['up'], params['layers']['up'][1].astype(jnp.bfloat16)) == 0
