"""Does a run fit on these devices? `python -m experiments.plan --model qwen3-8b --devices 8 --hbm-gb 80`.

Takes the flags of `experiments.train` and answers before anything is paid for: a table of bytes per device, from the
abstract parameter tree and from the real update and decode programs, compiled here for as many fake devices; FLOPs
against the model's own count; the collectives that the compiler put in; and a verdict, with the flags that help where
the run does not fit. Nothing of the model is allocated. On two cores a backbone of eight billion parameters takes a minute.

Short spellings: --batch for --problems, --prompt and --response for --lengths.prompt and --lengths.response.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sesa_jax import command, config, door
from sesa_jax.config import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument('--hbm-gb', type=float, default=80.0)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--batch', type=int)
    parser.add_argument('--prompt', type=int)
    parser.add_argument('--response', type=int)
    own, rest = parser.parse_known_args(arguments)
    try:
        run = command.from_command_line(rest, __doc__)
        lengths = {name: getattr(own, name) for name in ('prompt', 'response') if getattr(own, name) is not None}
        run = dataclasses.replace(
            run,
            devices=run.devices or 8,
            problems=run.problems if own.batch is None else own.batch,
            lengths=dataclasses.replace(run.lengths, **lengths),
        )
        door.check(run)
        if not own.hbm_gb > 0:
            raise ConfigError(f'--hbm-gb is {own.hbm_gb}; it must be above 0')
        result = plan(run, own.hbm_gb)
    except ConfigError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(rendered(result))
    if own.json:
        own.json.write_text(json.dumps(result, indent=1) + '\n')
    return 0


def plan(run: config.Run, hbm_gb: float) -> dict[str, Any]:
    """Everything that the table shows, as JSON data. Starts JAX with fake devices, so call it first in a process."""
    flag = f'--xla_force_host_platform_device_count={run.devices}'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'.strip()
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    import jax

    from sesa_jax.policy import backbones, sharding
    from sesa_jax.policy.arch import Architecture, parameter_count
    from sesa_jax.run import plan as planner

    arch = Architecture.from_config(backbones.architecture_of(run.model), run.model)
    train = sharding.make_mesh(run.devices)
    decode = sharding.decode_mesh(arch, run.devices, run.tensor_parallel)
    found = planner.parts(run, arch, train, decode)
    programs = planner.programs(run, arch, train, decode, say=lambda line: print(line, file=sys.stderr, flush=True))
    counted, own = planner.flops(run, arch)
    largest, phase = planner.peak(found)
    return {
        'model': run.model,
        'jax': jax.__version__,
        'parameters': parameter_count(arch),
        'devices': run.devices,
        'hbm_gb': hbm_gb,
        'decode_mesh': dict(decode.shape),
        'decode_rows': planner.decode_rows(run, decode),
        'micro_batch': planner.micro_batch_shape(run, train),
        'parts': [dataclasses.asdict(part) for part in found],
        'programs': [dataclasses.asdict(program) for program in programs],
        'flops': {'xla': counted, 'own': own, 'ratio': counted / own},
        'peak_bytes': largest,
        'peak_phase': phase,
        'verdict': planner.verdict(run, arch, train, decode, int(hbm_gb * 1e9)),
    }


def rendered(result: dict[str, Any]) -> str:
    """The plan as text."""
    gb = lambda size: f'{size / 1e9:8.2f}'  # noqa: E731
    mesh = result['decode_mesh']
    lines = [
        f'{result["model"]}: {result["parameters"] / 1e9:.3f} billion parameters on {result["devices"]} devices of '
        f'{result["hbm_gb"]:g} GB',
        f'training FSDP{result["devices"]}, micro-batch {result["micro_batch"][0]} rows of {result["micro_batch"][1]} '
        f'tokens; decoding TP{mesh["model"]} x DP{mesh["data"]}, {result["decode_rows"]} rows',
        '',
        'GB per device (10^9 bytes)                          update  rollout  source',
    ]
    for part in result['parts']:
        columns = [gb(part['size']) if part[phase] else ' ' * 8 for phase in ('update', 'rollout')]
        lines.append(f'{part["name"]:<48} {columns[0]} {columns[1]}  {part["source"]}')
    sums = [sum(part['size'] for part in result['parts'] if part[phase]) for phase in ('update', 'rollout')]
    lines += [f'{"sum":<48} {gb(sums[0])} {gb(sums[1])}', '']
    lines.append('program                        arguments  from the tree  temporary (CPU, float32)')
    for program in result['programs']:
        lines.append(
            f'{program["name"]:<30} {gb(program["arguments"])}  {gb(program["expected"])}       '
            f'{gb(program["temporary"])}'
        )
        for name, (places, size) in program['collectives'].items():
            lines.append(f'    {name}: {places} in the program, results of {size / 1e9:.3f} GB (a loop counted once)')
    lines += [
        '',
        f'FLOPs of XLA over our own count, one layer: {result["flops"]["ratio"]:.3f}',
        f'fullest in {result["peak_phase"]}: {result["peak_bytes"] / 1e9:.1f} GB a device',
        result['verdict'],
    ]
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
