"""Named points at which a test may kill the process, as a power cut would: no handler runs, nothing is flushed.

`SESA_CRASH_AT=commit.before_rename` kills at the first visit of that point, `commit.before_rename:3` at the third.
Without the variable `crash_point` is an empty function.
"""

from __future__ import annotations

import os
import signal

_WANTED, _, _VISIT = os.environ.get('SESA_CRASH_AT', '').partition(':')

if _WANTED:
    _left = int(_VISIT or '1')

    def crash_point(name: str) -> None:
        """Kill this process with SIGKILL if `name` is the wanted point and its visit has come."""
        global _left
        if name == _WANTED:
            _left -= 1
            if _left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

else:

    def crash_point(name: str) -> None:
        """Nothing: no crash was asked for."""
