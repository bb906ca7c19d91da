"""The validity checks, one by one, in their order."""

import numpy as np
import pytest

from sesa_jax.config import Challenger
from sesa_jax.records import Document, Search, Target, Trajectory, Turn
from sesa_jax.selfplay import checks

QUESTION = 'Which city in the north is the capital of the old country of Vel?'
TARGET = Target('Paris', aliases=('City of Light',))
FOUND = (Document('d0', 'Vel', 'Vel is a country.'),)


def row(question=QUESTION, queries=('vel capital', 'vel country'), outcome='ok', stop='question'):
    turns = tuple(Turn('search', query, 0, 1) for query in queries)
    turns += (Turn('question', question, 1, 2),) if stop == 'question' else ()
    searches = tuple(Search(query, FOUND if outcome == 'ok' else (), outcome, 0.0) for query in queries)
    return Trajectory(
        'challenger', 's00001-p000', 0, np.zeros(2, np.int32), np.array([False, True]), np.zeros(2, np.float32), 1,
        turns, searches, (), stop, 0, 0,
    )  # fmt: skip


def fault(trajectory, target=TARGET, held_out=frozenset(), **limits):
    return checks.fault(trajectory, target, Challenger(**limits), held_out)


def test_a_good_question_has_no_fault():
    assert fault(row()) is None


@pytest.mark.parametrize(
    ('trajectory', 'reason'),
    [
        (row(stop='outage'), 'outage'),
        (row(stop='length'), 'no question'),
        (row(stop='malformed'), 'no question'),
        (row(question=''), 'no question'),
        (row(question='Which city is it?'), 'length'),
        (row(question='word ' * 300), 'length'),
        (row(question=f'{QUESTION} Is it paris?'), 'answer leaks'),
        (row(question=f'{QUESTION} The city of light?'), 'answer leaks'),
        (row(outcome='empty'), 'no evidence'),
        (row(queries=('vel',)), 'too few searches'),
        (row(queries=('vel', 'vel')), 'repeated search'),
    ],
)
def test_each_check_has_its_reason(trajectory, reason):
    assert fault(trajectory) == reason
    assert reason in checks.REASONS


def test_the_first_check_that_fails_names_the_reason():
    assert fault(row(question='Paris?', queries=('vel', 'vel'))) == 'length'
    assert fault(row(question=f'{QUESTION} Paris?', queries=('vel', 'vel'))) == 'answer leaks'


def test_an_answer_in_a_search_is_a_fault_only_where_it_is_asked_for():
    trajectory = row(queries=('Paris', 'vel'))
    assert fault(trajectory) is None
    assert fault(trajectory, answer_in_search=False) == 'answer in search'


def test_what_only_measurement_may_ask_about():
    assert fault(row(), held_out=frozenset({'Vel'})) == 'held out'
    assert fault(row(), held_out=frozenset({'Velmar'})) is None


@pytest.mark.parametrize(
    ('question', 'answer', 'expected'),
    [
        ('Which countrys capital is Paris?', 'Paris', True),
        ('What happened in 1969?', '9', False),
        ('What about PARIS, then?', 'paris', True),
        ('Where is the Louvre?', 'The', False),
        ('Is it Parisian?', 'Paris', False),
        ('Who was Ren\u0065\u0301 here?', 'Ren\u00e9', True),
    ],
)
def test_leaks_are_whole_words_after_normalisation(question, answer, expected):
    assert checks.leaks(question, Target(answer)) == expected
