"""One file says that a step happened; recovery finds the newest that is true."""

import json
import os
import signal
import subprocess
import sys

import pytest

from sesa_jax.run import commit
from sesa_jax.run.commit import CommitRecord
from sesa_jax.run.files import seal
from sesa_jax.run.folder import RunFolder


def good(_):
    return None


@pytest.fixture
def folder(tmp_path):
    """Three committed steps and a fourth that did not get its record."""
    with RunFolder.create(tmp_path, {'seed': 0}) as made:
        offset = 0
        for step in (1, 2, 3, 4):
            (made.checkpoints / f'{step:05d}').mkdir()
            made.rollouts_file(step).write_bytes(b'r')
            made.questions_file(step).write_bytes(b'q')
            with open(made.metrics, 'ab') as file:
                file.write(json.dumps({'step': step, 'x': 10**step}).encode() + b'\n')
                offset = file.tell()
            if step < 4:
                commit.write(made, record(step, offset))
        yield made


def record(step, offset, **extra):
    return CommitRecord(
        step, f'ckpt{step}', 10 * step, f'bank{step}', f'queue{step}', offset, extra or {'pool': ['é', 1.5]}
    )


def test_round_trip(folder):
    assert commit.read(folder, 2) == record(2, 43)
    assert commit.recorded(folder) == [1, 2, 3]


def test_equal_records_are_equal_bytes(folder):
    before = folder.record_file(2).read_bytes()
    commit.write(folder, record(2, 43))
    assert folder.record_file(2).read_bytes() == before


def test_the_newest_good_record_is_taken(folder):
    found = commit.newest_valid(folder, good, good)
    assert found.record.step == 3
    assert found.skipped == ()


def test_each_broken_record_is_skipped_with_its_reason(folder):
    found = commit.newest_valid(
        folder,
        lambda r: 'bits of the weights changed' if r.step == 3 else None,
        lambda r: 'chain is broken' if r.step == 2 else None,
    )
    assert found.record.step == 1
    assert found.skipped == ((3, 'bits of the weights changed'), (2, 'chain is broken'))


def test_no_good_record_means_the_beginning(folder):
    found = commit.newest_valid(folder, lambda r: 'bad', good)
    assert found.record is None
    assert [step for step, _ in found.skipped] == [3, 2, 1]


def test_any_flipped_bit_of_a_record_is_noticed(folder):
    raw = folder.record_file(3).read_bytes()
    for position in range(0, 8 * len(raw), 7):
        bad = bytearray(raw)
        bad[position // 8] ^= 1 << position % 8
        folder.record_file(3).write_bytes(bytes(bad))
        found = commit.newest_valid(folder, good, good)
        assert (found.record.step, found.skipped[0][0]) == (2, 3)
        assert 'damaged' in found.skipped[0][1]


def test_a_record_under_the_name_of_another_step_is_refused(folder):
    folder.record_file(3).write_bytes(folder.record_file(1).read_bytes())
    found = commit.newest_valid(folder, good, good)
    assert found.record.step == 2
    assert 'is the record of step 1' in found.skipped[0][1]


@pytest.mark.parametrize(
    ('damage', 'reason'),
    [
        (lambda raw: raw[:60], 'has 60 bytes, the record needs'),
        (lambda raw: raw.replace(b'"step": 3', b'"step": 8'), 'does not hold the line of step 3'),
        (lambda raw: b' ' + raw, 'does not hold the line of step 3'),
    ],
)
def test_metrics_that_do_not_fit_are_noticed(folder, damage, reason):
    folder.metrics.write_bytes(damage(folder.metrics.read_bytes()))
    found = commit.newest_valid(folder, good, good)
    assert found.skipped[0][0] == 3
    assert reason in found.skipped[0][1]


def test_missing_metrics_are_noticed(folder):
    folder.metrics.unlink()
    assert commit.newest_valid(folder, good, good).record is None


def state(folder):
    return (
        commit.recorded(folder),
        sorted(child.name for child in folder.checkpoints.iterdir()),
        sorted(child.name for child in folder.rollouts.iterdir()),
        sorted(child.name for child in folder.questions.iterdir()),
        [json.loads(line)['step'] for line in folder.metrics.read_text().splitlines()],
    )


def test_everything_behind_the_record_goes(folder):
    commit.truncate_behind(folder, commit.read(folder, 2))
    files = ['step_00001.jsonl.gz', 'step_00002.jsonl.gz']
    assert state(folder) == ([1, 2], ['00001', '00002'], files, files, [1, 2])


def test_without_a_record_everything_goes_but_the_config(folder):
    commit.truncate_behind(folder, None)
    assert state(folder) == ([], [], [], [], [])
    assert folder.config.exists()


def test_an_evaluation_of_a_later_step_goes_with_its_report(folder):
    folder.report.write_text('html')
    folder.evaluation.write_text(json.dumps({'step': 3}))
    commit.truncate_behind(folder, commit.read(folder, 3))
    assert folder.evaluation.exists()
    assert folder.report.exists()
    commit.truncate_behind(folder, commit.read(folder, 2))
    assert not folder.evaluation.exists()
    assert not folder.report.exists()


CHILD = """
import sys
from sesa_jax.run import commit
from sesa_jax.run.folder import RunFolder
folder = RunFolder.resume(sys.argv[1])
if sys.argv[2] == 'write':
    for step in (4, 5):
        commit.write(folder, commit.CommitRecord(step, 'c', 1, 'b', 'q', 0))
else:
    commit.truncate_behind(folder, commit.read(folder, 1))
"""


def kill_at(folder, point, what):
    folder.close()
    env = {**os.environ, 'SESA_CRASH_AT': point}
    done = subprocess.run([sys.executable, '-c', CHILD, str(folder.path), what], env=env, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ('point', 'newest'),
    [
        ('commit.before_write', 3),
        ('commit.before_rename', 3),
        ('commit.after_rename', 4),
        ('commit.before_rename:2', 4),
    ],
)
def test_killed_in_a_commit_the_record_is_whole_or_not_there(folder, point, newest):
    kill_at(folder, point, 'write')
    assert commit.newest_valid(folder, good, good).record.step == newest


def test_killed_while_dropping_the_same_record_is_found_again(folder):
    kill_at(folder, 'truncate.after_records', 'truncate')
    found = commit.newest_valid(folder, good, good)
    assert found.record == commit.read(folder, 1)
    commit.truncate_behind(folder, found.record)
    assert state(folder)[1] == ['00001']


def test_a_record_of_an_unknown_form_is_skipped_not_fatal(folder):
    folder.record_file(9).write_bytes(seal({'step': 9, 'from': 'the future'}))
    found = commit.newest_valid(folder, good, good)
    assert found.record.step == 3
    assert 'does not understand' in found.skipped[0][1]
