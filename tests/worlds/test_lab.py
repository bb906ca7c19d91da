"""The embedded world: pure, fair, and solvable as its docstring says."""

import dataclasses

import numpy as np
import pytest

from sesa_jax.worlds import demonstrations, lab
from sesa_jax.worlds.search import Corpus

SEEDS = (0, 1, 2, 100)


@pytest.fixture(scope='module')
def world():
    return lab.build(100)


@pytest.fixture(scope='module')
def search(world):
    corpus = Corpus(world.documents)
    return lambda query: corpus.search([query], 2)[0]


def solve_all(world, search, questions, **options):
    rng = np.random.default_rng(0)
    right = []
    for question in questions:
        start = question.text.rstrip('.?').split()[-1]
        nouns = tuple(reversed([word for word in question.text.split() if word in world.relations]))
        _, answer = demonstrations.solve(world, search, start, nouns, question.text, rng, user='', **options)
        right.append(answer in question.answers)
    return float(np.mean(right))


def test_equal_seeds_give_equal_worlds_and_others_do_not(world):
    assert lab.build(100) == world
    assert lab.build(101).documents != world.documents


def test_the_words_of_both_halves_are_disjoint():
    warm, play = set(lab.words('warm')), set(lab.words('play'))
    assert not warm & play
    assert len(warm) == len(play) == lab.WORDS


def test_no_pair_of_syllables_tells_the_halves_apart():
    starts, ends = {}, {}
    for pool in ('warm', 'play'):
        triples = [lab.syllables(word) for word in lab.words(pool)]
        starts[pool], ends[pool] = {t[:2] for t in triples}, {t[1:] for t in triples}
        assert len(starts[pool]) > 0.9 * 6400
    # A pair that one half lacks, the other lacks by chance alone.
    for pairs in (starts, ends):
        assert len(pairs['warm'] & pairs['play']) > 0.9 * len(pairs['play'])


def test_syllables_put_a_word_together_again():
    for word in lab.words('play')[:500]:
        first, second, third = lab.syllables(word.capitalize())
        assert first + second + third == word.capitalize()
        assert (first.lower() in lab.STARTS, second in lab.ENDS, third in lab.ENDS) == (True, True, True)


@pytest.mark.parametrize('seed', SEEDS)
def test_warm_start_text_holds_no_word_of_a_play_world(seed):
    play = lab.build(seed)
    words = {name.lower() for name in play.types} | {k for r in play.relations.values() for k in r.keys or ()}
    for warm_seed in (10_000, 10_001):
        text = ' '.join(f'{d.title} {d.text}' for d in lab.build(warm_seed, pool='warm', size=0.35).documents).lower()
        assert not words & set(text.replace('.', ' ').replace(',', ' ').split())


def test_components_share_no_fact(world):
    assert all(world.parts[fact.subject] == world.parts[fact.object] for fact in world.facts)


def test_training_draws_nothing_that_is_held_out(world):
    targets = {target.answer for step in range(1, 60) for target in world.targets(16, step, seed=0)}
    questions = world.questions('train', 50, seed=0)
    assert len(targets) > 100
    for text in [*targets, *(q.text for q in questions), *(a for q in questions for a in q.answers)]:
        assert world.held_out_names.isdisjoint(text.strip('.?').split())


def test_held_out_questions_have_a_hundred_a_cell_and_one_gold(world):
    questions = world.questions('held_out', 100, seed=0)
    cells = {}
    for question in questions:
        cells.setdefault((question.kind, question.hops), []).append(question)
    assert {cell: len(of) for cell, of in cells.items()} == {(k, h): 100 for k in ('easy', 'hard') for h in (1, 2, 3)}
    assert len({q.id for q in questions}) == 600
    assert all(len(q.answers) == 1 for q in questions)


def test_hard_questions_have_exactly_one_hard_relation(world):
    hard = {noun for noun, relation in world.relations.items() if relation.is_hard}
    assert len(hard) == 8
    for question in world.questions('held_out', 100, seed=0):
        assert sum(word in hard for word in question.text.split()) == (question.kind == 'hard')


