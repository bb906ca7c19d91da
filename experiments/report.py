"""Make the report of a run: one HTML file from the run's files alone, to open, mail or archive.

    python -m experiments.report runs/sesa-0

Seconds on a laptop, no model is loaded. The last line of the output is the file's path.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from sesa_jax.config import ConfigError
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.report import write


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See the module's docstring."""

    run: tyro.conf.Positional[Path]
    """Run folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = tyro.cli(Arguments, args=arguments, description=__doc__)
    try:
        print(write(RunFolder.read(given.run)))
    except ConfigError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
