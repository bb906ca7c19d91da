"""Runs that are killed, stopped, resumed, damaged, refused or spread over eight devices."""

import json
import os
import pathlib
import random
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import runs

from experiments import evaluate, train
from sesa_jax.run import checkpoint, commit

STEPS = int(os.environ.get('SESA_TEST_STEPS', '5'))
KILLS = int(os.environ.get('SESA_TEST_KILLS', '3'))
"""Of the run that is killed; eight steps and ten kills for the figures in docs/first-run.md."""
LONG = ('--bank.every', '3', '--bank.at-least', '1', '--keep-checkpoints', '3')


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run that nothing disturbed, with a consolidation of step 3."""
    path = tmp_path_factory.mktemp('whole') / 'run'
    code, output = runs.finish(runs.start(path, *LONG, steps=STEPS))
    assert code == 0, output
    return runs.Played(path)


def assert_same_bits(run, other):
    """Parameters, moments, bank, queue and metrics of the last step are equal."""
    last = len(other.metrics)
    keep = ('checkpoint', 'bank_seq', 'bank_hash', 'queue_hash', 'extra')
    assert {k: run.record(last)[k] for k in keep} == {k: other.record(last)[k] for k in keep}
    assert run.timeless() == other.timeless()
    with run.bank() as ours, other.bank() as theirs:
        assert ours.dump() == theirs.dump()


def left_behind(path):
    """Host processes of a run folder that still live, and sockets of them."""
    alive = []
    for entry in pathlib.Path('/proc').iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / 'cmdline').read_bytes()
                where = os.readlink(entry / 'fd' / '2') if b'sesa_jax.host' in command else ''
            except OSError:
                continue
            if str(path) in where:
                alive.append(entry.name)
    return alive


@pytest.mark.slow
def test_killed_anywhere_and_resumed_a_run_ends_with_the_same_bits(whole, tmp_path):
    path = tmp_path / 'run'
    rng = random.Random(os.environ.get('SESA_TEST_SEED', 'kill'))
    begin = time.monotonic()
    process = runs.start(path, *LONG, steps=STEPS)
    for _ in range(KILLS):
        time.sleep(rng.uniform(1, 25))
        if process.poll() is not None:
            break
        runs.kill(process)
        has_config = (path / 'config.json').exists()
        process = runs.start(path, *LONG, *(['--resume'] if has_config else []), steps=STEPS)
    code, output = runs.finish(process)
    assert code == 0, output
    assert_same_bits(runs.Played(path), whole)
    time.sleep(max(0.0, 6 - (time.monotonic() - begin)))
    assert left_behind(path) == []


def test_resumed_with_more_steps_and_with_states_in_host_memory_it_ends_with_the_same_bits(whole, tmp_path):
    """Offloaded between uses, stopped before the consolidation of step 3 and resumed."""
    path = tmp_path / 'run'
    for steps, flags in ((2, (*LONG, '--offload')), (STEPS, ('--resume',))):
        code, output = runs.finish(runs.start(path, *flags, steps=steps))
        assert code == 0, output
    offloaded = runs.Played(path)
    assert offloaded.run.offload and not whole.run.offload
    assert_same_bits(offloaded, whole)


def test_a_longer_run_that_is_killed_goes_on_to_its_new_end(tmp_path, monkeypatch, capsys):
    """From 1 step to 3, killed in the third, then resumed without --steps."""
    path = tmp_path / 'run'
    runs.play(path, steps=1)
    step, explained = train.step, []

    class Killed(BaseException):
        pass

    def dies(game, states, references, pool, number, laps):
        if number == 3:
            raise Killed
        return step(game, states, references, pool, number, laps)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train, 'step', dies)
        train.main(['--run-dir', str(path), '--resume', '--steps', '3'])
    assert len(runs.Played(path).metrics) == 2
    before = {file: file.read_bytes() for file in path.rglob('*') if file.is_file()}
    code, error = refused(capsys, '--run-dir', str(path), '--resume', '--steps', '1')
    assert code == 2 and f'steps is 1, but {path} has done 2' in error
    assert {file: file.read_bytes() for file in path.rglob('*') if file.is_file()} == before

    monkeypatch.setattr(train, 'explain', lambda *arguments: explained.append(arguments[4]))
    assert train.main(['--run-dir', str(path), '--resume', '--report']) == 0
    played = runs.Played(path)
    assert (played.run.steps, len(played.metrics), played.record(3)['step'], explained) == (3, 3, 3, [3])
    assert not played.run.report  # of what a resumed run may change the length alone stays


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_resumed_run_has_no_other_states_in_memory_while_it_reads_its_own(whole, tmp_path, monkeypatch):
    path = shutil.copytree(whole.folder.path, tmp_path / 'run')
    begin, restore, found = train.begin_or_recover, checkpoint.restore, []

    def recovers(*arguments):
        found.append(live_bytes())
        return begin(*arguments)

    def reads(*arguments):
        found.append(live_bytes())
        states = restore(*arguments)
        found.append(live_bytes())
        return states

    monkeypatch.setattr(train, 'begin_or_recover', recovers)
    monkeypatch.setattr(checkpoint, 'restore', reads)
    assert train.main(['--run-dir', str(path), '--resume']) == 0
    reading, read = (size - found[0] for size in found[1:])
    assert reading < 1e6 < 20e6 < read  # two roles, three times 3.7 MB


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_in_a_checkpoint_is_refused_and_the_step_before_is_used(whole, tmp_path):
    path = shutil.copytree(whole.folder.path, tmp_path / 'run')
    place = checkpoint.directory(runs.Played(path).folder.checkpoints, STEPS)
    largest = max((f for f in place.rglob('*') if f.is_file()), key=lambda f: f.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    code, output = runs.finish(runs.start(path, *LONG, '--resume', steps=STEPS))
    assert code == 0, output
    assert f'step {STEPS} cannot be used and is dropped' in output
    assert 'is damaged' in output
    assert f'going on behind step {STEPS - 1}' in output
    assert_same_bits(runs.Played(path), whole)


def test_a_corrupt_bank_is_refused_with_its_path(whole, tmp_path):
    path = shutil.copytree(whole.folder.path, tmp_path / 'run')
    bank = path / 'bank.db'
    for extra in path.glob('bank.db-*'):
        extra.unlink()
    bank.write_bytes(b'no bank' * 1000)
    code, output = runs.finish(runs.start(path, '--resume', steps=STEPS + 1))
    assert code == 2
    assert 'error:' in output
    assert 'bank.db' in output
    assert 'Traceback' not in output


@pytest.mark.parametrize(('number', 'expected'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_at_a_boundary(number, expected, tmp_path):
    path = tmp_path / 'run'
    process = runs.start(path, steps=200)
    runs.await_file(path / 'steps' / '00000.json', [process])
    process.send_signal(number)
    code, output = runs.finish(process)
    assert code == expected, output
    played = runs.Played(path)
    assert played.record(len(played.metrics))['step'] == len(played.metrics)
    assert '--resume' in output
    time.sleep(1)
    assert left_behind(path) == []


def test_evaluation_changes_nothing_in_the_bank(whole, tmp_path):
    played = runs.Played(shutil.copytree(whole.folder.path, tmp_path / 'run'))
    with played.bank() as bank:
        before = bank.dump()
    result = evaluate.evaluate(played.folder.path, per_cell=2)
    assert result.rates['on']['total'].n == 12
    assert result.facts['per_cell'] == json.loads(played.folder.evaluation.read_text())['facts']['per_cell'] == 2
    with played.bank() as bank:
        assert bank.dump() == before


def test_a_damaged_checkpoint_is_not_measured_but_the_one_before(whole, tmp_path, capsys):
    played = runs.Played(shutil.copytree(whole.folder.path, tmp_path / 'run'))
    place = checkpoint.directory(played.folder.checkpoints, STEPS)
    largest = max((f for f in place.rglob('*') if f.is_file()), key=lambda f: f.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    before = commit.recorded(played.folder), checkpoint.steps(played.folder.checkpoints)
    assert evaluate.main([str(played.folder.path), '--per-cell', '1']) == 0
    said = capsys.readouterr().err
    assert f'step {STEPS} cannot be used' in said and f'measuring step {STEPS - 1}' in said
    assert json.loads(played.folder.evaluation.read_text())['step'] == STEPS - 1
    assert (commit.recorded(played.folder), checkpoint.steps(played.folder.checkpoints)) == before


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_same_tokens_and_losses(whole, tmp_path, monkeypatch):
    monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # one step calls a program a few times
    path = tmp_path / 'run'
    code, output = runs.finish(runs.start(path, *LONG, steps=1, devices=8))
    assert code == 0, output
    eight, losses = runs.Played(path), []
    for role in ('challenger', 'solver'):
        ours, theirs = whole.trajectories(1, role), eight.trajectories(1, role)
        assert [t.ids.tolist() for t in ours] == [t.ids.tolist() for t in theirs]
        updates = [run.metrics[0]['update'][role] for run in (whole, eight)]
        assert [u['optimizer_steps'] for u in updates] == [1, 1]
        losses += [[u['loss'], u['policy_loss']] for u in updates]
    np.testing.assert_allclose(losses[::2], losses[1::2], rtol=1e-5, atol=1e-7)


def refused(capsys, *arguments):
    code = train.main(list(arguments))
    return code, capsys.readouterr().err


def test_refusals_at_the_door(tmp_path, capsys):
    """Clear words, exit code 2, nothing half-made."""
    taken = tmp_path / 'taken'
    taken.mkdir()
    (taken / 'thesis.txt').write_text('mine')
    empty = tmp_path / 'empty'
    empty.mkdir()
    new = tmp_path / 'new'
    cases = [
        (['--model', 'qwen9', '--run-dir', str(new)], "model 'qwen9'"),
        (['--model', str(empty), '--run-dir', str(new)], 'has no config.json'),
        (['--steps', '0', '--run-dir', str(new)], '--steps is 0'),
        (['--solver.rollouts', '0', '--run-dir', str(new)], '--solver.rollouts is 0'),
        (['--run-dir', str(taken)], 'is not empty'),
        (['--run-dir', str(new), '--resume'], 'nothing to resume'),
        (['--run-dir', '/proc/nowhere/run'], 'cannot make the run folder'),
        (['--bank.retrieved', '14', '--run-dir', str(new)], '--bank.retrieved 14'),
        (['--devices', '999', '--run-dir', str(new)], '--devices 999'),
    ]
    for arguments, words in cases:
        code, error = refused(capsys, *arguments)
        assert code == 2, arguments
        assert words in error, (arguments, error)
        assert 'Traceback' not in error
        assert not new.exists(), arguments
    assert [p.name for p in taken.iterdir()] == ['thesis.txt']


def test_two_trainers_on_one_folder(tmp_path, capsys):
    path = tmp_path / 'run'
    runs.play(path, steps=1)
    from sesa_jax.run.folder import RunFolder

    with RunFolder.resume(path):
        code, error = refused(capsys, '--run-dir', str(path), '--resume', '--steps', '3')
    assert code == 2
    assert f'is in use by process {os.getpid()}' in error


def test_what_the_host_process_listens_on_is_gone_afterwards(tmp_path):
    before = {line.split()[-1] for line in pathlib.Path('/proc/net/unix').read_text().splitlines()[1:] if '/' in line}
    runs.play(tmp_path / 'run', steps=1)
    after = {line.split()[-1] for line in pathlib.Path('/proc/net/unix').read_text().splitlines()[1:] if '/' in line}
    assert after <= before
