"""The main job by two processes of one device each, against one process of two devices."""

import os
import signal
import socket
import time

import numpy as np
import pytest
import runs

from experiments import train
from sesa_jax.run import checkpoint

FLAGS = ('--seed', '106', '--solver.rollouts', '5')  # some groups of its first step are at the frontier


def start_pair(path, *flags, steps):
    """Two processes that train as one, on a port that is free now."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    cluster = ('--distributed', '--coordinator', f'127.0.0.1:{port}', '--processes', '2', '--process')
    return [runs.start(path, *FLAGS, *flags, *cluster, str(i), steps=steps, devices=1) for i in (0, 1)]


def await_step(path, number, pair, seconds=240):
    """Until a step is committed."""
    deadline = time.monotonic() + seconds
    while not (path / 'steps' / f'{number:05d}.json').exists():
        ended = [process.communicate()[0] for process in pair if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.1)


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
    """A run of two processes of which one is asked to stop: (folder, exit codes, outputs)."""
    path = tmp_path_factory.mktemp('pair') / 'run'
    pair = start_pair(path, steps=200)
    await_step(path, 1, pair)
    pair[1].send_signal(signal.SIGTERM)
    codes, outputs = zip(*(runs.finish(process) for process in pair), strict=True)
    return path, codes, outputs


@pytest.mark.devices
@pytest.mark.slow
def test_two_processes_play_and_learn_as_one(stopped, tmp_path):
    path = tmp_path / 'one'
    code, output = runs.finish(runs.start(path, *FLAGS, steps=2, devices=2), 580)
    assert code == 0, output
    one, two = runs.Played(path), runs.Played(stopped[0])
    losses = []
    for step in (1, 2):
        for role in ('challenger', 'solver'):
            ours, theirs = one.trajectories(step, role), two.trajectories(step, role)
            assert [t.ids.tolist() for t in ours] == [t.ids.tolist() for t in theirs]
            updates = [run.metrics[step - 1]['update'][role] for run in (one, two)]
            losses += [[u['loss'], u['policy_loss'], u['grad_norm']] for u in updates if 'loss' in u]
        assert one.metrics[step - 1]['bank'] == two.metrics[step - 1]['bank']
        assert one.metrics[step - 1]['calls'] == two.metrics[step - 1]['calls']
    assert losses, 'nothing was learned, so nothing was compared'
    np.testing.assert_allclose(losses[::2], losses[1::2], rtol=1e-5, atol=1e-7)
    assert one.record(0)['checkpoint'] == two.record(0)['checkpoint']


@pytest.mark.devices
@pytest.mark.slow
def test_a_signal_to_one_ends_both_and_one_process_goes_on(stopped):
    path, codes, (output, other) = stopped
    assert codes == (143, 143), (output, other)
    last = len(runs.Played(path).metrics)
    assert f'stopped at the end of step {last}' in output
    assert 'step' not in other  # process 0 has the terminal
    record = runs.Played(path).record(last)
    checkpoint.verify(path / 'checkpoints', last, record['checkpoint'])
    code, output = runs.finish(runs.start(path, '--resume', *FLAGS, steps=last + 1))
    assert code == 0, output
    assert f'going on behind step {last}' in output
    resumed = runs.Played(path)
    assert [row['step'] for row in resumed.metrics] == list(range(1, last + 2))
    assert resumed.record(last) == record


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize('killed', [0, 1])
def test_a_process_that_dies_ends_the_other(killed, tmp_path):
    path = tmp_path / 'run'
    pair = start_pair(path, steps=200)
    await_step(path, 0, pair)
    os.kill(pair[killed].pid, signal.SIGKILL)
    begin = time.monotonic()
    code, output = runs.finish(pair[1 - killed], 60)
    assert time.monotonic() - begin < 60
    assert code not in (0, 143), output
    assert 'error' in output.lower()
    pair[killed].communicate()


@pytest.mark.parametrize(
    ('flags', 'words'),
    [
        (['--coordinator', '10.0.0.1:8476'], '--distributed'),
        (['--process', '0', '--processes', '2'], '--distributed'),
        (['--distributed', '--process', '0', '--processes', '2'], '--coordinator is missing'),
        (['--distributed', '--coordinator', 'nowhere', '--process', '0', '--processes', '2'], 'is not ADDRESS:PORT'),
        (['--distributed', '--coordinator', '10.0.0.1:8476'], 'numbered from 0'),
    ],
)
def test_impossible_flags_are_refused(flags, words, tmp_path, capsys):
    path = tmp_path / 'run'
    assert train.main(['--run-dir', str(path), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not path.exists()


def test_the_flags_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        train.main(['--help'])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ('--distributed', '--coordinator', '--process ', '--processes', '--bank.every'))
