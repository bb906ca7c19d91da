"""The boundary table of the memory, row by row, and the order rules."""

import dataclasses

import numpy as np
import pytest
from skills_toy import SMALL, TableEncoder, draft, failure

from sesa_jax.config import Bank as Config
from sesa_jax.skills.card import Card
from sesa_jax.skills.consolidate import admit, commit_boundary, evictions, is_due, overflow, take

PAPER = Config()


def due(step, pending, config=PAPER, freeze_bank=False, failure_distillation=True):
    return is_due(step, pending, config, freeze_bank=freeze_bank, failure_distillation=failure_distillation)


@pytest.mark.parametrize(
    ('step', 'pending', 'expected'),
    [(10, 19, False), (10, 20, True), (11, 40, False), (19, 300, False), (20, 40, True), (0, 300, False)],
)
def test_a_consolidation_is_due_at_every_tenth_step_with_twenty_failures(step, pending, expected):
    assert due(step, pending) is expected


def test_nothing_is_due_in_a_frozen_bank_or_without_distillation():
    assert not due(10, 300, freeze_bank=True)
    assert not due(10, 300, failure_distillation=False)


def test_nothing_is_due_with_an_empty_queue_even_if_none_are_asked_for():
    assert not due(10, 0, dataclasses.replace(PAPER, at_least=0))
    assert due(10, 1, dataclasses.replace(PAPER, at_least=0))


@pytest.mark.parametrize(('lag', 'boundary'), [(0, 10), (1, 11), (5, 15)])
def test_a_consolidation_commits_exactly_the_lag_later(lag, boundary):
    assert commit_boundary(10, dataclasses.replace(PAPER, commit_lag=lag)) == boundary


def rows(failures):
    return [f'{f.step}.{f.rollout_id.split("-p")[1][0]}' for f in failures]


def test_at_most_thirty_of_forty_are_taken_and_they_are_the_newest():
    queue = [failure(step) for step in range(1, 41)]
    assert [f.step for f in take(queue, {}, 30)] == list(range(40, 10, -1))


def test_repeated_targets_come_first_then_guided_failures_then_newest():
    repeated, first = failure(3, 0, 'paris'), failure(1, 0, 'paris')
    guided = failure(2, 0, 'rome', cards=('c00001',))
    both = failure(2, 1, 'paris', cards=('c00001',))
    plain, newer = failure(3, 1, 'oslo'), failure(4, 0, 'bern')
    first_failed = {f.target.hash: f.step for f in (newer, plain, guided, first)}
    queue = [first, guided, both, repeated, plain, newer]
    assert rows(take(queue, first_failed, 6)) == ['2.1', '3.0', '2.0', '4.0', '3.1', '1.0']
    assert rows(take(queue, first_failed, 2)) == ['2.1', '3.0']


def test_two_failures_of_one_step_on_one_target_do_not_make_it_repeated():
    same_step = [failure(1, 0, 'paris'), failure(1, 1, 'paris'), failure(1, 2, 'rome')]
    first_failed = {f.target.hash: 1 for f in same_step}
    assert rows(take(same_step, first_failed, 3)) == ['1.2', '1.1', '1.0']


def test_305_failures_drop_the_5_oldest_of_the_lowest_urgency():
    queue = [failure(1, 0, cards=('c00001',)), *(failure(step) for step in range(2, 306))]
    assert [f.step for f in overflow(queue, {}, 300)] == [2, 3, 4, 5, 6]
    assert overflow(queue[:300], {}, 300) == []


def test_overflow_reaches_guided_failures_last_and_never_those_of_a_running_consolidation():
    queue = [failure(1), failure(2, cards=('c00001',)), failure(3), failure(4)]
    assert [f.step for f in overflow(queue, {}, 1)] == [1, 3, 4]
    assert [f.step for f in overflow(queue, {}, 1, taken=(queue[0].rollout_id,))] == [3, 4, 2]


def reasons(drafts, known=(), cosines=None, default=0.5, threshold=None):
    verdicts = admit(drafts, known, TableEncoder(cosines, default), threshold)
    assert [verdict.draft for verdict in verdicts] == list(drafts)
    return [verdict.reason for verdict in verdicts]


@pytest.mark.parametrize(
    ('cosine', 'reason'),
    [
        (0.9299, ''),
        (0.93, ''),
        (float(np.float32(0.93)), ''),  # 0.9300000072: a tie in single precision is a tie
        (0.9300009, ''),
        (0.930002, 'duplicate'),
        (0.9301, 'duplicate'),
        (float('nan'), 'duplicate'),
    ],
)
def test_a_draft_enters_up_to_the_threshold_ties_included(cosine, reason):
    assert reasons([draft('a')], [draft('k')], {('a', 'k'): cosine}) == [reason]


