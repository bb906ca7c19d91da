"""Several processes as one machine. They run the same program: the same calls, in the same order, with the same values.

`joined` makes this process one of them, before the first array is made. JAX detects a cluster that it knows (Slurm, Open
MPI, Kubernetes, cloud TPUs) by itself; elsewhere each process is told the coordinator's address, its own number and how
many there are. The coordinator listens on the address that it was given and on no other.

What only one may do (write the run folder, talk to the host process) process 0 does in `first` or `shared`, and the
others take its result or raise its exception. Alone, a process just does it. Whatever they do together here begins with
one and the same small exchange, in which each says what it came for: processes that took different branches raise, where
they would otherwise wait for each other for ever. Left out: going on with fewer processes when one is lost. All end, and
the run is resumed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from sesa_jax.command import Cluster
from sesa_jax.config import ConfigError
from sesa_jax.policy import sharding

T = TypeVar('T')

HEARTBEAT_SECONDS = 20
"""Silence after which a process counts as dead, and all end."""
FAREWELL_SECONDS = 10.0
"""How long a process that failed waits for the others to fail alike, before it ends and takes them with it."""


# --- joining and leaving ----------------------------------------------------------------------------------------------


def join(coordinator: str = '', process: int = -1, processes: int = 0, *, seconds: int = 120) -> None:
    """Make this process one of several.

    coordinator: 'address:port' of process 0, such as '10.0.0.1:8476'; '' leaves all three to JAX's own detection.
    ConfigError for an incomplete or impossible combination, and when the others do not come within `seconds`.
    """
    jax.config.update('jax_enable_preemption_service', False)  # it swallows SIGTERM, and nothing here asks it
    times = {'initialization_timeout': seconds, 'heartbeat_timeout_seconds': HEARTBEAT_SECONDS}
    if not coordinator:
        if process >= 0 or processes:
            raise ConfigError('--coordinator is missing: the number and count of processes mean nothing without it')
        try:
            jax.distributed.initialize(**times)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f'no cluster was detected ({error}); give --coordinator ADDRESS:PORT, --process and --processes'
            ) from error
        agree(0, None, 'start')
        return
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f'--coordinator {coordinator!r} is not ADDRESS:PORT, such as 10.0.0.1:8476')
    if not 0 <= process < processes:
        raise ConfigError(f'--process {process} of --processes {processes}: processes are numbered from 0')
    try:
        address = ipaddress.ip_address(host.strip('[]'))
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.gethostbyname(host))
        except OSError as error:
            raise ConfigError(f'--coordinator: {host!r} has no address ({error})') from error
    if address.is_unspecified:
        raise ConfigError(f'--coordinator {coordinator}: name the one address to listen on, not all of them')
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=processes,
            process_id=process,
            coordinator_bind_address=coordinator if process == 0 else None,
            **times,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f'process {process} of {processes} could not join at {coordinator}: {error}') from error
    agree(0, None, 'start')  # while they are together: on CPUs the first exchange waits 30 s for the last one, no longer


@contextlib.contextmanager
def joined(cluster: Cluster) -> Iterator[None]:
    """`join` where it is wanted, and leave together at the end.

    After an exception this process has FAREWELL_SECONDS to say so and to meet the others at the exit; if they do not
    come, for they know nothing of it and wait for this process in a computation, it ends at once with exit code 1.
    JAX ends the others within HEARTBEAT_SECONDS.
    """
    if not cluster.distributed:
        yield
        return
    join(cluster.coordinator, cluster.process, cluster.processes)
    try:
        yield
    except BaseException:
        last = threading.Timer(FAREWELL_SECONDS, os._exit, (1,))
        last.daemon = True
        last.start()
        raise
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this is process 0, which owns the run folder, the host process and the terminal."""
    return jax.process_index() == 0


# --- one does it for all ----------------------------------------------------------------------------------------------


