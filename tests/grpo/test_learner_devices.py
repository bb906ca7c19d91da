"""The learner's step on eight fake devices, in a process of its own, against one device."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from devices import fake_devices
from grpo_toy import ARCH, ONE_STEP, distance, gradient, toy_params, toy_samples

from sesa_jax.config import Lora
from sesa_jax.grpo.learner import init_state, update
from sesa_jax.policy import lora, sharding

SCRIPT = pathlib.Path(__file__).parent / 'grpo_devices.py'


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
    files = [tmp_path_factory.mktemp('devices') / f'{name}.npz' for name in ('gradient', 'adapter_gradient')]
    done = subprocess.run([sys.executable, SCRIPT, *files], env=fake_devices(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {file.stem: list(np.load(file).values()) for file in files}


@pytest.mark.devices
@pytest.mark.parametrize('of', ['', 'adapter_'])
def test_loss_and_gradient_are_equal_to_1e5(seen, of):
    assert seen['devices'] == 8
    start = lora.init(ARCH, Lora(2), [0], sharding.make_mesh(1)) if of else toy_params(ARCH, 0)
    one, metrics = update(init_state(start, ONE_STEP['optimizer']), toy_params(ARCH, 1), toy_samples(), **ONE_STEP)
    found = seen[of + 'metrics']
    for name in ('loss', 'kl', 'grad_norm', 'entropy'):
        assert found[name] == pytest.approx(metrics[name], rel=1e-5)
    assert (metrics['rows'], metrics['optimizer_steps']) == (7, 1)
    assert [found[name] for name in ('rows', 'tokens')] == [metrics[name] for name in ('rows', 'tokens')]
    assert distance(seen[of + 'gradient'], gradient(one)) < 1e-5


@pytest.mark.devices
def test_parameters_move_and_stay_where_they_were_put(seen):
    assert seen['moved']
    assert 'data' in seen['embed'] and 'data' in seen['adapter']
    assert seen['moments_lie_like_params']


@pytest.mark.devices
def test_the_second_step_compiles_nothing(seen):
    assert seen['programs'] == 1


@pytest.mark.devices
def test_an_overflow_on_one_device_skips_the_step_on_all(seen):
    assert (seen['skipped']['skipped_steps'], seen['skipped']['optimizer_steps']) == (1, 0)
    assert seen['skipped_bits']
