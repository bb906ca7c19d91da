import jax
import pytest

from sesa_jax.policy.arch import (
    Architecture,
    ModelError,
    RopeScaling,
    abstract,
    hf_names,
    leaves,
    parameter_count,
    shapes,
)

SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)
FAMILIES = {
    'qwen3': {},
    'qwen2': {'family': 'qwen2', 'qkv_bias': True, 'qk_norm': False},
    'llama': {'family': 'llama', 'qk_norm': False, 'rope_scaling': SCALING},
}
LLAMA3 = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
}


@pytest.mark.parametrize('family', FAMILIES)
def test_config_round_trip(make_arch, family):
    arch = make_arch(tied=False, rope_theta=5e5, **FAMILIES[family])
    assert Architecture.from_config(arch.to_config(), 'x') == arch


@pytest.mark.parametrize(
    ('family', 'kinds', 'per_layer'),
    [('qwen3', {'query_norm', 'key_norm'}, 11), ('qwen2', {'query_bias', 'key_bias', 'value_bias'}, 12),
     ('llama', set(), 9)],
)  # fmt: skip
def test_the_parameters_of_each_family(make_arch, family, kinds, per_layer):
    layer = abstract(make_arch(**FAMILIES[family]))['layers']
    assert len(layer) == per_layer
    assert {name for name in layer if name.startswith(('query_', 'key_', 'value_'))} == kinds


def test_biases_start_at_zero_and_live_on_the_heads(make_arch):
    layer = abstract(make_arch(**FAMILIES['qwen2']))['layers']
    assert {spec.init for name, spec in layer.items() if name.endswith('_bias')} == {'zeros'}
    assert (layer['query_bias'].axes, layer['key_bias'].axes) == (('layers', 'heads'), ('layers', 'kv_heads'))
    assert layer['value_bias'].hf == 'model.layers.{}.self_attn.v_proj.bias'


def test_switches_that_are_not_of_the_family_are_refused(make_arch):
    with pytest.raises(ModelError, match='family llama has qkv_bias False and qk_norm False, found False and True'):
        make_arch(family='llama')


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


def test_the_eps_of_the_norms_is_read(make_arch):
    assert Architecture.from_config({**make_arch().to_config(), 'rms_norm_eps': 1e-5}, 'x').eps == 1e-5


def test_older_keys_of_rope_are_read(make_arch):
    config = make_arch(rope_theta=1e6).to_config()
    del config['rope_parameters']
    assert Architecture.from_config({**config, 'rope_scaling': None}, 'x').rope_theta == 1e6


def test_newer_keys_of_rope_are_read(make_arch):
    config = make_arch(rope_theta=1e6).to_config()
    del config['rope_theta']
    assert Architecture.from_config(config, 'x').rope_theta == 1e6


@pytest.mark.parametrize('table', [LLAMA3, {**LLAMA3, 'type': 'llama3', 'rope_type': 'llama3'}])
def test_llama3_scaling_is_read_from_either_place(make_arch, table):
    config = make_arch(rope_theta=5e5).to_config()
    older = {**config, 'rope_scaling': table}
    del older['rope_parameters']
    newer = {**config, 'rope_parameters': {**table, 'rope_theta': 5e5}}
    del newer['rope_theta']
    for found in (older, newer):
        arch = Architecture.from_config(found, 'x')
        assert (arch.rope_theta, arch.rope_scaling) == (5e5, SCALING)


def test_the_oldest_name_of_the_rope_type_is_read(make_arch):
    table = {'type': 'llama3', **{key: value for key, value in LLAMA3.items() if key != 'rope_type'}}
    config = {**make_arch().to_config(), 'rope_scaling': table, 'rope_parameters': None}
    assert Architecture.from_config(config, 'x').rope_scaling == SCALING


def test_two_places_that_disagree_are_refused(make_arch):
    config = make_arch(rope_theta=5e5).to_config()
    with pytest.raises(ModelError, match=r'two values of rope_theta, rope_parameters.rope_theta = 500000.0, rope_th'):
        Architecture.from_config({**config, 'rope_theta': 1e6}, 'x')
    with pytest.raises(ModelError, match='two values of rope scaling'):
        Architecture.from_config({**config, 'rope_scaling': LLAMA3}, 'x')


@pytest.mark.parametrize(
    ('family', 'change', 'message'),
    [
        ('llama', {'mlp_bias': True}, 'mlp_bias = True is not supported; only False is'),
        ('llama', {'attention_bias': True}, 'attention_bias = True is not supported; only False is'),
        ('llama', {'hidden_act': 'gelu'}, "hidden_act = 'gelu' is not supported; only 'silu' is"),
        ('qwen2', {'use_sliding_window': True}, 'use_sliding_window = True is not supported; only False is'),
        ('qwen2', {'layer_types': ['full_attention', 'sliding_attention']}, "layer_types with 'sliding_attention'"),
        ('qwen2', {'model_type': 'llama'}, "Qwen2ForCausalLM is of model_type 'qwen2', found 'llama'"),
        ('qwen2', {'num_key_value_heads': 5}, '6 attention heads cannot share 5 key-value heads'),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(make_arch, family, change, message):
    with pytest.raises(ModelError) as caught:
        Architecture.from_config({**make_arch(**FAMILIES[family]).to_config(), **change}, 'here/config.json')
    assert message in str(caught.value)
    assert str(caught.value).startswith('here/config.json: ')


@pytest.mark.parametrize(
    ('table', 'message'),
    [
        ({'rope_type': 'yarn', 'factor': 4.0}, "rope_scaling of type 'yarn' is not supported"),
        ({'factor': 4.0}, "rope_scaling of type 'default' is not supported"),
        ({**LLAMA3, 'factor': None}, 'rope_scaling.factor must be a number, found None'),
        (
            {**LLAMA3, 'original_max_position_embeddings': 0.5},
            'original_max_position_embeddings must be a positive int',
        ),
        ({**LLAMA3, 'high_freq_factor': 1.0}, 'needs a factor of at least 1 and high_freq_factor > low_freq_factor'),
        ({**LLAMA3, 'factor': 0.5}, 'needs a factor of at least 1'),
        ({**LLAMA3, 'partial_rotary_factor': 0.5}, 'partial_rotary_factor must be 1.0, found 0.5'),
    ],
)
def test_ropes_that_are_not_llama3_are_refused(make_arch, table, message):
    config = {**make_arch(**FAMILIES['llama']).to_config(), 'rope_scaling': table}
    del config['rope_parameters']
    with pytest.raises(ModelError) as caught:
        Architecture.from_config(config, 'x')
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'architectures': ['MambaForCausalLM']}, 'MambaForCausalLM is not supported; supported: Qwen3ForCausalLM'),
        ({'architectures': None}, 'architecture none is not supported'),
        ({'architectures': 'Qwen3ForCausalLM'}, "architectures must be a list of one name, found 'Qwen3ForCausalLM'"),
        ({'rope_parameters': 'llama3'}, "rope_parameters must be an object, found 'llama3'"),
        ({'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, "rope_scaling of type 'yarn'"),
        ({'rope_parameters': {'rope_type': 'longrope', 'rope_theta': 5e5}}, "rope_parameters of type 'longrope'"),
        ({'max_position_embeddings': None}, 'max_position_embeddings must be a number, found None'),
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
