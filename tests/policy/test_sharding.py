import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from devices import fake_devices
from jax.sharding import PartitionSpec

from sesa_jax.policy import sharding
from sesa_jax.policy.arch import ModelError, Spec, abstract
from sesa_jax.policy.sharding import Rule


def mesh_of(data, model=1):
    """The sizes of a mesh of more devices than this process has: `_partition` reads nothing else of it."""
    return types.SimpleNamespace(shape={'data': data, 'model': model})


def spec(shape, axes):
    return Spec(shape, axes, 'normal', 0.1, 'x', False)


def partition(tensor, rules=sharding.TRAIN, data=8, model=1):
    return sharding._partition(('layers', 'up'), tensor, rules, mesh_of(data, model))


def test_training_splits_the_width_over_the_data_axis(make_arch):
    tree = abstract(make_arch(width=64, tied=False))
    parts = {name: partition(tree['layers'][name]) for name in ('query', 'output', 'down', 'mlp_norm')}
    assert parts == {
        'query': PartitionSpec(None, 'data'),
        'output': PartitionSpec(None, None, 'data'),
        'down': PartitionSpec(None, None, 'data'),
        'mlp_norm': PartitionSpec(),
    }
    assert partition(tree['embed']) == PartitionSpec(None, 'data')
    assert partition(tree['head']) == PartitionSpec('data')


def test_a_rule_may_keep_what_does_not_divide(make_arch):
    assert partition(spec((30, 4), ('width', 'hidden'))) == PartitionSpec()


def test_a_mesh_axis_of_one_device_is_not_named():
    assert partition(spec((64, 4), ('width', 'hidden')), data=1) == PartitionSpec()


def test_without_such_a_rule_it_is_refused_with_the_sizes():
    rules = {'width': Rule('data')}
    with pytest.raises(
        ModelError, match=r"layers/up \[30\]: axis 'width' of size 30 cannot be split over the 8 devices"
    ):
        partition(spec((30,), ('width',)), rules)


def test_a_mesh_axis_used_twice_is_refused():
    with pytest.raises(ModelError, match=r"layers/up \[16, 16\]: two of its axes .* over mesh axis 'data'"):
        partition(spec((16, 16), ('width', 'width')))


def test_an_axis_without_a_rule_is_refused():
    with pytest.raises(ModelError, match=r"layers/up \[16, 3\]: no rule for its axis 'experts'"):
        partition(spec((16, 3), ('width', 'experts')))


def test_a_rule_for_a_mesh_axis_that_is_not_there_is_refused():
    with pytest.raises(ModelError, match="names mesh axis 'expert'"):
        partition(spec((16,), ('width',)), {'width': Rule('expert')})


def test_every_parameter_has_a_sharding_in_both_layouts(make_arch):
    tree, mesh = abstract(make_arch(tied=False)), sharding.make_mesh(1)
    for rules in (sharding.TRAIN, sharding.DECODE):
        placed = sharding.shardings(tree, rules, mesh)
        assert len(jax.tree.leaves(placed)) == 14
        assert placed['layers']['up'].mesh is mesh


def test_decoding_splits_heads_hidden_and_vocabulary_over_the_model_axis(make_arch):
    tree = abstract(make_arch(vocab=64, tied=False))
    parts = {
        name: sharding._partition(('layers', name), tree['layers'][name], sharding.DECODE, mesh_of(4, 2))
        for name in ('query', 'value', 'output', 'up', 'down', 'mlp_norm')
    }
    assert parts == {
        'query': PartitionSpec(None, None, 'model'),
        'value': PartitionSpec(None, None, 'model'),
        'output': PartitionSpec(None, 'model'),
        'up': PartitionSpec(None, None, 'model'),
        'down': PartitionSpec(None, 'model'),
        'mlp_norm': PartitionSpec(),
    }
    assert partition(tree['head'], sharding.DECODE, 4, 2) == PartitionSpec(None, 'model')


def test_tensor_parallelism_takes_what_heads_and_devices_allow(make_arch, monkeypatch):
    monkeypatch.setattr(sharding, 'make_mesh', lambda count, model: (count, model))
    qwen = make_arch(heads=28, kv_heads=4)
    assert [sharding.decode_mesh(qwen, n) for n in (1, 2, 6, 8, 16)] == [(1, 1), (2, 2), (6, 2), (8, 4), (16, 4)]
    assert sharding.decode_mesh(qwen, 8, 2) == (8, 2)


