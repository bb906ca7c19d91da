"""Each doubt is raised by the data that calls for it, and by no other."""

import dataclasses

import pytest

from sesa_jax.evals.dual_path import evaluate
from sesa_jax.records import Question
from sesa_jax.run.doubts import doubts
from sesa_jax.skills.card import Card

CONFIG = {'seed': 4, 'steps': 6, 'world': {'name': 'wiki'}, 'failure_distillation': True, 'freeze_bank': False}
ONE_SEED = 'This is one seed (4)'


def row(step, **parts):
    """A step in which nothing is wrong."""
    return {
        'step': step,
        'challenger': {'issued': 100, 'valid': 70},
        'solver': {
            'p_histogram': [20, 10, 10, 10, 10, 10],
            'correct': 150, 'wrong': 190, 'malformed': 10, 'outage': 0, 'unjudged': 0,
        },
        'bank': {'active': 20, 'admitted': 40, 'consolidation': {'admitted': ['c00030']}},
        'update': {'solver': {'loss': 0.1, 'sampler_difference_max': 1e-5}, 'challenger': None},
        **parts,
    }  # fmt: skip


SIX = range(1, 7)
QUIET = {'active': 20, 'admitted': 40, 'consolidation': None}  # `admitted` counts since the start
ROWS = [row(step) for step in SIX]


def card(name, **fields):
    common = {'description': 'd', 'trigger': 't', 'queries': ('{x}',), 'retrieved': 5, 'helpful': 4, 'hurt': 1}
    return Card(id=name, **{**common, **fields})


CARDS = [card('s1', is_seed=True), card('c1', born_step=10), card('c2', born_step=20)]


def changed(cards, **fields):
    return [dataclasses.replace(card, **fields) for card in cards]


def evaluation(base, off, on, n=120):
    """`n` questions in each of two cells; the first `base`, `off`, `on` of each are answered."""
    questions = [Question(f'{kind}{i}', 'q', ('a',), kind, 1) for kind in ('easy', 'hard') for i in range(n)]
    outcomes = {
        arm: {q.id: int(q.id[4:]) < count for q in questions}
        for arm, count in (('base', base), ('off', off), ('on', on))
    }
    return evaluate(questions, outcomes, step=6, resamples=300)


GOOD = evaluation(30, 50, 80)


def found(config=CONFIG, rows=ROWS, result=GOOD, cards=CARDS):
    return doubts(config, rows, result, cards)


def test_of_a_good_run_only_the_single_seed_is_left():
    assert len(found()) == 1
    assert found()[0].startswith(ONE_SEED)


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'result': None}, 'There is no evaluation'),
        ({'result': evaluation(50, 50, 80)}, 'Off - base, [+0.0, +0.0] points, contains 0: no gain of the weights'),
        ({'result': evaluation(30, 80, 80)}, '[+0.0, +0.0] points, contains 0: no contribution of the final bank'),
        ({'result': evaluation(60, 30, 90)}, 'Off - base is negative overall: -25.0 points'),
        ({'result': evaluation(60, 30, 90)}, 'Off - base is negative on easy/1 questions'),
        ({'result': evaluation(10, 20, 35, n=40)}, '2 of 2 cells have fewer than 100 held-out questions (fewest: 40)'),
        ({'cards': CARDS[:1]}, "No card came from this run's own failures"),
        ({'rows': [*[row(s, bank=QUIET) for s in (1, 2, 3, 4)], *ROWS[4:]]}, 'Only 2 consolidation(s) added cards'),
        ({'cards': [CARDS[0], *changed(CARDS[1:], retrieved=0)]}, '2 of 2 learned cards were never'),
        ({'cards': changed(CARDS, retrieved=0)}, 'No card was ever retrieved'),
        ({'cards': changed(CARDS, hurt=9)}, '3 of 3 active cards were seen more often in failures'),
        ({'rows': [*ROWS[:4], *[row(s, challenger={'issued': 100, 'valid': 40}) for s in (5, 6)]]},
         'fell from 0.70 (first third of the steps) to 0.40 (last third)'),
        ({'rows': [row(s, challenger={'issued': 100, 'valid': 15}) for s in SIX]}, 'Only 90 of 600 questions'),
        ({'rows': [*ROWS[:5], row(6, solver={**ROWS[0]['solver'], 'outage': 30, 'unjudged': 10})]},
         '40 of 2140 rollouts were left out (30 outages, 10 without a verdict)'),
        ({'rows': [row(s, solver={**ROWS[0]['solver'], 'malformed': 200}) for s in SIX]},
         '400 of 1080 rollouts of the last third ended without an answer'),
        ({'rows': [row(s, solver={**ROWS[0]['solver'], 'p_histogram': [60, 1, 1, 1, 0, 20]}) for s in SIX]},
         'Only 6 of 166 problems of the last third were at the frontier'),
        ({'rows': [*ROWS[:5], row(6, non_finite=['update.solver.loss'])]}, 'not finite: update.solver.loss'),
        ({'rows': [*ROWS[:5], row(6, update={'solver': {'skipped': 1}})]}, '1 update(s) were skipped, first at step 6'),
        ({'rows': [*ROWS[:5], row(6, update={'challenger': {'sampler_difference_max': 0.02}})]},
         'disagree by up to 0.02 in the log-probability of a token (challenger, step 6)'),
        ({'rows': ROWS[:5]}, 'The run has not ended: 5 of 6 steps'),
        ({'config': {**CONFIG, 'world': {'name': 'lab'}}}, 'The world is made up'),
    ],
)  # fmt: skip
def test_each_doubt_is_raised_by_its_data(change, said):
    assert any(said in doubt for doubt in found(**change)), found(**change)


def test_an_interval_that_is_surer_than_the_exact_test_is_doubted():
    few = dataclasses.replace(GOOD.differences['off-base']['total'], low=0.004, high=0.03, p=0.125, wins=4, losses=0)
    differences = {**GOOD.differences, 'off-base': {**GOOD.differences['off-base'], 'total': few}}
    said = found(result=dataclasses.replace(GOOD, differences=differences))
    assert 'The interval of Off - base excludes 0 but the exact test does not (p = 0.12): only 4 of 240' in said[0]


def test_questions_without_a_verdict_are_said():
    result = dataclasses.replace(GOOD, excluded={'base': 0, 'off': 2, 'on': 1})
    assert 'Held-out questions without a verdict were left out: 2 in off, 1 in on.' in found(result=result)


def test_what_was_switched_off_is_no_doubt():
    for change in ({'freeze_bank': True}, {'failure_distillation': False}):
        assert len(found(config={**CONFIG, **change}, cards=CARDS[:1])) == 1


def test_a_method_without_challenger_and_bank_raises_no_doubt_about_them():
    rows = [row(step, challenger=None, bank=None) for step in range(1, 7)]
    assert len(found(rows=rows, cards=None)) == 1


def test_a_small_change_of_the_valid_rate_is_noise():
    rows = [*ROWS[:4], *[row(s, challenger={'issued': 100, 'valid': 65}) for s in (5, 6)]]
    assert len(found(rows=rows)) == 1


def test_a_run_without_steps_can_be_doubted():
    assert found(rows=[], result=None, cards=[])[0].startswith('There is no evaluation')
