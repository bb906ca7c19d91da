"""Who may write into a run folder, and what a refusal leaves behind: nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from sesa_jax.config import ConfigError
from sesa_jax.run.files import seal, unseal, write_atomic
from sesa_jax.run.folder import RunFolder

CONFIG = {'seed': 3, 'method': 'sesa'}


def everything(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob('*'))


def test_create_makes_the_layout_and_saves_the_config(tmp_path):
    with RunFolder.create(tmp_path / 'a' / 'run', CONFIG) as folder:
        assert folder.read_config() == CONFIG
        assert everything(tmp_path / 'a' / 'run') == [
            'checkpoints', 'config.json', 'lock', 'questions', 'rollouts', 'steps',
        ]  # fmt: skip
        assert folder.rollouts_file(12).name == 'step_00012.jsonl.gz'
        assert folder.record_file(12) == folder.steps / '00012.json'


def test_an_empty_folder_is_taken(tmp_path):
    RunFolder.create(tmp_path, CONFIG).close()
    assert (tmp_path / 'config.json').exists()


def test_a_folder_with_something_in_it_is_refused_and_untouched(tmp_path):
    (tmp_path / 'thesis.tex').write_text('x')
    with pytest.raises(ConfigError, match=r'is not empty \(thesis.tex\): choose another --run-dir'):
        RunFolder.create(tmp_path, CONFIG)
    assert everything(tmp_path) == ['thesis.tex']


def test_a_folder_with_a_run_points_to_resume(tmp_path):
    RunFolder.create(tmp_path, CONFIG).close()
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match='go on from it with --resume'):
        RunFolder.create(tmp_path, {'seed': 4})
    assert everything(tmp_path) == before
    assert json.loads((tmp_path / 'config.json').read_text()) == CONFIG


def test_what_a_run_left_that_died_before_its_config_counts_as_empty(tmp_path):
    (tmp_path / 'lock').write_text('')
    (tmp_path / 'config.json.tmp').write_text('{')
    (tmp_path / 'steps').mkdir()
    RunFolder.create(tmp_path, CONFIG).close()
    assert not (tmp_path / 'config.json.tmp').exists()


@pytest.mark.parametrize('name', ['a/run', 'a'])
def test_a_file_in_the_way_is_refused(tmp_path, name):
    (tmp_path / 'a').write_text('x')
    with pytest.raises(ConfigError, match=r'a file, not a folder|cannot make the run folder'):
        RunFolder.create(tmp_path / name, CONFIG)
    assert everything(tmp_path) == ['a']


def test_an_unwritable_place_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match='cannot make the run folder /proc/sesa/run: No such file'):
        RunFolder.create('/proc/sesa/run', CONFIG)


def test_a_failure_in_the_middle_takes_everything_back(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('sesa_jax.run.folder.write_atomic', full)
    with pytest.raises(ConfigError, match='No space left on device'):
        RunFolder.create(tmp_path / 'a' / 'run', CONFIG)
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda path: None, 'nothing to resume: there is no folder'),
        (lambda path: path.mkdir(), 'nothing to resume: .* holds no run'),
        (lambda path: path.write_text(''), 'nothing to resume: .* is a file'),
    ],
)
def test_resume_of_nothing_is_refused_and_makes_nothing(tmp_path, make, message):
    make(tmp_path / 'run')
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=message):
        RunFolder.resume(tmp_path / 'run')
    assert everything(tmp_path) == before


def test_resume_removes_what_is_half_made(tmp_path):
    folder = RunFolder.create(tmp_path, CONFIG)
    folder.close()
    (folder.checkpoints / '00002.tmp' / 'state').mkdir(parents=True)
    (folder.steps / '00002.json.tmp').write_text('{')
    (folder.rollouts / 'step_00002.jsonl.gz.partial').write_text('')
    (folder.steps / '00001.json').write_text('kept')
    RunFolder.resume(tmp_path).close()
    assert everything(folder.checkpoints) == everything(folder.rollouts) == []
    assert everything(folder.steps) == ['00001.json']


def test_two_writers_are_refused_and_told_who_holds_it(tmp_path):
    with RunFolder.create(tmp_path, CONFIG):
        with pytest.raises(ConfigError, match=f'in use by process {os.getpid()} on this machine'):
            RunFolder.resume(tmp_path)
        assert RunFolder.read(tmp_path).read_config() == CONFIG  # readers need no lock
    RunFolder.resume(tmp_path).close()


def test_a_holder_on_another_machine_is_named(tmp_path):
    with RunFolder.create(tmp_path, CONFIG) as folder:
        folder.lock.write_text(json.dumps({'pid': 7, 'boot': 'b1', 'host': 'node3'}))
        with pytest.raises(ConfigError, match='in use by process 7 on host node3, boot b1'):
            RunFolder.resume(tmp_path)


def test_a_killed_holder_gives_the_lock_back_and_its_children_do_not_keep_it(tmp_path):
    RunFolder.create(tmp_path, CONFIG).close()
    code = (
        'import subprocess, sys, time; from sesa_jax.run.folder import RunFolder; f = RunFolder.resume(sys.argv[1])\n'
        'child = subprocess.Popen(["sleep", "60"]); print(child.pid, flush=True)\n'
        'time.sleep(60)'
    )
    holder = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f'in use by process {holder.pid} on this machine'):
            RunFolder.resume(tmp_path)
        holder.kill()
        holder.wait()
        RunFolder.resume(tmp_path).close()
        os.kill(child, 0)  # it was alive all the time
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_damaged_config_is_named(tmp_path):
    RunFolder.create(tmp_path, CONFIG).close()
    (tmp_path / 'config.json').write_text('{"seed": ')
    with pytest.raises(ConfigError, match=r'config\.json is damaged'):
        RunFolder.read(tmp_path).read_config()


def test_every_flipped_bit_of_sealed_data_is_noticed():
    raw = seal({'step': 12, 'hash': 'ab', 'extra': {'é': [1.5, None]}})
    assert unseal(raw, 'x') == {'step': 12, 'hash': 'ab', 'extra': {'é': [1.5, None]}}
    for position in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match='x is damaged'):
            unseal(bytes(bad), 'x')


def test_a_write_that_dies_before_its_rename_leaves_the_old_content(tmp_path):
    file = tmp_path / 'f'
    write_atomic(file, b'old')
    code = (
        'import pathlib, sys; from sesa_jax.run.files import write_atomic\n'
        'write_atomic(pathlib.Path(sys.argv[1]), b"new", "p")'
    )
    for point, expected in (('p.before_rename', b'old'), ('p.after_rename', b'new')):
        done = subprocess.run(
            [sys.executable, '-c', code, str(file)], env={**os.environ, 'SESA_CRASH_AT': point}, check=False
        )
        assert done.returncode == -signal.SIGKILL
        assert pathlib.Path(file).read_bytes() == expected


def test_the_config_is_changed_by_the_holder_of_the_lock_alone(tmp_path):
    with RunFolder.create(tmp_path, CONFIG) as folder:
        folder.change_config({**CONFIG, 'seed': 4})
        assert folder.read_config() == {'seed': 4, 'method': 'sesa'}
    with pytest.raises(RuntimeError, match='by the holder of the lock alone'):
        folder.change_config(CONFIG)
    assert RunFolder.read(tmp_path).read_config()['seed'] == 4
