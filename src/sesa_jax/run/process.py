"""What a command does to its own process before it makes the first array.

* Freed memory stays (`keep_freed_memory`). XLA takes its temporary buffers from malloc at each call, and glibc returns
  large ones to the kernel at once, so every step pays for its page faults again: 1.8 million in a benchmark of 14
  updates, 0.5 million with this, which took 0.55 to 0.75 of the time. (One arena for all threads made steps a
  twentieth faster still, but the threads that compile wait for it: 64 s to the end of a first step instead of 52.)
* Compiled programs are kept between runs, in a folder of the user's cache that nobody else can write.
* A jaxlib that computes wrong numbers in silence is refused (`refuse_faulty_jaxlib`): pip can be overruled.
* On GPUs a run that promises equal bits asks XLA for kernels that repeat them (`repeat_bits`).
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from importlib import metadata
from pathlib import Path

import jax
import jaxlib

from sesa_jax.run.files import cache_folder

FAULTY = {
    '0.10.2': 'it computes wrong numbers on a CPU, in silence (jax issues 39103 and 39352)',
    '0.11.0': 'it computes wrong gradients on a GPU where residuals of a scan are offloaded (openxla issue 46231)',
    '0.11.1': 'on a CPU it rewrites whole buffers in the loops of the engine (jax issue 40101)',
}
"""Releases of jaxlib that pyproject.toml excludes, with the reason."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h


def prepare() -> None:
    """Call once at the start of a command. Ends the process with the reason where it should not run at all."""
    refuse_faulty_jaxlib()
    keep_freed_memory()
    keep_compiled_programs()


def refuse_faulty_jaxlib(version: str = jaxlib.__version__) -> None:
    """SystemExit with what to install instead, for a release in `FAULTY`."""
    if version in FAULTY:
        instead = f'pip install "jax!={version}" "jaxlib!={version}"'
        raise SystemExit(f'jaxlib {version} cannot be used: {FAULTY[version]}; {instead}')


def repeat_bits() -> bool:
    """Let XLA take kernels that give the same bits each time, on a GPU: sums by atomics (the gradient of an embedding),
    cuDNN's backward pass and autotuned products do not by themselves. Before the first array. Returns whether the flag
    was added: only where a plugin for accelerators is installed, and XLA_FLAGS does not name it already.
    """
    flags = os.environ.get('XLA_FLAGS', '')
    if not metadata.entry_points(group='jax_plugins') or 'xla_gpu_deterministic_ops' in flags:
        return False
    os.environ['XLA_FLAGS'] = f'{flags} --xla_gpu_deterministic_ops=true'.strip()
    return True


def keep_freed_memory() -> bool:
    """Tell glibc not to give memory back; elsewhere nothing happens. Returns whether it took effect."""
    if not sys.platform.startswith('linux'):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another libc
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20))
    return all([mallopt(key, value) for key, value in settings])


def keep_compiled_programs() -> Path | None:
    """Use a compilation cache in the user's cache folder, unless the environment names one. Returns the folder.

    A cached program is executed as it is, so a folder that others could write is not used.
    """
    if os.environ.get('JAX_COMPILATION_CACHE_DIR') or jax.config.jax_compilation_cache_dir:
        return None
    folder = cache_folder() / 'jax'
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
    return folder
