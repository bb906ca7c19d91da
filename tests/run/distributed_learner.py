"""One of two processes, run by test_distributed.py: the learner's update over both, and how a failure in it ends them.

Arguments: coordinator, process, file for gradients or 'raise' or 'kill', the process that it is to happen to. Each prints
what it saw as one JSON line.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'grpo'))

from grpo_toy import ARCH, ONE_STEP, gradient, toy_params, toy_samples

from sesa_jax.command import Cluster
from sesa_jax.grpo.learner import init_state, update
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import abstract
from sesa_jax.run import distributed


def bits(state):
    return [part.data.tobytes() for x in jax.tree.leaves(state) for part in x.addressable_shards]


def words(work, *arguments):
    try:
        return repr(work(*arguments))
    except Exception as error:
        return f'{type(error).__name__}: {error}'


def together(process, file, state, step):
    """What both do alike, what both refuse, and what no process sees coming: another branch in the other one."""
    rows = toy_samples()
    said, gradients = {'metrics': {}, 'same bits': {}}, {}
    idle = [dataclasses.replace(row, is_included=False) for row in rows]
    overflow = [dataclasses.replace(row, advantage=3e38 if i == 5 else row.advantage) for i, row in enumerate(rows)]
    for name, samples in {'all': rows, 'one row': rows[:1], 'none': [], 'left out': idle, 'overflow': overflow}.items():
        new, said['metrics'][name] = step(state, samples)
        said['same bits'][name] = bits(new) == bits(state)
        gradients |= {f'{name} {i}': x for i, x in enumerate(jax.tree.leaves(gradient(new, distributed.whole)))}
    if process == 0:
        np.savez(file, **gradients)
    other = [dataclasses.replace(rows[0], advantage=2.0), *rows[1:]]
    said['empty'] = words(step, state, [] if process else rows)
    said['other'] = words(step, state, other if process else rows)
    said['branch'] = words(distributed.shared, bits, state) if process else words(distributed.agree, 0, {})
    said['after all'] = distributed.shared(lambda: 'on we go')
    print(json.dumps(said), flush=True)


def main(coordinator, process, what, victim):
    with distributed.joined(Cluster(True, coordinator, process, 2)):
        mesh = sharding.make_mesh()
        places = sharding.shardings(abstract(ARCH), sharding.TRAIN, mesh)
        params, reference = (jax.tree.map(sharding.placed, toy_params(ARCH, seed), places) for seed in (0, 1))
        state = init_state(params, ONE_STEP['optimizer'])
        options = ONE_STEP | {'grpo': dataclasses.replace(ONE_STEP['grpo'], micro_batch_tokens=2 * 128)}  # one shape

        def step(state, rows):
            return update(state, reference, rows, mesh=mesh, donate=False, **options)

        if what not in ('raise', 'kill'):
            return together(process, what, state, step)
        step(state, toy_samples())
        print(json.dumps({'stepped': process}), flush=True)
        while True:
            if process == victim:
                os.kill(os.getpid(), signal.SIGKILL) if what == 'kill' else _raise()
            step(state, toy_samples())


def _raise():
    raise ValueError('I alone')


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
