"""What a command does to its process."""

import os
import pathlib
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
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


def test_a_gpu_is_asked_to_repeat_its_bits(monkeypatch):
    """Where a plugin could bring one, and the user has not chosen otherwise. The flag is one that XLA knows."""
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=')
    monkeypatch.setattr(process.metadata, 'entry_points', lambda group: [])
    assert not process.repeat_bits()
    assert os.environ['XLA_FLAGS'] == '--xla_dump_to='
    monkeypatch.setattr(process.metadata, 'entry_points', lambda group: ['xla_cuda12'] if group == 'jax_plugins' else [])
    assert process.repeat_bits()
    assert os.environ['XLA_FLAGS'] == '--xla_dump_to= --xla_gpu_deterministic_ops=true'
    subprocess.run([sys.executable, '-c', 'import jax; jax.devices()'], check=True)  # it ends where a flag is unknown
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=false')
    assert not process.repeat_bits()


@pytest.mark.parametrize('version', process.FAULTY)
def test_a_faulty_jaxlib_is_refused_with_the_reason(version):
    with pytest.raises(SystemExit, match=rf'jaxlib {version} cannot be used: .*pip install'):
        process.refuse_faulty_jaxlib(version)


def test_what_is_refused_is_what_the_project_excludes():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / 'pyproject.toml').read_text())['project']
    for requirement in (*project['dependencies'][:2], *project['optional-dependencies']['cuda12']):
        assert {part[2:] for part in requirement.split(',') if part.startswith('!=')} == set(process.FAULTY)
    process.refuse_faulty_jaxlib(jaxlib.__version__)


# The CPU of 0.10.2 gets both of these wrong, without a word; so might another release, on another machine.


def test_a_product_under_vmap_and_a_sum_are_fused_into_the_right_number():
    """jax issue 39103."""
    rows = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769.0))
    square = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))
    assert square(rows)[-1] == 2.0**30


@pytest.mark.parametrize('size', [49, 50, 64, 200])
def test_arcus_tangents_of_long_vectors_are_right(size):
    """jax issue 39352."""
    x = np.linspace(-3, 3, size, dtype=np.float32)
    np.testing.assert_allclose(jnp.arctan(x), np.arctan(x), rtol=1e-6, atol=1e-6)