def test_the_config_overrides_the_threshold_of_the_encoder():
    assert reasons([draft('a')], [draft('k')], {('a', 'k'): 0.7}, threshold=0.6) == ['duplicate']


def test_of_two_drafts_alike_in_one_round_the_earlier_enters():
    assert reasons([draft('a'), draft('b')], [draft('k')], {('a', 'b'): 0.99}) == ['', 'duplicate']


def test_a_rejected_draft_does_not_reject_others():
    chain = {('a', 'b'): 0.99, ('b', 'c'): 0.99, ('a', 'c'): 0.2}
    assert reasons([draft('a'), draft('b'), draft('c')], (), chain) == ['', 'duplicate', '']


def test_the_same_text_never_enters_twice_whatever_the_encoder_says():
    assert reasons([draft('a'), draft('a')], [draft('k')], default=0.0) == ['', 'duplicate']
    assert reasons([draft('k')], [draft('k')], default=0.0, threshold=2.0) == ['duplicate']


def test_the_first_draft_enters_an_empty_bank():
    assert reasons([draft('a')]) == ['']


def test_an_invalid_draft_is_named_and_does_not_shift_the_others():
    bad = draft('b', avoid='<b>')
    verdicts = admit([bad, draft('a'), draft('c')], [draft('k')], TableEncoder({('c', 'a'): 0.99}), None)
    assert [v.reason for v in verdicts] == ['invalid', '', 'duplicate']
    assert verdicts[0].detail == 'avoid: holds one of < > |'
    assert (verdicts[2].nearest, verdicts[2].cosine) == (2, 0.99)  # behind one known card, the second draft


def test_a_draft_with_a_wrong_source_is_left_out():
    verdicts = admit([draft('a'), draft('b')], (), TableEncoder(), None, ('unknown rollout', ''))
    assert [(v.reason, v.detail) for v in verdicts] == [('source', 'unknown rollout'), ('', '')]


def card(number, retrieved=0, score=0, born=0, is_seed=False):
    counters = {'helpful': max(score, 0), 'hurt': max(-score, 0)}
    return Card(
        id=f'c{number:05d}', description='d', trigger='t', queries=('{x}',), retrieved=retrieved, born_step=born,
        is_seed=is_seed, **counters,
    )  # fmt: skip


@pytest.mark.parametrize(
    ('retrieved', 'score', 'is_seed', 'leaves'),
    [(3, -1, False, True), (2, -5, False, False), (3, 0, False, False), (9, -9, True, False), (4, -1, False, True)],
)
def test_a_card_leaves_after_three_retrievals_with_more_hurt_than_help(retrieved, score, is_seed, leaves):
    expected = {'c00001': 'harmful'} if leaves else {}
    assert evictions([card(1, retrieved, score, is_seed=is_seed)], 5, PAPER) == expected


def test_over_capacity_the_lowest_score_leaves_and_of_equals_the_oldest():
    cards = [
        card(1, score=2),
        card(2, score=1, born=4),
        card(3, score=1, born=2),
        card(4, score=1, born=2),
        card(5, score=3),
    ]
    config = dataclasses.replace(SMALL, capacity=3)
    assert evictions(cards, 5, config) == {'c00003': 'capacity', 'c00004': 'capacity'}
    assert list(evictions(list(reversed(cards)), 5, config)) == ['c00003', 'c00004']


def test_a_newcomer_leaves_a_full_bank_of_better_cards_unless_it_has_grace():
    cards = [*(card(number, score=1) for number in range(1, 801)), card(801, born=10)]
    assert evictions(cards, 10, PAPER) == {'c00801': 'capacity'}
    assert evictions(cards, 14, dataclasses.replace(PAPER, grace_steps=5)) == {'c00001': 'capacity'}
    assert evictions(cards, 15, dataclasses.replace(PAPER, grace_steps=5)) == {'c00801': 'capacity'}


def test_grace_gives_way_where_nothing_else_can_leave():
    cards = [card(1, is_seed=True), card(2, born=9), card(3, born=9)]
    config = dataclasses.replace(SMALL, capacity=2, grace_steps=5)
    assert evictions(cards, 10, config) == {'c00002': 'capacity'}


def test_grace_does_not_shield_from_harm():
    assert evictions([card(1, 3, -1, born=9)], 10, dataclasses.replace(SMALL, grace_steps=5)) == {'c00001': 'harmful'}


def test_seeds_stay_over_capacity_and_harmful_cards_make_room_first():
    config = dataclasses.replace(SMALL, capacity=2)
    assert evictions([card(1, is_seed=True, score=-50), card(2), card(3, 3, -1)], 5, config) == {'c00003': 'harmful'}
    assert evictions([card(n, is_seed=True) for n in range(1, 4)], 5, config) == {}
