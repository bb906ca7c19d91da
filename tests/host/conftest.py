"""A real host process for the tests that need one; those that kill theirs start their own."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sesa_jax import config
from sesa_jax.host.client import HostClient, HostProcess


@pytest.fixture(scope='session')
def run_data() -> dict[str, Any]:
    """The config of a run on the lab whose bank consolidates at every step that has a failure."""
    run = config.lab_preset(config.Run(seed=100))
    return config.to_json(dataclasses.replace(run, bank=dataclasses.replace(run.bank, every=2, at_least=1)))


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the sockets of a test lie; nothing may be left there."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(folder))
    yield folder
    assert os.listdir(folder) == []
    folder.rmdir()


@pytest.fixture
def process(tmp_path: Path, run_data: dict[str, Any]) -> Iterator[HostProcess]:
    with HostProcess.start(tmp_path, run_data) as process:
        yield process


@pytest.fixture
def host(process: HostProcess) -> Iterator[HostClient]:
    with HostClient(process) as host:
        yield host


@pytest.fixture(scope='module')
def server(tmp_path_factory: pytest.TempPathFactory, run_data: dict[str, Any]) -> Iterator[HostProcess]:
    """One process for all tests of a module that leave it alive."""
    with HostProcess.start(tmp_path_factory.mktemp('run'), run_data) as process:
        yield process


@pytest.fixture(scope='module')
def shared(server: HostProcess) -> Iterator[HostClient]:
    with HostClient(server) as host:
        yield host