def test_key_words_hang_on_the_seed_and_belong_to_one_relation(world):
    keys = [key for relation in world.relations.values() for key in relation.keys or ()]
    assert len(set(keys)) == 16
    other = lab.build(101)
    assert {r.keys for r in world.relations.values()} & {r.keys for r in other.relations.values()} == {None}


def test_a_quarter_of_the_hard_facts_has_a_pointer():
    shares = []
    for seed in SEEDS:
        world = lab.build(seed)
        shares.append(len(world.pointers) / sum(world.relations[f.relation].is_hard for f in world.facts))
    assert 0.2 < np.mean(shares) < 0.3
    assert lab.build(100, pointer_share=0.0).pointers == frozenset()
    with pytest.raises(ValueError, match=r'pointer_share is 1\.5'):
        lab.build(100, pointer_share=1.5)


def test_pointers_stand_in_the_own_passage_alone(world):
    for name in sorted(world.pointers)[:40]:
        (hard,) = [n for n in world.forward[name] if world.relations[n].is_hard]
        keys = ' '.join(world.relations[hard].keys)
        (own,) = [d for d in world.documents if d.title == name]
        assert keys in own.text
    plain = next(
        f.subject for f in world.facts if world.relations[f.relation].is_hard and f.subject not in world.pointers
    )
    (own,) = [d for d in world.documents if d.title == plain]
    assert not any(' '.join(r.keys) in own.text for r in world.relations.values() if r.keys)


def test_scripted_players_give_the_scale(world, search):
    questions = world.questions('held_out', 60, seed=0)
    easy, hard = [[q for q in questions if q.kind == kind] for kind in ('easy', 'hard')]
    assert solve_all(world, search, easy) >= 0.95
    assert solve_all(world, search, hard) <= 0.02
    assert solve_all(world, search, hard, knows_keys=True) >= 0.9


def test_key_words_of_the_wrong_relation_do_not_help(world, search):
    swapped = dict(world.relations)
    hard = [noun for noun, relation in world.relations.items() if relation.is_hard]
    for noun, other in zip(hard, hard[1:] + hard[:1], strict=True):
        swapped[noun] = dataclasses.replace(world.relations[noun], keys=world.relations[other].keys)
    found = [
        any(f.object in d.text and d.title == ' '.join(world.relations[f.relation].keys) for d in search(query))
        for f in world.facts
        if f.relation in hard
        for query in [f'{f.subject} {" ".join(swapped[f.relation].keys)}']
    ]
    assert np.mean(found) <= 0.02


def test_passages_fit_the_observation_budget(world):
    assert max(len(f'{d.title} {d.text}'.split()) for d in world.documents) <= 45


def test_a_card_reader_solves_what_its_card_is_about(world, search):
    rng = np.random.default_rng(0)
    fact = next(f for f in world.facts if f.relation == 'founder' and f.subject not in world.pointers)
    card = demonstrations.make_card('founder', '{entity} ' + ' '.join(world.relations['founder'].keys), rng)
    script, answer = demonstrations.solve(
        world, search, fact.subject, ('founder',), '', rng, user='', cards=[card]
    )  # fmt: skip
    assert answer == fact.object
    assert [text for kind, text in script.segments if kind == 'search'] == [
        f'{fact.subject} {" ".join(world.relations["founder"].keys)}'
    ]


def test_a_scripted_challenger_asks_what_has_its_target_as_answer(world, search):
    rng = np.random.default_rng(0)
    asked = 0
    for target in world.targets(40, step=1, seed=0):
        _, chain = demonstrations.challenge(world, search, target.answer, target.hops, rng, user='')
        if chain is not None:
            asked += 1
            at, nouns = chain
            for noun in nouns:
                at = world.forward[at][noun]
            assert at == target.answer
    assert asked >= 20
