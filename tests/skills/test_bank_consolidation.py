import os
import subprocess
import sys
from pathlib import Path

import pytest
from skills_toy import TableEncoder, again, distil, draft, failure, idle, new_bank, reopen, triggers

from sesa_jax.skills.bank import BankError


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
