"""Tables, differences and the sentence, from outcomes whose numbers can be counted by hand."""

import dataclasses
import json

import pytest

from sesa_jax.evals.dual_path import EvaluationResult, evaluate, gain, summary, table
from sesa_jax.evals.statistics import minimum_detectable
from sesa_jax.records import Question


def question(name, kind, hops):
    return Question(name, f'Question {name}?', ('gold',), kind, hops)


# Four questions a cell; what each arm answers, by position.
QUESTIONS = [
    question(f'{kind}{hops}-{i}', kind, hops) for kind in ('hard', 'easy') for hops in (2, 1) for i in range(4)
]
RIGHT = {
    'base': {'easy/1': '1110', 'easy/2': '1100', 'hard/1': '0000', 'hard/2': '0000'},
    'off': {'easy/1': '1110', 'easy/2': '1101', 'hard/1': '1000', 'hard/2': '0000'},
    'on': {'easy/1': '1111', 'easy/2': '1111', 'hard/1': '1110', 'hard/2': '1010'},
}


def outcomes(*arms):
    return {
        arm: {q.id: RIGHT[arm][f'{q.kind}/{q.hops}'][int(q.id[-1])] == '1' for q in QUESTIONS} for arm in arms or RIGHT
    }


@pytest.fixture(scope='module')
def result():
    return evaluate(QUESTIONS, outcomes(), step=7, facts={'seed': 3}, resamples=500)


def test_sections_are_total_kinds_and_cells_in_order(result):
    assert result.sections == ('total', 'easy', 'hard', 'easy/1', 'easy/2', 'hard/1', 'hard/2')


def test_rates_are_counted_per_section(result):
    assert {name: rate.correct for name, rate in result.rates['off'].items()} == {
        'total': 7, 'easy': 6, 'hard': 1, 'easy/1': 3, 'easy/2': 3, 'hard/1': 1, 'hard/2': 0,
    }  # fmt: skip
    assert result.rates['off']['total'].n == 16
    assert result.rates['off']['total'].rate == 7 / 16


def test_differences_are_paired_by_question(result):
    found = result.differences['off-base']['easy/2']  # 1100 -> 1101
    assert (found.wins, found.losses, found.difference) == (1, 0, 0.25)
    total = result.differences['on-off']['total']
    assert (total.wins, total.losses, total.difference) == (6, 0, 6 / 16)
    assert total.p == 2 / 2**6
    assert total.low > 0
    assert total.excludes_zero


def test_an_interval_that_touches_zero_does_not_exclude_it(result):
    assert not result.differences['off-base']['hard/2'].excludes_zero
    assert result.differences['off-base']['hard/2'].p == 1.0


def test_questions_without_a_verdict_are_in_no_rate_and_in_no_pair():
    answers = outcomes('base', 'on')
    answers['on']['hard1-0'] = None  # would have been right
    found = evaluate(QUESTIONS, answers, step=7, resamples=100)
    assert found.excluded == {'base': 0, 'on': 1}
    assert (found.rates['on']['hard/1'].n, found.rates['on']['hard/1'].correct) == (3, 2)
    assert (found.differences['on-base']['hard/1'].n, found.differences['on-base']['hard/1'].wins) == (3, 2)
    assert 'Left out, without a verdict: base 0, on 1.' in table(found)


def test_a_run_without_memory_has_no_on_arm():
    found = evaluate(QUESTIONS, outcomes('base', 'off'), step=7, resamples=100)
    assert found.arms == ('base', 'off')
    assert list(found.differences) == ['off-base']
    assert '(On)' not in summary(found)


def test_json_carries_everything(result):
    assert EvaluationResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_an_unknown_version_is_refused(result):
    with pytest.raises(ValueError, match='version 2'):
        EvaluationResult.from_json({**result.to_json(), 'version': 2})


def test_order_of_questions_changes_nothing(result):
    assert evaluate(QUESTIONS[::-1], outcomes(), step=7, facts={'seed': 3}, resamples=500) == result


def test_missing_and_unasked_questions_are_errors():
    answers = outcomes()
    del answers['off']['easy1-0']
    with pytest.raises(ValueError, match="'off' and the questions differ in 1 ids, such as 'easy1-0'"):
        evaluate(QUESTIONS, answers, step=7)
    with pytest.raises(ValueError, match='unknown arm'):
        evaluate(QUESTIONS, {'maybe': answers['on']}, step=7)
    with pytest.raises(ValueError, match='same id'):
        evaluate([*QUESTIONS, QUESTIONS[0]], outcomes(), step=7)


def test_the_sentence(result):
    wilson = {arm: result.rates[arm]['total'] for arm in result.arms}
    said = summary(result)
    off = f'43.8% [{100 * wilson["off"].low:.1f}, {100 * wilson["off"].high:.1f}] trained, without cards (Off), 81.2% ['
    assert said.startswith('Of 16 held-out questions the solver answers 31.2% [')
    assert off in said
    assert '; in points On - base +50.0 [' in said
    assert said.count('\n') == 0
    assert said.endswith(' p=0.031.')


def test_the_detectable_difference_allows_for_one_more_pair_than_was_seen():
    questions = [question(f'easy1-{i}', 'easy', 1) for i in range(100)]
    same = {q.id: True for q in questions}
    found = evaluate(questions, {'base': same, 'off': same}, step=1, resamples=50).differences['off-base']['total']
    assert found.detectable is None  # a share of 1/100 that differs could never show
    mixed = {q.id: i > 20 for i, q in enumerate(questions)}
    found = evaluate(questions, {'base': same, 'off': mixed}, step=1, resamples=50).differences['off-base']['total']
    assert found.detectable == minimum_detectable(100, 22 / 100)


def test_a_tiny_p_value_is_not_given_more_digits_than_it_has(result):
    found = dataclasses.replace(result.differences['on-off']['total'], low=0.1, high=0.5, p=2e-9)
    assert gain(found) == '+37.5 [+10.0, +50.0] p<0.001'


def test_the_table_has_a_row_a_section_and_aligned_columns(result):
    lines = table(result).split('\n')
    assert [line.split()[0] for line in lines[1:8]] == list(result.sections)
    assert len({len(line) for line in lines[:8]}) == 1
