"""The warm start: the lab's stream is the one that made `tiny`, real demonstrations really search, and a kill costs nothing."""

import hashlib
import itertools
import json
import pathlib

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

    class Killed(BaseException):
        pass

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


def test_nothing_to_resume_is_said(tmp_path, capsys):
    assert warm_start.main(['--resume', str(tmp_path / 'none')]) == 2
    assert 'nothing to resume' in capsys.readouterr().err


def test_the_recipe_is_the_labs_unless_something_else_is_named(tmp_path):
    assert isinstance(warm_start.recipe_of([str(tmp_path)]), warm_start_lab.Recipe)
    recipe = warm_start.recipe_of(['--model', 'x', '--world', 'wiki', str(tmp_path)])
    assert (type(recipe), recipe.model, recipe.world) == (warm_start.Recipe, 'x', 'wiki')
    plain = json.loads(json.dumps(vars(warm_start.recipe_of([str(tmp_path)])), default=str))
    assert (plain['steps'], plain['learning_rate'], plain['world_size']) == (9000, 0.02, 0.35)
