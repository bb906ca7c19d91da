"""Speed as ratios: `python -m experiments.bench rollout --model smollm2-135m --json FILE`, or `update`.

Contenders take turns (A, B, B, A, ...), so that what the machine does besides meets all of them. Nothing is timed before
they were seen to do the same: greedy tokens must be equal, or loss and gradient norm. A figure is the median of the
ratios of neighbouring measurements, with its quartiles; times themselves mean little and are written down for
completeness.

Left out: compilation and the first call of everybody (they are warm-up), and machines: compare ratios, not seconds.
"""

from __future__ import annotations

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import dataclasses
import functools
import json
import os.path
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from experiments import bench_rollout, bench_update
from sesa_jax.config import ConfigError
from sesa_jax.run.files import write_atomic
from sesa_jax.run.process import prepare

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'transformers', 'torch', 'trl', 'numpy')


@dataclass(frozen=True)
class Flags:
    """What both benchmarks take."""

    model: str = 'smollm2-135m'
    """A backbone's name or a local Hugging Face folder."""
    pairs: int = 7
    """Measurements of each contender."""
    json: str = ''
    """File for every figure, with the command, versions, flags and the machine."""


@dataclass(frozen=True)
class Rollout(Flags):
    """Sampling: our engine against a plain sampler of ours and, where torch is installed, transformers' generate."""

    prompts: int = 8
    group: int = 5
    """Rollouts of each prompt."""
    prompt_tokens: int = 256
    new_tokens: int = 64
    calls: bool = True
    """Measure one turn of known length against the others."""
    growth: bool = True
    """Measure how our time grows with rows, prompt length and turns."""
    turns: int = 4
    """Most turns of the rollouts with a scripted search, whose latencies are measured; 0: leave them out."""
    rounds: int = 3
    """Such rollouts for each place, so that some decode while others wait."""
    observation_tokens: int = 128
    latencies: tuple[int, ...] = (0, 50, 200, 1000)
    """Of the scripted search, in milliseconds."""


@dataclass(frozen=True)
class Update(Flags):
    """One optimizer step on fixed rows: our learner against TRL's GRPO step, where TRL is installed."""

    rows: int = 16
    mean_tokens: float = 500
    """Mean length of a row, prompt included."""
    variation: float = 0.6
    """Standard deviation of the log-normal lengths over their mean; 0: all have the mean length."""
    prompt_tokens: int = 64
    actions: float = 0.3
    """Share of the tokens that are actions; 1: all behind the prompt."""
    kl: float = 0.01
    """Weight of k3 against a frozen reference; 0: no reference on either side."""
    remat: Literal['none', 'nothing'] = 'none'
    """Recompute layers in the backward pass, on both sides: the default of both for this model, and a third more work."""
    micro_batch_tokens: int = 2048
    trl_tokens: int = 2048
    """Padded tokens of a micro-batch, ours and TRL's."""
    stock: bool = False
    """Measure also the micro-batches that TRL's trainer makes by itself (`--stock-rows` rows each, padded to the longest)."""
    stock_rows: int = 2
    counters: bool = True
    """Count FLOPs and memory of our program, which needs no quiet machine."""


@dataclass(frozen=True)
class Ratio:
    """How much longer the other one took: quartiles over pairs of neighbouring measurements."""

    median: float
    low: float
    high: float
    least_seconds: float  # of ours
    least_seconds_other: float

    def __str__(self) -> str:
        return f'{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]'


def interleaved(ours: Callable[[], Any], others: Mapping[str, Callable[[], Any]], pairs: int) -> dict[str, Ratio]:
    """Ratios of the time of each of `others` to ours, in an order that turns round from pair to pair."""
    runs = {'ours': ours, **others}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiles, fills caches
    for pair in range(pairs):
        for name in runs if pair % 2 == 0 else reversed(list(runs)):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    return {name: ratio(seconds['ours'], seconds[name]) for name in others}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Ratio(median, low, high, min(ours), min(theirs))


def circumstances(flags: Any) -> dict[str, Any]:
    """What a figure belongs to."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        'command': ' '.join(['python -m experiments.bench', *sys.argv[1:]]),
        'flags': dataclasses.asdict(flags),
        'versions': {'python': platform.python_version(), **versions},
        'machine': {
            'cores': os.cpu_count(),
            'processor': platform.processor() or platform.machine(),
            'devices': [f'{device.platform} {device.device_kind}' for device in jax.devices()],
            'load': os.getloadavg(),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for flags that cannot work, 1 where contenders disagree."""
    flags = tyro.cli(
        Annotated[Rollout, tyro.conf.subcommand('rollout')]
        | Annotated[Update, tyro.conf.subcommand('update')]
        | Annotated[None, tyro.conf.subcommand('machine')],
        args=None if arguments is None else list(arguments),
        description=__doc__,
    )
    if flags is None:
        print(json.dumps(circumstances(Rollout()), indent=2))
        return 0
    prepare()
    say = functools.partial(print, flush=True)
    try:
        if isinstance(flags, Update):
            found = bench_update.measure(flags, ratio, say)
        else:
            found = bench_rollout.measure(flags, interleaved, say)
    except (ConfigError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except (bench_rollout.Disagreement, bench_update.Disagreement) as error:
        print(f'error: nothing was timed: {error}', file=sys.stderr)
        return 1
    if flags.json:
        write_atomic(Path(flags.json), json.dumps(circumstances(flags) | found, indent=2).encode() + b'\n')
        print(f'figures: {flags.json}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
