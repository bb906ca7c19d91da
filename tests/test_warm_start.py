"""The warm start: the lab's stream is the one that made `tiny`, real demonstrations really search, and a kill costs nothing."""

import gc
import hashlib
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assets import needs_wiki

import sesa_jax
from experiments import warm_start, warm_start_lab
from sesa_jax.config import Challenger
from sesa_jax.host import judge
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.records import Search, Target, Trajectory, Turn
from sesa_jax.rollout.episode import parse_turn
from sesa_jax.run import checkpoint
from sesa_jax.selfplay import checks
from sesa_jax.worlds import demonstrations, wiki
from sesa_jax.worlds.naming import names_one_of
from sesa_jax.worlds.search import Corpus

TINY = pathlib.Path(sesa_jax.__file__).parent / 'assets' / 'tiny'
STREAM = '8eaf905dd9f962190ca782a2ed1083432994d6db9e28ee7a1f73ed9873ba6549'


def test_the_stream_of_the_lab_is_the_one_that_made_tiny():
    """Digest of the first 30 batches, taken before the recipe was moved into a file of its own."""
    digest = hashlib.sha256()
    for batch in itertools.islice(
        warm_start_lab.batches(Tokenizer(TINY), warm_start_lab.Recipe(out=TINY, steps=40)), 30
    ):
        for array in batch:
            digest.update(array.tobytes())
    assert digest.hexdigest() == STREAM


@pytest.fixture(scope='module')
def world():
    return wiki.build(0)


@pytest.fixture(scope='module')
def shown(world):
    from sesa_jax.worlds.wiki_demonstrations import Players, stream

    return list(itertools.islice(stream(Players(world, 3), seed=0, step=1), 80))


def is_challenger(demonstration) -> bool:
    return '\nTarget answer: ' in demonstration.user


def turns(demonstration):
    """(kind, content) of each turn, read as a rollout's turns are read."""
    role = 'challenger' if is_challenger(demonstration) else 'solver'
    acts = [text for kind, text in demonstration.segments if kind == 'act']
    return [parse_turn(text, role) for text in acts]


def searches(demonstration):
    return [segment for _, segment in demonstration.segments if isinstance(segment, Search)]


@needs_wiki
def test_each_demonstration_searches_and_reads_what_it_says(world, shown):
    corpus = Corpus(world.documents)
    assert 15 < sum(map(is_challenger, shown)) < 45
    for demonstration in shown:
        found = searches(demonstration)
        *before, (last, final) = turns(demonstration)
        assert [('search', search.query) for search in found] == before
        assert last == ('question' if is_challenger(demonstration) else 'answer')
        assert [tuple(d) for d in corpus.search([search.query for search in found], 3)] == [s.documents for s in found]
        read = ' '.join(search.text for search in found)
        if last == 'answer':
            assert final in read
        for _, think in (segment for segment in demonstration.segments if segment[0] == 'think'):
            named = [
                name for name in world.names if f'names {name},' in think or think.startswith(f'<think> {name} is ')
            ]
            assert all(name in read for name in named)
        assert not names_one_of(final, world.held_out_names)


@needs_wiki
def test_the_game_accepts_most_of_the_questions_that_are_demonstrated(world, shown):
    posed = [d for d in shown if is_challenger(d)]
    materials = [[search.text for search in searches(d)] for d in posed]
    accepted = 0
    for i, demonstration in enumerate(posed):
        answer = demonstration.user.split('\nTarget answer: ')[1].split('\n')[0]
        target = Target(answer, world.aliases(answer))
        question = turns(demonstration)[-1][1]
        row = Trajectory(
            'challenger', 'p', 0, np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), 0,
            (Turn('question', question, 0, 1),), tuple(searches(demonstration)), (), 'question', 0, 0,
        )  # fmt: skip
        assert checks.fault(row, target, Challenger(), world.held_out_names) is None, question
        noise = ['\n\n'.join(materials[(i + k) % len(posed)]) for k in range(1, 5)]
        verdict = judge.verify(question=question, golds=target.golds, materials=materials[i], noise=noise, seed=i)
        accepted += verdict.outcome == 'accept'
    assert accepted >= 0.75 * len(posed)


@needs_wiki
def test_a_demonstration_is_learned_where_the_policy_acts(shown):
    tokenizer = Tokenizer(TINY)
    weight_of = {'context': 0.0, 'observation': 0.0, 'think': 1.0, 'act': 1.0}
    for demonstration in shown[:8]:
        ids, weights = demonstrations.encode(demonstration, tokenizer, weight_of, 500)
        prompt = tokenizer.chat(None, demonstration.user)
        assert ids[: len(prompt)].tolist() == prompt
        learned = tokenizer.decode(ids[weights > 0])
        assert learned == ''.join(text for kind, text in demonstration.segments if kind in ('think', 'act'))


class Killed(BaseException):
    pass


