"""Shared test set-up: one persistent compilation cache, the CPU as the platform, and quick compilation."""

import gc
import importlib.metadata
import os
import pathlib

import pytest

CACHE = pathlib.Path(__file__).resolve().parent.parent / '.cache' / 'jax'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # XLA's doubts about its own cached code
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
if importlib.metadata.version('jaxlib').startswith('0.10.'):  # later ones know no such flag, and abort
    # The older way to make code of a fusion; compiling takes half as long. `.ci/run` plays and tests with the newer one.
    os.environ.setdefault('XLA_FLAGS', '--xla_cpu_use_fusion_emitters=false')


def is_run(path: pathlib.Path) -> bool:
    """Whether the file plays whole runs, whose programs are called often enough to be worth optimising."""
    return path.parent == pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope='module', autouse=True)
def quick_compilation(request):
    """Compiling is most of what other files do, and half of it is LLVM making programs fast that are called once. Where
    JAX_DISABLE_MOST_OPTIMIZATIONS is set, it holds for all; `.ci/run` so repeats what must be exact."""
    import jax  # behind the environment above, which it reads

    if 'JAX_DISABLE_MOST_OPTIMIZATIONS' in os.environ:
        yield
        return
    is_quick = not is_run(request.path)
    jax.config.update('jax_disable_most_optimizations', is_quick)
    with pytest.MonkeyPatch.context() as patch:  # for the processes that tests start
        patch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', str(int(is_quick)))
        yield


MAPPINGS = pathlib.Path('/proc/self/maps')
MOST_MAPPINGS = 20_000
"""Of the 65,530 that Linux lets a process have by default."""


@pytest.fixture(scope='module', autouse=True)
def room_for_programs():
    """Each compiled program holds memory mappings for as long as JAX keeps it, and XLA aborts the worker that has no more
    of them; so what is kept is let go between files."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b'\n') > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """Whole runs first: they take longest, and files that are worked off side by side should end together."""
    items.sort(key=lambda item: not is_run(item.path))
