"""The main job: `python -m experiments.train` trains, measures and explains a pair of policies.

Without flags it plays on the embedded world with the packaged `tiny` policy, on two CPU cores in minutes, and ends with one
sentence and the path of a report. `--model DIR` takes a Hugging Face folder; `--method` and the ablation flags choose
what is studied; `--run-dir DIR --resume` goes on from the newest commit of a run that was stopped or killed. With
`--distributed` several processes, on one machine or many that share the run folder, train as one (docs/policies.md).

Read `train` below for the life of a run, then `selfplay/step.py` for one step. Exit codes: 0 done, 2 a flag or a folder that
cannot be used, 143 or 130 ended at a boundary by SIGTERM or Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # XLA fills the terminal with doubts about its own cached code

import contextlib
import dataclasses
import datetime
import pathlib
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import Console

from experiments import evaluate
from sesa_jax import command, config, door, worlds
from sesa_jax.config import ConfigError, Run
from sesa_jax.evals import dual_path
from sesa_jax.host.client import BankState, HostClient, HostError, HostProcess
from sesa_jax.records import problem_from_json, to_json
from sesa_jax.rollout.trajectory import write_trajectories
from sesa_jax.run import checkpoint, commit, distributed, report
from sesa_jax.run.clock import Laps
from sesa_jax.run.distributed import first, shared
from sesa_jax.run.files import write_atomic
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.metrics import MetricsLog, Reporter
from sesa_jax.run.process import prepare, repeat_bits
from sesa_jax.run.questions import question_row, write_questions
from sesa_jax.selfplay import bootstrap, exam, setup
from sesa_jax.selfplay.challenger import ReusePool
from sesa_jax.selfplay.game import Game, check_room
from sesa_jax.selfplay.setup import Backbone
from sesa_jax.selfplay.step import Ledger, States, step
from sesa_jax.skills import consolidate, priming
from sesa_jax.skills.card import DraftCard


def train(run: Run, folder: RunFolder, backbone: Backbone, reporter: Reporter) -> int:
    """The life of a run: begin or recover, then step by step to the end, then measure and explain. Returns the exit code.

    Of several processes each comes this way; what is written, process 0 writes (`first`).
    """
    laps = Laps()
    with host_of(run, folder) as host, stop_signals() as stop, contextlib.ExitStack() as stack:
        game = setup.make_game(run, backbone, host)
        states, pool, done = begin_or_recover(run, folder, game, backbone, reporter)
        references = dict.fromkeys(setup.roles(run), backbone.params)
        validation = game.world.questions('held_out', run.evaluation.validate_per_cell, seed=1)
        log = first(lambda: stack.enter_context(contextlib.closing(MetricsLog(folder))))
        number = done
        for number in range(done + 1, run.steps + 1):
            host.snapshot(version=number - 1)
            states, ledger = step(game, states, references, pool, number, laps)
            pool = ledger.pool
            metrics = ledger.metrics
            with laps('boundary'):
                metrics |= {'bank': cross_boundary(run, host, ledger)}
            if number % run.validate_every == 0:
                with laps('validation'):
                    metrics |= {'validation': validate(game, states, validation, number)}
            # Read once: a signal that comes later ends the next step.
            received = distributed.agree(stop[0] if stop else 0, metrics)
            digest = ''
            with laps('checkpoint'):
                first(write_rollouts, folder, ledger)
                if number % run.checkpoint_every == 0 or number == run.steps or received:
                    digest = checkpoint.save(folder.checkpoints, number, dict(states))
            metrics |= {'calls': host.take_calls(), 'time': laps.read() | engine_times(game)}
            first(enter, log, metrics, folder, host.state(), digest, pool, run.keep_checkpoints)
            reporter.step(metrics)
            if received:
                reporter.say(f'stopped at the end of step {number}; go on with --run-dir {folder.path} --resume')
                return 128 + received
        if run.report:
            explain(game, folder, states, backbone, number, reporter)
    return 0


# --- beginning -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def host_of(run: Run, folder: RunFolder) -> Iterator[HostClient]:
    """The run's host process, which process 0 has, and a client of it; both end with the block."""
    with contextlib.ExitStack() as stack:
        process = first(lambda: stack.enter_context(HostProcess.start(folder.path, config.to_json(run))))
        yield stack.enter_context(HostClient(process, share=shared if jax.process_count() > 1 else None))


