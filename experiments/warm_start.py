"""Shows a policy how the game is played, before it plays: imitation of scripted players, whose searches are real.

    python -m experiments.warm_start DIR                            `tiny`, from nothing, on the lab (`warm_start_lab.py`)
    python -m experiments.warm_start --model M --world wiki DIR     any policy, on Wikipedia summaries

A language model that has never seen the tags of the protocol ends nearly every row as malformed, and nothing can be learned
from that. Some hundred steps of demonstrations (`worlds/wiki_demonstrations.py`: one- and two-hop questions made from titles,
descriptions and mentions) teach it to search, to answer and to ask. DIR becomes a Hugging Face folder; play with
`python -m experiments.train --model DIR --world wiki`.

A checkpoint is kept in DIR/checkpoints until the end; with --resume a run that was killed goes on from it, and ends with
the same bits as one that was not. Left out: any reward (`experiments/train.py` is what learns from outcomes).
"""

from __future__ import annotations

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import warm_start_lab
from sesa_jax import command, config, worlds
from sesa_jax.config import ConfigError
from sesa_jax.grpo import learner
from sesa_jax.grpo.microbatch import Sample
from sesa_jax.policy import hf
from sesa_jax.records import Trajectory
from sesa_jax.run import checkpoint
from sesa_jax.run.clock import SYSTEM
from sesa_jax.run.files import canonical, remove, write_atomic
from sesa_jax.run.process import prepare
from sesa_jax.selfplay import setup
from sesa_jax.worlds import demonstrations, wiki_demonstrations

IMITATION = config.Grpo(kl=0.0, importance_weights='off')
"""With advantage 1 on every token and weights that have just been read, the gradient of the clipped objective is that of the
log-likelihood; so the learner of the game is also the teacher's: its shards, its micro-batches, its arithmetic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a policy is prepared for real text."""

    out: tyro.conf.Positional[pathlib.Path]
    """Folder to write; a Hugging Face model folder."""
    model: str
    """A backbone's name, or a local Hugging Face folder."""
    world: Literal['wiki'] = 'wiki'
    resume: bool = False
    """Go on from the newest checkpoint of that folder."""
    steps: int = 300
    rows: int = 16
    """Demonstrations a step."""
    tokens: int = 2048
    """Longest demonstration; longer ones are left out."""
    micro_batch_tokens: int = 4096
    """Padded tokens per forward and backward pass, over all devices."""
    documents: int = config.Lengths.documents
    observation: int = config.Lengths.observation
    """Passages a search, and tokens of one block; as in the run that is to follow."""
    learning_rate: float = 2e-5
    warmup: int = 20
    stop: int | None = None
    """Stop here on a schedule of `steps`."""
    checkpoint_every: int = 50
    say_every: int = 1
    devices: int = 0
    """Devices of the mesh; 0: all."""
    seed: int = 0


def prepare_text(
    recipe: Recipe,
) -> tuple[Any, Callable[[int], Iterator[Any]], Callable[..., Any], Callable[[Any], None]]:
    """(state, batches from behind a step on, update, export) of any policy on real text."""
    run = config.Run(
        model=recipe.model, seed=recipe.seed, devices=recipe.devices, world=config.World(name=recipe.world)
    )
    world = worlds.build(run)
    backbone = setup.load(run)
    tokenizer = backbone.tokenizer
    optimizer = config.Optimizer(learning_rate=recipe.learning_rate, warmup_steps=recipe.warmup)
    state = learner.init_state(backbone.params, optimizer)
    backbone = dataclasses.replace(backbone, params={})  # the state has its own copy
    grpo = dataclasses.replace(IMITATION, micro_batch_tokens=recipe.micro_batch_tokens)
    players = wiki_demonstrations.Players(world, recipe.documents)
    weight_of = {'context': 0.0, 'observation': 0.0, 'think': 1.0, 'act': 1.0}

    def batch(step: int) -> list[Sample]:
        rows: list[Sample] = []
        for number, shown in enumerate(wiki_demonstrations.stream(players, recipe.seed, step)):
            ids, weights = demonstrations.encode(shown, tokenizer, weight_of, recipe.observation)
            if len(ids) <= recipe.tokens:
                rows.append(_sample(ids, weights > 0, f'{step}-{number}'))
            if len(rows) == recipe.rows:
                return rows
            if number >= 20 * recipe.rows:
                raise ConfigError(
                    f'--tokens {recipe.tokens}: only {len(rows)} of {number + 1} demonstrations are that short; raise it, '
                    'or lower --documents or --observation'
                )
        raise AssertionError('the stream does not end')

    def update(state: Any, rows: list[Sample]) -> tuple[Any, dict[str, float]]:
        state, found = learner.update(
            state, {}, rows, arch=backbone.arch, grpo=grpo, optimizer=optimizer, temperature=1.0,
            allowed=tokenizer.vocab_size, response_length=recipe.tokens, mesh=backbone.mesh, dtype=backbone.dtype,
        )  # fmt: skip
        if found['skipped_steps']:
            raise ConfigError(f'the loss is not finite; lower --learning-rate {recipe.learning_rate}')
        # The demonstrator is sure of what it does (log-prob 0), so the mean difference to it is the cross-entropy.
        return state, {'loss': found['sampler_difference'], 'entropy': found['entropy'], 'tokens': found['tokens']}

    def export(state: Any) -> None:
        hf.save(recipe.out, backbone.arch, state.params, hf.load_config(backbone.folder), backbone.folder)

    return state, lambda done: map(batch, itertools.count(done + 1)), update, export


