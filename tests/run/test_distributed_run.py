"""The main job by two processes of one device each, against one process of two devices."""

import signal
import socket

import numpy as np
import pytest
import runs

from experiments import train
from sesa_jax.run import checkpoint

FLAGS = (
    '--problems', '4', '--solver.rollouts', '4', '--solver.max-turns', '3',
    '--challenger.max-turns', '3', '--grpo.micro-batch-tokens', '8192', '--grpo.mini-batch', '4',
    '--seed', '1',  # both policies learn in its first step, the solver in its second
)  # fmt: skip
MEASURED = ('--evaluation.validate-per-cell', '1', '--validate-every', '1')


def start_pair(path, *flags, steps):
    """Two processes that train as one, on a port that is free now."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    cluster = ('--distributed', '--coordinator', f'127.0.0.1:{port}', '--processes', '2', '--process')
    return [runs.start(path, *FLAGS, *flags, *cluster, str(i), steps=steps, devices=1) for i in (0, 1)]


@pytest.mark.devices
@pytest.mark.slow
def test_two_processes_play_and_learn_as_one_and_a_signal_to_one_ends_both(tmp_path):
    """SIGTERM in the first step: both end behind the same one, with what one process of two devices has there."""
    path = tmp_path / 'two'
    pair = start_pair(path, '--offload', *MEASURED, steps=200)
    runs.await_file(path / 'steps' / '00000.json', pair)
    pair[1].send_signal(signal.SIGTERM)
    (code, output), (other_code, other) = [runs.finish(process) for process in pair]
    assert (code, other_code) == (143, 143), (output, other)
    two = runs.Played(path)
    last = len(two.metrics)
    assert f'stopped at the end of step {last}' in output
    assert 'step' not in other  # process 0 has the terminal
    alone = tmp_path / 'one'
    code, output = runs.finish(runs.start(alone, *FLAGS, *MEASURED, '--no-report', steps=last, devices=2))
    assert code == 0, output
    one = runs.Played(alone)
    losses = []
    for step in range(1, last + 1):
        ours, theirs = one.metrics[step - 1], two.metrics[step - 1]
        for role in ('challenger', 'solver'):
            assert [t.ids.tolist() for t in one.trajectories(step, role)] == [
                t.ids.tolist() for t in two.trajectories(step, role)
            ]
            if 'loss' in ours['update'][role]:
                losses.append([[row['update'][role][name] for name in ('loss', 'grad_norm')] for row in (ours, theirs)])
        for name in ('solver', 'bank', 'calls', 'validation'):
            assert ours[name] == theirs[name]
    assert len(losses) > 1, 'nothing was learned, so nothing was compared'
    np.testing.assert_allclose(*np.transpose(losses, (1, 0, 2)), rtol=1e-5, atol=1e-7)
    assert one.record(0)['checkpoint'] == two.record(0)['checkpoint']
    checkpoint.verify(path / 'checkpoints', last, two.record(last)['checkpoint'])


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