def begin_or_recover(
    run: Run, folder: RunFolder, game: Game, backbone: Backbone, reporter: Reporter
) -> tuple[States, ReusePool, int]:
    """(states, reuse pool, steps done): from the newest commit whose parts verify, or from the beginning."""
    reporter.say(game.engine.summary)
    found = shared(recover, folder, backbone, reporter)
    if found is None:
        states: States = setup.initial_states(run, backbone)
        warm_up(run, game, states)
        begin(run, folder, game, states)
        return states, ReusePool(), 0
    record = commit.CommitRecord(**found)
    game.host.open_bank(at_seq=record.bank_seq, chain_hash=record.bank_hash)
    check_known(run, game, ())  # of the cards that the bank has by now, a prompt takes as many as it has room for
    wanted = setup.abstract_states(run, backbone)  # no arrays: a machine may have no room for two of each
    states = checkpoint.restore(folder.checkpoints, record.step, wanted, record.checkpoint)
    warm_up(run, game, states)
    game.host.take_calls()
    reporter.say(f'going on behind step {record.step}')
    return states, ReusePool(tuple(problem_from_json(p) for p in record.extra['pool'])), record.step


def warm_up(run: Run, game: Game, states: States) -> None:
    """Compile the programs of the rollouts, where the run asks for that."""
    if run.rollout.ahead:
        game.engine.warm_up(game.deployed(states['solver'].params))


def recover(folder: RunFolder, backbone: Backbone, reporter: Reporter) -> dict[str, Any] | None:
    """The fields of the newest commit whose parts verify; what came after it is removed. None: there is no commit."""
    write_atomic(folder.tokenizer, (backbone.folder / 'tokenizer.json').read_bytes())  # the report reads ids with it
    recovery = evaluate.newest_commit(folder)
    for number, reason in recovery.skipped:
        reporter.say(f'step {number} cannot be used and is dropped: {reason}')
    record = recovery.record
    if record is None and recovery.skipped:  # nothing is removed: somebody may want to look at it
        raise ConfigError(f'no commit of {folder.path} can be used; start again in another --run-dir')
    commit.truncate_behind(folder, record)
    return record and dataclasses.asdict(record)


def begin(run: Run, folder: RunFolder, game: Game, states: States) -> None:
    """Fill the bank, and commit step 0, so that a run that is killed in step 1 does not mine its cards again."""
    check_known(run, game, priming.handwritten() if run.memory_priming else ())
    written, mined = bootstrap.seed_cards(game, {role: state.params for role, state in states.items()})
    game.host.create_bank([*written, *mined])
    game.host.take_calls()
    digest = checkpoint.save(folder.checkpoints, 0, dict(states))
    first(acknowledge, folder, game.host.state(), 0, digest, 0, ReusePool(), run.keep_checkpoints)


def check_known(run: Run, game: Game, cards: Sequence[DraftCard]) -> None:
    """ConfigError unless every question and target that is known before play fits into its prompt."""
    parts = (run.evaluation.validate_per_cell, 1), (run.evaluation.per_cell, evaluate.QUESTION_SEED)
    held_out = [question for size, seed in parts for question in game.world.questions('held_out', size, seed=seed)]
    questions = [question.text for question in [*game.training_questions, *held_out]]
    check_room(run, game.tokenizer, [card.shown() for card in cards], questions, bootstrap.targets(run, game.world))


# --- one boundary ----------------------------------------------------------------------------------------------------


