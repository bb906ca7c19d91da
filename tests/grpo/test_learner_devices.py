"""The learner's step on eight fake devices, in a process of its own, against one device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / 'grpo_devices.py'


@pytest.fixture(scope='module')
def seen():
    env = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=8', 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.devices
@pytest.mark.parametrize('of', ['', '_adapters'])
def test_losses_are_equal_to_1e5(seen, of):
    assert seen['devices'] == 8
    for one, many in zip(seen['one' + of], seen['many' + of], strict=True):
        assert many['loss'] == pytest.approx(one['loss'], rel=1e-5)
        assert many['kl'] == pytest.approx(one['kl'], rel=1e-5)
        assert many['grad_norm'] == pytest.approx(one['grad_norm'], rel=1e-4)
        assert (many['tokens'], many['rows'], many['optimizer_steps']) == (one['tokens'], 7, 1)


@pytest.mark.devices
def test_parameters_follow_each_other_and_stay_where_they_were_put(seen):
    assert seen['largest_parameter_difference'] < 1e-4
    assert seen['largest_adapter_difference'] < 1e-4
    assert 'data' in seen['embed'] and 'data' in seen['adapter']
    assert seen['moments_lie_like_params']
