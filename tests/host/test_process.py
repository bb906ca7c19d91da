"""The life of the host process, with real processes: it starts, serves one run, and never outlives its parent."""

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sesa_jax.host import process as process_module
from sesa_jax.host.client import HostClient, HostError, HostProcess, HostStartError
from sesa_jax.host.server import make_socket_folder


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_running(pid: int) -> bool:
    """Whether a process runs. One that ended and was not waited for does not."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def test_a_process_starts_serves_and_stops_without_a_trace(tmp_path, run_data):
    mask = os.umask(0)  # the worst case for whatever hangs on it
    try:
        process = HostProcess.start(tmp_path, run_data)
    finally:
        os.umask(mask)
    path, pid = Path(process.socket), process.pid
    try:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads((tmp_path / 'host.json').read_text()) == {'pid': pid, 'socket': str(path)}
        with HostClient(process) as host:
            assert host.search(['zyx'], 2)[0].outcome == 'empty'
        assert os.getsid(pid) == pid  # no signal for our process group reaches it
    finally:
        process.stop()
    assert process._child.returncode == 0  # it ended by itself when it was asked to
    process.stop()
    assert not is_running(pid)
    assert not path.parent.exists()
    assert os.listdir(tmp_path) == ['host.log']
    assert 'host-client' not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(HostError, match='stopped'):
        process.replace(0, 'a test')


def test_neither_jax_nor_transformers_is_imported():
    probe = (
        'import sys, sesa_jax.host.server; print([m for m in ("jax", "jaxlib", "transformers") if m in sys.modules])'
    )
    assert subprocess.run([sys.executable, '-c', probe], capture_output=True, text=True, check=True).stdout == '[]\n'


PARENT = """
import json, os, sys, time
from sesa_jax.host.process import HostProcess
process = HostProcess.start(sys.argv[1], json.loads(sys.argv[2]))
if 'fork' in sys.argv:
    sibling = os.fork()  # inherits the pipe, as a forked data loader would, and outlives us
    if not sibling:
        time.sleep(30)
        os._exit(0)
else:
    sibling = 0
print(process.pid, process.socket, sibling, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize('manner', ['plain', 'fork'])
def test_it_ends_when_its_parent_is_killed_even_where_the_pipe_stays_open(tmp_path, run_data, manner):
    parent = subprocess.Popen(
        [sys.executable, '-c', PARENT, str(tmp_path), json.dumps(run_data), manner],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    pid, path, sibling = parent.stdout.readline().split()
    try:
        # What a terminal or a scheduler sends to the group is for the trainer, and does not reach the host.
        os.kill(int(pid), signal.SIGTERM)
        os.kill(int(pid), signal.SIGINT)
        assert not wait_until(lambda: not is_running(int(pid)), 0.3)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(int(pid)), 5)
        assert not Path(path).parent.exists()
        assert not (tmp_path / 'host.json').exists()
    finally:
        if int(sibling):
            os.kill(int(sibling), signal.SIGKILL)
        parent.stdout.close()


def test_a_bad_config_is_one_error_with_the_cause_in_it(tmp_path, run_data):
    with pytest.raises(HostStartError, match='did not start: ConfigError: config: colour is not a field'):
        HostProcess.start(tmp_path, {**run_data, 'colour': 'red'})
    assert not (tmp_path / 'host.json').exists()


def test_a_missing_run_folder_is_an_error_that_names_it(tmp_path, run_data):
    with pytest.raises(HostStartError, match=r'run folder .*nowhere, which does not exist'):
        HostProcess.start(tmp_path / 'nowhere', run_data)


def shadowed(tmp_path, monkeypatch, code):
    """Lets a host process run some code before it starts."""
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'shadow'))
    (tmp_path / 'shadow').mkdir()
    (tmp_path / 'shadow' / 'aiohttp.py').write_text(code)


def test_a_child_that_dies_at_once_is_reported_with_the_last_lines_of_its_log(tmp_path, run_data, monkeypatch):
    shadowed(tmp_path, monkeypatch, 'raise SystemError("aiohttp is broken here")')
    with pytest.raises(HostStartError, match=r'ended with exit code 1 .*aiohttp is broken here'):
        HostProcess.start(tmp_path, run_data)


def test_a_child_that_hangs_is_given_up(tmp_path, run_data, monkeypatch):
    shadowed(tmp_path, monkeypatch, 'import time; time.sleep(60)')
    monkeypatch.setattr(process_module, 'LOOK_SECONDS', 0.2)
    with pytest.raises(HostStartError, match='no answer, and no work for 1 s'):
        HostProcess.start(tmp_path, run_data, start_seconds=1.0)


def test_a_child_that_works_has_all_the_time_that_it_needs_and_the_person_is_told(
    tmp_path, run_data, monkeypatch, capsys
):
    work = 'import time\nwhile time.process_time() < 2.5: pass\nraise SystemError("indexed for a while")'
    shadowed(tmp_path, monkeypatch, work)
    monkeypatch.setattr(process_module, 'LOOK_SECONDS', 0.2)
    monkeypatch.setattr(process_module, 'TELL_SECONDS', 1.0)
    with pytest.raises(HostStartError, match=r'ended with exit code 1 .*indexed for a while'):
        HostProcess.start(tmp_path, run_data, start_seconds=1.0)
    assert 'the host process still indexes its corpus, for 1 s now' in capsys.readouterr().err


def test_a_run_folder_that_another_host_process_serves_is_refused(tmp_path, run_data):
    with open(tmp_path / 'host.json', 'w') as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        record.write('{"pid": 77, "socket": "/tmp/sesa-other/host.sock"}')
        record.flush()
        with pytest.raises(HostStartError, match=r'socket of this run folder is in use.*"pid": 77'):
            HostProcess.start(tmp_path, run_data)


def test_the_next_start_removes_the_socket_of_a_killed_host_and_nothing_else(tmp_path, run_data):
    left = make_socket_folder()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(left / 'host.sock'))
    stale.close()
    (tmp_path / 'host.json').write_text(json.dumps({'pid': 1, 'socket': str(left / 'host.sock')}))
    with HostProcess.start(tmp_path, run_data) as process:
        assert not left.exists()
        assert Path(process.socket).exists()


@pytest.mark.parametrize('what', ['file in it', 'other name', 'other folder', 'link'])
def test_only_a_socket_of_ours_is_removed(tmp_path, what):
    folder = tmp_path / ('tmp' if what == 'other folder' else 'sesa-x')
    folder.mkdir()
    path = folder / ('other' if what == 'other name' else 'host.sock')
    path.write_text('precious')
    if what == 'link':
        (tmp_path / 'sesa-link').symlink_to(folder)
        process_module.remove_socket_folder(tmp_path / 'sesa-link' / 'host.sock')
    else:
        process_module.remove_socket_folder(path)
    assert path.read_text() == 'precious'


def test_the_path_of_the_socket_is_short_wherever_temporary_files_go(tmp_path, monkeypatch):
    deep = tmp_path / ('x' * 120)
    deep.mkdir()
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(deep))
    monkeypatch.setattr('tempfile.tempdir', str(deep))
    folder = make_socket_folder()
    try:
        assert folder.parent == Path('/tmp')
    finally:
        folder.rmdir()
