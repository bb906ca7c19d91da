"""What did the run gain, and where does it sit: in the weights (Off) or in the bank (On)?

Three arms answer the same held-out questions: `base` (initial solver, no cards), `off` (trained solver, no cards), `on`
(trained solver, cards of the final bank). Pure functions of per-question outcomes: rates with intervals by class and
number of hops, paired differences, a sentence and a table. The runner that plays the questions is elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sesa_jax.evals.statistics import BOOTSTRAP_SEED, RESAMPLES, mcnemar, minimum_detectable, paired_bootstrap, wilson
from sesa_jax.records import Question

ARMS = ('base', 'off', 'on')
PAIRS = (('off', 'base'), ('on', 'base'), ('on', 'off'))  # each read as: first minus second
TOTAL = 'total'


class Cell(NamedTuple):
    """Questions that are alike: the strata of the bootstrap and the rows of the table."""

    kind: str
    hops: int

    @property
    def name(self) -> str:
        return f'{self.kind}/{self.hops}'


@dataclasses.dataclass(frozen=True)
class Rate:
    """Share of correct answers with its 95% Wilson interval."""

    n: int
    correct: int
    rate: float | None  # None for n = 0
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """A paired difference of two arms over the questions that both answered."""

    n: int
    difference: float | None  # None for n = 0
    low: float  # 95%, stratified paired bootstrap
    high: float
    p: float  # exact McNemar
    wins: int  # the first arm right, the second wrong
    losses: int
    detectable: float | None  # smallest difference that as many pairs, differing as often, would show (power 0.8)

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def is_shown(self) -> bool:
        """Both the interval and the exact test say so: where few questions differ, the bootstrap alone is too sure."""
        return self.excludes_zero and self.p < 0.05


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Everything that an evaluation found. Sections are 'total', a kind such as 'hard', or a cell such as 'hard/2'."""

    step: int  # of the run that was measured
    arms: tuple[str, ...]
    sections: tuple[str, ...]
    excluded: Mapping[str, int]  # arm -> questions without a verdict (outage, unjudged): in no rate
    rates: Mapping[str, Mapping[str, Rate]]  # arm -> section
    differences: Mapping[str, Mapping[str, Difference]]  # 'on-off' -> section
    outcomes: Mapping[str, Mapping[str, bool | None]]  # arm -> question id, so that runs can be paired later
    facts: Mapping[str, Any]  # what the runner adds: seeds, tokens, bank hash, ...

    def to_json(self) -> dict[str, Any]:
        return {'version': 1, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EvaluationResult:
        """Inverse of `to_json`. ValueError for a version that this code does not know."""
        if data.get('version') != 1:
            raise ValueError(f'evaluation of version {data.get("version")!r}: this code reads version 1')
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        fields['arms'], fields['sections'] = tuple(fields['arms']), tuple(fields['sections'])
        for name, kind in (('rates', Rate), ('differences', Difference)):
            fields[name] = {
                outer: {section: kind(**value) for section, value in inner.items()}
                for outer, inner in fields[name].items()
            }
        return cls(**fields)


def evaluate(
    questions: Sequence[Question],
    outcomes: Mapping[str, Mapping[str, bool | None]],
    *,
    step: int,
    facts: Mapping[str, Any] | None = None,
    resamples: int = RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
) -> EvaluationResult:
    """Rates and paired differences of the arms in `outcomes` ('base', 'off', 'on'; 'on' is absent without a memory).

    `outcomes[arm][question id]` is True, False, or None where there is no verdict. ValueError unless each arm has
    exactly the ids of `questions`.
    """
    cell_of = {question.id: Cell(question.kind, question.hops) for question in questions}
    if len(cell_of) != len(questions):
        raise ValueError('two questions of the evaluation have the same id')
    for arm, answered in outcomes.items():
        if arm not in ARMS:
            raise ValueError(f'unknown arm {arm!r}: known are {", ".join(ARMS)}')
        if odd := cell_of.keys() ^ answered.keys():
            raise ValueError(f'arm {arm!r} and the questions differ in {len(odd)} ids, such as {min(odd)!r}')
    arms = tuple(arm for arm in ARMS if arm in outcomes)
    sections = _sections(cell_of)
    rates = {
        arm: {name: _rate([outcomes[arm][q] for cell in cells for q in cell]) for name, cells in sections.items()}
        for arm in arms
    }
    differences = {
        f'{after}-{before}': {
            name: _difference(cells, outcomes[after], outcomes[before], resamples, seed)
            for name, cells in sections.items()
        }
        for after, before in PAIRS
        if after in arms and before in arms
    }
    return EvaluationResult(
        step=step,
        arms=arms,
        sections=tuple(sections),
        excluded={arm: sum(value is None for value in outcomes[arm].values()) for arm in arms},
        rates=rates,
        differences=differences,
        outcomes={arm: {q: outcomes[arm][q] for q in cell_of} for arm in arms},
        facts=dict(facts or {}),
    )


def summary(result: EvaluationResult) -> str:
    """The result in one sentence, with its doubt in it."""
    total = {arm: result.rates[arm][TOTAL] for arm in result.arms}
    n = max(rate.n for rate in total.values())
    meaning = {
        'base': 'as it began (base)',
        'off': 'trained, without cards (Off)',
        'on': 'trained, with its cards (On)',
    }
    said = [
        f'{percent(rate.rate)}% [{percent(rate.low)}, {percent(rate.high)}] {meaning[arm]}'
        for arm, rate in total.items()
    ]
    names = {'on-base': 'On - base', 'off-base': 'Off - base', 'on-off': 'On - Off'}
    gains = [
        f'{name} {gain(result.differences[pair][TOTAL])}' for pair, name in names.items() if pair in result.differences
    ]
    sentence = f'Of {n} held-out questions the solver answers {", ".join(said)}'
    return f'{sentence}; in points {", ".join(gains)}.' if gains else f'{sentence}.'


def table(result: EvaluationResult) -> str:
    """The result as aligned plain text: a row a section, rates and paired differences in points with intervals."""
    head = ['', 'n', *result.arms, *(pair.replace('-', ' - ') for pair in result.differences)]
    rows = [head]
    for section in result.sections:
        rates = [result.rates[arm][section] for arm in result.arms]
        row = [section, str(max(rate.n for rate in rates))]
        row += [f'{percent(rate.rate)} [{percent(rate.low)}, {percent(rate.high)}]' for rate in rates]
        row += [gain(result.differences[pair][section]) for pair in result.differences]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    notes = [
        '',
        'Solve rates in percent with 95% Wilson intervals; paired differences in points with 95% bootstrap',
        'intervals, p from the exact McNemar test.',
    ]
    if any(result.excluded.values()):
        notes.append(
            'Left out, without a verdict: ' + ', '.join(f'{arm} {k}' for arm, k in result.excluded.items()) + '.'
        )
    return '\n'.join([*lines, *notes])


def _sections(cell_of: Mapping[str, Cell]) -> dict[str, list[list[str]]]:
    """Section name -> its cells, each a list of question ids: the total, each kind, each cell."""
    cells: dict[Cell, list[str]] = {}
    for question, cell in cell_of.items():
        cells.setdefault(cell, []).append(question)
    order = sorted(cells)
    sections = {TOTAL: [cells[cell] for cell in order]}
    for kind in dict.fromkeys(cell.kind for cell in order):
        sections[kind] = [cells[cell] for cell in order if cell.kind == kind]
    sections.update({cell.name: [cells[cell]] for cell in order})
    return sections


def _rate(values: Sequence[bool | None]) -> Rate:
    known = [value for value in values if value is not None]
    n, correct = len(known), sum(known)
    low, high = wilson(correct, n)
    return Rate(n, correct, correct / n if n else None, low, high)


def _difference(
    cells: Sequence[Sequence[str]],
    after: Mapping[str, bool | None],
    before: Mapping[str, bool | None],
    resamples: int,
    seed: int,
) -> Difference:
    strata = [
        [int(after[q]) - int(before[q]) for q in cell if after[q] is not None and before[q] is not None]
        for cell in cells
    ]
    flat = [value for stratum in strata for value in stratum]
    n, wins, losses = len(flat), flat.count(1), flat.count(-1)
    low, high = paired_bootstrap(strata, resamples=resamples, seed=seed)
    return Difference(
        n=n,
        difference=(wins - losses) / n if n else None,
        low=low,
        high=high,
        p=mcnemar(wins, losses),
        wins=wins,
        losses=losses,
        # One more discordant pair than was seen, so that none seen does not read as none possible.
        detectable=minimum_detectable(n, min(1.0, (wins + losses + 1) / n)) if n else None,
    )


def percent(value: float | None) -> str:
    """A rate in percent with one decimal; '-' for none."""
    return '-' if value is None else f'{100 * value:.1f}'


def gain(found: Difference) -> str:
    """A difference in points, with its interval and p value."""
    if found.difference is None:
        return '-'
    p = 'p<0.001' if found.p < 0.001 else f'p={found.p:.3f}'
    return f'{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}] {p}'
