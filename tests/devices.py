"""The environment of a process with several fake devices."""

import os


def fake_devices(count: int) -> dict[str, str]:
    """This process's environment, with its other XLA flags, and `count` CPU devices."""
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={count}'
    return {**os.environ, 'XLA_FLAGS': flags.strip(), 'JAX_PLATFORMS': 'cpu'}
