"""Text from outside, made safe to show to a person: no control character reaches a terminal or a page."""

from __future__ import annotations

import re

# C0 and C1 controls but tab and newline; line and paragraph separators; what turns the reading direction; surrogates,
# which no file can hold. Zero-width characters stay: scripts need them.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]')


def clean(text: str) -> str:
    """`text` with each control character, bidirectional override and lone surrogate shown as U+FFFD."""
    return _CONTROL.sub('\ufffd', text.replace('\r\n', '\n'))


def one_line(text: str, width: int = 0) -> str:
    """`clean` on a single line, cut to `width` characters (0: not cut) with an ellipsis."""
    line = ' '.join(clean(text).split())
    return line if not width or len(line) <= width else line[: width - 1] + '…'


def duration(seconds: float) -> str:
    """`7 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f'{whole} s'
    if whole < 3600:
        return f'{whole // 60} min {whole % 60} s'
    return f'{whole // 3600} h {whole % 3600 // 60} min'
