import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from devices import fake_devices

from sesa_jax import config
from sesa_jax.config import ConfigError
from sesa_jax.grpo.learner import init_state, update
from sesa_jax.run import distributed

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / 'grpo'))

from grpo_toy import ARCH, ONE_STEP, distance, gradient, toy_params, toy_samples  # noqa: E402


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def start(script, *arguments, devices):
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=fake_devices(devices),
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


def start_pair(script, *arguments):
    coordinator = f'127.0.0.1:{free_port()}'
    return [start(script, coordinator, process, *arguments, devices=1) for process in (0, 1)]


def alone(rows):
    """(gradient, metrics) of one process of one device, by micro-batches of one row."""
    options = ONE_STEP | {'grpo': dataclasses.replace(ONE_STEP['grpo'], micro_batch_tokens=128)}
    state, reference = init_state(toy_params(ARCH, 0), ONE_STEP['optimizer']), toy_params(ARCH, 1)
    state, metrics = update(state, reference, rows, **options)
    return gradient(state), metrics


@pytest.mark.devices
def test_two_processes_learn_as_one_and_refuse_to_learn_apart(tmp_path):
    pair = start_pair('distributed_learner.py', tmp_path / 'gradients.npz', -1)
    outputs = [child.communicate(timeout=240) for child in pair]
    assert [child.returncode for child in pair] == [0, 0], [err[-2000:] for _, err in outputs]
    first, second = (said(out) for out, _ in outputs)
    # The same loss and gradient as one process, also where there are fewer rows than processes.
    found = np.load(tmp_path / 'gradients.npz')
    for name, rows in (('all', toy_samples()), ('one row', toy_samples()[:1])):
        whole, metrics = alone(rows)
        leaves = [found[f'{name} {i}'] for i in range(len(jax.tree.leaves(whole)))]
        assert distance(leaves, whole) < 1e-5
        for key in ('loss', 'kl', 'grad_norm', 'entropy', 'tokens', 'rows', 'optimizer_steps'):
            assert first['metrics'][name][key] == pytest.approx(metrics[key], rel=1e-5)
    # A batch that is empty for both is an idle step; one that overflows in one process is skipped by both.
    steps = {name: (m['optimizer_steps'], m['skipped_steps']) for name, m in first['metrics'].items()}
    assert steps == {'all': (1, 0), 'one row': (1, 0), 'none': (0, 0), 'left out': (0, 0), 'overflow': (0, 1)}
    unchanged = {'all': False, 'one row': False, 'none': True, 'left out': True, 'overflow': True}
    assert first['same bits'] == second['same bits'] == unchanged
    assert first['metrics'] == second['metrics']
    # What differs between the processes is refused by both, before one waits for the other.
    assert first['empty'] == second['empty'] == first['other'] == second['other']
    assert 'processes [1] came to another batch than process 0' in first['empty']
    assert 'processes [1] took another branch than process 0; process 0 came to: agree' in first['branch']
    assert 'process 1 came to: bits' in second['branch']
    assert first['after all'] == second['after all'] == 'on we go'


@pytest.mark.devices
@pytest.mark.parametrize(('what', 'victim'), [('raise', 0), ('kill', 0), ('kill', 1)])
def test_a_process_that_fails_between_two_steps_ends_the_other(what, victim):
    """The other one waits for it in a computation; within a minute it ends too, and says what it saw."""
    pair = start_pair('distributed_learner.py', what, victim)
    try:
        for child in pair:
            while not child.stdout.readline().startswith('{'):  # up to the first step
                assert child.poll() is None, child.stderr.read()[-2000:]
        begin = time.monotonic()
        (_, err), (_, other) = [pair[i].communicate(timeout=60) for i in (victim, 1 - victim)]
        assert time.monotonic() - begin < 60
    finally:
        for child in pair:
            child.kill()
    assert pair[victim].returncode and pair[1 - victim].returncode
    assert what == 'kill' or 'ValueError: I alone' in err
    assert 'rror' in other  # what JAX saw: a lost connection, or a heartbeat that did not come


@pytest.mark.devices
def test_a_host_process_that_is_lost_for_good_ends_both(tmp_path):
    """It dies twice: once it is replaced and both go on, then both raise what process 0 saw."""
    run = config.to_json(config.with_method(config.lab_preset(config.Run(seed=100)), 'ssp'))
    pair = start_pair('distributed_host.py', tmp_path, json.dumps(run))
    outputs = [child.communicate(timeout=240) for child in pair]
    for child, (out, err) in zip(pair, outputs, strict=True):
        assert child.returncode == 1
        assert len(said(out)['found']) == 2
        assert 'HostError: the host process failed 2 times' in err


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