def test_tensor_parallelism_that_cuts_a_head_is_refused_with_the_sizes(make_arch):
    with pytest.raises(
        ModelError, match=r'--tensor-parallel 8: 28 query and 4 kv heads .* the most for 8 devices is 4'
    ):
        sharding.decode_mesh(make_arch(heads=28, kv_heads=4), 8, 8)


def test_an_uneven_mesh_is_refused():
    with pytest.raises(ModelError, match='1 devices cannot be split into groups of 2'):
        sharding.make_mesh(1, 2)


def test_offload_and_onload_keep_values_and_layout():
    placed = jax.device_put({'a': np.arange(6.0)}, sharding.replicated(sharding.make_mesh(1)))
    away = sharding.offload(placed)
    assert (away['a'].sharding.memory_kind, away['a'].sharding.spec) == ('pinned_host', placed['a'].sharding.spec)
    back = sharding.onload(away)
    assert back['a'].sharding == placed['a'].sharding
    np.testing.assert_array_equal(back['a'], np.arange(6.0))


def test_more_devices_than_present_are_refused():
    with pytest.raises(ModelError, match='a mesh of 512 devices was asked for, but'):
        sharding.make_mesh(512)


def test_the_mesh_has_both_axes():
    assert dict(sharding.make_mesh(1).shape) == {'data': 1, 'model': 1}


def test_rows_are_padded_to_a_multiple():
    assert [sharding.padded_rows(n, mesh_of(8)) for n in (1, 8, 9)] == [8, 8, 16]


def test_rules_are_values():
    assert dataclasses.replace(Rule('data'), or_whole=True) == Rule('data', True)


EIGHT = """
import jax, jax.numpy as jnp, numpy as np
from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract, shapes

arch = Architecture(97, 1, 64, 56, 4, 2, 12, 1e4, 1e-6, tied=False, max_positions=64)
ids = jax.random.randint(jax.random.key(1), (16, 9), 0, 97)
lengths = jnp.arange(16) % 9 + 1
rng = np.random.default_rng(0)
host = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype('float32'), shapes(arch, 'float32'))
results = []
for devices in (1, 8):
    mesh = sharding.make_mesh(devices)
    placed = sharding.shardings(abstract(arch), sharding.TRAIN, mesh)
    rows = sharding.rows(mesh)
    params = jax.device_put(host, placed)
    up = params['layers']['up']
    assert up.addressable_shards[0].data.shape == (1, 64 // devices, 56), up.sharding

    def forward(params, ids, lengths):
        states = transformer.hidden(params, arch, ids, lengths, rows_sharding=rows)
        return transformer.logits(params, arch, states)

    def loss(params, ids, lengths):
        return jnp.square(forward(params, ids, lengths)).mean()

    results.append(jax.device_get(jax.jit(jax.value_and_grad(loss), out_shardings=(None, placed))(
        params, jax.device_put(ids, rows), jax.device_put(lengths, rows))))
one, eight = (jax.tree.leaves(result) for result in results)
for a, b in zip(one, eight, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max())
np.testing.assert_allclose(one[0], eight[0], rtol=1e-5)
print('equal', len(one))
"""


def run_on_eight(*command):
    done = subprocess.run([sys.executable, *command], env=fake_devices(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.devices
def test_loss_and_gradients_on_eight_devices_equal_those_on_one():
    assert run_on_eight('-c', EIGHT).endswith('equal 15')


@pytest.mark.devices
def test_logits_are_the_same_in_every_layout():
    found = json.loads(run_on_eight(str(pathlib.Path(__file__).with_name('layout_devices.py'))))
    assert len(found) == 12
    for name, layout in found.items():
        assert layout['difference'] <= 1e-5, name
    assert found['28/4 TPauto']['mesh'] == {'data': 2, 'model': 4}  # Qwen2.5-7B's heads, by themselves
    assert found['28/4 TPauto']['query'] == [64, 56]  # a device holds a quarter of the query matrix
    assert found['8/8 TPauto']['mesh'] == {'data': 1, 'model': 8}
    assert 'all-reduce' in found['8/8 TP8']['collectives']
