import contextlib
import sqlite3

import pytest
from skills_toy import TableEncoder, again, distil, draft, failure, idle, new_bank, reopen, triggers

from sesa_jax.skills.bank import Bank, BankError

# Creating and opening.


def test_a_new_bank_has_its_seeds_under_ids_in_order(tmp_path):
    bank = new_bank(tmp_path, 'a b')
    assert [(card.id, card.trigger, card.is_seed, card.born_step) for card in bank.active()] == [
        ('c00001', 'a', True, 0),
        ('c00002', 'b', True, 0),
    ]
    assert (bank.seq, bank.step) == (1, 0)


def test_a_bank_is_not_created_over_a_file(tmp_path):
    new_bank(tmp_path, 'a')
    with pytest.raises(BankError, match=r'bank\.db exists already'):
        new_bank(tmp_path, 'b')


def test_an_interrupted_creation_leaves_nothing_in_the_way(tmp_path):
    (tmp_path / 'bank.db.new').write_bytes(b'half')
    assert triggers(new_bank(tmp_path, 'a').active()) == 'a'
    assert not list(tmp_path.glob('*.new*'))


def test_more_seeds_than_places_are_refused_and_no_file_is_made(tmp_path):
    with pytest.raises(BankError, match=r'7 seed cards, but the bank holds 6'):
        new_bank(tmp_path, 'a b c d e f g')
    assert not list(tmp_path.iterdir())


def test_a_repeated_seed_is_left_out_and_recorded(tmp_path):
    bank = new_bank(tmp_path, 'a b', encoder=TableEncoder({('a', 'b'): 0.94}))
    (created,) = bank.history()
    assert triggers(bank.active()) == 'a'
    assert [(r['reason'], r['repeats'], r['cosine']) for r in created['rejected']] == [
        ('duplicate', 'draft 0: a', 0.94)
    ]


def test_a_reopened_bank_is_the_same(tmp_path):
    bank = new_bank(tmp_path, 'a b')
    bank.commit_step(1, {'c00001': 1}, {'c00001': 2}, {'c00001': 3}, [failure(1)])
    before = (bank.dump(), bank.chain_hash, bank.queue_hash)
    bank = reopen(bank)
    assert (bank.dump(), bank.chain_hash, bank.queue_hash) == before


# A step.


def test_a_step_counts_and_queues(tmp_path):
    bank = new_bank(tmp_path, 'a b')
    bank.commit_step(1, {'c00001': 1, 'c00002': 2}, {'c00001': 4}, {'c00001': 1, 'c00002': 5}, [failure(1)])
    counters = [(card.retrieved, card.helpful, card.hurt) for card in bank.active()]
    assert counters == [(1, 4, 1), (2, 0, 5)]
    assert bank.queue() == [failure(1)]


def test_a_step_is_committed_once_however_often_it_is_sent(tmp_path):
    bank = new_bank(tmp_path, 'a')
    first = bank.commit_step(1, {'c00001': 1}, {'c00001': 2}, {}, [failure(1)])
    idle(bank, 3)
    before = bank.dump()
    assert bank.commit_step(1, {'c00001': 1}, {'c00001': 2}, {}, [failure(1)]) == first
    bank = reopen(bank)
    assert bank.commit_step(1, {'c00001': 1}, {'c00001': 2}, {}, [failure(1)]) == first
    assert bank.dump() == before


def test_a_step_with_other_contents_is_refused(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank.commit_step(1, {'c00001': 1}, {}, {})
    with pytest.raises(BankError, match=r'"step 1" was committed before, with other contents'):
        bank.commit_step(1, {'c00001': 2}, {}, {})


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ((3, {}, {}, {}), r'step 3 cannot follow step 1'),
        ((0, {}, {}, {}), r'step 0 cannot follow step 1'),
        ((2, {'c00009': 1}, {}, {}), r"retrieved names card 'c00009', which this bank never had"),
        ((2, {}, {}, {'c00001': -1}), r'hurt of card c00001 is -1'),
        ((2, {}, {}, {}, [failure(2), failure(2)]), r'a failure was reported twice'),
        ((2, {}, {}, {}, [failure(1, rollout_id='x')]), r'x is not a failure of this step'),
        ((2, {}, {}, {}, [failure(2, rollout_id='solver:s1-p0:0')]), r'a failure was reported twice'),
    ],
)
def test_a_wrong_step_is_refused_and_changes_nothing(tmp_path, arguments, message):
    bank = new_bank(tmp_path, 'a')
    bank.commit_step(1, {}, {}, {}, [failure(1)])
    before = bank.dump()
    with pytest.raises(BankError, match=message):
        bank.commit_step(*arguments)
    assert reopen(bank).dump() == before


def test_a_harmful_card_leaves_in_the_commit_that_makes_it_harmful(tmp_path):
    bank = new_bank(tmp_path, 'a')
    distil(bank, 1, '') if False else None
    idle(bank, 1)
    distil(bank, 2, 'b c')
    assert bank.commit_step(3, {'c00002': 2, 'c00003': 3}, {}, {'c00002': 9, 'c00003': 1})['evicted'] == {
        'c00003': 'harmful'
    }
    assert bank.commit_step(4, {'c00002': 1}, {}, {})['evicted'] == {'c00002': 'harmful'}
    assert triggers(bank.active()) == 'a'
    tombstones = [(card.id, card.evicted_step, card.evicted_reason) for card in bank.cards()[1:]]
    assert tombstones == [('c00002', 4, 'harmful'), ('c00003', 3, 'harmful')]


