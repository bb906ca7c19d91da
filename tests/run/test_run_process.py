"""What a command does to its process."""

import os
import subprocess
import sys

import pytest

from sesa_jax.run import process

CODE = 'from sesa_jax.run import process; print(process.keep_compiled_programs())'


def folder_used(cache, **environment):
    env = {**os.environ, 'XDG_CACHE_HOME': str(cache), **environment}
    if not environment:
        env.pop('JAX_COMPILATION_CACHE_DIR', None)
    return subprocess.run([sys.executable, '-c', CODE], env=env, capture_output=True, text=True).stdout.strip()


def test_compiled_programs_are_kept_where_only_the_user_can_write(tmp_path):
    used = folder_used(tmp_path)
    assert used == str(tmp_path / 'sesa-jax' / 'jax')
    assert (tmp_path / 'sesa-jax' / 'jax').stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
    folder = tmp_path / 'sesa-jax' / 'jax'
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert folder_used(tmp_path) == 'None'


def test_the_environments_choice_wins(tmp_path):
    assert folder_used(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'mine')) == 'None'


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='glibc only')
def test_freed_memory_is_kept():
    assert process.keep_freed_memory() is True
