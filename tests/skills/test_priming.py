import dataclasses
import re

import pytest
from skills_toy import SMALL, TableEncoder, draft, failure

from sesa_jax.config import Bank as Config
from sesa_jax.skills import priming
from sesa_jax.skills.bank import Bank
from sesa_jax.skills.card import problems
from sesa_jax.skills.encoder import Hashing


def test_there_are_fifteen_valid_handwritten_cards():
    cards = priming.handwritten()
    assert len(cards) == 15
    assert [problems(card) for card in cards] == [[]] * 15
    assert {(card.distiller, card.rollout_ids) for card in cards} == {('handwritten', ())}


@pytest.mark.parametrize('card', priming.handwritten(), ids=lambda card: card.trigger)
def test_a_handwritten_card_is_short(card):
    assert len(card.trigger.split()) <= 12
    assert len(card.queries) == 1 and len(card.queries[0].split()) <= 6
    assert len(card.avoid.split()) <= 8
    assert re.fullmatch(r'[a-z{][^A-Z.]*', card.trigger)  # it goes on behind "when"


def test_no_handwritten_card_repeats_another():
    encoder = Hashing()
    cosines = encoder.similarity(priming.handwritten(), ())
    assert max(cosines[i, j] for i in range(15) for j in range(i)) < encoder.threshold


def mined(name, step=900_000):
    return draft(name, failure(step))


def names(cards):
    return ''.join(card.trigger for card in cards)


def test_seeds_are_the_written_cards_then_the_new_mined_ones_in_order():
    encoder = TableEncoder({('a', 'w'): 0.99, ('c', 'b'): 0.99})
    found = priming.seeds([draft('w')], [mined(n) for n in 'abcd'], Config(), encoder)
    assert names(found) == 'wbd'


@pytest.mark.parametrize(('most', 'capacity', 'expected'), [(2, 800, 'wbc'), (9, 3, 'wbc'), (9, 1, 'w'), (0, 800, 'w')])
def test_seeds_are_at_most_so_many_and_fit_into_the_bank(most, capacity, expected):
    config = dataclasses.replace(SMALL, mined=most, capacity=capacity)
    assert names(priming.seeds([draft('w')], [mined(n) for n in 'bcd'], config, TableEncoder())) == expected


def test_an_invalid_mined_card_is_left_out():
    assert names(priming.seeds([], [draft('a', avoid='<b>'), mined('b')], SMALL, TableEncoder())) == 'b'


@pytest.mark.parametrize(('mined_are_seeds', 'expected'), [(True, [True, True]), (False, [True, False])])
def test_mined_cards_are_permanent_only_if_the_config_says_so(tmp_path, mined_are_seeds, expected):
    config = dataclasses.replace(SMALL, mined_are_seeds=mined_are_seeds)
    bank = Bank.create(tmp_path / 'b', [draft('w'), mined('a')], config, encoder=TableEncoder())
    assert [card.is_seed for card in bank.active()] == expected
