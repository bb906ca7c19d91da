"""What `experiments.rollouts` prints, and what it refuses."""

import numpy as np
import pytest
from rich.console import Console

from experiments import rollouts
from sesa_jax.records import Document, Outcome, Problem, Search, Target, Trajectory, Turn
from sesa_jax.rollout.trajectory import write_trajectories
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.questions import question_row, write_questions


def row(sample, role='solver', stop='answer', last='answer'):
    return Trajectory(
        role=role, problem_id='p', sample=sample, ids=np.arange(9, dtype=np.int32),
        is_action=np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], bool), logprobs=np.zeros(9, np.float32), prompt_length=2,
        turns=(Turn('search', 'the river', 2, 4), Turn(last, 'green [bold]' if last == 'answer' else '', 6, 9)),
        searches=(Search('the river', (Document('d', 'Old \x1b[31mharbour', 'text'),), 'ok', 0.012),),
        card_ids=('c00007',), stop_reason=stop, weights_version=5, bank_version=4,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    with RunFolder.create(tmp_path / 'run', {}) as made:
        write_trajectories(
            made.rollouts_file(3),
            [row(0, 'challenger', 'question'), row(0), row(1), row(2, stop='length', last='malformed')],
        )
        outcomes = [Outcome('wrong', 0.0, 'green'), Outcome('correct', 1.0, 'blue'), Outcome('malformed', 0.0, '')]
        problem = Problem('p', 0, 'What colour?', Target('blue'))
        write_questions(made.questions_file(3), [question_row(problem, outcomes, ['c00007'], 3)])
    return tmp_path / 'run'


def printed(path, *flags):
    console = Console(record=True, width=200, highlight=False, emoji=False)
    code = rollouts.main([str(path), *flags], console)
    return code, console.export_text()


def test_a_rollout_is_printed_with_its_turns_searches_cards_and_versions(path):
    code, text = printed(path, '--step', '3', '--rollout', 'solver:p:0')
    assert code == 0
    for part in (
        'solver:p:0', 'answer wrong', 'What colour?', 'blue', 'green [bold]', 'c00007', 'weights 5, bank 4',
        '2 prompt, 5 sampled, 9 in all', 'turn 1: search, tokens 2 to 4; ok after 12 ms: Old', 'turn 2: answer, tokens 6 to 9',
    ):  # fmt: skip
        assert part in text, part
    assert '\x1b[31m' not in text


@pytest.mark.parametrize(
    ('flags', 'expected'),
    [
        (('--outcome', 'wrong'), {'solver:p:0'}),
        (('--role', 'solver'), {'solver:p:0', 'solver:p:1', 'solver:p:2'}),
        (('--stop', 'length'), {'solver:p:2'}),
        (('--role', 'solver', '--limit', '1'), {'solver:p:0'}),
        ((), {'solver:p:0', 'solver:p:1', 'solver:p:2', 'challenger:p:0'}),
    ],
)
def test_flags_choose_rollouts(path, flags, expected):
    code, text = printed(path, '--step', '3', *flags)
    names = ('challenger:p:0', *(f'solver:p:{sample}' for sample in range(3)))
    assert code == 0
    assert {name for name in names if name in text} == expected


def test_without_a_step_all_are_summed_up(path):
    code, text = printed(path)
    assert code == 0
    line = next(line for line in text.splitlines() if 'solver' in line)
    cells = [cell.strip() for cell in line.strip('│').split('│')]
    assert cells == ['3', 'solver', '3', '27', '15', '6', '83%', '3', 'answer 2, length 1']


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (('--step', '4'), 'no rollouts of that step on disk (there are: 3 to 3)'),
        (('--step', '3', '--rollout', 'solver:q:0'), 'step 3 has challenger:p:0'),
        (('--step', '3', '--outcome', 'late'), 'no rollout of step 3 fits'),
    ],
)
def test_what_is_not_there_is_said(path, flags, message, capsys):
    code, _ = printed(path, *flags)
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert printed(tmp_path)[0] == 2
    assert 'holds no run' in capsys.readouterr().err
