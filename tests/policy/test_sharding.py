import dataclasses
import types

import jax
import pytest
from jax.sharding import PartitionSpec

from sesa_jax.policy import sharding
from sesa_jax.policy.arch import ModelError, Spec, abstract
from sesa_jax.policy.sharding import Rule


def mesh_of(data, model=1):
    """The sizes of a mesh of more devices than this process has: `_partition` reads nothing else of it."""
    return types.SimpleNamespace(shape={'data': data, 'model': model})


def spec(shape, axes):
    return Spec(shape, axes, 'normal', 0.1, 'x', False)


def partition(tensor, rules=sharding.TRAIN, data=8):
    return sharding._partition(('layers', 'up'), tensor, rules, mesh_of(data))


def test_training_splits_the_width_over_the_data_axis(make_arch):
    tree = abstract(make_arch(width=64, tied=False))
    parts = {name: partition(tree['layers'][name]) for name in ('query', 'output', 'down', 'mlp_norm')}
    assert parts == {
        'query': PartitionSpec(None, 'data', None),
        'output': PartitionSpec(None, None, 'data'),
        'down': PartitionSpec(None, None, 'data'),
        'mlp_norm': PartitionSpec(None, None),
    }
    assert partition(tree['embed']) == PartitionSpec(None, 'data')
    assert partition(tree['head']) == PartitionSpec('data', None)


def test_a_rule_may_keep_what_does_not_divide(make_arch):
    assert partition(spec((30, 4), ('width', 'hidden'))) == PartitionSpec(None, None)


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


def test_more_devices_than_present_are_refused():
    with pytest.raises(ModelError, match='a mesh of 512 devices was asked for, but'):
        sharding.make_mesh(512)


def test_the_mesh_has_both_axes():
    assert dict(sharding.make_mesh(1).shape) == {'data': 1, 'model': 1}


def test_rows_are_padded_to_a_multiple():
    assert [sharding.padded_rows(n, mesh_of(8)) for n in (1, 8, 9)] == [8, 8, 16]


def test_rules_are_values():
    assert dataclasses.replace(Rule('data'), or_whole=True) == Rule('data', True)
