"""The run folder: which file lies where, and who may write. Everything that a run leaves behind is under one path.

Left out: what the files contain (`commit.py`, `checkpoint.py`, `metrics.py`, `skills/bank.py` and
`rollout/trajectory.py` know). A writer holds an exclusive lock for as long as it lives; the kernel gives it back
however the process ends. Readers (reports, viewers) take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sesa_jax.config import ConfigError
from sesa_jax.run.files import TEMPORARY, remove, sync, write_atomic


class RunFolder:
    """Paths of one run. Make it with `create`, `resume` (both take the lock) or `read` (no lock)."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / 'config.json'
        self.metrics = path / 'metrics.jsonl'
        self.tensorboard = path / 'tensorboard'
        self.checkpoints = path / 'checkpoints'
        self.bank = path / 'bank.db'
        self.rollouts = path / 'rollouts'
        self.questions = path / 'questions'
        self.steps = path / 'steps'
        self.evaluation = path / 'evaluation.json'
        self.report = path / 'report.html'
        self.tokenizer = path / 'tokenizer.json'
        self.lock = path / 'lock'
        self._handle: int | None = None

    def rollouts_file(self, step: int) -> Path:
        return self.rollouts / f'step_{step:05d}.jsonl.gz'

    def questions_file(self, step: int) -> Path:
        return self.questions / f'step_{step:05d}.jsonl.gz'

    def record_file(self, step: int) -> Path:
        return self.steps / f'{step:05d}.json'

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> RunFolder:
        """A new run folder that holds `config`, locked.

        `path` must not exist, or be an empty folder; what a run left that was killed before it wrote its config counts
        as empty. ConfigError otherwise, and where the place cannot be written; then nothing was made.
        """
        folder = cls(Path(path).absolute())
        made = _make_folder(folder.path)
        try:
            folder._refuse_content()  # before the lock file: a folder of someone else's gets no file of ours
            folder._take_lock()
            folder._refuse_content()  # again: another process may have made its run in between
            for place in folder._places:
                place.mkdir(exist_ok=True)
            folder._write_config(config)
            for place in made:
                sync(place.parent)
        except OSError as error:
            folder._take_back(made)
            raise ConfigError(f'cannot write the run folder {path}: {error.strerror or error}') from error
        except ConfigError:
            folder._take_back(made)
            raise
        return folder

    @classmethod
    def resume(cls, path: str | Path) -> RunFolder:
        """An existing run folder, locked, its half-made files removed. ConfigError if there is nothing to resume."""
        folder = cls.read(path, 'nothing to resume: ')
        folder._take_lock()
        try:
            # A run that was killed between its config and its first commit starts again from step 0.
            for place in folder._places:
                place.mkdir(exist_ok=True)
                for leftover in [*place.glob('*' + TEMPORARY), *place.glob('*.partial')]:
                    remove(leftover)
            for leftover in folder.path.glob('*' + TEMPORARY):
                remove(leftover)
        except OSError as error:
            folder.close()
            raise ConfigError(f'cannot write the run folder {path}: {error.strerror or error}') from error
        return folder

    @classmethod
    def read(cls, path: str | Path, reason: str = '') -> RunFolder:
        """An existing run folder for reading, without the lock. ConfigError if there is no run at `path`."""
        folder = cls(Path(path).absolute())
        if not folder.path.exists():
            raise ConfigError(f'{reason}there is no folder {path}')
        if not folder.path.is_dir():
            raise ConfigError(f'{reason}{path} is a file, not a run folder')
        if not folder.config.is_file():
            raise ConfigError(f'{reason}{path} holds no run (no config.json in it)')
        return folder

    def read_config(self) -> dict[str, Any]:
        """The resolved config as it was saved."""
        try:
            return json.loads(self.config.read_text(encoding='utf-8'))
        except ValueError as error:
            raise ConfigError(f'{self.config} is damaged: {error}') from error

    def change_config(self, config: Mapping[str, Any]) -> None:
        """Save another config in place of the one that is there. The holder of the lock may do it."""
        if not self.is_locked:
            raise RuntimeError(f'{self.path}: its config may be written by the holder of the lock alone')
        try:
            self._write_config(config)
        except OSError as error:
            raise ConfigError(f'cannot write the run folder {self.path}: {error.strerror or error}') from error

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._handle is not None

    def close(self) -> None:
        """Give the lock back. The lock file stays; it is empty then."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _places(self) -> tuple[Path, ...]:
        return (self.checkpoints, self.rollouts, self.questions, self.steps)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        write_atomic(self.config, json.dumps(dict(config), indent=2, sort_keys=True).encode() + b'\n', 'folder')

    def _refuse_content(self) -> None:
        """ConfigError unless the folder is empty, but for what a run left that died before its config was written."""
        ours = {self.lock.name, self.config.name + TEMPORARY, *(place.name for place in self._places)}
        found = sorted(child.name for child in self.path.iterdir())
        if all(name in ours for name in found) and not any(any(p.iterdir()) for p in self._places if p.is_dir()):
            return
        shown = ', '.join(found[:4]) + (', ...' if len(found) > 4 else '')
        if self.config.exists():
            raise ConfigError(
                f'{self.path} holds a run ({shown}): go on from it with --resume, or choose another --run-dir'
            )
        raise ConfigError(f'{self.path} is not empty ({shown}): choose another --run-dir')

    def _take_back(self, made: list[Path]) -> None:
        """Undo a `create` that failed. What others may hold, and folders that were there before, stay."""
        if self.is_locked:
            for place in self._places:
                with contextlib.suppress(OSError):
                    place.rmdir()
            for file in (self.config, self.config.with_name(self.config.name + TEMPORARY), self.lock):
                with contextlib.suppress(OSError):
                    file.unlink()
            self.close()
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()

    def _take_lock(self) -> None:
        try:
            # Python opens with close-on-exec, so the host process never inherits the lock.
            handle = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f'cannot write in the run folder {self.path}: {error.strerror}') from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(handle, 4096, 0)
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(f'the run folder {self.path} is in use by {_describe(holder)}') from error
            raise ConfigError(f'the file system of {self.path} cannot lock files: {error.strerror}') from error
        me = {'pid': os.getpid(), 'boot': _boot_id(), 'host': socket.gethostname()}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(me).encode(), 0)
        self._handle = handle


def _boot_id() -> str:
    """Identifies this boot of this machine, so that a process number can be told from an older one; '' off Linux."""
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    except OSError:
        return ''


def _describe(raw: bytes) -> str:
    try:
        holder = json.loads(raw)
        pid, boot, host = int(holder['pid']), str(holder['boot']), str(holder['host'])
    except (ValueError, KeyError, TypeError):
        return 'another process'
    where = 'this machine' if boot == _boot_id() and host == socket.gethostname() else f'host {host}, boot {boot}'
    return f'process {pid} on {where}: wait for it, stop it, or choose another --run-dir'


def _make_folder(path: Path) -> list[Path]:
    """Make `path` and its missing parents; returns what was made, innermost first. On refusal nothing was made."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f'{path} is a file, not a folder: choose another --run-dir')
    missing = []
    for place in [path, *path.parents]:
        if place.exists():
            break
        missing.append(place)
    made: list[Path] = []
    try:
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            made.insert(0, place)
    except OSError as error:
        for place in made:
            place.rmdir()
        raise ConfigError(f'cannot make the run folder {path}: {error.strerror}') from error
    return made
