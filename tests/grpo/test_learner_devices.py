"""The learner's step on eight fake devices, in a process of its own, against one device."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from grpo_toy import ARCH, ONE_STEP, distance, gradient, toy_params, toy_samples

from sesa_jax.grpo.learner import init_state, update

SCRIPT = pathlib.Path(__file__).parent / 'grpo_devices.py'


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
    file = tmp_path_factory.mktemp('devices') / 'gradient.npz'
    quick = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'  # to compile
    flags = f'--xla_force_host_platform_device_count=8 {quick}'
    env = os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run([sys.executable, SCRIPT, file], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), 'gradient': list(np.load(file).values())}


@pytest.mark.devices
def test_loss_and_gradient_are_equal_to_1e5(seen):
    assert seen['devices'] == 8
    one, metrics = update(
        init_state(toy_params(ARCH, 0), ONE_STEP['optimizer']), toy_params(ARCH, 1), toy_samples(), **ONE_STEP
    )
    for name in ('loss', 'kl', 'grad_norm', 'entropy'):
        assert seen['metrics'][name] == pytest.approx(metrics[name], rel=1e-5)
    assert (metrics['rows'], metrics['optimizer_steps']) == (7, 1)
    assert [seen['metrics'][name] for name in ('rows', 'tokens')] == [metrics[name] for name in ('rows', 'tokens')]
    assert distance(seen['gradient'], gradient(one)) < 1e-5


@pytest.mark.devices
def test_parameters_move_and_stay_where_they_were_put(seen):
    assert seen['moved']
    assert 'data' in seen['embed']
    assert seen['moments_lie_like_params']


@pytest.mark.devices
def test_the_second_step_compiles_nothing(seen):
    assert seen['programs'] == 1


@pytest.mark.devices
def test_an_overflow_on_one_device_skips_the_step_on_all(seen):
    assert (seen['skipped']['skipped_steps'], seen['skipped']['optimizer_steps']) == (1, 0)
    assert seen['skipped_bits']
