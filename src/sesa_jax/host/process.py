"""The host process as its parent sees it: start, liveness, restart, stop. What runs inside is `server.py`.

The child gets one line of JSON on its standard input, which then stays open and silent: that it ends is how the child
knows that its parent asked it to stop, or died. It answers with one line on its standard output: where its socket is,
or why it cannot start. What it says later goes to `host.log` in the run folder. It runs in a session of its own, so a
signal for the trainer's process group does not reach it.

The child makes and removes the folder of its socket. Where it was killed and could not, the parent removes it, and
where both were, the next start in the same run folder does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sesa_jax.run.clock import SYSTEM, Clock

LOG = 'host.log'
RECORD = 'host.json'  # process id and socket of the run's host process; whoever holds its lock is that process
SOCKET = 'host.sock'
PREFIX = 'sesa-'
RESTART_WINDOW = 600.0  # seconds in which a few restarts are forgiven; more is a fault that a restart does not mend
STOP_SECONDS = 6.0  # the child ends by itself within 5
ANSWER_BYTES = 1 << 16
LOOK_SECONDS = 1.0  # between two looks at what a starting child does
TELL_SECONDS = 30.0  # of starting, after which the person is told, and again each time


class HostError(RuntimeError):
    """The host process, or a call to it, failed."""


class HostStartError(HostError):
    """The host process did not start; the message has its own words."""


class HostProcess:
    """A running host process. Make it with `start`; it is a context manager that stops the process."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], start_seconds: float, most_restarts: int, clock: Clock
    ):
        self._run_dir = run_dir
        self._config = dict(config)
        self._start_seconds = start_seconds
        self._most_restarts = most_restarts
        self._clock = clock
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where this child's part of the log begins
        self._is_stopped = False
        self._restarted: list[float] = []  # when, within the window
        self.socket = ''  # path of the Unix socket
        self.restarts = 0  # how often the child had to be replaced

    @classmethod
    def start(
        cls,
        run_dir: str | Path,
        config: Mapping[str, Any],
        *,
        start_seconds: float = 60.0,
        most_restarts: int = 3,
        clock: Clock = SYSTEM,
    ) -> HostProcess:
        """Start the host process of a run.

        `run_dir` is an existing folder; `config` is the run's config as JSON data (`config.to_json`). HostStartError,
        with the child's words, if it cannot start; then nothing is left.

        There is no limit on how long it may take: the child indexes its corpus, which takes hours where that is large
        enough, and a fixed time would end the run although all is well, and again at each try. So it has time as long
        as it works, and the person is told that it does. A child that uses no processor time for `start_seconds` on
        end hangs, and is given up: nobody may be there to end an unattended run. One that ends is noticed at once.
        A process that dies or hangs is replaced at most `most_restarts` times in ten minutes.
        """
        process = cls(Path(run_dir).absolute(), config, start_seconds, most_restarts, clock)
        process._launch()
        return process

    @property
    def run(self) -> str:
        """Name of the run folder."""
        return self._run_dir.name

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def replace(self, seen: int, reason: str) -> int:
        """Kill what is left of the child and start another; returns the new value of `restarts`.

        `seen` is the value of `restarts` when the caller last reached it: if somebody else has replaced the child
        since, nothing is done. HostError when it was done too often, or after `stop`.
        """
        with self._lock:
            if self.restarts != seen:
                return self.restarts
            if self._is_stopped:
                raise HostError(f'the host process was stopped ({reason})')
            now = self._clock.monotonic()
            self._restarted = [then for then in self._restarted if now - then < RESTART_WINDOW]
            if len(self._restarted) >= self._most_restarts:
                raise HostError(
                    f'the host process failed {len(self._restarted) + 1} times within {RESTART_WINDOW / 60:.0f} '
                    f'minutes, last: {reason} ({self._last_words()})'
                )
            self._restarted.append(now)
            self._end(grace=0.0)
            self._launch()
            self.restarts += 1
            return self.restarts

    def stop(self) -> None:
        """Ask the child to end, and see to it. Leaves no process, socket or folder; may be called twice."""
        with self._lock:
            self._is_stopped = True
            self._end(grace=STOP_SECONDS)

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self) -> None:
        if not self._run_dir.is_dir():
            raise HostStartError(f'the host process needs the run folder {self._run_dir}, which does not exist')
        first = json.dumps({'run_dir': str(self._run_dir), 'config': self._config, 'parent': os.getpid()})
        try:
            with open(self._run_dir / LOG, 'ab') as log:
                self._log_start = log.tell()
                self._child = subprocess.Popen(
                    [sys.executable, '-m', 'sesa_jax.host.server'],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise HostStartError(f'the host process did not start: {error}') from error
        answer: dict[str, Any] = {}
        with contextlib.suppress(BrokenPipeError):  # it died before it read: its log says why
            self._child.stdin.write(first.encode() + b'\n')
            self._child.stdin.flush()
        try:
            answer = self._read_answer()
        finally:
            if 'socket' not in answer:
                self._end(grace=0.0 if not answer else 1.0)
        if 'socket' not in answer:
            raise HostStartError(f'the host process did not start: {answer["error"]}')
        self.socket = answer['socket']
        self._child.stdout.close()

    def _read_answer(self) -> dict[str, Any]:
        """The child's first line, or {} with the reason under 'error'."""
        output, raw = self._child.stdout.fileno(), b''
        begin = worked = told = self._clock.monotonic()
        work = _work(self.pid)
        while not raw.endswith(b'\n') and len(raw) < ANSWER_BYTES:
            if not select.select([output], [], [], LOOK_SECONDS)[0]:
                before, work, now = work, _work(self.pid), self._clock.monotonic()
                if work is None or work != before:
                    worked = now
                if now - worked > self._start_seconds:
                    return {'error': f'no answer, and no work for {now - worked:.0f} s ({self._last_words()})'}
                if now - told > TELL_SECONDS:
                    told = now
                    print(f'the host process still indexes its corpus, for {now - begin:.0f} s now', file=sys.stderr)
                continue
            chunk = os.read(output, ANSWER_BYTES)
            if not chunk:
                return {'error': f'it ended with exit code {self._child.wait()} ({self._last_words()})'}
            raw += chunk
        try:
            return dict(json.loads(raw))
        except (ValueError, TypeError):
            return {'error': f'it answered {raw[:200]!r}'}

    def _last_words(self) -> str:
        """The last lines that the child wrote to its log."""
        with open(self._run_dir / LOG, 'rb') as log:
            log.seek(self._log_start)
            lines = log.read()[-2000:].decode(errors='replace').strip().splitlines()
        return f'{self._run_dir / LOG}: ' + (' | '.join(lines[-3:]) if lines else 'empty')

    def _end(self, grace: float) -> None:
        child = self._child
        if child is None:
            return
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()  # end of file is the request to stop
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        if self.socket:
            remove_socket_folder(Path(self.socket))
            self.socket = ''


def _work(pid: int) -> int | None:
    """Processor time that a process has used, in ticks; None where the system does not tell."""
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None


def remove_socket_folder(path: Path) -> None:
    """Remove a socket that a host process left, and its folder: only ours, only of our making, nothing else in it."""
    folder = path.parent
    with contextlib.suppress(OSError):
        info = folder.lstat()
        is_ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and folder.name.startswith(PREFIX)
        if not is_ours or path.name != SOCKET:
            return
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                return
            path.unlink()
        folder.rmdir()
