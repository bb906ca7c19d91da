"""A trained policy leaves its run as a Hugging Face folder, and plays on from there.

The run is made here as the main job makes it (config, checkpoints, commit records), with random parameters in place of
trained ones: two steps of real play may leave a policy as it was.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import export
from sesa_jax import config
from sesa_jax.grpo import learner
from sesa_jax.policy import backbones, hf
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.run import checkpoint, commit
from sesa_jax.run.folder import RunFolder

TINY = backbones.ASSETS / 'tiny'


def states_of(step):
    """What the main job saves: a TrainState of each role."""
    arch = hf.load_architecture(TINY)
    initial = hf.load_params(TINY, arch)
    made = {}
    for seed, role in enumerate(('solver', 'challenger')):
        rng = np.random.default_rng([step, seed])
        moved = jax.tree.map(lambda x, rng=rng: x + 0.01 * rng.standard_normal(x.shape).astype(np.float32), initial)
        made[role] = learner.init_state(moved, config.Optimizer())
    return made


@pytest.fixture(scope='module')
def played(tmp_path_factory):
    path = tmp_path_factory.mktemp('runs') / 'sesa'
    with RunFolder.create(path, config.to_json(config.Run())) as folder:
        folder.tokenizer.write_bytes((TINY / 'tokenizer.json').read_bytes())
        for step in (1, 2):
            digest = checkpoint.save(folder.checkpoints, step, states_of(step))
            commit.write(folder, commit.CommitRecord(step, digest, 0, '', '', 0))
    return path


@pytest.fixture
def run(played, tmp_path):
    """A copy to be changed."""
    return shutil.copytree(played, tmp_path / 'run')


def command(capsys, *arguments):
    code = export.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


@pytest.mark.parametrize(('role', 'flags', 'step'), [('solver', (), 2), ('challenger', ('--step', '1'), 1)])
def test_the_folder_holds_the_policy_of_the_checkpoint(played, tmp_path, capsys, role, flags, step):
    target = tmp_path / 'out' / 'model'
    code, said = command(capsys, played, '--role', role, *flags, target)
    assert (code, said.out) == (
        0, f'{target}: the {role} of step {step} in float32, read back and equal to the checkpoint\n'
    )  # fmt: skip
    arch = hf.load_architecture(target)
    assert arch == hf.load_architecture(TINY)
    ours, theirs = (jax.tree.leaves(tree) for tree in (hf.load_params(target, arch), states_of(step)[role].params))
    for a, b in zip(ours, theirs, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert Tokenizer(target).chat(None, 'x') == Tokenizer(TINY).chat(None, 'x')
    assert [path.name for path in target.parent.iterdir()] == ['model']


def test_transformers_computes_the_same_logits(played, tmp_path, capsys):
    torch = pytest.importorskip('torch')
    from transformers import AutoModelForCausalLM

    from sesa_jax.policy import transformer

    assert command(capsys, played, tmp_path / 'm')[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'm', dtype=torch.float32)
    ids = np.array([Tokenizer(tmp_path / 'm').chat(None, 'Question: which river is longest?')])
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    arch = hf.load_architecture(tmp_path / 'm')
    params = states_of(2)['solver'].params
    ours = transformer.logits(params, arch, transformer.hidden(params, arch, ids, np.array([ids.shape[1]])))
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-4)


def test_bfloat16_rounds_once(played, tmp_path, capsys):
    target = tmp_path / 'm'
    target.mkdir()  # an empty folder may be there
    assert command(capsys, played, target, '--dtype', 'bfloat16')[0] == 0
    written, exact = (hf.load_params(target, hf.load_architecture(TINY)), states_of(2)['solver'].params)
    for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(exact), strict=True):
        assert np.array_equal(a, np.asarray(b).astype('bfloat16').astype(np.float32))
    assert json.loads((target / 'config.json').read_text())['dtype'] == 'bfloat16'


def test_what_cannot_be_had_is_refused_and_leaves_nothing(played, tmp_path, capsys):
    full = tmp_path / 'full'
    full.mkdir()
    (full / 'mine').touch()
    for flags, message in (
        ((tmp_path / 'm', '--step', '7'), 'has no checkpoint of step 7; there are 1, 2'),
        ((full,), f'{full} exists and is not an empty folder'),
        ((full / 'mine',), f'{full / "mine"} exists and is not an empty folder'),
    ):
        code, said = command(capsys, played, *flags)
        assert (code, message in said.err) == (2, True)
    code, said = command(capsys, tmp_path / 'nowhere', tmp_path / 'm')
    assert (code, 'there is no folder' in said.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ['full']
    assert [path.name for path in full.iterdir()] == ['mine']


def test_a_role_that_the_run_lacks_is_refused(run, tmp_path, capsys):
    settings = json.loads((run / 'config.json').read_text())
    (run / 'config.json').write_text(json.dumps({**settings, 'self_play': False, 'method': 'skillrl'}))
    code, said = command(capsys, run, tmp_path / 'm', '--role', 'challenger')
    assert (code, 'has no challenger: its method is skillrl' in said.err) == (2, True)


def test_a_model_folder_that_has_changed_since_is_refused(run, tmp_path, capsys):
    (run / 'tokenizer.json').write_text('{}')
    code, said = command(capsys, run, tmp_path / 'm')
    assert (code, 'its tokenizer.json has changed' in said.err) == (2, True)


def test_a_damaged_checkpoint_is_refused(run, tmp_path, capsys):
    file = max((run / 'checkpoints' / '00002' / 'state').rglob('*'), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, said = command(capsys, run, tmp_path / 'm')
    assert (code, 'is damaged' in said.err) == (2, True)
    assert not (tmp_path / 'm').exists()


def test_a_folder_that_reads_back_otherwise_is_not_called_done(played, tmp_path, capsys, monkeypatch):
    """A disk that loses one bit between writing and reading."""
    write = hf.save

    def save(folder, *arguments, **options):
        write(folder, *arguments, **options)
        tensors = load_file(folder / hf.SINGLE)
        tensors['model.layers.1.mlp.up_proj.weight'].view(np.uint32)[3, 5] ^= 1
        save_file(tensors, folder / hf.SINGLE)

    monkeypatch.setattr(hf, 'save', save)
    code, said = command(capsys, played, tmp_path / 'm')
    assert (code, 'layers/up was read back with other values' in said.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_base_models_template_goes_with_it(played, tmp_path, capsys, monkeypatch):
    """So that the exported folder is asked as the run was, though the source ships no template."""
    source = shutil.copytree(TINY, tmp_path / 'source')
    settings = json.loads((source / 'tokenizer_config.json').read_text())
    del settings['chat_template']
    (source / 'tokenizer_config.json').write_text(json.dumps(settings))
    monkeypatch.setattr(backbones, 'resolve', lambda name: source)
    monkeypatch.setattr(backbones, 'template_of', lambda name: backbones.CHATML)
    assert command(capsys, played, tmp_path / 'm')[0] == 0
    assert Tokenizer(tmp_path / 'm').chat(None, 'x') == Tokenizer(source, template=backbones.CHATML).chat(None, 'x')
