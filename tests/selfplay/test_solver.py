"""Outcomes, credit for cards, and which failures are worth a lesson."""

from dataclasses import replace

import numpy as np
import pytest

from sesa_jax import config
from sesa_jax.config import Run
from sesa_jax.host.client import Hit
from sesa_jax.records import Document, Outcome, Problem, Rejected, Search, Target, Trajectory, Turn
from sesa_jax.selfplay import reward, solver
from sesa_jax.selfplay.challenger import Posed, ReusePool, problem_id
from sesa_jax.selfplay.solver import Solved

RUN = Run()
HITS = (Hit('c1', 'one', 0.9), Hit('c2', 'two', 0.8))
DOCUMENTS = [Document(f'd{i}', f't{i}', f'text {i}') for i in range(3)]


def row(problem, sample=0, searches=(), stop='answer', final='x'):
    turns = (Turn('answer', final, 1, 2),) if stop == 'answer' else ()
    return Trajectory(
        'solver', problem.id, sample, np.zeros(2, np.int32), np.array([False, True]), np.zeros(2, np.float32), 1,
        turns, searches, ('c1', 'c2'), stop, 0, 4,
    )  # fmt: skip


def problem(slot, reused=False):
    return Problem(problem_id(5, slot), slot, f'question {slot}', Target(f'a{slot}'), (), -1 if reused else slot, reused)


def solved(kinds, reused=()):
    """A step with a group per entry of `kinds`."""
    problems = tuple(problem(slot, slot in reused) for slot in range(len(kinds)))
    rows, outcomes = [], []
    for p, group in zip(problems, kinds, strict=True):
        for sample, kind in enumerate(group):
            rows.append(row(p, sample))
            outcomes.append(Outcome(kind, float(kind == 'correct'), 'x'))
    return Solved(problems, (HITS,) * len(problems), tuple(rows), tuple(outcomes))


class Judge:
    """Stands where the host client stands; it answers from a list."""

    def __init__(self, verdicts):
        self.verdicts, self.items = verdicts, []

    def judge(self, items):
        self.items = items
        return self.verdicts


