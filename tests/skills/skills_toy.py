"""Small cards, failures and an encoder whose cosines are written down, for the tests of the memory."""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sesa_jax.config import Bank as Config
from sesa_jax.records import Document, Failure, Target
from sesa_jax.skills.bank import Bank
from sesa_jax.skills.card import DraftCard

SMALL = Config(capacity=6, every=2, at_least=2, at_most=3, queue=5, commit_lag=1)


class TableEncoder:
    """Cosines by the triggers of two cards; `default` where none is given. A question's cosine is written in it."""

    name = 'table'
    threshold = 0.93

    def __init__(self, cosines: Mapping[tuple[str, str], float] | None = None, default: float = 0.5) -> None:
        self.cosines = {frozenset(pair): value for pair, value in (cosines or {}).items()}
        self.default = default

    def similarity(self, drafts, known):
        others = [*known, *drafts]
        pairs = [[self.cosines.get(frozenset((a.trigger, b.trigger)), self.default) for b in others] for a in drafts]
        return np.array(pairs, np.float64).reshape(len(drafts), len(others))

    def index(self, cards):
        """A question is a list such as 'a=0.3 b=0.9': cosines by trigger, 0 where none is given."""

        def score(question):
            scores = dict(part.split('=') for part in question.split() if '=' in part)
            return np.array([float(scores.get(card.trigger, 0)) for card in cards])

        return score


def draft(trigger: str, failure: Failure | None = None, **fields) -> DraftCard:
    if failure is not None:
        fields = {
            'source_question_hash': failure.question_hash,
            'source_target_hash': failure.target.hash,
            'rollout_ids': (failure.rollout_id,),
            'distiller': 'toy',
            **fields,
        }
    return DraftCard(
        **{'description': f'about {trigger}', 'trigger': trigger, 'queries': (f'{{entity}} {trigger}',), **fields}
    )


def failure(step: int, row: int = 0, target: str = '', cards: tuple[str, ...] = (), **fields) -> Failure:
    return Failure(
        **{
            'rollout_id': f'solver:s{step}-p{row}:0',
            'step': step,
            'question': f'question {step} {row}?',
            'target': Target(target or f'target {step} {row}'),
            'prediction': 'wrong',
            'evidence': (Document(f'd{row}', 'title', 'text'),),
            'queries': ('query',),
            'card_ids': cards,
            'bank_version': step - 1,
            **fields,
        }
    )


def new_bank(path: Path, triggers='', config: Config = SMALL, encoder=None, **flags) -> Bank:
    """A bank with one seed a trigger; every cosine is .5 unless the encoder says otherwise."""
    seeds = [draft(trigger) for trigger in triggers.split()]
    return Bank.create(path / 'bank.db', seeds, config, encoder=encoder or TableEncoder(), **flags)


def reopen(bank: Bank, **arguments) -> Bank:
    bank.close()
    return again(bank, **arguments)


def again(bank: Bank, path: Path | None = None, **arguments) -> Bank:
    """The same file opened once more, or another with the same config."""
    flags = {'freeze_bank': bank.freeze_bank, 'failure_distillation': bank.failure_distillation}
    return Bank.open(path or bank._log.path, bank.config, encoder=bank.encoder, **{**flags, **arguments})


def crashed(bank: Bank, path: Path) -> Path:
    """The files as a killed process leaves them: main file and WAL, no clean close."""
    for suffix in ('', '-wal'):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f'{bank._log.path}{suffix}', f'{path}{suffix}')
    return path


def idle(bank: Bank, upto: int) -> None:
    """Commit empty steps up to and with `upto`."""
    for step in range(bank.step + 1, upto + 1):
        bank.commit_step(step, {}, {}, {}, [])


def triggers(cards):
    return ' '.join(card.trigger for card in cards)


def distil(bank, step, names):
    """One consolidation behind `step` from two fresh failures; its drafts have these triggers."""
    failures = [failure(step, row) for row in range(2)]
    bank.commit_step(step, {}, {}, {}, failures)
    assert len(bank.start_consolidation(step)) == 2
    return bank.finish_consolidation(step, [draft(name, failures[0]) for name in names.split()])
