"""Shared test set-up: one persistent compilation cache, and the CPU as the platform."""

import os
import pathlib

CACHE = pathlib.Path(__file__).resolve().parent.parent / '.cache' / 'jax'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # XLA's doubts about its own cached code
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')


def pytest_collection_modifyitems(items):
    """Whole runs first: they take longest, and files that are worked off side by side should end together."""
    here = pathlib.Path(__file__).resolve().parent
    items.sort(key=lambda item: item.path.parent != here)
