"""One self-contained HTML page about a run, made from the run's files alone: what came out, and why to doubt it.

No script, no request, no outside file: the page can be mailed, and opened in ten years. Its content-security policy
forbids everything but its own style sheet, and all text is escaped, because cards, rollouts and documents come from
models and from outside. Left out: pages of a live run, and comparisons between runs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sesa_jax import config
from sesa_jax.config import ConfigError
from sesa_jax.evals.dual_path import EvaluationResult, Rate, gain, percent, summary
from sesa_jax.records import Failure
from sesa_jax.run import charts
from sesa_jax.run.doubts import doubts
from sesa_jax.run.files import write_atomic
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.metrics import get, read_metrics, valid_rate
from sesa_jax.run.rollouts import examples, rollout_steps
from sesa_jax.run.visible import clean, one_line
from sesa_jax.skills.bank import Bank, BankError
from sesa_jax.skills.card import Card

NEWEST = 12
"""Cards shown, newest first."""
FAILURES = 3
"""Failures shown for a card."""


def write(folder: RunFolder) -> Path:
    """Write `report.html` into the run folder; returns its path. Errors as `build`."""
    write_atomic(folder.report, build(folder).encode())
    return folder.report


def build(folder: RunFolder) -> str:
    """The report as HTML. ConfigError names a file that the run should have and has not, or that is damaged.

    config.json and metrics.jsonl are always needed, rollouts where steps were played, bank.db where the run has a skill
    memory. A run without evaluation.json is reported as not evaluated. Fields that a method lacks are left out.
    """
    try:
        return _render(folder)
    except FileNotFoundError as error:
        raise ConfigError(f'the run folder {folder.path} lacks {error.filename}, which the report needs') from error
    except ConfigError:
        raise
    except (ValueError, BankError) as error:
        raise ConfigError(f'the run folder {folder.path} cannot be reported: {error}') from error


def _render(folder: RunFolder) -> str:
    saved = folder.read_config()
    rows = read_metrics(folder.metrics)
    evaluation = read_evaluation(folder)
    cards, newest = _memory(folder) if saved['skill_memory'] else (None, [])
    steps = [row['step'] for row in rows]
    played = rollout_steps(folder)
    if rows and not played:
        raise FileNotFoundError(2, 'No such file', str(folder.rollouts_file(steps[-1])))
    shown = examples(folder, played[-1]) if played else []
    css = (_assets() / 'report.css').read_text(encoding='utf-8')
    title = f'{saved["method"]} with {saved["model"]}, seed {saved["seed"]}'
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: clean(value) if type(value) is str else value,  # whatever is shown, no control character
        trim_blocks=True,
    )
    template = environment.from_string((_assets() / 'report.html.j2').read_text(encoding='utf-8'))
    return template.render(
        title=title,
        subtitle=f'{len(rows)} of {saved["steps"]} steps · world {get(saved, "world/name")} · {folder.path.name}',
        run=folder.path.name,
        style=Markup(css),  # packaged with the code
        style_hash=base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        summary=summary(evaluation) if evaluation else '',
        doubts=doubts(saved, rows, evaluation, cards),
        evaluation=_evaluation_table(evaluation) if evaluation else None,
        width=charts.WIDTH,
        height=charts.HEIGHT,
        left=charts.LEFT,
        validation=_validation(steps, rows),
        validation_size=max((get(row, 'validation/n') or 0 for row in rows), default=0),
        valid=charts.curve(steps, {'valid': [valid_rate(row) for row in rows]}, top=1.0),
        cards_curve=charts.curve(steps, {'cards': [get(row, 'bank/active') for row in rows]}, form='d'),
        heat=charts.heat_map(steps, [get(row, 'solver/p_histogram') or [] for row in rows]),
        rejected=_rejected(rows),
        rollouts=shown,
        full_text=folder.tokenizer.exists(),
        card_text={card.id: card.shown() for card in cards or []},
        newest=newest,
        difference=_difference(saved),
    )


def read_evaluation(folder: RunFolder) -> EvaluationResult | None:
    """The run's `evaluation.json`, or None before it was evaluated. ValueError if it is damaged."""
    if not folder.evaluation.exists():
        return None
    try:
        return EvaluationResult.from_json(json.loads(folder.evaluation.read_text(encoding='utf-8')))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{folder.evaluation} is damaged: {error!r}') from error


