import contextlib
import dataclasses
import json
import os

import pytest
from skills_toy import TableEncoder, again, distil, draft, failure, idle, new_bank, reopen, triggers

from sesa_jax.skills.bank import Bank, BankError, CorruptBank

# Snapshots.


def test_a_card_accepted_behind_a_step_is_not_in_the_snapshot_of_that_step(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    seen_in_step_3 = bank.snapshot(2)
    idle(bank, 3)
    bank.finish_consolidation(3, [draft('b', taken[0])])
    assert triggers(seen_in_step_3.retrieve('b=0.9', 3)) == 'a'
    assert triggers(bank.snapshot(2).retrieve('b=0.9', 3)) == 'a'
    assert triggers(bank.snapshot(3).retrieve('b=0.9', 3)) == 'b a'


def test_earlier_snapshots_can_be_had_again(tmp_path):
    bank = new_bank(tmp_path, 'a')
    hashes = {}
    for step in range(1, 7):
        bank.commit_step(step, {'c00001': 1}, {}, {}, [failure(step, row) for row in range(2)])
        if taken := bank.start_consolidation(step):
            bank.finish_consolidation(step, [draft(f'b{step}', taken[0])])
        hashes[step] = bank.snapshot(step).hash
    bank = reopen(bank)
    assert {step: bank.snapshot(step).hash for step in hashes} == hashes
    assert triggers(bank.snapshot(0).cards) == 'a' and bank.snapshot(0).cards[0].retrieved == 0
    assert len(set(hashes.values())) == 6


def test_a_snapshot_is_built_once_and_again_when_a_consolidation_changed_it(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    bank.commit_step(2, {}, {}, {}, [failure(2, row) for row in range(2)])
    before = bank.snapshot()
    assert bank.snapshot() is before
    taken = bank.start_consolidation(2)
    bank.finish_consolidation(2, [draft('b', taken[0])])
    assert (triggers(before.cards), triggers(bank.snapshot().cards)) == ('a', 'a b')


def test_a_snapshot_of_the_future_is_refused(tmp_path):
    with pytest.raises(BankError, match='no snapshot 1, the last committed step is 0'):
        new_bank(tmp_path).snapshot(1)


def test_retrieving_changes_nothing(tmp_path):
    bank = new_bank(tmp_path, 'a b')
    before = bank.dump()
    bank.snapshot().retrieve('a=0.3', 3)
    assert reopen(bank).dump() == before


def test_evicted_cards_are_not_retrieved(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    distil(bank, 2, 'b')
    bank.commit_step(3, {'c00002': 3}, {}, {'c00002': 1})
    assert triggers(bank.snapshot().retrieve('b=0.9', 3)) == 'a'


# Going back.


def story(bank):
    """Six steps with two consolidations; yields the state behind each event."""
    dumps = {bank.seq: bank.dump()}
    for step in range(1, 7):
        bank.commit_step(step, {'c00001': 1}, {'c00001': step}, {}, [failure(step, row) for row in range(2)])
        dumps[bank.seq] = bank.dump()
        if taken := bank.start_consolidation(step):
            dumps[bank.seq] = bank.dump()
            bank.finish_consolidation(step, [draft(f'b{step}', taken[0])])
            dumps[bank.seq] = bank.dump()
    return dumps


def test_opening_at_an_event_gives_the_state_behind_it_and_keeps_the_rest_as_orphans(tmp_path):
    bank = new_bank(tmp_path, 'a')
    dumps = story(bank)
    assert len(dumps) == 13
    for seq in (12, 8, 3, 1):
        bank = reopen(bank, at_seq=seq)
        assert bank.dump() == dumps[seq]
    assert [seq for seq, _ in bank._log.orphaned()] == [13, 9, 10, 11, 12, 4, 5, 6, 7, 8, 2, 3]


def test_the_same_steps_after_going_back_give_the_same_bank(tmp_path):
    bank = new_bank(tmp_path, 'a')
    whole = story(bank)[13]
    bank = reopen(bank, at_seq=1)
    assert story(bank)[13] == whole


def test_events_that_the_file_does_not_have_are_missed(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 2)
    with pytest.raises(CorruptBank, match=r'bank\.db: event 9 was committed, but the file ends with event 3'):
        reopen(bank, at_seq=9)


def test_another_hash_than_the_expected_one_is_refused_and_nothing_is_cut(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    chain_hash = bank.chain_hash
    idle(bank, 3)
    dump = bank.dump()
    with pytest.raises(CorruptBank, match='event 3 has hash'):
        reopen(bank, at_seq=3, chain_hash=chain_hash)
    assert again(bank).dump() == dump
    assert again(bank, at_seq=2, chain_hash=chain_hash).seq == 2


def test_verify_tells_a_whole_bank_from_another_and_changes_nothing(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    seq, chain_hash = bank.seq, bank.chain_hash
    idle(bank, 3)
    Bank.verify(tmp_path / 'bank.db', seq, chain_hash)
    with pytest.raises(CorruptBank):
        Bank.verify(tmp_path / 'bank.db', seq + 1, chain_hash)
    assert bank.seq == 4 == reopen(bank).seq


def test_banks_with_equal_chain_hashes_are_equal_and_others_differ(tmp_path):
    banks = []
    for name, helpful in (('x', 1), ('y', 1), ('z', 2)):
        (tmp_path / name).mkdir()
        banks.append(new_bank(tmp_path / name, 'a b'))
        banks[-1].commit_step(1, {'c00001': 1}, {'c00001': helpful}, {})
    x, y, z = banks
    assert x.chain_hash == y.chain_hash and x.dump() == y.dump()
    assert x.chain_hash != z.chain_hash and x.dump() != z.dump()


def test_no_event_holds_a_time(tmp_path):
    bank = new_bank(tmp_path, 'a')
    story(bank)
    text = json.dumps(list(bank.history()))
    assert not any(word in text for word in ('time', 'date', 'clock', str(os.getpid())))


# Reading.


def test_reading_neither_changes_nor_locks_the_file_and_sees_the_newest_commit(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 2)

    def files():
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}

    before = files()
    assert set(before) >= {'bank.db', 'bank.db-wal'}
    reader = again(bank, readonly=True)
    assert reader.dump() == bank.dump()
    assert files() == before
    bank.commit_step(3, {'c00001': 1}, {}, {})
    assert reader.step == 2 and bank.step == 3
    reader.close()


def test_a_reader_works_in_a_folder_that_it_cannot_write_and_leaves_nothing_behind(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    tmp_path.chmod(0o500)
    try:
        with contextlib.closing(again(bank, readonly=True)) as reader:
            assert triggers(reader.active()) == 'a'
            with pytest.raises(BankError, match='was opened for reading'):
                reader.commit_step(1, {}, {}, {})
    finally:
        tmp_path.chmod(0o700)
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_a_reader_can_look_at_an_earlier_event(tmp_path):
    bank = new_bank(tmp_path, 'a')
    dumps = story(bank)
    assert again(bank, readonly=True, at_seq=5).dump() == dumps[5]
    assert bank.seq == 13 == reopen(bank).seq


# History.


def test_why_tells_sources_uses_and_descendants(tmp_path):
    bank = new_bank(tmp_path, 'a')
    failures = [failure(1, row) for row in range(2)]
    bank.commit_step(1, {}, {}, {}, failures)
    idle(bank, 2)
    bank.start_consolidation(2)
    bank.finish_consolidation(2, [draft('b', failures[1])])
    later = [failure(3, 0, cards=('c00002',)), failure(3, 1)]
    bank.commit_step(3, {'c00002': 1}, {'c00002': 2}, {'c00002': 1}, later)
    idle(bank, 4)
    bank.start_consolidation(4)
    bank.finish_consolidation(4, [draft('c', later[0])])
    lineage = bank.why('c00002')
    assert lineage.failures == (failures[1],)
    assert [dataclasses.astuple(use) for use in lineage.uses] == [(3, 1, 2, 1)]
    assert lineage.failed_rollouts == ('solver:s3-p0:0',)
    assert lineage.children == ('c00003',)
    assert bank.why('c00001').failures == ()


def test_why_of_an_unknown_card_says_what_there_is(tmp_path):
    with pytest.raises(KeyError, match='no card c00099; its 1 cards'):
        new_bank(tmp_path, 'a').why('c00099')


def test_history_is_every_event_in_order(tmp_path):
    bank = new_bank(tmp_path, 'a')
    story(bank)
    events = list(bank.history())
    assert [event['seq'] for event in events] == list(range(1, 14))
    assert [event['kind'] for event in events][:5] == ['created', 'step', 'step', 'started', 'finished']


def test_everything_is_accounted_for(tmp_path):
    bank = new_bank(tmp_path, 'a', encoder=TableEncoder({('a', 'c'): 0.99}))
    idle(bank, 1)
    failures = [failure(2, row) for row in range(4)]
    bank.commit_step(2, {}, {}, {}, failures)
    bank.start_consolidation(2)
    bank.finish_consolidation(
        2, [draft(n, failures[3]) for n in 'bcd'] + [draft('e'), draft('f', failures[3], avoid='<')]
    )
    bank.commit_step(3, {'c00002': 3}, {}, {'c00002': 1})
    assert bank.counts() == {
        'active': 2, 'seeds': 1, 'tombstones': 1, 'queue': 1, 'in_job': 0, 'drafts': 6, 'admitted': 3,
        'rejected.duplicate': 1, 'rejected.invalid': 1, 'rejected.source': 1, 'evicted.harmful': 1,
        'failures': 4, 'dropped': 0, 'consolidated': 3,
    }  # fmt: skip
