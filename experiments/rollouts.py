"""Read what the policies of a run did: prompts, actions, what their searches found, and how each rollout ended.

    python -m experiments.rollouts RUN                              how many rollouts of each step ended how
    python -m experiments.rollouts RUN --step N                     a few of them: successes beside failures
    python -m experiments.rollouts RUN --step N --role solver --outcome wrong --limit 10
    python -m experiments.rollouts RUN --step N --rollout solver:s00003-p1:2

Made from the files of the run folder, which is read, never locked or changed, so a run may be under way. Seconds, no
model is loaded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sesa_jax.config import ConfigError
from sesa_jax.records import Trajectory
from sesa_jax.rollout.trajectory import read_trajectories
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.rollouts import Shown, decoder, examples, outcome_of, questions_of, rollout_steps, show
from sesa_jax.run.visible import one_line

STYLES = {'prompt': 'dim', 'action': 'bold', 'observation': 'cyan'}


@dataclass(frozen=True)
class Arguments:
    """See the module's docstring."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    step: int | None = None
    """The step to read; without it, all steps are summed up."""
    role: Literal['challenger', 'solver', 'both'] = 'both'
    outcome: str = ''
    """Of solver rollouts, such as correct or wrong."""
    stop: str = ''
    """Why rollouts ended, such as answer, question, length, turns, malformed or outage."""
    rollout: str = ''
    """One rollout by its id, as it is printed."""
    limit: int = 6
    """Most rollouts to print."""


def summary(folder: RunFolder, console: Console) -> None:
    """A table: for each step with rollouts on disk, how many of each role, their tokens and turns, and how they ended."""
    grid = Table(title='rollouts', title_justify='left')
    for column in ('step', 'role', 'rollouts', 'tokens', 'sampled', 'turns', 'well-formed', 'searches', 'ended'):
        grid.add_column(column, overflow='fold')
    for step in rollout_steps(folder):
        rows = read_trajectories(folder.rollouts_file(step))
        for role in ('challenger', 'solver'):
            if mine := [row for row in rows if row.role == role]:
                stops = Counter(row.stop_reason for row in mine)
                turns = [turn.kind != 'malformed' for row in mine for turn in row.turns]
                grid.add_row(
                    str(step), role, str(len(mine)), str(sum(len(row.ids) for row in mine)),
                    str(sum(int(row.is_action.sum()) for row in mine)), str(len(turns)), f'{sum(turns) / len(turns):.0%}',
                    str(sum(len(row.searches) for row in mine)),
                    ', '.join(f'{name} {count}' for name, count in stops.most_common()),
                )  # fmt: skip
    if not grid.row_count:
        raise ConfigError(f'{folder.path} has no rollouts on disk yet')
    console.print(grid)


def chosen(folder: RunFolder, given: Arguments) -> list[tuple[Trajectory, Shown]]:
    """What the flags ask for; without any but --step, successes beside failures. ConfigError where nothing is left."""
    if given.step not in (steps := rollout_steps(folder)):
        there = f'{steps[0]} to {steps[-1]}' if steps else 'none'
        raise ConfigError(f'--step {given.step}: no rollouts of that step on disk (there are: {there})')
    rows = {row.rollout_id: row for row in read_trajectories(folder.rollouts_file(given.step))}
    if given.rollout and given.rollout not in rows:
        raise ConfigError(f'--rollout {given.rollout}: step {given.step} has {", ".join(list(rows)[:4])}, ...')
    if not (given.rollout or given.outcome or given.stop) and given.role == 'both':
        asked = given.limit // 3
        return [(rows[s.id], s) for s in examples(folder, given.step, solver=given.limit - asked, challenger=asked)]
    questions, decode = questions_of(folder, given.step), decoder(folder)
    picked = []
    for name, row in rows.items():
        question = questions.get(row.problem_id, {})
        fits = (
            given.rollout in ('', name)
            and given.role in ('both', row.role)
            and given.stop in ('', row.stop_reason)
            and given.outcome in ('', outcome_of(row, question).get('kind', ''))
        )
        if fits:
            picked.append((row, show(row, given.step, question, decode)))
    if not picked:
        raise ConfigError(f'no rollout of step {given.step} fits all of these flags')
    return picked[: given.limit]


def describe(row: Trajectory, shown: Shown, console: Console) -> None:
    """One rollout: a head of facts, the dialogue in colours, its turns and its searches."""
    console.rule(Text(one_line(shown.id)), align='left')
    facts = {
        'ended': f'{shown.stop_reason} {shown.outcome}'.strip(),
        'question': shown.question,
        'answer': shown.answer,
        'said': shown.prediction,
        'cards': ', '.join(shown.card_ids),
        'versions': f'weights {shown.weights_version}, bank {shown.bank_version}',
        'tokens': f'{row.prompt_length} prompt, {int(row.is_action.sum())} sampled, {len(row.ids)} in all',
    }
    for name, value in facts.items():
        if value:
            console.print(Text.assemble((f'{name:9}', 'dim'), one_line(value, 300)))
    for segment in shown.segments:
        console.print(Text.assemble((f'[{segment.kind}] ', 'magenta'), (segment.text, STYLES[segment.kind])))
    searches = iter(row.searches)
    for number, turn in enumerate(row.turns, start=1):
        line = f'turn {number}: {turn.kind}, tokens {turn.start} to {turn.end}'
        if turn.kind == 'search' and (search := next(searches, None)) is not None:
            titles = ', '.join(document.title for document in search.documents)
            line += f'; {search.outcome} after {1000 * search.latency:.0f} ms: {titles or "nothing"}'
        console.print(Text(one_line(line, 300), style='dim'))


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    given = tyro.cli(Arguments, args=arguments, description=__doc__)
    console = console or Console(highlight=False, emoji=False)
    try:
        folder = RunFolder.read(given.run)
        if given.step is None:
            summary(folder, console)
        else:
            for row, shown in chosen(folder, given):
                describe(row, shown, console)
    except (ConfigError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
