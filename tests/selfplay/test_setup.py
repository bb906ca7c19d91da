"""From a config to the parts of a run: the model that it began with and no other, and its states before they are read."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from experiments import evaluate, export, train
from sesa_jax import config
from sesa_jax.command import from_command_line
from sesa_jax.policy import backbones, hf
from sesa_jax.run import checkpoint, commit
from sesa_jax.run.folder import RunFolder
from sesa_jax.selfplay import setup
from sesa_jax.skills.bank import Bank

TINY = backbones.ASSETS / 'tiny'
OTHER = 'is not the base that this run began with'


@pytest.mark.parametrize('flags', [[], ['--offload'], ['--method', 'ssp', '--lora.rank', '4'], ['--method', 'skillrl']])
def test_abstract_states_are_the_initial_ones_without_arrays(flags):
    run = from_command_line(flags)
    backbone = setup.load(run)
    states, abstract = setup.initial_states(run, backbone), setup.abstract_states(run, backbone)
    assert jax.tree.structure(abstract) == jax.tree.structure(states)
    for ours, theirs in zip(jax.tree.leaves(abstract), jax.tree.leaves(states), strict=True):
        assert isinstance(ours, jax.ShapeDtypeStruct)
        assert (ours.shape, ours.dtype, ours.sharding) == (theirs.shape, theirs.dtype, theirs.sharding)


def nudged(folder):
    arch = hf.load_architecture(folder)
    params = hf.load_params(folder, arch)
    params['embed'] = params['embed'].at[3, 5].add(1e-3)
    hf.save(folder, arch, params, hf.load_config(folder), folder)


def other_norm(folder):
    settings = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**settings, 'rms_norm_eps': 1e-5}))


def other_tokenizer(folder):
    with open(folder / 'tokenizer.json', 'a') as file:
        file.write('\n')


@pytest.mark.parametrize('flags', [[], ['--lora.rank', '4']])
@pytest.mark.parametrize('change', [nudged, other_norm, other_tokenizer])
def test_another_base_is_refused_wherever_a_run_is_taken_up_again(flags, change, tmp_path, capsys):
    """A model folder that was made again under its name: resumed, evaluated, exported."""
    model, path = shutil.copytree(TINY, tmp_path / 'model'), tmp_path / 'run'
    run = setup.pin(from_command_line(['--model', str(model), '--world', 'lab', '--run-dir', str(path), *flags]), model)
    with RunFolder.create(path, config.to_json(run)) as folder:
        with Bank.create(folder.bank) as bank:
            seq, chain = bank.seq, bank.chain_hash
        digest = checkpoint.save(folder.checkpoints, 0, {'solver': np.zeros(1)})
        commit.write(folder, commit.CommitRecord(0, digest, seq, chain, '', 0))
    setup.load(run)
    change(model)
    shutil.copy(model / 'tokenizer.json', folder.tokenizer)
    for main, arguments in (
        (train.main, ['--run-dir', str(path), '--resume']),
        (evaluate.main, [str(path)]),
        (export.main, [str(path), str(tmp_path / 'out')]),
    ):
        assert main(arguments) == 2
        assert f'{model} {OTHER}' in capsys.readouterr().err


def test_the_digest_is_kept_and_is_no_difference_from_the_defaults():
    run = setup.pin(from_command_line([]), TINY)
    assert len(run.base) == 64
    assert config.from_json(json.loads(json.dumps(config.to_json(run)))) == run
    assert config.difference(run) == config.difference(dataclasses.replace(run, base=''))
    assert list(config.difference(run, dataclasses.replace(run, base=''))) == ['base']
