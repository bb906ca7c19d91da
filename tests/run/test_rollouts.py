"""Which rollouts are picked for showing, and what of them is shown."""

import dataclasses

import numpy as np
import pytest

from sesa_jax.records import Outcome, Problem, Target, Trajectory
from sesa_jax.rollout.trajectory import write_trajectories
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.questions import question_row, read_questions, write_questions
from sesa_jax.run.rollouts import MAX_CHARACTERS, Segment, examples, rollout_steps, show, using_card


def row(problem, sample, role='solver', stop='answer', cards=()):
    return Trajectory(
        role=role, problem_id=problem, sample=sample, ids=np.arange(8, dtype=np.int32),
        is_action=np.array([0, 0, 1, 1, 0, 1, 1, 0], bool), logprobs=np.zeros(8, np.float32), prompt_length=2,
        turns=(), searches=(), card_ids=cards, stop_reason=stop, weights_version=1, bank_version=0,
    )  # fmt: skip


def problem(name, kinds):
    outcomes = [Outcome(kind, float(kind == 'correct'), kind) for kind in kinds]
    return question_row(Problem(name, 0, f'Q {name}?', Target('gold')), outcomes, ['c1'], 3)


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path, {}) as made:
        rows = [row(p, s, cards=('c1',) if p == 'b' else ()) for p in 'abc' for s in range(3)]
        asked = [
            row(p, 0, 'challenger', stop) for p, stop in zip('abc', ('question', 'question', 'length'), strict=True)
        ]
        write_trajectories(made.rollouts_file(4), [*asked, *rows])
        kinds = {'a': ['wrong'] * 3, 'b': ['wrong', 'malformed', 'correct'], 'c': ['correct'] * 3}
        write_questions(made.questions_file(4), [problem(name, kind) for name, kind in kinds.items()])
        yield made


def test_contrasts_come_first_then_one_rollout_of_each_other_problem(folder):
    shown = examples(folder, 4)
    assert [(s.id, s.outcome) for s in shown if s.role == 'solver'] == [
        ('solver:b:2', 'correct'), ('solver:b:0', 'wrong'), ('solver:a:0', 'wrong'), ('solver:c:0', 'correct'),
    ]  # fmt: skip


def test_of_the_challenger_one_that_asked_and_one_that_did_not(folder):
    assert [s.id for s in examples(folder, 4) if s.role == 'challenger'] == ['challenger:a:0', 'challenger:c:0']


def test_segments_follow_the_masks_token_by_token():
    found = show(row('a', 0), 4, {}, lambda ids: ' '.join(map(str, ids))).segments
    assert found == (
        Segment('prompt', '0 1'),
        Segment('action', '2 3'),
        Segment('observation', '4'),
        Segment('action', '5 6'),
        Segment('observation', '7'),
    )


def test_long_text_is_cut_and_the_cut_is_marked():
    found = show(row('a', 0), 4, {}, lambda ids: 'x' * (MAX_CHARACTERS + 5)).segments
    assert found[0].text == 'x' * MAX_CHARACTERS + ' … (5 more)'


def test_a_run_without_questions_shows_its_rollouts_without_outcomes(folder):
    folder.questions_file(4).unlink()
    assert {s.outcome for s in examples(folder, 4)} == {''}


def test_users_of_a_card_are_found_with_their_outcomes(folder):
    write_trajectories(
        folder.rollouts_file(5), [row('d', 0, cards=('c1', 'c2')), row('d', 1, 'challenger', cards=('c1',))]
    )
    found = [(step, t.rollout_id, outcome) for step, t, outcome in using_card(folder, 'c1')]
    assert found == [
        (4, 'solver:b:0', 'wrong'), (4, 'solver:b:1', 'malformed'), (4, 'solver:b:2', 'correct'), (5, 'solver:d:0', ''),
    ]  # fmt: skip
    assert rollout_steps(folder) == [4, 5]


def test_question_rows_carry_hashes_and_bank_version_and_repeat_byte_for_byte(folder):
    (first, *_) = read_questions(folder.questions_file(4))
    expected = Problem('a', 0, 'Q a?', Target('gold'))
    assert (first['question_hash'], first['target_hash']) == (expected.question_hash, expected.target.hash)
    assert (first['bank_version'], first['card_ids'], first['target']['answer']) == (3, ['c1'], 'gold')
    before = folder.questions_file(4).read_bytes()
    write_questions(folder.questions_file(4), list(read_questions(folder.questions_file(4))))
    assert folder.questions_file(4).read_bytes() == before


def test_a_damaged_questions_file_is_named(folder):
    folder.questions_file(4).write_bytes(folder.questions_file(4).read_bytes()[:-12])
    with pytest.raises(ValueError, match=r'step_00004\.jsonl\.gz is damaged'):
        list(read_questions(folder.questions_file(4)))


def test_a_row_of_another_sample_count_has_no_outcome():
    question = problem('a', ['correct'])
    assert show(dataclasses.replace(row('a', 0), sample=1), 4, question, None).outcome == ''