COURSES = {
    'wiki': ('--model', 'tiny', '--world', 'wiki', '--rows', '2', '--documents', '1', '--observation', '128',
             '--learning-rate', '1e-3', '--warmup', '1', '--tokens', '2048'),
    'lab': ('--start', str(TINY), '--tokens', '640', '--warmup', '1'),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('course', ['lab', pytest.param('wiki', marks=needs_wiki)])
def test_killed_and_resumed_it_ends_with_the_same_bytes(course, tmp_path, monkeypatch, capsys):
    flags = (*COURSES[course], '--steps', '3', '--checkpoint-every', '2', '--say-every', '1')
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert warm_start.main([*flags, str(whole)]) == 0
    assert 'step 3/3 loss' in capsys.readouterr().out
    assert not (whole / 'checkpoints').exists()
    before, after = ((folder / 'model.safetensors').read_bytes() for folder in (TINY, whole))
    assert len(before) == len(after) and before != after

    tell = warm_start.Teller.step

    def dies(teller, step, *arguments, **options):
        if step == 3:
            raise Killed
        tell(teller, step, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(warm_start.Teller, 'step', dies)
        warm_start.main([*flags, str(broken)])
    assert [child.name for child in (broken / 'checkpoints').iterdir()] == ['00002']
    assert warm_start.main([*flags, str(broken)]) == 2  # without --resume
    assert warm_start.main([*flags, '--seed', '3', '--resume', str(broken)]) == 2  # another stream
    assert warm_start.main([*flags, '--resume', str(broken)]) == 0
    assert (broken / 'model.safetensors').read_bytes() == after


SIZE = 100_003  # of an array that no other test has


@pytest.fixture
def counting(monkeypatch):
    """In place of a policy, an array to which every step adds 1; what was exported."""
    exported = []

    def prepare(recipe):
        update = lambda state, batch: ({'x': state['x'] + 1}, {'loss': 0.0})  # noqa: E731
        export = lambda state: exported.append(float(state['x'][0]))  # noqa: E731
        return {'x': jnp.zeros(SIZE)}, lambda done: itertools.count(done + 1), update, export

    monkeypatch.setattr(warm_start_lab, 'prepare', prepare)
    return exported


def dies(*_, **__):
    raise Killed


@pytest.mark.parametrize('is_written', [False, True])
def test_killed_while_it_writes_its_plan_it_can_begin_again(counting, tmp_path, monkeypatch, is_written):
    write = warm_start.write_atomic
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(warm_start, 'write_atomic', lambda *arguments: (is_written and write(*arguments), dies()))
        warm_start.main(['--steps', '2', str(tmp_path / 'a')])
    assert warm_start.main(['--steps', '2', str(tmp_path / 'a')]) == 0
    assert counting == [2.0]


def test_killed_before_its_first_checkpoint_it_is_resumed_from_the_beginning(counting, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(warm_start, 'teach', dies)
        warm_start.main(['--steps', '2', str(tmp_path / 'a')])
    assert warm_start.main(['--steps', '2', '--resume', str(tmp_path / 'a')]) == 0
    assert counting == [2.0]


def test_checkpoints_without_a_plan_are_refused(tmp_path, capsys):
    (tmp_path / 'checkpoints').mkdir()
    assert warm_start.main(['--resume', str(tmp_path)]) == 2
    assert f'warm_start.json is missing, so nobody knows its flags; remove {tmp_path}' in capsys.readouterr().err


@pytest.mark.parametrize('is_damaged', [False, True])
def test_while_a_checkpoint_is_read_no_other_state_is_in_memory(counting, tmp_path, monkeypatch, is_damaged):
    flags, there = ['--steps', '3', str(tmp_path)], []
    assert warm_start.main(['--stop', '2', *flags]) == 0
    if is_damaged:
        (tmp_path / 'checkpoints' / '00002' / 'manifest.json').write_text('{}')
    restore = checkpoint.restore

    def count():
        there.append(sum(array.shape == (SIZE,) for array in jax.live_arrays()))

    monkeypatch.setattr(checkpoint, 'restore', lambda *arguments: (count(), restore(*arguments))[1])
    gc.collect()
    count()
    assert warm_start.main(['--resume', *flags]) == 0
    assert len(there) == 2 and there[0] == there[1]
    assert counting == [2.0, 3.0]


def test_nothing_to_resume_is_said(tmp_path, capsys):
    assert warm_start.main(['--resume', str(tmp_path / 'none')]) == 2
    assert 'nothing to resume' in capsys.readouterr().err


def test_the_recipe_is_the_labs_unless_something_else_is_named(tmp_path):
    assert isinstance(warm_start.recipe_of([str(tmp_path)]), warm_start_lab.Recipe)
    recipe = warm_start.recipe_of(['--model', 'x', '--world', 'wiki', str(tmp_path)])
    assert (type(recipe), recipe.model, recipe.world) == (warm_start.Recipe, 'x', 'wiki')
    plain = json.loads(json.dumps(vars(warm_start.recipe_of([str(tmp_path)])), default=str))
    assert (plain['steps'], plain['learning_rate'], plain['world_size']) == (9000, 0.02, 0.35)
