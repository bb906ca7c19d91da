"""The one place that reads the clock. Everything that waits or measures takes a `Clock`, so a test can move time.

Monotonic time is for durations, wall time is only ever shown. Neither reaches a value that must repeat bit for bit:
metrics keep what hangs on the clock under the key `time`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Clock:
    """Two readings, in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


SYSTEM = Clock()


class Laps:
    """Seconds per named phase of a step; phases with the same name add up, phases may nest."""

    def __init__(self, clock: Clock = SYSTEM):
        self._clock = clock
        self._start = clock.monotonic()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = self._clock.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.monotonic() - begin

    def read(self) -> dict[str, float]:
        """Seconds per phase, and `total` since the laps were made or last read; starts anew."""
        now = self._clock.monotonic()
        seconds = {name: round(value, 4) for name, value in self._seconds.items()}
        seconds['total'] = round(now - self._start, 4)
        self._start, self._seconds = now, {}
        return seconds
