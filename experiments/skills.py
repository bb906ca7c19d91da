"""Look into the memory of a run: which cards there are, where one came from, and what the bank went through.

    python -m experiments.skills RUN show [--all]
    python -m experiments.skills RUN why CARD
    python -m experiments.skills RUN history

`why` shows the failures that a card was distilled from and the rollouts that were shown it. The bank is read, never
locked or changed, so a run may be under way. Seconds, no model is loaded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sesa_jax.config import ConfigError
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.report import open_bank, origin, state
from sesa_jax.run.rollouts import using_card
from sesa_jax.run.visible import one_line
from sesa_jax.skills.bank import Bank, BankError
from sesa_jax.skills.card import Card

ROLLOUTS = 40
"""Rollouts that `why` lists, newest last; the counters above it count all."""


@dataclasses.dataclass(frozen=True)
class Show:
    """The cards, best first."""

    all: bool = False
    """Evicted cards, too."""


@dataclasses.dataclass(frozen=True)
class Why:
    """Where a card came from and who used it."""

    card: tyro.conf.Positional[str]
    """Its id, such as c00016."""


@dataclasses.dataclass(frozen=True)
class History:
    """What the bank went through, step by step."""


Command = (
    Annotated[Show, tyro.conf.subcommand('show')]
    | Annotated[Why, tyro.conf.subcommand('why')]
    | Annotated[History, tyro.conf.subcommand('history')]
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See the module's docstring."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    command: Command


def show(bank: Bank, command: Show, console: Console) -> None:
    """A table of the cards, by helpful - hurt, then by id."""
    cards = bank.cards() if command.all else bank.active()
    columns = ('card', 'born', 'state', 'retrieved', 'helpful', 'hurt', 'what the solver reads')
    grid = _table(f'{len(cards)} cards', columns)
    for card in sorted(cards, key=lambda card: (card.evicted_step >= 0, -card.score, card.id)):
        counters = (card.retrieved, card.helpful, card.hurt)
        _row(grid, card.id, card.born_step, state(card), *counters, card.shown())
    console.print(grid)


def why(bank: Bank, folder: RunFolder, command: Why, console: Console) -> None:
    """A card's text, its lineage, the failures that it came from, and the rollouts that were shown it."""
    try:
        found = bank.why(command.card)
    except KeyError as error:
        raise ConfigError(f'{error.args[0]}; `show --all` lists them') from error
    _describe(found.card, console)
    grid = _table(
        f'{len(found.failures)} failures that it came from', ('step', 'rollout', 'question', 'gold', 'said', 'searched')
    )
    for failure in found.failures:
        searched = ' → '.join(failure.queries)
        _row(
            grid,
            failure.step,
            failure.rollout_id,
            failure.question,
            failure.target.answer,
            failure.prediction,
            searched,
        )
    _print(grid, 'It came from no failure: it is a card of the priming.', console)
    uses = [(step, t.rollout_id, outcome, t.final or '') for step, t, outcome in using_card(folder, found.card.id)]
    shown = f', the last {ROLLOUTS}' if len(uses) > ROLLOUTS else ''
    grid = _table(f'{len(uses)} rollouts that were shown it{shown}', ('step', 'rollout', 'outcome', 'said'))
    for use in uses[-ROLLOUTS:]:
        _row(grid, *use)
    _print(grid, 'No rollout on disk was shown it.', console)
    if found.children:
        console.print(Text(f'Its children: {one_line(", ".join(found.children))}'))


def history(bank: Bank, console: Console) -> None:
    """One line an event that changed the cards or started a consolidation, and the totals."""
    grid = _table('history', ('event', 'step', 'kind', 'what'))
    for event in bank.history():
        if said := _event(event):
            _row(grid, event['seq'], event['step'], event['kind'], said)
    console.print(grid)
    console.print(Text(', '.join(f'{name} {count}' for name, count in bank.counts().items())))


def _event(event: dict) -> str:
    """What an event did, in words; '' for a step in which nothing entered and nothing left."""
    parts = []
    if event['kind'] == 'started':
        parts.append(f'{len(event["taken"])} failures to the distiller')
    if event.get('error'):
        parts.append(f'failed: {event["error"]}')
    if admitted := event.get('admitted'):
        ids = [card['id'] for card in admitted]
        parts.append(f'admitted {len(ids)}: {ids[0]}' + (f' to {ids[-1]}' if len(ids) > 1 else ''))
    if rejected := event.get('rejected'):
        reasons = [draft['reason'] for draft in rejected]
        parts.append('rejected ' + ', '.join(f'{reasons.count(r)} {r}' for r in sorted(set(reasons))))
    if evicted := event.get('evicted'):
        parts.append('evicted ' + ', '.join(f'{card} ({reason})' for card, reason in evicted.items()))
    if failures := event.get('failures'):
        parts.append(f'{len(failures)} failures queued')
    return '; '.join(parts)


def _describe(card: Card, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    fields = {
        'card': f'{card.id}, {state(card)}, born at step {card.born_step}',
        'description': card.description,
        'when': card.trigger,
        'search': ' | '.join(card.queries),
        'avoid': card.avoid,
        'evidence': card.evidence,
        'masked question': card.masked_question,
        'counters': f'retrieved {card.retrieved}, helpful {card.helpful}, hurt {card.hurt}',
        'origin': origin(card),
    }
    for name, value in fields.items():
        if value:
            _row(grid, name, value)
    console.print(grid)


def _table(title: str, columns: Sequence[str]) -> Table:
    grid = Table(title=title, title_justify='left')
    for column in columns:
        grid.add_column(column, overflow='fold')
    return grid


def _row(grid: Table, *cells: object) -> None:
    # Text, so that no markup in it is obeyed; one_line, so that no control character reaches the terminal.
    grid.add_row(*(Text(one_line(str(cell), 300)) for cell in cells))


def _print(grid: Table, otherwise: str, console: Console) -> None:
    console.print(grid if grid.row_count else Text(otherwise))


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    given = tyro.cli(Arguments, args=arguments, description=__doc__, config=(tyro.conf.OmitSubcommandPrefixes,))
    console = console or Console(highlight=False, emoji=False)
    try:
        folder = RunFolder.read(given.run)
        with open_bank(folder) as bank:
            if isinstance(given.command, Show):
                show(bank, given.command, console)
            elif isinstance(given.command, Why):
                why(bank, folder, given.command, console)
            else:
                history(bank, console)
    except FileNotFoundError as error:
        print(f'error: {given.run} has no skill bank ({error.filename})', file=sys.stderr)
        return 2
    except (ConfigError, BankError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
