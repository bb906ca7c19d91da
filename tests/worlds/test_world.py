"""Which world a run plays in, what is refused, and a whole run on people's own files."""

import json
import subprocess
import sys

import pytest
import runs
from assets import QA, needs_qa

from experiments import train
from sesa_jax import config, door, worlds
from sesa_jax.command import from_command_line
from sesa_jax.config import ConfigError
from sesa_jax.run.folder import RunFolder
from sesa_jax.selfplay import checks
from sesa_jax.worlds import files, lab

FILES = ('--world', 'files')


@pytest.fixture
def own(tmp_path):
    """Flags of a small world of files."""
    rows = {
        'corpus': [{'title': f'Town{i}', 'text': f'Town{i} was founded by Person{i}.'} for i in range(12)],
        'answers': [{'answer': f'Person{i}', 'hops': 1} for i in range(12)],
        'questions': [
            {'question': f'Who founded Town{i}?', 'answer': f'Person{i}', 'split': 'test' if i < 4 else 'train'}
            for i in range(12)
        ],
    }
    for name, items in rows.items():
        (tmp_path / name).write_text('\n'.join(map(json.dumps, items)))
    return tmp_path, (*FILES, *(part for name in rows for part in (f'--{name}', str(tmp_path / name))))


# --- names and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('flags', 'name', 'size'),
    [
        ([], 'lab', 'lab'),
        (['--model', 'some/folder'], 'wiki', 'paper'),
        (['--model', 'some/folder', '--size', 'small'], 'wiki', 'small'),
        (['--world', 'wiki'], 'wiki', 'paper'),
        (['--world.name', 'wiki'], 'wiki', 'paper'),
        (['--model', 'some/folder', '--world', 'lab'], 'lab', 'paper'),
    ],
)
def test_tiny_plays_on_the_lab_and_any_other_model_on_wikipedia(flags, name, size):
    run = from_command_line(flags)
    assert run.world.name == name
    assert (run.problems, run.prompt_style) == {'lab': (16, 'short'), 'paper': (256, 'full'), 'small': (4, 'full')}[
        size
    ]


@pytest.mark.parametrize('prefix', ['--', '--world.'])
def test_the_short_and_the_long_spelling_are_the_same(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = from_command_line([*FILES, f'{prefix}corpus', 'c', f'{prefix}answers', 'a', f'{prefix}questions', 'q'])
    world = run.world
    assert (world.corpus, world.answers, world.questions) == tuple(str(tmp_path / name) for name in 'caq')


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ([*FILES], '--world files needs --corpus FILE'),
        (
            [*FILES, '--corpus', 'c'],
            '--world files needs --answers FILE: target answers for the self-play of --method sesa',
        ),
        ([*FILES, '--corpus', 'c', '--method', 'ssp', '--questions', 'q'], 'needs --answers FILE'),
        ([*FILES, '--corpus', 'c', '--method', 'search-r1', '--answers', 'a'], 'needs --questions FILE'),
        (['--corpus', 'c'], '--corpus is for --world files, but the world is lab'),
        (['--world', 'wiki', '--questions', 'q'], '--questions is for --world files, but the world is wiki'),
        (['--world', 'wiki', '--world.pointer-share', '0.5'], '--world.pointer-share is for --world lab'),
    ],
)
def test_pairs_that_cannot_work_are_refused(flags, said):
    with pytest.raises(ConfigError) as error:
        from_command_line(flags)
    assert said in str(error.value)


def test_an_unknown_world_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        from_command_line(['--world', 'moon'])
    assert "('lab', 'wiki', 'files')" in capsys.readouterr().err


def test_build_knows_each_name(own):
    _, flags = own
    assert isinstance(worlds.build(from_command_line([])), lab.World)
    world = worlds.build(from_command_line(flags))
    assert isinstance(world, files.World)
    assert world.held_out_names == {f'Person{i}' for i in range(4)}
    assert {t.answer for t in world.targets(8, 1, 0)} == {f'Person{i}' for i in range(4, 12)}


def test_a_missing_file_makes_no_run_folder(own, capsys):
    path, flags = own
    (path / 'answers').unlink()
    assert train.main([*flags, '--run-dir', str(path / 'run')]) == 2
    assert 'answers' in capsys.readouterr().err
    assert not (path / 'run').exists()