def cross_boundary(run: Run, host: HostClient, ledger: Ledger) -> dict[str, Any]:
    """Enter the step's ledger into the bank; let a due consolidation commit, and a new one start.

    A consolidation that started at one boundary commits exactly `commit_lag` boundaries later, waiting for it if it must.
    """
    entered = host.commit_step(ledger.step, ledger.retrieved, ledger.helpful, ledger.hurt, ledger.failures)
    finished, began = None, entered.state.consolidating
    if began is not None and ledger.step == consolidate.commit_boundary(began, run.bank):
        finished = host.finish_consolidation(ledger.step)
    taken = host.start_consolidation(ledger.step)
    state = host.state()
    evicted = entered.evicted | (finished.evicted if finished else {})
    return {
        **state.counts,
        'version': state.step,
        'seq': state.seq,
        'chain_hash': state.chain_hash,
        'queued': entered.queued,
        'dropped_now': entered.dropped,
        'evicted_now': dict(sorted(Counter(evicted.values()).items())),
        'consolidation': None if finished is None else {
            'started': finished.started,
            'failures': finished.failures,
            'admitted': list(finished.admitted),
            'rejected': finished.rejected,
            'error': finished.error,
        },
        'taken': taken,
    }  # fmt: skip


def validate(game: Game, states: States, questions: Sequence[Any], number: int) -> dict[str, Any]:
    """Solve rates on a fixed sample of held-out questions, with cards where the run has a memory."""
    game.host.snapshot(version=number)
    solver = states['solver']
    outcomes = exam.sit(
        game, solver.params, questions, with_cards=game.run.skill_memory, step=number, weights_version=int(solver.step)
    )
    known = {kind: [outcomes[q.id] for q in questions if q.kind == kind and outcomes[q.id] is not None]
             for kind in sorted({q.kind for q in questions})}  # fmt: skip
    everything = [value for values in known.values() for value in values]
    rate = lambda values: sum(values) / len(values) if values else None  # noqa: E731
    return {'solve_rate': rate(everything), **{k: rate(v) for k, v in known.items()}, 'n': len(everything)}


def write_rollouts(folder: RunFolder, ledger: Ledger) -> None:
    """The step's trajectories, and its questions with their outcomes, cards and bank version."""
    solved = ledger.solved
    write_trajectories(folder.rollouts_file(ledger.step), [*ledger.posed.trajectories, *solved.trajectories])
    rows = []
    for index, (problem, hits) in enumerate(zip(solved.problems, solved.cards, strict=True)):
        outcomes = [o for o, group in zip(solved.outcomes, solved.group, strict=True) if group == index]
        rows.append(question_row(problem, outcomes, [hit.id for hit in hits], ledger.step - 1))
    write_questions(folder.questions_file(ledger.step), rows)


def enter(
    log: MetricsLog, metrics: dict[str, Any], folder: RunFolder, bank: BankState, digest: str, pool: ReusePool, keep: int
) -> None:
    """Write the step's line of metrics, and commit the step where it has a checkpoint."""
    offset = log.append(metrics)
    if digest:
        acknowledge(folder, bank, metrics['step'], digest, offset, pool, keep)


def acknowledge(
    folder: RunFolder, bank: BankState, number: int, digest: str, offset: int, pool: ReusePool, keep: int
) -> None:
    """The commit record, written last: from here on the step has happened."""
    extra = {'pool': [to_json(problem) for problem in pool.problems]}
    record = commit.CommitRecord(number, digest, bank.seq, bank.chain_hash, bank.queue_hash, offset, extra)
    commit.write(folder, record)
    checkpoint.prune(folder.checkpoints, keep, commit.recorded(folder))


def engine_times(game: Game) -> dict[str, float]:
    """Of all rollouts of this process so far: programs compiled (a resumed run compiles again, so this counts as time), and
    the seconds of `Engine`."""
    seconds = {f'engine_{name}': round(value, 3) for name, value in game.engine.seconds.items()}
    return {'engine_programs': game.engine.counters['compilations'], **seconds}


