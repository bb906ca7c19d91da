"""What did a run gain, and where does it sit? `python -m experiments.evaluate RUN`.

The initial solver without cards (base), the trained one without (Off) and with the final bank (On) answer the same held-out
questions, greedily, once. Prints solve rates by class with 95% intervals and the paired differences, and writes
RUN/evaluation.json. What is measured is the newest commit whose parts verify. On the lab: 600 questions, some 45 seconds an
arm on two cores. The bank is only read.
"""

from __future__ import annotations

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

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
from sesa_jax.run.process import prepare, repeat_bits
from sesa_jax.selfplay import exam, setup
from sesa_jax.selfplay.game import Game
from sesa_jax.skills.bank import Bank, BankError

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
        'per_cell': run.evaluation.per_cell,
        'optimizer_steps': version,
        'bank_hash': game.host.state().chain_hash if run.skill_memory else '',
    }
    return dual_path.evaluate(questions, arms, step=step, facts=facts)


def save(folder: RunFolder, result: EvaluationResult) -> None:
    write_atomic(folder.evaluation, json.dumps(result.to_json(), indent=1).encode())


def newest_commit(folder: RunFolder) -> commit.Recovery:
    """The newest commit of a run whose parts verify, and why newer ones cannot be used. Changes nothing."""

    def problem(verify: Callable[..., Any], *arguments: Any) -> str | None:
        try:
            verify(*arguments)
        except (ValueError, OSError, BankError) as error:
            return str(error)
        return None

    return commit.newest_valid(
        folder,
        verify_checkpoint=lambda record: problem(checkpoint.verify, folder.checkpoints, record.step, record.checkpoint),
        verify_bank=lambda record: problem(Bank.verify, folder.bank, record.bank_seq, record.bank_hash),
    )


def evaluate(path: pathlib.Path, per_cell: int | None = None) -> EvaluationResult:
    """Evaluate the newest commit of a run that is whole, and say which newer ones are not. ConfigError where none is."""
    with RunFolder.resume(path) as folder:
        run = config.from_json(folder.read_config())
        if run.rollout.deterministic:
            repeat_bits()
        if per_cell is not None:
            run = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, per_cell=per_cell))
            door.check(run)
        recovery = newest_commit(folder)
        for number, reason in recovery.skipped:
            print(f'step {number} cannot be used: {reason}', file=sys.stderr)
        record = recovery.record
        if record is None:
            raise ConfigError(f'{path} has no committed step to evaluate' + (' that is whole' * bool(recovery.skipped)))
        if recovery.skipped:
            print(f'measuring step {record.step}', file=sys.stderr)
        backbone = setup.load(run)
        solver = dataclasses.replace(setup.abstract_states(run, backbone)['solver'], moments={})  # nobody reads them
        wanted = {'solver': solver}
        solver = checkpoint.restore(folder.checkpoints, record.step, wanted, record.checkpoint, part=True)['solver']
        with HostProcess.start(folder.path, config.to_json(run)) as process, HostClient(process) as host:
            host.open_bank(at_seq=record.bank_seq, chain_hash=record.bank_hash, readonly=True)
            game = setup.make_game(run, backbone, host)
            result = measure(game, backbone.params, solver, record.step)
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
