"""What did a run gain, and where does it sit? `python -m experiments.evaluate RUN`.

The initial solver without cards (base), the trained one without (Off) and with the final bank (On) answer the same held-out
questions, greedily, once. Prints solve rates by class with 95% intervals and the paired differences, and writes
RUN/evaluation.json. On the lab: 600 questions, some 45 seconds an arm on two cores. The bank is only read.
"""

from __future__ import annotations

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import tyro

from sesa_jax import config, door
from sesa_jax.config import ConfigError
from sesa_jax.evals import dual_path
from sesa_jax.evals.dual_path import EvaluationResult
from sesa_jax.grpo.learner import TrainState
from sesa_jax.host.client import HostClient, HostError, HostProcess
from sesa_jax.policy.transformer import Params
from sesa_jax.run import checkpoint, commit
from sesa_jax.run.files import write_atomic
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.process import prepare
from sesa_jax.selfplay import exam, setup
from sesa_jax.selfplay.game import Game

QUESTION_SEED = 2  # the validation during a run draws with another one


def measure(game: Game, base: Params, solver: TrainState, step: int) -> EvaluationResult:
    """Play the three arms (two without a memory) and compare them. The host must have the final bank open."""
    run = game.run
    questions = game.world.questions('held_out', run.evaluation.per_cell, seed=QUESTION_SEED)
    version = int(solver.step)
    arms = {
        'base': exam.sit(game, base, questions, with_cards=False, step=step, weights_version=0),
        'off': exam.sit(game, solver.params, questions, with_cards=False, step=step, weights_version=version),
    }
    if run.skill_memory:
        game.host.snapshot(version=step)
        arms['on'] = exam.sit(game, solver.params, questions, with_cards=True, step=step, weights_version=version)
    facts = {
        'method': run.method,
        'seed': run.seed,
        'question_seed': QUESTION_SEED,
        'optimizer_steps': version,
        'bank_hash': game.host.state().chain_hash if run.skill_memory else '',
    }
    return dual_path.evaluate(questions, arms, step=step, facts=facts)


def save(folder: RunFolder, result: EvaluationResult) -> None:
    write_atomic(folder.evaluation, json.dumps(result.to_json(), indent=1).encode())


def evaluate(path: pathlib.Path, per_cell: int | None = None) -> EvaluationResult:
    """Evaluate the newest commit of a run. ConfigError where there is none."""
    with RunFolder.resume(path) as folder:
        run = config.from_json(folder.read_config())
        if per_cell is not None:
            run = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, per_cell=per_cell))
            door.check(run)
        steps = commit.recorded(folder)
        if not steps:
            raise ConfigError(f'{path} has no committed step to evaluate')
        record = commit.read(folder, steps[-1])
        backbone = setup.load(run)
        states = setup.initial_states(run, backbone)
        states = checkpoint.restore(folder.checkpoints, record.step, states, record.checkpoint)
        with HostProcess.start(folder.path, config.to_json(run)) as process, HostClient(process) as host:
            host.open_bank(at_seq=record.bank_seq, chain_hash=record.bank_hash, readonly=True)
            game = setup.make_game(run, backbone, host)
            result = measure(game, backbone.params, states['solver'], record.step)
        save(folder, result)
    return result


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See the module's docstring."""

    run: tyro.conf.Positional[pathlib.Path]
    """Run folder."""
    per_cell: int | None = None
    """Held-out questions per class and number of hops; by default the run's own."""


def main(arguments: Sequence[str] | None = None) -> int:
    prepare()
    given = tyro.cli(Arguments, args=arguments, description=__doc__)
    try:
        result = evaluate(given.run, given.per_cell)
    except (ConfigError, HostError, checkpoint.CheckpointError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(dual_path.table(result))
    print(dual_path.summary(result))
    return 0


if __name__ == '__main__':
    sys.exit(main())