def test_a_method_without_self_play_needs_a_question_to_train_on(own):
    path, flags = own
    (path / 'questions').write_text(json.dumps({'question': 'Who?', 'answer': 'b', 'split': 'test'}))
    run = from_command_line([*flags, '--method', 'search-r1'])
    with pytest.raises(ConfigError, match='all of them are held out'):
        worlds.training_questions(run, worlds.build(run))


def test_worlds_start_no_device():
    modules = 'wiki, files, lab, demonstrations, wiki_demonstrations'
    code = f'import sys; from sesa_jax.worlds import {modules}; print("jax" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'False'


# --- digests ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_world_and_refuses_files_that_changed(own, capsys):
    path, flags = own
    run = worlds.pin(from_command_line([*flags, '--run-dir', str(path / 'run')]))
    assert [len(digest) for digest in run.world.digests] == [64, 64, 64]
    assert config.from_json(json.loads(json.dumps(config.to_json(run)))) == run
    with RunFolder.create(path / 'run', config.to_json(run)):
        pass
    resume = ['--run-dir', str(path / 'run'), '--resume']
    again = from_command_line(resume, saved=run)
    door.refuse_changes(again, run)
    assert worlds.build(again).documents == worlds.build(run).documents

    other = from_command_line(
        [*resume, '--world', 'lab', '--corpus', '', '--answers', '', '--questions', ''], saved=run
    )
    with pytest.raises(ConfigError, match=r"world\.name is 'lab' here, but 'files'"):
        door.refuse_changes(other, run)

    with open(path / 'questions', 'a') as file:
        file.write('\n')
    assert train.main(resume) == 2
    said = capsys.readouterr().err
    assert f'the questions of --world files changed since this run began ({path / "questions"})' in said


# --- whole runs -------------------------------------------------------------------------------------------------------

SMALL = (
    '--size', 'small', '--prompt-style', 'short', '--lengths.prompt', '512', '--lengths.observation', '160',
    '--lengths.documents', '1', '--challenger.min-searches', '1', '--challenger.min-words', '5', '--report',
    '--evaluation.per-cell', '3', '--validate-every', '2',
)  # fmt: skip


@pytest.mark.slow
@needs_qa
@pytest.mark.parametrize('method', ['search-r1', 'sesa'])
def test_two_steps_on_hotpot_and_musique(method, tmp_path):
    """Their paragraphs are the corpus, titles of paragraphs the answers, their questions the questions."""
    mixed = tmp_path / 'rows.jsonl'
    mixed.write_text(''.join((QA / f'migres_{name}_200.jsonl').read_text() for name in ('hotpot', 'musique')))
    answers = tmp_path / 'answers.jsonl'
    titles = sorted({document.title for document in files.read_corpus(mixed)})
    answers.write_text('\n'.join(json.dumps({'answer': title, 'hops': 2}) for title in titles))
    flags = (*FILES, '--corpus', str(mixed), '--answers', str(answers), '--questions', str(mixed))
    played = runs.play(tmp_path / 'run', *flags, *SMALL, '--problems', '4', '--method', method)
    world = worlds.build(played.run)
    assert len(played.metrics) == 2
    for row in played.metrics:
        if method == 'sesa':
            asked = row['challenger']
            assert asked['issued'] == 4 == asked['valid'] + sum(asked['rejected'].values())
            assert set(asked['rejected']) <= set(checks.REASONS)
        else:
            assert row['solver']['issued'] == 12
            assert {q['question'] for q in played.questions(row['step'])} <= {
                q.text for q in world.questions('train', 10**6, 0)
            }
        for update in row['update'].values():
            assert update['skipped_steps'] == 0
        if not any(update['optimizer_steps'] for update in row['update'].values()):  # nothing to learn from
            before, after = (played.record(step)['checkpoint'] for step in (row['step'] - 1, row['step']))
            assert before == after  # the digest of all parameters and moments
    measured = json.loads(played.folder.evaluation.read_text())
    assert set(measured['rates']['base']) == {'total', 'all', 'all/2', 'all/3', 'all/4'}
    assert measured['rates']['base']['total']['n'] == 9
