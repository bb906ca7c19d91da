"""What a prompt has room for: checked at the door where it is known, made to fit where it is not."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import runs

from experiments import train
from sesa_jax import config
from sesa_jax.config import ConfigError
from sesa_jax.host.client import Hit
from sesa_jax.policy import backbones
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.records import Document, Problem, Question, Search, Target, Trajectory, Turn
from sesa_jax.selfplay import challenger, exam, solver
from sesa_jax.selfplay.game import Game, check_room

TOKENIZER = Tokenizer(backbones.resolve('tiny'))
LONG = 'Which town is north of ' + 'the old mill by the river and ' * 6 + 'Velmar?'
HITS = tuple(Hit(f'c{i}', 'when a question asks for the founder: search {entity} charter roll', 0.9) for i in range(3))


def size(question, cards=0):
    return len(GAME.solver_prompt(question, [hit.text for hit in HITS[:cards]]))


class Engine:
    """Ends each row at once, with a text of the test's choice, and keeps the requests."""

    def __init__(self, final):
        self.final, self.requests = final, []

    def rollout(self, params, requests, *_, weights_version, bank_version, **__):
        self.requests += requests
        return [self.row(request, weights_version, bank_version) for request in requests]

    def row(self, request, weights_version, bank_version):
        searches = tuple(Search(q, (Document('d', 'Vel', 'Vel is a town.'),), 'ok', 0.0) for q in ('vel', 'vel town'))
        kind = 'question' if request.role == 'challenger' else 'answer'
        ids = np.array([*request.prompt, 1], np.int32)
        return Trajectory(
            request.role, request.problem_id, request.sample, ids, np.arange(len(ids)) == len(request.prompt),
            np.zeros(len(ids), np.float32), len(request.prompt), (Turn(kind, self.final, 0, 1),), searches,
            request.card_ids, kind, weights_version, bank_version,
        )  # fmt: skip


class Host:
    """Has the same cards for every question, and finds every answer wrong."""

    def retrieve(self, questions, k):
        return [HITS[:k] for _ in questions]

    def judge(self, items):
        return ['wrong'] * len(items)


def game(prompt, final='x', **fields):
    run = config.lab_preset(config.Run())
    run = replace(run, lengths=replace(run.lengths, prompt=prompt), bank=replace(run.bank, retrieved=3), **fields)
    world = SimpleNamespace(held_out_names=frozenset())
    return Game(run, world, TOKENIZER, Engine(final), Host(), None, lambda params: params, ())


GAME = game(10_000)


def problem(question):
    return Problem('s00001-p000', 0, question, Target('Orin'), (), 0)


def test_a_prompt_drops_its_lowest_cards_until_it_has_room_and_counts_them_as_not_shown():
    for most, room in ((3, size(LONG, 3)), (2, size(LONG, 3) - 1), (0, size(LONG))):
        played = game(room)
        solved = solver.solve(played, {}, [problem(LONG)], step=1, weights_version=0)
        assert [hit.id for hit in solved.cards[0]] == ['c0', 'c1', 'c2'][:most]
        assert {row.card_ids for row in solved.trajectories} == {('c0', 'c1', 'c2')[:most]}
        assert {tuple(r.prompt) for r in played.engine.requests} == {
            tuple(GAME.solver_prompt(LONG, [hit.text for hit in HITS[:most]]))
        }
        retrieved, _, hurt = solver.utility(solved)
        assert set(retrieved) == set(hurt) == {'c0', 'c1', 'c2'} if most == 3 else len(retrieved) == most


def test_an_exam_shows_the_cards_that_it_has_room_for():
    played = game(size(LONG, 1))
    exam.sit(played, {}, [Question('q', LONG, ('Orin',), 'easy', 1)], with_cards=True, step=1, weights_version=0)
    assert [(len(r.prompt), r.card_ids) for r in played.engine.requests] == [(size(LONG, 1), ('c0',))]


@pytest.mark.parametrize(('spare', 'reasons'), [(0, []), (-1, ['length'])])
def test_a_question_that_no_solver_has_room_for_is_too_long(spare, reasons):
    played = game(size(LONG) + spare, LONG, verification=False)
    posed = challenger.pose(played, {}, [Target('Orin')], step=1, weights_version=0)
    assert [rejected.reason for rejected in posed.rejected] == reasons
    assert len(posed.problems) == 1 - len(reasons)


def test_a_challenger_that_sees_cards_sees_those_that_it_has_room_for():
    target = Target('Orin')
    room = len(GAME.challenger_prompt(target, [HITS[0].text]))
    played = game(room, 'short', challenger_sees_skills=True)
    challenger.pose(played, {}, [target], step=1, weights_version=0)
    assert [len(request.prompt) for request in played.engine.requests] == [room]


def test_the_longest_known_question_must_have_room_for_the_longest_cards():
    cards = [hit.text for hit in HITS]
    questions = ['Who is it?'] * 500 + [LONG] + ['What is it?'] * 500
    check_room(game(size(LONG, 3)).run, TOKENIZER, cards, questions)
    with pytest.raises(ConfigError, match=rf"--lengths.prompt {size(LONG, 3) - 1}: the question 'Which town .* 3 cards need"):
        check_room(game(size(LONG, 3) - 1).run, TOKENIZER, cards, questions)
    with pytest.raises(ConfigError, match='leave this question out'):
        check_room(game(size(LONG) - 1).run, TOKENIZER, [], questions)


def test_the_longest_target_must_fit_into_a_challengers_prompt():
    targets = [Target('Orin'), Target(LONG), Target('Vel')]
    room = len(GAME.challenger_prompt(targets[1], ()))
    check_room(game(room).run, TOKENIZER, [], targets=targets)
    with pytest.raises(ConfigError, match=rf"--lengths.prompt {room - 1}: a challenger with the target 'Which town"):
        check_room(game(room - 1).run, TOKENIZER, [], targets=targets)


@pytest.mark.parametrize('what', ['question', 'target'])
def test_a_run_is_refused_before_it_plays_where_a_known_text_is_too_long(tmp_path, capsys, what):
    rows = {
        'corpus': [{'id': f'd{i}', 'contents': f'"Vel {i}"\nVel {i} is a town of Orin.'} for i in range(3)],
        'answers': [{'answer': 'Orin Tarn ' * (200 if what == 'target' else 1)}],
        'questions': [
            {'question': 'Which river is it? ' * (200 if what == 'question' else 1), 'answer': f'Dorn {i}'}
            for i in range(8)
        ],
    }
    flags = ['--world', 'files']
    for name, lines in rows.items():
        file = tmp_path / f'{name}.jsonl'
        file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
        flags += [f'--{name}', str(file)]
    code = train.main([*runs.SMALL, '--size', 'small', '--run-dir', str(tmp_path / 'run'), '--steps', '1', *flags])
    assert code == 2
    assert '--lengths.prompt' in capsys.readouterr().err
