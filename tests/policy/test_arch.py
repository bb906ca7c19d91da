import jax
import pytest

from sesa_jax.policy.arch import Architecture, ModelError, abstract, hf_names, leaves, parameter_count, shapes


def test_config_round_trip(make_arch):
    arch = make_arch(tied=False, rope_theta=5e5)
    assert Architecture.from_config(arch.to_config(), 'x') == arch


def test_a_head_size_that_is_not_width_over_heads(make_arch):
    config = make_arch(width=2560, heads=32, kv_heads=8, head_size=128).to_config()
    specs = dict(leaves(abstract(Architecture.from_config(config, 'x'))))
    assert specs['layers', 'query'].hf_shape == (4096, 2560)
    assert specs['layers', 'key'].hf_shape == specs['layers', 'value'].hf_shape == (1024, 2560)
    assert specs['layers', 'output'].hf_shape == (2560, 4096)


def test_an_absent_head_size_is_width_over_heads(make_arch):
    config = make_arch(width=96, heads=6).to_config()
    del config['head_dim']
    assert Architecture.from_config(config, 'x').head_size == 16


def test_older_keys_of_rope_are_read(make_arch):
    config = make_arch(rope_theta=1e6).to_config()
    del config['rope_parameters']
    assert Architecture.from_config({**config, 'rope_scaling': None}, 'x').rope_theta == 1e6


def test_newer_keys_of_rope_are_read(make_arch):
    config = make_arch(rope_theta=1e6).to_config()
    del config['rope_theta']
    assert Architecture.from_config(config, 'x').rope_theta == 1e6


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'architectures': ['MambaForCausalLM']}, 'MambaForCausalLM is not supported; supported: Qwen3ForCausalLM'),
        ({'architectures': None}, 'architecture none is not supported'),
        ({'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, "rope_scaling of type 'yarn'"),
        ({'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5}}, "rope_parameters of type 'llama3'"),
        ({'rope_parameters': None, 'rope_theta': None}, 'rope_theta must be a number'),
        ({'hidden_size': 'big'}, "hidden_size must be a number, found 'big'"),
        ({'num_hidden_layers': 0}, 'num_hidden_layers must be a positive int, found 0'),
        ({'num_key_value_heads': 4}, '6 attention heads cannot share 4 key-value heads'),
        ({'head_dim': 7}, 'head_dim 7 must be even'),
        ({'attention_bias': True}, 'attention_bias = True is not supported'),
        ({'use_sliding_window': True}, 'use_sliding_window = True is not supported'),
        ({'hidden_act': 'gelu'}, "hidden_act = 'gelu' is not supported"),
        ({'quantization_config': {'bits': 4}}, 'quantised weights are not supported'),
    ],
)
def test_what_the_forward_pass_lacks_is_refused_by_name(make_arch, change, message):
    with pytest.raises(ModelError) as caught:
        Architecture.from_config({**make_arch().to_config(), **change}, 'here/config.json')
    assert message in str(caught.value)
    assert str(caught.value).startswith('here/config.json: ')


def test_names_cover_every_parameter_once(make_arch):
    arch = make_arch(tied=False)
    places = [(path, layer) for path, layer, _ in hf_names(arch).values()]
    assert len(places) == len(set(places)) == 11 * arch.layers + 3
    assert {path for path, _ in places} == {path for path, _ in leaves(abstract(arch))}


def test_a_tied_model_has_no_head(make_arch):
    assert 'head' not in abstract(make_arch(tied=True))
    assert abstract(make_arch(tied=False))['head'].shape == (40, 97)


def test_the_shipped_shape_has_this_many_parameters(make_arch):
    arch = make_arch(vocab=1024, layers=4, width=128, hidden=384, heads=4, kv_heads=2, head_size=32)
    assert parameter_count(arch) == 918_912
    assert sum(x.size for x in jax.tree.leaves(shapes(arch, 'float32'))) == 918_912
