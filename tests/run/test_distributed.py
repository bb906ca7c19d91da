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

HERE = pathlib.Path(__file__).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def start(script, *arguments, devices):
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}', 'JAX_PLATFORMS': 'cpu'}
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={**os.environ, **flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(out):
    """The JSON line of a process; gloo reports on stdout too."""
    return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith('{')))


@pytest.mark.devices
def test_two_processes_give_the_logits_of_one():
    coordinator = f'127.0.0.1:{free_port()}'
    alone = start('distributed_process.py', coordinator, 0, 1, devices=8)
    pair = [start('distributed_process.py', coordinator, process, 2, devices=4) for process in (0, 1)]
    outputs = []
    for child in (alone, pair[0], pair[1]):
        out, err = child.communicate(timeout=240)
        assert child.returncode == 0, err
        outputs.append(out)
    one, two = map(said, outputs[:2])
    assert (one['devices'], one['local'], two['devices'], two['local']) == (8, 8, 8, 4)
    logits = np.asarray(one['logits'])
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(two['logits'], logits, atol=1e-5)


@pytest.mark.devices
def test_a_checkpoint_is_the_same_whoever_saves_it(tmp_path):
    """One process of four devices and two of two save equal digests, and each restores what the other saved."""
    found = []
    for processes, saved, restored in ((1, 1, -1), (2, 2, 1), (1, 3, 2)):
        coordinator = f'127.0.0.1:{free_port()}'
        children = [
            start('distributed_checkpoint.py', coordinator, process, processes, tmp_path, saved, restored,
                  devices=4 // processes)
            for process in range(processes)
        ]  # fmt: skip
        for child in children:
            out, err = child.communicate(timeout=120)
            assert child.returncode == 0, err
            found.append(said(out)) if child is children[0] else None
    digest = found[0]['saved']
    assert found == [{'saved': digest}, {'saved': digest, 'restored': digest}, {'saved': digest, 'restored': digest}]


@pytest.mark.devices
def test_process_0_answers_for_both_and_a_lonely_failure_ends_both():
    coordinator = f'127.0.0.1:{free_port()}'
    pair = [start('distributed_sharing.py', coordinator, process, devices=1) for process in (0, 1)]
    (out, err), (other_out, other_err) = [child.communicate(timeout=90) for child in pair]
    first, second = said(out), said(other_out)
    assert (first.pop('first'), second.pop('first')) == ('0', 'None')
    assert first.pop('result') == second.pop('result') == "{'of': 0}"
    assert first.pop('foreign') == 'Foreign: what '
    assert second.pop('foreign') == 'RuntimeError: Foreign: what '
    assert (first['bytes'], first['empty'], first['signal']) == (100_000, "b''", 15)
    assert first['config'] == 'ConfigError: no room '
    assert first['host'] == 'HostFailure: CorruptBank: a hole CorruptBank'
    assert first['python'].startswith('FileNotFoundError: [Errno 2] no such file')
    assert 'processes [1] came to another step' in first['differ']
    assert first['searches'] == ['a', 'b', {'search': 2}]
    assert first == second
    assert 'ValueError: I alone' in other_err
    assert pair[1].returncode not in (0, None)
    assert pair[0].returncode not in (0, None), err


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
