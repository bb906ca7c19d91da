"""A real host process for the tests that need one; those that kill theirs start their own."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sesa_jax import config


@pytest.fixture(scope='session')
def run_data() -> dict[str, Any]:
    """The config of a run on the lab without a memory: what loads fastest."""
    return config.to_json(config.with_method(config.lab_preset(config.Run(seed=100)), 'ssp'))


@pytest.fixture(scope='session')
def memory_data() -> dict[str, Any]:
    """The config of a run whose bank consolidates at every second step that finds a failure waiting."""
    run = config.lab_preset(config.Run(seed=100))
    return config.to_json(dataclasses.replace(run, bank=dataclasses.replace(run.bank, every=2, at_least=1)))


@pytest.fixture(scope='module', autouse=True)
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the sockets of a module's processes lie; nothing may be left there."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_RUNTIME_DIR', folder)
        patch.setenv('TMPDIR', str(tmp_path_factory.mktemp('tmp')))  # a killed reader of a bank leaves its copy there
        yield Path(folder)
        assert os.listdir(folder) == []