# --- the end ---------------------------------------------------------------------------------------------------------


def explain(
    game: Game, folder: RunFolder, states: States, backbone: Backbone, number: int, reporter: Reporter
) -> None:
    """Measure base, Off and On on held-out questions, write the report, and say the result in one sentence."""
    reporter.say('measuring on held-out questions')
    result = evaluate.measure(game, backbone.params, states['solver'], number)
    first(evaluate.save, folder, result)
    path = first(report.write, folder)
    reporter.say(dual_path.table(result))
    reporter.say(dual_path.summary(result))
    reporter.say(f'report: {path}')


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that holds the first SIGTERM or SIGINT; the second ends the process at once."""
    received: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def default_folder(run: Run) -> pathlib.Path:
    now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
    return pathlib.Path('runs') / f'{run.method}-{run.seed}-{now}'


def describe(run: Run, folder: RunFolder) -> str:
    """The config's difference from the paper's defaults, in lines, and where the whole of it lies."""
    lines = [f'  {name} = {ours!r} (paper: {theirs!r})' for name, (ours, theirs) in config.difference(run).items()]
    return '\n'.join([f'run {folder.path}', f'config {folder.config}; it differs from the defaults in', *lines])


def open_run(run: Run, saved: Run | None) -> tuple[Run, RunFolder, Backbone]:
    """A new run, or the saved one to go on with. Process 0 has the folder's lock."""
    if jax.process_count() > 1:
        theirs = config.from_json(shared(config.to_json, run))
        for name, (value, other) in config.difference(run, theirs).items():
            raise ConfigError(f'process {jax.process_index()} was given {name} {value!r}, process 0 {other!r}')
        distributed.agree(0, saved is None, 'choice of --resume')
    if saved is not None:
        folder = first(RunFolder.resume, run.run_dir) or RunFolder.read(run.run_dir)
        with contextlib.ExitStack() as refused:
            refused.callback(folder.close)
            done = shared(lambda: max(commit.recorded(folder), default=0))
            door.refuse_changes(run, saved, done)
            worlds.build(run)  # refuses files that changed
            backbone = setup.load(run)
            if run.steps != saved.steps:  # the new length stays, for whoever resumes it without the flag
                first(folder.change_config, config.to_json(dataclasses.replace(saved, steps=run.steps)))
            refused.pop_all()
        return run, folder, backbone
    backbone = setup.load(run)  # refuses a bad model before the folder is made
    if run.memory_priming:
        check_room(run, backbone.tokenizer, [card.shown() for card in priming.handwritten()])
    run = config.from_json(shared(lambda: config.to_json(setup.pin(worlds.pin(run), backbone.folder))))
    path = shared(lambda: str(pathlib.Path(run.run_dir or default_folder(run)).absolute()))
    folder = first(RunFolder.create, path, config.to_json(run))
    return run, folder or RunFolder.read(path, 'not on a file system that the processes share: '), backbone


def main(arguments: Sequence[str] | None = None) -> int:
    prepare()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        saved = None
        if resumed := command.folder_to_resume(arguments):
            saved = config.from_json(RunFolder.read(resumed, 'nothing to resume: ').read_config())
        run, cluster = command.from_cluster_command_line(arguments, __doc__, saved)
        if run.rollout.deterministic:
            repeat_bits()
        with distributed.joined(cluster):
            run, folder, backbone = open_run(run, saved)
            console = None if distributed.is_first() else Console(quiet=True, force_terminal=False)
            with folder, Reporter(run.steps, f'{run.method} · {run.model} · seed {run.seed}', console) as reporter:
                reporter.say(describe(run, folder))
                return train(run, folder, backbone, reporter)
    except (ConfigError, HostError, checkpoint.CheckpointError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
