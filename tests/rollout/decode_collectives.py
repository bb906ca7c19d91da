"""Run by test_layouts.py on eight fake devices: the shapes of all collectives in the decode program of two layers of
qwen3-8b under each layout, as one JSON line."""

import dataclasses
import json
import re

from sesa_jax.config import Run
from sesa_jax.policy import backbones, sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.run import plan


def main():
    whole = Architecture.from_config(backbones.architecture_of('qwen3-8b'), 'qwen3-8b')
    arch = dataclasses.replace(whole, layers=2)
    found = {'vocab': sharding.decode_arch(arch, sharding.decode_mesh(arch, 8)).vocab}
    for model in (8, 4):
        mesh = sharding.decode_mesh(arch, 8, model)
        run = Run(model='qwen3-8b')
        text = plan.decode_program(run, arch, mesh)[1]().compile().as_text()
        results = re.findall(rf'= (\(?[^=()]*\)?) (?:{"|".join(plan.COLLECTIVES)})(?:-start)?\(', text)
        shapes = [
            [int(n) for n in s.split(',') if n] for r in results for s in re.findall(r'[a-z0-9]+\[([0-9,]*)\]', r)
        ]
        found[str(model)] = {'rows': plan.decode_rows(run, mesh), 'shapes': shapes}
    print(json.dumps(found))


if __name__ == '__main__':
    main()
