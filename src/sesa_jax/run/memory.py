"""Keeps freed memory in the process on a CPU.

XLA takes its temporary buffers from malloc at each call, and glibc returns large ones to the kernel at once, so every
step pays for its page faults again: 1.8 million in a benchmark of 14 updates, 0.5 million with this; the updates took
0.55 to 0.75 of the time. Only glibc has these switches; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Call once, before the first array is made. Returns whether it took effect."""
    if not sys.platform.startswith('linux'):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another libc
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20), (_ARENA_MAX, 1))
    return all([mallopt(key, value) for key, value in settings])