def test_only_complete_answers_reach_the_judge():
    p = problem(0)
    rows = [row(p, final='right'), row(p, stop='length'), row(p, stop='outage'), row(p, stop='turns'), row(p, final='no')]
    host = Judge(['correct', 'unjudged'])
    found = solver.judge(host, rows, [('q', ('right',))] * 5)
    assert [o.kind for o in found] == ['correct', 'malformed', 'outage', 'malformed', 'unjudged']
    assert [o.reward for o in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [item.prediction for item in host.items] == ['right', 'no']


def test_nothing_to_judge_asks_nobody():
    host = Judge(None)
    assert [o.kind for o in solver.judge(host, [row(problem(0), stop='malformed')], [('q', ('a',))])] == ['malformed']
    assert host.items == []


def test_utility_counts_problems_once_and_rollouts_each():
    step = solved([['correct', 'correct', 'wrong', 'malformed', 'outage'], ['wrong'] * 5])
    retrieved, helpful, hurt = solver.utility(step)
    assert (retrieved['c1'], helpful['c1'], hurt['c1']) == (2, 2, 6)
    assert retrieved == {'c1': 2, 'c2': 2}


def test_failures_are_wrong_rows_of_new_frontier_questions():
    step = solved(
        [['wrong'] * 5, ['correct', 'wrong', 'malformed', 'wrong', 'correct'], ['correct'] * 5, ['correct', 'wrong'] * 2],
        reused=(3,),
    )
    scores = reward.score_solver(RUN, step)
    assert scores.is_frontier.tolist() == [False, True, False, True]
    found = solver.failures(step, scores.is_frontier, step=5)
    assert [f.rollout_id for f in found] == ['solver:s00005-p001:1', 'solver:s00005-p001:3']
    assert found[0].card_ids == ('c1', 'c2')
    assert (found[0].step, found[0].bank_version, found[0].target.answer) == (5, 4, 'a1')


def test_evidence_is_from_all_turns_and_each_passage_once():
    searches = (
        Search('one', (DOCUMENTS[0], DOCUMENTS[1]), 'ok', 0.0),
        Search('two', (DOCUMENTS[1], DOCUMENTS[2]), 'ok', 0.0),
    )
    record = solver.record(row(problem(0), searches=searches), Outcome('wrong', 0.0, 'x'), problem(0), 5)
    assert [d.id for d in record.evidence] == ['d0', 'd1', 'd2']
    assert record.queries == ('one', 'two')


def posed(problems, rejected=(), rows=4):
    return Posed(
        tuple(Target(f'a{i}') for i in range(rows)), tuple(row(problem(i)) for i in range(rows)), problems, rejected
    )


def test_the_challenger_is_paid_by_slot_and_punished_for_invalid_ones():
    step = solved([['correct', 'correct', 'wrong', 'wrong', 'wrong'], ['wrong'] * 5, ['outage'] * 5])
    asked = posed(step.problems, (Rejected('length', 3),))
    rewards, scores = reward.score_challenger(RUN, asked, step, reward.score_solver(RUN, step))
    np.testing.assert_allclose(rewards, [0.96, -0.1, 0.0, -0.1], rtol=1e-6)
    assert scores.is_included.tolist() == [True, True, False, True]  # nobody could score the third
    np.testing.assert_allclose(scores.advantage[[0, 1, 3]], [2**0.5, -(2**-0.5), -(2**-0.5)], rtol=1e-4)


def test_an_outage_of_the_challenger_is_left_out_not_punished():
    step = solved([['correct', 'wrong', 'wrong', 'wrong', 'wrong']])
    asked = posed(step.problems, (Rejected('outage', 1), Rejected('no question', 2)), rows=3)
    _, scores = reward.score_challenger(RUN, asked, step, reward.score_solver(RUN, step))
    assert scores.is_included.tolist() == [True, False, True]


def test_reused_problems_do_not_pay_the_challenger():
    step = solved([['correct', 'wrong', 'wrong', 'wrong', 'wrong']], reused=(0,))
    rewards, _ = reward.score_challenger(RUN, posed((), (Rejected('length', 0),), rows=1), step, reward.score_solver(RUN, step))
    np.testing.assert_allclose(rewards, [-0.1], rtol=1e-6)


@pytest.mark.parametrize('correct', range(6))
def test_frontier_reward_of_a_group_of_five(correct):
    step = solved([['correct'] * correct + ['wrong'] * (5 - correct)])
    scores = reward.score_solver(config.Run(), step)
    expected = [-0.1, 0.64, 0.96, 0.96, 0.64, -0.1][correct]
    np.testing.assert_allclose(scores.frontier_reward, [expected], rtol=1e-6)


def test_both_roles_take_the_advantage_of_their_config():
    run = replace(RUN, solver=replace(RUN.solver, advantage='rloo'), challenger=replace(RUN.challenger, advantage='raw'))
    step = solved([['correct', 'wrong', 'wrong', 'wrong', 'wrong']])
    scores = reward.score_solver(run, step)
    np.testing.assert_allclose(scores.advantage, [1, -0.25, -0.25, -0.25, -0.25], rtol=1e-6)
    asked = posed(step.problems, (Rejected('length', 1),), rows=2)
    np.testing.assert_allclose(reward.score_challenger(run, asked, step, scores)[1].advantage, [0.64, -0.1], rtol=1e-6)


def test_the_pool_fills_empty_slots_with_earlier_problems_and_is_cleared():
    first = posed((problem(0), problem(1)), rows=2)
    pool = ReusePool().after(first, step=1, clear_every=10)
    second = posed((problem(2),), rows=4)
    filled = pool.fill(second, step=2, seed=0)
    assert [p.slot for p in filled] == [0, 1, 3]
    assert all(p.reused and p.challenger_row == -1 and p.question in ('question 0', 'question 1') for p in filled)
    assert len({p.id for p in filled}) == 3
    assert pool.fill(second, step=2, seed=0) == filled
    assert pool.after(second, step=10, clear_every=10).problems == ()
    assert ReusePool().fill(second, step=2, seed=0) == ()
