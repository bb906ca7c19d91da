"""Small real runs for tests: the main job on the lab, a few problems a step, everything real but the size."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from devices import fake_devices

from experiments import train
from sesa_jax import config
from sesa_jax.records import Trajectory
from sesa_jax.rollout.trajectory import read_trajectories
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.metrics import read_metrics
from sesa_jax.run.questions import read_questions
from sesa_jax.skills.bank import Bank

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SMALL = (
    '--problems', '8', '--solver.rollouts', '3', '--bank.bootstrap-steps', '0', '--seed', '100', '--no-report',
    '--validate-every', '100', '--grpo.mini-batch', '8', '--rollout.no-ahead',
    '--rollout.rows', '24', '--rollout.single', '8',
    '--rollout.blocks', '1',  # a decode program for each pool, and no more
    '--grpo.micro-batch-tokens', '256',  # a row each, nearly always: a program for each length, and no more
)  # fmt: skip


class Played:
    """What a run left behind."""

    def __init__(self, path: pathlib.Path):
        self.folder = RunFolder.read(path)
        self.run = config.from_json(self.folder.read_config())
        self.metrics = read_metrics(self.folder.metrics)

    def trajectories(self, step: int, role: str) -> list[Trajectory]:
        return [t for t in read_trajectories(self.folder.rollouts_file(step)) if t.role == role]

    def questions(self, step: int) -> list[dict[str, Any]]:
        return list(read_questions(self.folder.questions_file(step)))

    def bank(self) -> Bank:
        return Bank.open(self.folder.bank, self.run.bank, readonly=True)

    def record(self, step: int) -> dict[str, Any]:
        return json.loads(self.folder.record_file(step).read_text())

    def timeless(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != 'time'} for row in self.metrics]


def play(path: pathlib.Path, *flags: str, steps: int = 2) -> Played:
    """Run the main job in this process."""
    code = train.main([*SMALL, '--run-dir', str(path), '--steps', str(steps), *flags])
    assert code == 0
    return Played(path)


def start(path: pathlib.Path, *flags: str, steps: int = 2, devices: int = 1) -> subprocess.Popen:
    """Start the main job as a user does, in a session of its own."""
    command = [sys.executable, '-m', 'experiments.train', *SMALL, '--run-dir', str(path), '--steps', str(steps), *flags]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=fake_devices(devices), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def await_file(file: pathlib.Path, processes: Sequence[subprocess.Popen], seconds: float = 1500) -> None:
    """Until the processes of a run have written a file."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        ended = [process.communicate()[0] for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.1)


def finish(process: subprocess.Popen, seconds: float = 1500) -> tuple[int, str]:
    """(exit code, output). It may take so long only where nothing is compiled yet and others use the machine, too."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.returncode, output


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the trainer's whole process group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