def _assets() -> Any:
    return importlib.resources.files('sesa_jax') / 'assets'


def _validation(steps: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> charts.Curve | None:
    kinds = sorted({kind for row in rows for kind in get(row, 'validation') or {}} - {'solve_rate', 'n'})
    names = {'all': 'validation/solve_rate'} | {kind: f'validation/{kind}' for kind in kinds}
    return charts.curve(steps, {label: [get(row, name) for row in rows] for label, name in names.items()}, top=1.0)


def _rejected(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(get(row, 'challenger/rejected') or {})
    return sorted(((reason, count) for reason, count in total.items() if count), key=lambda item: (-item[1], item[0]))


def _evaluation_table(result: EvaluationResult) -> dict[str, Any]:
    def rate(found: Rate) -> dict[str, Any]:
        return _cell(f'{percent(found.rate)} [{percent(found.low)}, {percent(found.high)}]')

    rows = []
    for section in result.sections:
        rates = [result.rates[arm][section] for arm in result.arms]
        found = [result.differences[pair][section] for pair in result.differences]
        cells = [_cell(section), _cell(str(max(r.n for r in rates))), *map(rate, rates)]
        cells += [_cell(gain(d), d.is_shown) for d in found]
        rows.append({'cells': cells, 'is_group': '/' not in section})
    pairs = [pair.replace('-', ' − ') for pair in result.differences]
    return {'head': ['questions', 'n', *result.arms, *pairs], 'rows': rows}


def _cell(text: str, is_shown: bool = False) -> dict[str, Any]:
    return {'text': text, 'is_shown': is_shown}


def open_bank(folder: RunFolder) -> Bank:
    """The run's bank for reading; the file is neither locked nor changed. FileNotFoundError or BankError."""
    if not folder.bank.exists():
        raise FileNotFoundError(2, 'No such file', str(folder.bank))
    return Bank.open(folder.bank, readonly=True)


def _memory(folder: RunFolder) -> tuple[list[Card], list[dict[str, Any]]]:
    """All cards of the bank, tombstones too, and the newest ones with the failures that they came from."""
    with open_bank(folder) as bank:
        cards = bank.cards()
        order = sorted(cards, key=lambda card: (-card.born_step, card.id))[:NEWEST]
        return cards, [_card(card, bank.why(card.id).failures) for card in order]


def _card(card: Card, failures: Sequence[Failure]) -> dict[str, Any]:
    return {
        'id': card.id,
        'born_step': card.born_step,
        'state': state(card),
        'retrieved': card.retrieved,
        'helpful': card.helpful,
        'hurt': card.hurt,
        'shown': one_line(card.shown(), 120),
        'description': card.description,
        'origin': origin(card),
        'failures': [
            {
                'step': failure.step,
                'rollout_id': failure.rollout_id,
                'question': one_line(failure.question),
                'gold': one_line(failure.target.answer),
                'prediction': one_line(failure.prediction),
                'queries': one_line(' → '.join(failure.queries)),
            }
            for failure in failures[:FAILURES]
        ],
    }


def state(card: Card) -> str:
    """`seed`, `active`, or when and why the card left."""
    if card.evicted_step >= 0:
        return f'evicted at step {card.evicted_step} ({one_line(card.evicted_reason)})'
    return 'seed' if card.is_seed else 'active'


def origin(card: Card) -> str:
    """Where a card came from, in a sentence."""
    parts = [f'made by {card.distiller or "hand"}']
    if card.rollout_ids:
        parts.append(f'from {", ".join(card.rollout_ids)}')
    if card.parents:
        parts.append(f'which had been shown {", ".join(card.parents)}')
    if card.source_question_hashes:
        parts.append(f'never retrieved for the questions {", ".join(card.source_question_hashes)}')
    return one_line(f'{", ".join(parts)}; bank version {card.bank_version}.')


def _difference(saved: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Fields of the config that differ from the paper's defaults: (name, ours, default)."""
    found = config.difference(config.from_json(saved))
    return [(name, *(json.dumps(value, ensure_ascii=False) for value in pair)) for name, pair in found.items()]
