"""Shared test set-up: one persistent compilation cache, the CPU as the platform, and quick compilation."""

import os
import pathlib

CACHE = pathlib.Path(__file__).resolve().parent.parent / '.cache' / 'jax'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # XLA's doubts about its own cached code
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
# Compiling is most of what the tests do, and half of it is LLVM making programs fast that run once. `.ci/run` plays its
# runs, and repeats the exactness tests, without this.
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')


def pytest_collection_modifyitems(items):
    """Whole runs first: they take longest, and files that are worked off side by side should end together."""
    here = pathlib.Path(__file__).resolve().parent
    items.sort(key=lambda item: item.path.parent != here)