def shared(work: Callable[..., T], *arguments: Any) -> T:
    """What `work(*arguments)` gives on process 0, on every process; its result must be JSON-ready.

    An exception on process 0 is raised on all: of the same type where it is Python's own or one of this project's, else
    a RuntimeError with its words. Two small transfers; alone, nothing but the call. RuntimeError, too, where the others
    came for other work.
    """
    if jax.process_count() == 1:
        return work(*arguments)
    what = getattr(work, '__qualname__', type(work).__qualname__)
    if not is_first():
        answer = json.loads(broadcast(b'', what))
        if 'error' in answer:
            raise _rebuilt(**answer['error'])
        return answer['result']
    try:
        result = work(*arguments)
        raw = json.dumps({'result': result}).encode()
    except Exception as error:
        broadcast(json.dumps({'error': _described(error)}).encode(), what)
        raise
    broadcast(raw, what)
    return result


def first(work: Callable[..., T], *arguments: Any) -> T | None:
    """`work(*arguments)` on process 0 alone, and its result there; None on the others, which wait. Exceptions as in
    `shared`."""
    kept: list[T] = []

    @functools.wraps(work)  # `shared` says by its name what the processes came for
    def keep() -> None:
        kept.append(work(*arguments))

    shared(keep)
    return kept[0] if kept else None


def broadcast(data: bytes, what: str = 'broadcast') -> bytes:
    """The bytes that process 0 gives; what the others give is not looked at. `what` must be the same on all."""
    size = int(_met(what, len(data))[0, 0])
    padded = np.zeros(1 << max(size - 1, 1023).bit_length(), np.uint8)  # few lengths, for each is compiled once
    if is_first():
        padded[:size] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded))[:size].tobytes()


def _described(error: Exception) -> dict[str, Any]:
    kind = type(error)
    ours = kind.__module__ == 'builtins' or kind.__module__.startswith('sesa_jax.')
    fields = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    arguments = [value if isinstance(value, str | int | float | None) else str(value) for value in error.args]
    if isinstance(error, OSError) and error.filename is not None:
        arguments.append(str(error.filename))
    if not ours:
        return {'module': 'builtins', 'name': 'RuntimeError', 'arguments': [f'{kind.__name__}: {error}'], 'fields': {}}
    return {'module': kind.__module__, 'name': kind.__qualname__, 'arguments': arguments, 'fields': fields}


def _rebuilt(module: str, name: str, arguments: list[Any], fields: dict[str, Any]) -> Exception:
    """The exception that process 0 described, without calling its constructor, which may take other arguments."""
    kind = getattr(importlib.import_module(module), name, RuntimeError)
    error = kind.__new__(kind, *arguments)
    vars(error).update(fields)
    return error


# --- all of them together ---------------------------------------------------------------------------------------------


def agree(signal: int, facts: Any, what: str = 'step') -> int:
    """What the processes agree on between two steps: the largest signal number that one of them received, 0 for none.

    RuntimeError where `facts` (what the step came to, of plain values) differ, for then they play different games.
    """
    if jax.process_count() == 1:
        return signal
    all_of_them = _met(f'agree on the {what}', signal, zlib.crc32(repr(facts).encode()))
    if odd := np.flatnonzero(all_of_them[:, 1] != all_of_them[0, 1]).tolist():
        raise RuntimeError(f'processes {odd} came to another {what} than process 0; their machines or files differ')
    return int(all_of_them[:, 0].max())


def _met(what: str, value: int, facts: int = 0) -> np.ndarray:
    """u32[P, 2]: the two numbers of each process. RuntimeError on all of them if they came for different things."""
    mine = np.asarray([zlib.crc32(what.encode()), value, facts], np.uint32)
    all_of_them = np.asarray(multihost_utils.process_allgather(mine))
    if odd := np.flatnonzero(all_of_them[:, 0] != all_of_them[0, 0]).tolist():
        raise RuntimeError(
            f'processes {odd} took another branch than process 0; process {jax.process_index()} came to: {what}'
        )
    return all_of_them[:, 1:]


def whole(array: Any) -> np.ndarray:
    """All of an array on each process, wherever its parts lie. All processes must call it together.

    Parts of other processes travel: until the result is let go, the array takes its whole size on every device and in
    every process's memory.
    """
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        array = multihost_utils.process_allgather(sharding.onload(array), tiled=True)
    return np.asarray(array)