def _sample(ids: np.ndarray, is_action: np.ndarray, name: str) -> Sample:
    row = Trajectory(
        role='solver', problem_id=name, sample=0, ids=ids, is_action=is_action, logprobs=np.zeros(len(ids), np.float32),
        prompt_length=int(is_action.argmax()), turns=(), searches=(), card_ids=(), stop_reason='answer',
        weights_version=0, bank_version=0,
    )  # fmt: skip
    return Sample(row, 1.0)


# --- the loop, for both -----------------------------------------------------------------------------------------------


def teach(recipe: Any, parts: tuple[Any, Callable, Callable, Callable], begin: int, checkpoints: pathlib.Path) -> None:
    """From behind step `begin` to the end: update, say, keep a checkpoint; then write the model and drop the checkpoints."""
    state, batches, update, export = parts
    last = min(recipe.steps, recipe.stop or recipe.steps)
    with Teller(recipe.steps, begin, recipe.say_every) as teller:
        for step, batch in zip(range(begin + 1, last + 1), batches(begin), strict=False):
            state, found = update(state, batch)
            teller.step(step, {name: float(value) for name, value in found.items()}, is_last=step == last)
            if step % recipe.checkpoint_every == 0 or step == last:
                checkpoint.save(checkpoints, step, state)
                checkpoint.prune(checkpoints, 1, checkpoint.steps(checkpoints))
    export(state)
    if last == recipe.steps:
        remove(checkpoints)


def newest(checkpoints: pathlib.Path, abstract: Any) -> tuple[Any, int]:
    """(state, step) of the newest checkpoint that is whole; what is not is removed. (None, 0) for none.

    abstract: of the state, without arrays, so that the machine needs no room for two.
    """
    for step in reversed(checkpoint.steps(checkpoints)):
        try:
            return checkpoint.restore(checkpoints, step, abstract), step
        except checkpoint.CheckpointError as error:
            print(f'{error}; going on from an older one', file=sys.stderr)
            remove(checkpoint.directory(checkpoints, step))
    return None, 0


class Teller:
    """A bar on a terminal, a line every so many steps elsewhere; means since the last one."""

    def __init__(self, steps: int, begin: int, every: int, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._steps, self._every, self._began = steps, every, SYSTEM.monotonic()
        self._sums: dict[str, float] = {}
        self._count = 0
        columns = ('step', MofNCompleteColumn(), BarColumn(), TextColumn('{task.fields[found]}'), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task('', total=steps, completed=begin, found='')

    def __enter__(self) -> Teller:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, found: dict[str, float], *, is_last: bool) -> None:
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in found.items()}
        self._count += 1
        means = ' '.join(f'{name} {value / self._count:.4g}' for name, value in self._sums.items())
        self._bar.update(self._task, completed=step, found=means)
        if step % self._every == 0 or is_last:
            if not self._console.is_terminal:
                seconds = SYSTEM.monotonic() - self._began
                self._console.print(f'step {step}/{self._steps} {means} {seconds:.0f} s', soft_wrap=True, markup=False)
            self._sums, self._count = {}, 0


def recipe_of(arguments: Sequence[str]) -> Any:
    """The recipe of a command line: the lab's, unless another model or world is named."""
    known = command.first_look(arguments)
    is_text = known.world == 'wiki' or known.model != 'tiny'
    return tyro.cli(Recipe if is_text else warm_start_lab.Recipe, args=list(arguments), description=__doc__)


def main(arguments: Sequence[str] | None = None) -> int:
    prepare()
    try:
        recipe = recipe_of(sys.argv[1:] if arguments is None else arguments)
        plan, checkpoints = recipe.out / 'warm_start.json', recipe.out / 'checkpoints'
        free = {'resume', 'stop', 'out', 'say_every', 'checkpoint_every'}
        fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in free}
        written = canonical(json.loads(json.dumps(fields, default=str)))
        if checkpoints.exists() != recipe.resume:
            what = 'nothing to resume: it has no' if recipe.resume else 'go on with --resume, or remove its'
            raise ConfigError(f'{recipe.out}: {what} checkpoints')
        if recipe.resume and not plan.is_file():
            raise ConfigError(f'{plan} is missing, so nobody knows its flags; remove {checkpoints}, or begin elsewhere')
        if recipe.resume and plan.read_bytes() != written:
            raise ConfigError(f'{plan}: its warm start had other flags; repeat them, or begin in another folder')
        is_lab = isinstance(recipe, warm_start_lab.Recipe)
        prepared = warm_start_lab.prepare if is_lab else prepare_text
        state, *others = prepared(recipe)
        begin = 0
        if recipe.resume:
            state = checkpoint.abstract(state)  # the arrays go before those of the checkpoint come
            state, begin = newest(checkpoints, state)
            if not begin:
                state, *others = prepared(recipe)
        else:
            recipe.out.mkdir(parents=True, exist_ok=True)
            write_atomic(plan, written)
            checkpoints.mkdir()  # last: where it is, there is a plan
        teach(recipe, (state, *others), begin, checkpoints)
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
