"""Verdicts, exact match, and the reader that checks questions."""

import pytest

from sesa_jax.host.judge import judge, occurs, parse_verdict, sentences, verify
from sesa_jax.host.schema import Verification

ACCEPT = Verification('accept')
MISSING = Verification('reject', 'target-not-in-materials')
UNREAD = Verification('reject', 'target-not-read')


@pytest.mark.parametrize(
    ('reply', 'expected'),
    [
        ('Correct', True),
        ('  CORRECT.  ', True),
        ('correct!\nbecause both name the city', True),
        ('\n\nCorrect\n', True),
        ('Correct。', True),
        ('wrong', False),
        ('Wrong.', False),
        ('INCORRECT', False),
        ('incorrect\ncorrect', False),
        ('{"correct": true}', True),
        (' {"correct": false, "why": "correct"} ', False),
        ('<think>yes, correct</think>\n{"correct": false}', False),
        ('<think>wrong</think>Correct', True),
        # Anything else is unjudged.
        ('', None),
        (None, None),
        ('not correct', None),
        ('Correct, but wrong city', None),
        ('The answer is correct', None),
        ('Verdict: correct', None),
        ('correct?', None),
        ('correct:\nno', None),
        ('correctly', None),
        ('yes', None),
        ('{"correct": tr', None),
        ('{"correct": "true"}', None),
        ('{"correct": 1}', None),
        ('{"correct": null}', None),
        ('{"correct": true, "correct": false}', None),
        ('{"verdict": "correct"}', None),
        ('"correct"', None),
        ('[true]', None),
        ('<think>Correct', None),
        ('<think>\nCorrect\n', None),
        ('<think>Correct</think>', None),
        ('[' * 100_000, None),
    ],
)
def test_verdicts_are_read_strictly(reply, expected):
    assert parse_verdict(reply) is expected


def test_a_last_line_that_was_cut_is_no_verdict_and_a_whole_one_before_it_is():
    assert parse_verdict('Correct', is_cut=True) is None
    assert parse_verdict('Correct\nbeca', is_cut=True) is True
    assert parse_verdict('{"correct": false}', is_cut=True) is False


@pytest.mark.parametrize(
    ('prediction', 'golds', 'expected'),
    [
        ('the Montreal.', ['Laval', 'Montreal'], 'correct'),
        ('Paris is in France', ['Paris'], 'wrong'),
        ('', ['Paris'], 'wrong'),
        (' .:', ['Paris'], 'wrong'),
        ('grade: CORRECT', ['Paris'], 'wrong'),
    ],
)
def test_the_offline_judge_is_exact_match(prediction, golds, expected):
    assert judge(prediction, golds) == expected


def test_an_answer_without_golds_cannot_be_judged():
    with pytest.raises(ValueError, match='gold answer'):
        judge('Paris', [])


@pytest.mark.parametrize(
    ('answer', 'text', 'expected'),
    [
        ('9', 'in 1969', False),
        ('9', 'on 9 May', True),
        ('Paris', 'PARIS-based', True),
        ('Paris', "Paris's mayor", True),
        ('Paris', 'Parisian', False),
        ('São Tomé', 'in sa\u0303o tome\u0301.', True),
        ('St. Mary', 'at St Mary', True),
        ('New York', 'new roads in york', False),
        ('?!', 'what?!', False),
        ('', 'anything', False),
    ],
)
def test_an_answer_occurs_at_word_boundaries_only(answer, text, expected):
    assert occurs(answer, text) is expected


def test_sentences_are_cut_at_ends_and_lines_not_at_initials_or_decimals_and_read_once():
    blocks = ['Orsk: It has 3.14 km. J. Vel founded it! Why?\nDr. No came', 'Why? Last one...']
    assert sentences(blocks) == ['Orsk: It has 3.14 km.', 'J. Vel founded it!', 'Why?', 'Dr. No came', 'Last one...']


QUESTION = 'Who founded the company Velmar?'
OWN = ['Velmar: The company Velmar was founded by Orin. It makes ships.']


def test_a_question_whose_target_can_be_read_is_accepted():
    assert verify(QUESTION, ['Orin'], OWN, ['Tar: A river.', 'Bel: A city.'], seed=0) == ACCEPT


def test_an_alias_is_as_good_as_the_answer():
    assert verify(QUESTION, ['Orin Vale', 'Orin'], OWN, [], seed=0) == ACCEPT


def test_a_target_outside_the_own_materials_is_rejected_even_where_the_noise_has_it():
    assert verify(QUESTION, ['Bram'], OWN, ['Bram founded the company Velmar.'], seed=0) == MISSING


def test_a_target_inside_a_longer_word_is_not_there():
    assert verify(QUESTION, ['Ori'], OWN, [], seed=0) == MISSING


def test_without_materials_nothing_is_accepted():
    assert verify(QUESTION, ['Orin'], [], ['Orin founded Velmar.'], seed=0) == MISSING


def test_a_target_in_a_sentence_that_the_question_does_not_lead_to_is_rejected():
    own = ['Velmar: Ships come from here. Orin began it all. Ships.']
    assert verify('Who makes ships?', ['Orin'], own, ['Tar: Ships carry ore.'], seed=0) == UNREAD


@pytest.mark.parametrize(('better', 'expected'), [(2, ACCEPT), (3, UNREAD)])
def test_the_reader_looks_at_three_sentences_and_no_further(better, expected):
    noise = [f'{i}x founded the company Velmar, who founded the company Velmar' for i in range(better)]
    assert verify(QUESTION, ['Orin'], ['Orin founded Velmar in spring.'], noise, seed=0) == expected


def test_a_sentence_that_was_found_twice_takes_one_place():
    twice = ['Who founded the company Velmar: Bram founded the company Velmar.'] * 5
    assert verify(QUESTION, ['Orin'], [*twice, 'Orin founded Velmar in spring.'], [], seed=0) == ACCEPT


def test_the_seed_decides_nothing_but_ties():
    noise = [f'Noise {i}: the company Velmar.' for i in range(4)]
    assert {verify(QUESTION, ['Orin'], OWN, noise, seed) for seed in range(20)} == {ACCEPT}
    tied = ['zor Velmar.', 'zom Velmar.', 'zot Velmar.', 'zol Velmar.']
    results = {verify('Velmar?', ['Orin'], ['Orin Velmar.'], tied, seed) for seed in range(20)}
    assert results == {ACCEPT, UNREAD}


def test_the_same_seed_gives_the_same_verdict():
    tied = ['zor Velmar.', 'zom Velmar.', 'zot Velmar.', 'zol Velmar.']
    once, again = ([verify('Velmar?', ['Orin'], ['Orin Velmar.'], tied, s) for s in range(20)] for _ in range(2))
    assert once == again
