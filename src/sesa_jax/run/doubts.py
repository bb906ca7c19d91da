"""Reasons to doubt a run, computed from its own data. A result is shown together with what speaks against it.

Each check is a small function that returns a sentence or nothing; the thresholds stand beside it. Nothing here excuses
or hides: a doubt that does not apply is not mentioned, and an empty list is itself suspicious (one seed is always one).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sesa_jax.evals.dual_path import TOTAL, EvaluationResult
from sesa_jax.evals.statistics import wilson
from sesa_jax.run.metrics import flatten, get
from sesa_jax.skills.card import Card

SMALL_CELL = 100  # held-out questions per class and number of hops
FEW_CONSOLIDATIONS = 3
MANY_EXCLUDED = 0.01
LOW_VALID = 0.2
FEW_FRONTIER = 0.1
MANY_MALFORMED = 0.2
SAMPLER_GAP = 'sampler_difference_max'  # the learner's name for it
LARGE_LOGPROB_DIFFERENCE = 1e-3  # float32; bfloat16 sampling lies near 1e-2 and deserves the remark

Row = Mapping[str, Any]


def doubts(
    config: Mapping[str, Any],
    rows: Sequence[Row],
    evaluation: EvaluationResult | None,
    cards: Sequence[Card] | None,
) -> list[str]:
    """All doubts, the most serious kinds first. `cards`: active ones and tombstones; None without a bank."""
    found = [
        *_evaluation(evaluation),
        *_memory(config, rows, cards),
        *_play(rows),
        *_numbers(rows),
        *_scope(config, rows),
    ]
    return list(found)


def _evaluation(evaluation: EvaluationResult | None) -> Iterator[str]:
    if evaluation is None:
        yield 'There is no evaluation on held-out questions: nothing is known about what was learned.'
        return
    names = {'on-base': 'On - base', 'off-base': 'Off - base', 'on-off': 'On - Off'}
    meaning = {
        'on-base': 'no gain is shown at all',
        'off-base': 'no gain of the weights alone is shown',
        'on-off': 'no contribution of the final bank is shown',
    }
    for pair, sections in evaluation.differences.items():
        total = sections[TOTAL]
        if total.difference is not None and not total.excludes_zero:
            yield (
                f'The 95% interval of {names[pair]}, [{100 * total.low:+.1f}, {100 * total.high:+.1f}] points, '
                f'contains 0: {meaning[pair]}. {_detectable(total.detectable)}'
            )
        elif total.excludes_zero and not total.is_shown:
            yield (
                f'The interval of {names[pair]} excludes 0 but the exact test does not (p = {total.p:.2g}): only '
                f'{total.wins + total.losses} of {total.n} questions differ.'
            )
        for section, found in sections.items():
            if found.high < 0:
                place = 'overall' if section == TOTAL else f'on {section} questions'
                yield f'{names[pair]} is negative {place}: {100 * found.difference:+.1f} points, interval below 0.'
    cells = {section for section in evaluation.sections if '/' in section}
    small = {s: n for s in cells if (n := min(evaluation.rates[arm][s].n for arm in evaluation.arms)) < SMALL_CELL}
    if small:
        yield (
            f'{len(small)} of {len(cells)} cells have fewer than {SMALL_CELL} held-out questions '
            f'(fewest: {min(small.values())}): read their rows as hints.'
        )
    if missing := {arm: k for arm, k in evaluation.excluded.items() if k}:
        said = ', '.join(f'{k} in {arm}' for arm, k in missing.items())
        yield f'Held-out questions without a verdict were left out: {said}.'


def _detectable(value: float | None) -> str:
    if value is None:
        return 'As few questions as these could not have shown any difference.'
    return f'The smallest difference that these questions would have shown is about {100 * value:.0f} points.'


def _memory(config: Mapping[str, Any], rows: Sequence[Row], cards: Sequence[Card] | None) -> Iterator[str]:
    if cards is None:
        return
    learned = [card for card in cards if card.born_step > 0]
    rounds = sum(bool(get(row, 'bank/consolidation/admitted')) for row in rows)
    if config.get('failure_distillation', True) and not config.get('freeze_bank', False):
        if not learned:
            yield "No card came from this run's own failures: On measures the seed bank, not an evolving one."
        elif rounds < FEW_CONSOLIDATIONS:
            yield f'Only {rounds} consolidation(s) added cards: too few to speak of an evolving bank.'
    unused = sum(card.retrieved == 0 for card in learned)
    if learned and unused > len(learned) / 2:
        yield f'{unused} of {len(learned)} learned cards were never retrieved: what they are worth is not known.'
    if cards and not any(card.retrieved for card in cards):
        yield 'No card was ever retrieved: the bank took no part in training.'
    hurt = sum(card.score < 0 for card in cards if card.evicted_step < 0)
    active = sum(card.evicted_step < 0 for card in cards)
    if active and hurt > active / 2:
        yield f'{hurt} of {active} active cards were seen more often in failures than in successes.'


def _play(rows: Sequence[Row]) -> Iterator[str]:
    asked = [row for row in rows if get(row, 'challenger/issued')]
    if asked:
        third = max(1, len(asked) // 3)
        (early_valid, early), (late_valid, late) = _valid(asked[:third]), _valid(asked[-third:])
        # Intervals that do not meet: more than noise, at the sizes at hand.
        if len(asked) >= 2 and wilson(late_valid, late).high < wilson(early_valid, early).low:
            yield (
                f'The share of valid questions fell from {early_valid / early:.2f} (first third of the steps) '
                f'to {late_valid / late:.2f} (last third): the challenger drifts.'
            )
        valid, issued = _valid(asked)
        if valid / issued < LOW_VALID:
            yield f'Only {valid} of {issued} questions were valid: training saw little of what it asked for.'
    kinds = {kind: _total(rows, f'solver/{kind}') for kind in ('correct', 'wrong', 'malformed', 'outage', 'unjudged')}
    rollouts = sum(kinds.values())
    excluded = kinds['outage'] + kinds['unjudged']
    if rollouts and excluded / rollouts > MANY_EXCLUDED:
        yield (
            f'{excluded} of {rollouts} rollouts were left out ({kinds["outage"]} outages, {kinds["unjudged"]} without '
            'a verdict): if failures are not random, the rest is biased.'
        )
    late = rows[-max(1, len(rows) // 3) :]
    malformed, every = _total(late, 'solver/malformed'), sum(_total(late, f'solver/{kind}') for kind in kinds)
    if every and malformed / every > MANY_MALFORMED:
        yield f'{malformed} of {every} rollouts of the last third ended without an answer in the asked form.'
    histograms = [counts for row in late if (counts := get(row, 'solver/p_histogram'))]
    problems, frontier = sum(map(sum, histograms)), sum(sum(counts[1:-1]) for counts in histograms)
    if problems and frontier / problems < FEW_FRONTIER:
        yield (
            f'Only {frontier} of {problems} problems of the last third were at the frontier (solved by some rollouts, '
            'not all): the rest gave no gradient and no failure to learn from.'
        )


def _numbers(rows: Sequence[Row]) -> Iterator[str]:
    if bad := sorted({name for row in rows for name in row.get('non_finite', [])}):
        yield f'Some values were not finite: {", ".join(bad[:5])}.'
    leaves = [(row['step'], name, value) for row in rows for name, value in flatten(row.get('update') or {})]
    skipped = [step for step, name, value in leaves if 'skipped' in name and value]
    if skipped:
        yield f'{len(skipped)} update(s) were skipped, first at step {skipped[0]}.'
    gaps = [(value, step, name) for step, name, value in leaves if name.endswith(SAMPLER_GAP) and value is not None]
    if gaps and max(gaps)[0] > LARGE_LOGPROB_DIFFERENCE:
        value, step, name = max(gaps)
        yield (
            f'Sampler and learner disagree by up to {value:.2g} in the log-probability of a token '
            f'({name.split("/")[0]}, step {step}): the ratios start away from 1.'
        )


def _scope(config: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    if rows and rows[-1]['step'] < config.get('steps', 0):
        yield f'The run has not ended: {rows[-1]["step"]} of {config["steps"]} steps.'
    yield (
        f'This is one seed ({config.get("seed")}): the intervals cover the choice of questions, not what another seed '
        'would have learned.'
    )
    if get(config, 'world/name') == 'lab':
        yield 'The world is made up and the policy is small: effects here need not carry over to real models and text.'


def _valid(rows: Sequence[Row]) -> tuple[int, int]:
    return _total(rows, 'challenger/valid'), _total(rows, 'challenger/issued')


def _total(rows: Sequence[Row], name: str) -> int:
    return sum(get(row, name) or 0 for row in rows)
