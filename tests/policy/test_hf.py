import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import fake_devices
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from sesa_jax.policy import hf, sharding
from sesa_jax.policy.arch import ModelError, abstract, hf_names, leaves
from sesa_jax.policy.tokenizer import Tokenizer

Q = 'model.layers.1.self_attn.q_proj.weight'


@pytest.fixture(scope='module')
def model(make_arch, random_params):
    arch = make_arch(layers=2, tied=False)
    return arch, random_params(arch)


@pytest.fixture(scope='module')
def saved(model, tmp_path_factory):
    """One file, and the same in shards."""
    folders = [tmp_path_factory.mktemp('single'), tmp_path_factory.mktemp('sharded')]
    hf.save(folders[0], *model)
    hf.save(folders[1], *model, shard_bytes=50_000)
    return folders


@pytest.fixture
def single(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / 'model')


@pytest.fixture
def sharded(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / 'model')


def edit(path, change):
    """Rewrites a safetensors file after `change(tensors)`."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={'format': 'pt'})


def edit_index(folder, change):
    index = json.loads((folder / hf.INDEX).read_text())
    change(index['weight_map'])
    (folder / hf.INDEX).write_text(json.dumps(index))


def refusal(folder, arch):
    with pytest.raises(ModelError) as caught:
        hf.load_params(folder, arch)
    return str(caught.value)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('which', [0, 1], ids=['one file', 'shards'])
def test_save_then_load_gives_the_same_bits(model, saved, which):
    assert hf.load_architecture(saved[which]) == model[0]
    assert_equal(hf.load_params(saved[which], model[0]), model[1])


def test_the_index_lists_every_tensor_once(model, saved):
    index = json.loads((saved[1] / hf.INDEX).read_text())
    held = {file.name: set(load_file(file)) for file in saved[1].glob('*.safetensors')}
    assert len(held) > 2
    assert sum(map(len, held.values())) == len(index['weight_map']) == 2 * 11 + 3
    assert all(name in held[file] for name, file in index['weight_map'].items())
    assert index['metadata']['total_size'] == sum(x.nbytes for x in jax.tree.leaves(model[1]))


def test_bfloat16_round_trips(model, tmp_path):
    arch, params = model
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    hf.save(tmp_path, arch, half, dtype='bfloat16')
    assert json.loads((tmp_path / 'config.json').read_text())['dtype'] == 'bfloat16'
    assert_equal(hf.load_params(tmp_path, arch, dtype=jnp.bfloat16), half)
    assert_equal(hf.load_params(tmp_path, arch), jax.tree.map(lambda x: x.astype(jnp.float32), half))


def test_a_tied_file_may_repeat_the_head(make_arch, random_params, tmp_path):
    arch = make_arch(layers=1)
    params = random_params(arch)
    hf.save(tmp_path, arch, params)
    assert 'lm_head.weight' not in load_file(tmp_path / hf.SINGLE)
    edit(tmp_path / hf.SINGLE, lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight']}))
    assert_equal(hf.load_params(tmp_path, arch), params)


def test_parameters_land_where_the_shardings_say(model, saved):
    arch, params = model
    placed = sharding.shardings(abstract(arch), sharding.TRAIN, sharding.make_mesh(1))
    loaded = hf.load_params(saved[0], arch, placed)
    assert_equal(loaded, params)
    assert loaded['layers']['up'].sharding == placed['layers']['up']


def test_saving_again_leaves_no_older_file(model, sharded):
    hf.save(sharded, *model)
    assert sorted(path.name for path in sharded.iterdir()) == ['config.json', hf.SINGLE]


def test_weights_are_as_readable_as_the_config(saved):
    modes = {path.stat().st_mode for path in saved[1].iterdir()}
    assert len(modes) == 1


def test_a_given_config_keeps_its_keys(model, tmp_path):
    arch, params = model
    hf.save(tmp_path, arch, params, {**arch.to_config(), 'eos_token_id': 5, 'torch_dtype': 'bfloat16'})
    config = hf.load_config(tmp_path)
    assert (config['eos_token_id'], config['dtype'], 'torch_dtype' in config) == (5, 'float32', False)


def test_a_config_of_another_model_is_refused_before_anything_is_written(model, make_arch, tmp_path):
    with pytest.raises(ModelError, match='describes another architecture'):
        hf.save(tmp_path / 'new', *model, make_arch().to_config())
    assert not (tmp_path / 'new').exists()


def test_the_tokenizer_comes_along_from_a_folder_or_an_object(make_arch, random_params, tokenizer_folder, tmp_path):
    arch = make_arch(vocab=400, layers=1)
    params = random_params(arch)
    text = 'The <|im_end|> of the river.'
    for name, source in (('a', tokenizer_folder), ('b', AutoTokenizer.from_pretrained(tokenizer_folder))):
        hf.save(tmp_path / name, arch, params, tokenizer=source)
        ours = Tokenizer(tmp_path / name)
        assert ours.chat('s', text) == Tokenizer(tokenizer_folder).chat('s', text)
        assert AutoTokenizer.from_pretrained(tmp_path / name).encode(text) == ours.encode_trusted(text)


def test_a_tokenizer_source_without_a_tokenizer_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match=r'tokenizer\.json is missing'):
        hf.save(tmp_path / 'new', *model, tokenizer=tmp_path)


def test_parameters_of_another_shape_are_refused(model, tmp_path):
    arch, params = model
    with pytest.raises(ModelError, match=r'parameter embed has shape \(96, 40\), expected \(97, 40\)'):
        hf.save(tmp_path, arch, {**params, 'embed': params['embed'][1:]})


def test_every_device_gets_its_part_and_the_rest_is_not_read(model, saved):
    """Eight devices that are not there: the parts that they would get, put together again."""
    arch, params = model
    specs = dict(leaves(abstract(arch)))
    views = hf._map(saved[0] / hf.SINGLE)
    for path in (('layers', 'up'), ('layers', 'output'), ('embed',), ('head',)):
        spec = specs[path]
        names = [name for name, (place, _, _) in hf_names(arch).items() if place == path]
        tensors = [(saved[0], name, views[name].array) for name in names]
        axis = spec.axes.index('width')
        parts = [tuple(map(range, spec.shape)) for _ in range(8)]
        parts = [(*p[:axis], range(5 * i, 5 * i + 5), *p[axis + 1 :]) for i, p in enumerate(parts)]
        whole = np.concatenate([hf._shard(spec, tensors, part, np.float32) for part in parts], axis=axis)
        np.testing.assert_array_equal(whole, functools.reduce(lambda tree, key: tree[key], path, params))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('kind', ['float16', 'bfloat16'])
def test_each_type_of_file_is_read_into_each_type_of_parameter(model, tmp_path, kind, dtype):
    arch, params = model
    hf.save(tmp_path, arch, params, dtype=kind)
    assert load_file(tmp_path / hf.SINGLE)[Q].dtype == jnp.dtype(kind)
    rounded = jax.tree.map(lambda x: x.astype(kind).astype(dtype), params)
    assert_equal(hf.load_params(tmp_path, arch, dtype=dtype), rounded)


def test_the_chat_template_and_the_generation_config_come_along(model, tokenizer_folder, tmp_path):
    source = shutil.copytree(tokenizer_folder, tmp_path / 'source')
    extra = {'generation_config.json': '{"eos_token_id": [1, 2]}', 'chat_template.jinja': '{{ messages }}'}
    for name, text in extra.items():
        (source / name).write_text(text)
    hf.save(tmp_path / 'new', *model, tokenizer=source)
    assert {name: (tmp_path / 'new' / name).read_text() for name in extra} == extra


def test_a_tokenizer_file_may_not_lead_out_of_its_folder(model, tokenizer_folder, tmp_path):
    source = shutil.copytree(tokenizer_folder, tmp_path / 'source')
    (tmp_path / 'secret').write_text('{}')
    (source / 'generation_config.json').symlink_to(tmp_path / 'secret')
    with pytest.raises(ModelError, match=r'generation_config\.json is a link that leads out of the folder'):
        hf.save(tmp_path / 'new', *model, tokenizer=source)


def test_an_unknown_type_to_save_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match="weights cannot be saved as 'int8'; supported: float32, bfloat16, float16"):
        hf.save(tmp_path, *model, dtype='int8')


@pytest.mark.slow
@pytest.mark.devices
def test_a_billion_parameters_need_no_more_host_memory_than_their_shards_and_two_tensors(tmp_path):
    script = Path(__file__).with_name('hf_devices.py')
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=fake_devices(8), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(report)
    assert report['parameters'] > 1e9 and report['devices'] == 8 and report['shard'] == [16, 256, 8192]
    assert report['marks'] == [layer + 1 for layer in range(16)]
    assert report['target'] <= report['peak'] + 2 * report['largest']  # the sampler saw the parameters arrive
    assert report['peak'] <= report['target'] + 2 * report['largest']


# --- folders with faults ----------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(model, single):
    edit(single / hf.SINGLE, lambda t: t.pop(Q))
    assert refusal(single, model[0]) == f'{single / hf.SINGLE}: tensor {Q} is missing'


def test_an_untied_file_without_its_head_is_refused(model, single):
    edit(single / hf.SINGLE, lambda t: t.pop('lm_head.weight'))
    assert 'tensor lm_head.weight is missing' in refusal(single, model[0])


def test_an_extra_tensor_is_named(model, single):
    edit(single / hf.SINGLE, lambda t: t.update({'model.layers.0.self_attn.q_proj.bias': np.zeros(72, np.float32)}))
    message = refusal(single, model[0])
    assert message.startswith(f'{single / hf.SINGLE}: tensor model.layers.0.self_attn.q_proj.bias does not belong')


def test_a_misshapen_tensor_is_named(model, single):
    edit(single / hf.SINGLE, lambda t: t.update({Q: t[Q][:, :-1].copy()}))
    assert refusal(single, model[0]) == f'{single / hf.SINGLE}: tensor {Q} has shape [72, 39], expected [72, 40]'


def test_a_transposed_square_shape_is_not_guessed(make_arch, random_params, tmp_path):
    arch = make_arch(layers=1)
    hf.save(tmp_path, arch, random_params(arch))
    edit(tmp_path / hf.SINGLE, lambda t: t.update({Q.replace('1', '0'): t[Q.replace('1', '0')].T.copy()}))
    assert 'has shape [40, 72], expected [72, 40]' in refusal(tmp_path, arch)


def test_a_tensor_of_whole_numbers_is_refused(model, single):
    edit(single / hf.SINGLE, lambda t: t.update({Q: t[Q].astype(np.int8)}))
    assert f'tensor {Q} has type I8, supported: F32, BF16, F16' in refusal(single, model[0])


def test_a_tensor_that_is_not_finite_is_refused(model, single):
    edit(single / hf.SINGLE, lambda t: t[Q].__setitem__((3, 3), np.nan))
    assert refusal(single, model[0]) == f'{single / hf.SINGLE}: tensor {Q} holds values that are not finite'


@pytest.mark.parametrize('cut', [1, 1000])
def test_a_short_file_is_named(model, single, cut):
    path = single / hf.SINGLE
    path.write_bytes(path.read_bytes()[:-cut])
    assert refusal(single, model[0]).startswith(f'{path} is damaged or cut short')


def test_a_header_of_an_absurd_size_is_refused(model, single):
    path = single / hf.SINGLE
    path.write_bytes((2**60).to_bytes(8, 'little') + path.read_bytes()[8:])
    assert refusal(single, model[0]).startswith(f'{path} is damaged or cut short')


def test_a_missing_shard_is_named(model, sharded):
    shard = sorted(sharded.glob('*.safetensors'))[1]
    shard.unlink()
    assert refusal(sharded, model[0]) == f'{shard} is missing, though {hf.INDEX} names it'


def test_a_short_shard_is_named(model, sharded):
    shard = sorted(sharded.glob('*.safetensors'))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refusal(sharded, model[0]).startswith(f'{shard} is damaged or cut short')


def test_a_file_that_the_index_does_not_list_is_ignored(model, sharded):
    shutil.copy(next(sharded.glob('*.safetensors')), sharded / 'other.safetensors')
    assert_equal(hf.load_params(sharded, model[0]), model[1])


def test_a_shard_without_its_tensor_is_named(model, sharded):
    name = json.loads((sharded / hf.INDEX).read_text())['weight_map'][Q]
    edit(sharded / name, lambda t: t.pop(Q))
    assert refusal(sharded, model[0]) == f'{sharded / name}: tensor {Q} is missing, though {hf.INDEX} places it there'


def test_a_shard_with_a_tensor_too_many_is_named(model, sharded):
    name = json.loads((sharded / hf.INDEX).read_text())['weight_map'][Q]
    edit(sharded / name, lambda t: t.update(stray=np.zeros(1, np.float32)))
    assert refusal(sharded, model[0]) == f'{sharded / name}: tensor stray is not placed there by {hf.INDEX}'


def test_an_index_without_a_tensor_is_named(model, sharded):
    edit_index(sharded, lambda m: m.update({Q: m['model.norm.weight']}))
    assert f'tensor {Q} is' in refusal(sharded, model[0])


@pytest.mark.parametrize('name', ['../x.safetensors', '/etc/passwd', 'a/b.safetensors', '..', '', 'a\\b', 'a\0b'])
def test_an_index_may_not_lead_out_of_the_folder(model, sharded, name):
    shutil.copy(next(sharded.glob('*.safetensors')), sharded.parent / 'x.safetensors')
    edit_index(sharded, lambda m: m.update({Q: name}))
    assert refusal(sharded, model[0]) == f'{sharded / hf.INDEX}: file name {name!r} leads out of the folder'


def test_a_link_may_not_lead_out_of_the_folder(model, single):
    outside = single.parent / 'outside.safetensors'
    (single / hf.SINGLE).rename(outside)
    (single / hf.SINGLE).symlink_to(outside)
    assert 'is a link that leads out of the folder' in refusal(single, model[0])


def test_the_layout_of_a_hugging_face_cache_is_read(model, single, tmp_path):
    snapshot, blobs = tmp_path / 'hub' / 'snapshots' / 'abc', tmp_path / 'hub' / 'blobs'
    snapshot.mkdir(parents=True), blobs.mkdir()
    (single / hf.SINGLE).rename(blobs / '123')
    (snapshot / hf.SINGLE).symlink_to(blobs / '123')
    assert_equal(hf.load_params(snapshot, model[0]), model[1])


def test_pickled_weights_are_never_opened(model, single):
    (single / hf.SINGLE).unlink()
    (single / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n(S"false"\ntR.')
    message = refusal(single, model[0])
    assert 'has neither' in message and 'pytorch_model.bin is a pickle, which is never opened' in message


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (None, 'config.json is missing'),
        ('{"a": ', 'cannot be read as JSON'),
        ('[1]', 'must hold a JSON object, not list'),
    ],
)
def test_a_config_with_faults_is_named(single, text, message):
    path = single / 'config.json'
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ModelError, match=message):
        hf.load_config(single)


def test_an_index_without_a_map_is_named(model, sharded):
    (sharded / hf.INDEX).write_text('{"weight_map": {"a": 1}}')
    assert refusal(sharded, model[0]) == f'{sharded / hf.INDEX}: weight_map must map tensor names to file names'