def test_a_seed_stays_whatever_it_did(tmp_path):
    bank = new_bank(tmp_path, 'a')
    assert bank.commit_step(1, {'c00001': 9}, {}, {'c00001': 50})['evicted'] == {}
    assert bank.active()[0].score == -50


def test_a_card_that_left_is_still_counted(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    distil(bank, 2, 'b')
    bank.commit_step(3, {'c00002': 3}, {}, {'c00002': 1})
    bank.commit_step(4, {'c00002': 1}, {'c00002': 5}, {})
    assert [(c.retrieved, c.helpful, c.evicted_step) for c in bank.cards()[1:]] == [(4, 5, 3)]


def test_the_queue_is_bounded_and_what_found_no_place_is_counted(tmp_path):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(4)])
    event = bank.commit_step(2, {}, {}, {}, [failure(2, row, f'target 1 {row}') for row in range(3)])
    assert event['dropped'] == ['solver:s1-p0:0', 'solver:s1-p1:0']  # the new ones are on targets that failed before
    assert [f.rollout_id for f in bank.queue()][:2] == ['solver:s1-p2:0', 'solver:s1-p3:0']
    event = bank.commit_step(3, {}, {}, {}, [failure(3, row) for row in range(9)])
    assert [t['rollout_id'] for t in event['turned_away']] == [f'solver:s3-p{row}:0' for row in range(7)]
    counts = bank.counts()
    assert (counts['queue'], counts['failures'], counts['dropped']) == (5, 16, 11)


def test_a_target_counts_as_failed_before_even_if_its_failure_found_no_place(tmp_path):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row, f't{row}') for row in range(9)])
    assert [f.target.answer for f in bank.queue()] == ['t4', 't5', 't6', 't7', 't8']
    bank.commit_step(2, {}, {}, {}, [failure(2, 0, 't0'), failure(2, 1, 'new')])
    assert bank.start_consolidation(2)[0].target.answer == 't0'


# Flags.


def test_in_a_frozen_bank_nothing_enters_nothing_leaves_and_counters_count(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    distil(bank, 2, 'b')
    bank = reopen(bank, freeze_bank=True)
    event = bank.commit_step(3, {'c00002': 3}, {}, {'c00002': 9}, [failure(3, row) for row in range(3)])
    assert event['evicted'] == {} and bank.active()[1].hurt == 9
    idle(bank, 4)
    assert bank.start_consolidation(4) == []
    assert triggers(bank.active()) == 'a b'


def test_a_frozen_bank_refuses_the_cards_of_a_consolidation_that_is_under_way(tmp_path):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    bank = reopen(bank, freeze_bank=True)
    with pytest.raises(BankError, match='the bank is frozen'):
        bank.finish_consolidation(2, [draft('b', taken[0])])
    bank.finish_consolidation(2, [], error='frozen')
    assert len(bank.queue()) == 2


def test_without_distillation_there_is_no_queue_and_eviction_goes_on(tmp_path):
    bank = new_bank(tmp_path)
    idle(bank, 1)
    distil(bank, 2, 'b')
    bank = reopen(bank, failure_distillation=False)
    event = bank.commit_step(3, {'c00001': 3}, {}, {'c00001': 1}, [failure(3, row) for row in range(3)])
    assert (event['failures'], event['evicted'], bank.queue()) == ([], {'c00001': 'harmful'}, [])
    idle(bank, 4)
    assert bank.start_consolidation(4) == []


# Trouble.


def test_a_full_disk_changes_nothing_and_the_step_can_be_sent_again(tmp_path):
    bank = new_bank(tmp_path, 'a')
    before = bank.dump()
    big = [failure(1, row, prediction='x' * 100_000) for row in range(3)]
    bank._log._db.execute('PRAGMA max_page_count=10')
    with pytest.raises(sqlite3.OperationalError, match='full'):
        bank.commit_step(1, {'c00001': 1}, {}, {}, big)
    assert bank.dump() == before
    bank._log._db.execute('PRAGMA max_page_count=1000000')
    bank.commit_step(1, {'c00001': 1}, {}, {}, big)
    after = bank.dump()
    assert reopen(bank).dump() == after


def test_a_second_writer_is_noticed(tmp_path):
    bank = new_bank(tmp_path, 'a')
    other = again(bank)
    bank.commit_step(1, {'c00001': 1}, {}, {})
    with pytest.raises(BankError, match='another process wrote to this bank'):
        other.commit_step(1, {}, {}, {})
    assert other.step == 0 and again(bank).dump() == bank.dump()


def test_a_config_with_defaults_is_enough(tmp_path):
    with contextlib.closing(Bank.create(tmp_path / 'b')) as bank:
        assert (bank.counts()['active'], bank.snapshot().retrieve('what?', 3), bank.config.capacity) == (0, [], 800)
