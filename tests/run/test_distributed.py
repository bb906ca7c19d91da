import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from sesa_jax.config import ConfigError
from sesa_jax.run import distributed

SCRIPT = pathlib.Path(__file__).with_name('distributed_process.py')


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def start(coordinator, process, processes, devices):
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}', 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, str(SCRIPT), coordinator, str(process), str(processes)]
    return subprocess.Popen(
        command, env={**os.environ, **flags}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.devices
def test_two_processes_give_the_logits_of_one():
    coordinator = f'127.0.0.1:{free_port()}'
    alone = start(coordinator, 0, 1, 8)
    pair = [start(coordinator, process, 2, 4) for process in (0, 1)]
    outputs = []
    for child in (alone, pair[0], pair[1]):
        out, err = child.communicate(timeout=240)
        assert child.returncode == 0, err
        outputs.append(out)
    one, two = (json.loads(out.splitlines()[-1]) for out in outputs[:2])  # gloo reports on stdout too
    assert (one['devices'], one['local'], two['devices'], two['local']) == (8, 8, 8, 4)
    logits = np.asarray(one['logits'])
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(two['logits'], logits, atol=1e-5)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('', 0, 2), '--coordinator is missing'),
        (('10.0.0.1', 0, 2), 'is not ADDRESS:PORT'),
        (('10.0.0.1:99999', 0, 2), 'is not ADDRESS:PORT'),
        (('127.0.0.1:8476', 2, 2), 'numbered from 0'),
        (('0.0.0.0:8476', 0, 2), 'not all of them'),
        (('[::]:8476', 0, 2), 'not all of them'),
    ],
)
def test_an_impossible_combination_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        distributed.join(*arguments)
