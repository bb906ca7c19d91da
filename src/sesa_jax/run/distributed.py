"""Several processes as one machine: `join` before the first array is made.

JAX detects a cluster that it knows (Slurm, Open MPI, Kubernetes, cloud TPUs) by itself; elsewhere each process is told
the coordinator's address, its own number and how many there are. The coordinator listens on the address that it was
given and on no other.
"""

from __future__ import annotations

import ipaddress
import socket

import jax

from sesa_jax.config import ConfigError


def join(coordinator: str = '', process: int = -1, processes: int = 0, *, seconds: int = 120) -> None:
    """Make this process one of several.

    coordinator: 'address:port' of process 0, such as '10.0.0.1:8476'; '' leaves all three to JAX's own detection.
    ConfigError for an incomplete or impossible combination, and when the others do not come within `seconds`.
    """
    if not coordinator:
        if process >= 0 or processes:
            raise ConfigError('--coordinator is missing: the number and count of processes mean nothing without it')
        try:
            jax.distributed.initialize(initialization_timeout=seconds)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f'no cluster was detected ({error}); give --coordinator ADDRESS:PORT, --process and --processes'
            ) from error
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
            initialization_timeout=seconds,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f'process {process} of {processes} could not join at {coordinator}: {error}') from error
