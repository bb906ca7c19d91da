import contextlib
import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from skills_toy import TableEncoder, again, draft, failure, idle, new_bank, reopen

from sesa_jax.skills.bank import Bank, BankError, CorruptBank


def triggers(cards):
    return ' '.join(card.trigger for card in cards)


def distil(bank, step, names):
    """One consolidation behind `step` from two fresh failures; its drafts have these triggers."""
    failures = [failure(step, row) for row in range(2)]
    bank.commit_step(step, {}, {}, {}, failures)
    assert len(bank.start_consolidation(step)) == 2
    return bank.finish_consolidation(step, [draft(name, failures[0]) for name in names.split()])


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


# A consolidation.


def test_failures_leave_the_queue_when_the_consolidation_commits_and_not_before(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(4)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    assert [f.rollout_id for f in taken] == ['solver:s1-p3:0', 'solver:s1-p2:0', 'solver:s1-p1:0']
    assert len(bank.queue()) == 4
    idle(bank, 3)
    bank.finish_consolidation(3, [draft('b', taken[0])])
    assert [f.rollout_id for f in bank.queue()] == ['solver:s1-p0:0']
    assert bank.pending_consolidation() is None


def test_what_arrives_meanwhile_is_kept(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    bank.commit_step(3, {'c00001': 1}, {'c00001': 5}, {}, [failure(3)])
    bank.finish_consolidation(3, [draft('b', taken[0])])
    assert bank.queue() == [failure(3)]
    assert bank.active()[0].helpful == 5


def test_failures_of_a_running_consolidation_are_not_pushed_out(tmp_path):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    bank.commit_step(3, {}, {}, {}, [failure(3, row, f'target 1 {row % 2}') for row in range(9)])
    assert len(bank.queue()) == 5
    assert bank.pending_consolidation().failures == tuple(taken)


def test_a_failed_consolidation_gives_its_failures_back_and_waits_for_the_next_slot(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    event = bank.finish_consolidation(2, [draft('b', taken[0])], error='the distiller did not answer')
    assert (event['admitted'], len(bank.queue()), bank.pending_consolidation()) == ([], 2, None)
    assert bank.start_consolidation(2) == []
    idle(bank, 3)
    assert bank.start_consolidation(3) == []
    idle(bank, 4)
    assert bank.start_consolidation(4) == taken


def test_a_consolidation_without_drafts_uses_its_failures_up(tmp_path):
    bank = new_bank(tmp_path)
    idle(bank, 1)
    distil(bank, 2, '')
    assert (bank.counts()['queue'], bank.counts()['consolidated']) == (0, 2)


def test_a_started_consolidation_is_found_after_reopening(tmp_path):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    taken = bank.start_consolidation(2)
    bank = reopen(bank)
    job = bank.pending_consolidation()
    assert (job.step, list(job.failures)) == (2, taken)
    assert bank.start_consolidation(2) == taken
    assert bank.seq == 4


def test_a_second_consolidation_does_not_start_while_one_is_under_way(tmp_path):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    bank.start_consolidation(2)
    bank.commit_step(3, {}, {}, {}, [failure(3, row) for row in range(2)])
    idle(bank, 4)
    assert bank.start_consolidation(4) == []


def test_a_consolidation_commits_once_however_often_it_is_sent(tmp_path):
    bank = new_bank(tmp_path)
    idle(bank, 1)
    first = distil(bank, 2, 'b c')
    before = bank.dump()
    drafts = [draft(name, failure(2, 0)) for name in 'bc']
    assert bank.finish_consolidation(2, drafts) == first
    assert reopen(bank).finish_consolidation(2, drafts) == first
    assert again(bank).dump() == before
    with pytest.raises(BankError, match='with other contents'):
        again(bank).finish_consolidation(2, drafts[:1])


def test_a_consolidation_that_never_started_cannot_finish(tmp_path):
    bank = new_bank(tmp_path)
    idle(bank, 2)
    with pytest.raises(BankError, match='no consolidation is under way at step 2'):
        bank.finish_consolidation(2, [])


@pytest.mark.parametrize('step', [1, 3])
def test_a_consolidation_belongs_to_the_boundary_of_the_last_step(tmp_path, step):
    bank = new_bank(tmp_path)
    bank.commit_step(1, {}, {}, {}, [failure(1, row) for row in range(2)])
    idle(bank, 2)
    with pytest.raises(BankError, match=f'behind step {step}, but the last committed step is 2'):
        bank.start_consolidation(step)
    bank.start_consolidation(2)
    with pytest.raises(BankError, match=f'behind step {step}, but the last committed step is 2'):
        bank.finish_consolidation(step, [])


def test_a_card_knows_its_sources(tmp_path):
    bank = new_bank(tmp_path, 'a b')
    failures = [failure(1, 0, cards=('c00002',)), failure(1, 1, cards=('c00001', 'c00002'))]
    bank.commit_step(1, {}, {}, {}, failures)
    idle(bank, 2)
    bank.start_consolidation(2)
    idle(bank, 3)
    bank.finish_consolidation(3, [draft('c', failures[0], rollout_ids=tuple(f.rollout_id for f in failures))])
    card = bank.active()[-1]
    assert (card.id, card.born_step, card.bank_version, card.is_seed) == ('c00003', 3, 0, False)
    assert card.parents == ('c00001', 'c00002')
    assert card.source_question_hashes == tuple(sorted(f.question_hash for f in failures))


@pytest.mark.parametrize(
    ('fields', 'detail'),
    [
        ({'rollout_ids': ()}, 'names no rollout that it came from'),
        ({'rollout_ids': ('other',)}, 'names other, which this consolidation did not take'),
        ({'source_question_hash': 'other'}, 'its question hash is not that of one of its rollouts'),
    ],
)
def test_a_draft_without_a_true_source_is_rejected(tmp_path, fields, detail):
    bank = new_bank(tmp_path)
    idle(bank, 1)
    failures = [failure(2, row) for row in range(2)]
    bank.commit_step(2, {}, {}, {}, failures)
    bank.start_consolidation(2)
    event = bank.finish_consolidation(2, [draft('b', failures[0], **fields)])
    assert [(r['reason'], r['detail']) for r in event['rejected']] == [('source', detail)]


def test_an_evicted_card_is_still_a_duplicate(tmp_path):
    bank = new_bank(tmp_path, encoder=TableEncoder({('c', 'b'): 0.94}))
    idle(bank, 1)
    distil(bank, 2, 'b')
    bank.commit_step(3, {'c00001': 3}, {}, {'c00001': 1})
    assert bank.active() == []
    event = distil(bank, 4, 'c d')
    assert [(r['repeats'], r['cosine']) for r in event['rejected']] == [('c00001', 0.94)]
    assert triggers(bank.active()) == 'd'


def test_ids_are_never_used_again(tmp_path):
    bank = new_bank(tmp_path, 'a')
    idle(bank, 1)
    distil(bank, 2, 'b c')
    bank.commit_step(3, dict.fromkeys(('c00002', 'c00003'), 3), {}, dict.fromkeys(('c00002', 'c00003'), 1))
    bank = reopen(bank)
    event = distil(bank, 4, 'd e')
    assert [card['id'] for card in event['admitted']] == ['c00004', 'c00005']


def test_a_full_bank_makes_room_at_admission(tmp_path):
    bank = new_bank(tmp_path, 'a b c d e')
    idle(bank, 1)
    event = distil(bank, 2, 'f g h')
    assert event['evicted'] == {'c00006': 'capacity', 'c00007': 'capacity'}
    assert triggers(bank.active()) == 'a b c d e h'


def test_equal_scores_leave_in_the_same_order_under_every_hash_seed(tmp_path):
    script = (
        'import sys, pathlib; sys.path[:0] = sys.argv[2:]\n'
        'from skills_toy import *\n'
        'b = new_bank(pathlib.Path(sys.argv[1]), "a b c"); idle(b, 1)\n'
        'fs = [failure(2, r, f"t{r % 2}", ("c00001",)) for r in range(4)]\n'
        'b.commit_step(2, {"c00001": 1, "c00002": 2}, {"c00003": 1}, {"c00002": 1}, fs)\n'
        'b.start_consolidation(2)\n'
        'b.finish_consolidation(2, [draft(n, fs[3]) for n in "qwertz"])\n'
        'print(b.chain_hash, b.queue_hash, b.snapshot().hash)\n'
    )
    here = Path(__file__).parent
    printed = set()
    for seed in ('0', '1'):
        folder = tmp_path / seed
        folder.mkdir()
        printed.add(
            subprocess.run(
                [sys.executable, '-c', script, folder, here],
                env={**os.environ, 'PYTHONHASHSEED': seed},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert len(printed) == 1 and len(printed.pop().split()) == 3


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
