"""A run of adapters from the door to the exported folder, with the packaged policy and without play."""

import jax
import numpy as np
import pytest

from experiments import export
from sesa_jax import config
from sesa_jax.command import from_command_line
from sesa_jax.config import ConfigError
from sesa_jax.grpo import learner
from sesa_jax.policy import backbones, hf, lora, transformer
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.run import checkpoint, commit
from sesa_jax.run.folder import RunFolder
from sesa_jax.selfplay import setup

TINY = backbones.ASSETS / 'tiny'


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope='module')
def run():
    return setup.pin(from_command_line(['--lora.rank', '4', '--lora.alpha', '8']), TINY)


@pytest.fixture(scope='module')
def backbone(run):
    return setup.load(run)


def moved(adapters, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.05 * rng.standard_normal(x.shape, np.float32), adapters)


def test_rollouts_get_the_base_at_first_and_merged_weights_later(run, backbone):
    states = setup.initial_states(run, backbone)
    deployed = setup.deployment(backbone)
    plain = bits(deployed(backbone.params))
    assert bits(deployed(states['solver'].params)) == bits(deployed(states['challenger'].params)) == plain
    assert bits(states['solver'].params) != bits(states['challenger'].params)
    adapters = moved(states['solver'].params)
    expected = jax.jit(
        lambda base, adapters: transformer.unstack(lora.merged(base, adapters), backbone.decode_arch)
    )(backbone.params, adapters)  # fmt: skip
    for ours, theirs in zip(jax.tree.leaves(deployed(adapters)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert bits(deployed(adapters)) != plain


def test_the_exported_folder_computes_what_base_and_adapters_do(run, backbone, tmp_path):
    torch = pytest.importorskip('torch')
    from transformers import AutoModelForCausalLM

    states = setup.initial_states(run, backbone)
    adapters = moved(states['challenger'].params)
    states['challenger'] = learner.init_state(adapters, run.optimizer)
    path, target = tmp_path / 'run', tmp_path / 'model'
    with RunFolder.create(path, config.to_json(run)) as folder:
        folder.tokenizer.write_bytes((TINY / 'tokenizer.json').read_bytes())
        digest = checkpoint.save(folder.checkpoints, 3, states)
        commit.write(folder, commit.CommitRecord(3, digest, 0, '', '', 0))
    assert export.main([str(path), '--role', 'challenger', str(target)]) == 0
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = np.array([Tokenizer(target).chat(None, 'Question: which river is longest?')])
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    arch, length = backbone.arch, np.array([ids.shape[1]])

    @jax.jit
    def logits(params):
        return transformer.logits(params, arch, transformer.hidden(params, arch, ids, length))

    ours, base = logits(lora.applied(backbone.params, adapters)), logits(backbone.params)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert np.abs(np.asarray(base) - theirs).max() > 0.1


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--lora.alpha', '8'], '--lora.alpha and --lora.projections do nothing without --lora.rank'),
        (['--lora.projections', 'query'], 'do nothing without --lora.rank'),
        (['--lora.rank', '-1'], '--lora.rank is -1'),
    ],
)
def test_flags_that_cannot_be(flags, message):
    with pytest.raises(ConfigError) as error:
        from_command_line(flags)
    assert message in str(error.value)


def test_a_rank_that_the_model_does_not_have_is_refused_before_its_weights_are_read(monkeypatch):
    monkeypatch.setattr(hf, 'load_params', None)
    with pytest.raises(ConfigError, match=r'--lora\.rank 500: the matrix query'):
        setup.load(from_command_line(['--lora.rank', '500']))


def test_options_survive_the_saved_config():
    run = from_command_line(['--lora.rank', '2', '--lora.projections', 'query', 'value'])
    assert config.from_json(config.to_json(run)) == run
    assert run.lora.projections == ('query', 'value')
