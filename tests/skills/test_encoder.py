import dataclasses

import numpy as np
import pytest
from skills_toy import TableEncoder, draft

from sesa_jax.records import text_hash
from sesa_jax.skills import priming
from sesa_jax.skills.card import Card, DraftCard
from sesa_jax.skills.encoder import E5, Hashing, Index, get_encoder, index_of

RELATIONS = ['founder', 'planner', 'patron', 'surveyor', 'composer', 'rector', 'illustrator', 'mentor']
KEYS = tuple(f'{start}{end}' for start in ('vel', 'dor', 'sag', 'tar', 'rud') for end in ('mar', 'vin', 'rum', 'nix'))
TRIGGERS = (
    'a question asks for the {}',
    'the {} is asked for',
    'you look for the {}',
    'a hop needs the {} of {{entity}}',
    'asked who or what the {} is',
)


def lesson(relation: str, keys: str, wording: int = 0) -> DraftCard:
    return DraftCard(
        description=f'The {relation} is found with {keys}.',
        trigger=TRIGGERS[wording].format(relation),
        masked_question=f'Who is the {relation} of {{entity}}?',
        queries=(f'{{entity}} {keys}',),
    )


def as_cards(drafts):
    fields = [f.name for f in dataclasses.fields(DraftCard)]
    return [Card(id=f'c{i:05d}', **{n: getattr(d, n) for n in fields}) for i, d in enumerate(drafts)]


@pytest.fixture(scope='module')
def lessons():
    """Eight relations, each with key words of its own."""
    return [lesson(relation, f'{KEYS[2 * i]} {KEYS[2 * i + 1]}') for i, relation in enumerate(RELATIONS)]


def banks():
    return {'empty': [], 'handwritten': priming.handwritten()}


@pytest.mark.parametrize('known', banks().values(), ids=banks())
def test_the_same_lesson_in_another_wording_is_a_duplicate(known):
    encoder = Hashing()
    for i, relation in enumerate(RELATIONS):
        keys = f'{KEYS[2 * i]} {KEYS[2 * i + 1]}'
        for wording in range(1, len(TRIGGERS)):
            pair = [lesson(relation, keys), lesson(relation, keys, wording)]
            assert encoder.similarity(pair, known)[0, -1] > encoder.threshold


@pytest.mark.parametrize('known', banks().values(), ids=banks())
def test_other_key_words_or_another_relation_make_another_lesson(known):
    encoder = Hashing()
    for i, relation in enumerate(RELATIONS):
        mine, others = f'{KEYS[2 * i]} {KEYS[2 * i + 1]}', f'{KEYS[2 * i + 2]} {KEYS[2 * i + 3]}'
        neighbour = RELATIONS[i - 1]
        for other in (lesson(neighbour, others), lesson(relation, others), lesson(neighbour, mine)):
            assert encoder.similarity([lesson(relation, mine), other], known)[0, -1] < encoder.threshold


def test_cosines_are_of_unit_vectors_in_double_precision(lessons):
    cosines = Hashing().similarity(lessons, priming.handwritten())
    assert cosines.dtype == np.float64
    np.testing.assert_allclose(np.diag(cosines[:, 15:]), 1, atol=1e-12)
    np.testing.assert_array_equal(cosines[:, 15:], cosines[:, 15:].T)


def test_one_card_alone_has_a_vector(lessons):
    assert Hashing().similarity(lessons[:1], ())[0, 0] == pytest.approx(1)
    assert index_of(as_cards(lessons[:1])).retrieve('Who is the founder of Zarn?', 3)[0][1] > 0.3


def test_the_right_card_is_among_the_first_three_of_a_hundred(lessons):
    noise = [
        lesson(f'{a}{b}', f'{b} {a}', (i + j) % len(TRIGGERS))
        for i, a in enumerate(KEYS[:9])
        for j, b in enumerate(KEYS[11:20])
    ]
    drafts = [*priming.handwritten(), *lessons, *noise][:100]
    index = index_of(as_cards(drafts))
    frames = (
        'Who is the {} of Zormak?',
        'Name the {} of the employer of Zormak.',
        'Tell me the {} of the birthplace of the author of Zormak.',
    )
    hits = [
        relation in [card.trigger.split()[-1] for card, _ in index.retrieve(frame.format(relation), 3)]
        for relation in RELATIONS
        for frame in frames
    ]
    assert len(drafts) == 100
    assert np.mean(hits) >= 0.9


def test_rarity_in_the_snapshot_outweighs_phrases_that_many_cards_share(lessons):
    frame = 'Tell me the {} of the birthplace of the author of {}.'
    noise = [
        dataclasses.replace(lesson(word, f'{word}x', 1), masked_question=frame.format(word, '{entity}'))
        for word in KEYS
    ]
    index = index_of(as_cards([*lessons, *noise]))
    found = [index.retrieve(frame.format(relation, 'Zormak'), 1)[0][0].trigger for relation in RELATIONS]
    assert found == [card.trigger for card in lessons]


def test_templates_count_twice_for_duplicates():
    """So that short cards with the same template are alike in any wording, and with other key words are not."""

    def short(trigger, keys):
        return draft(trigger, description='how to find the founder', queries=(f'{{entity}} {keys}',))

    first = short('a question asks for the founder of {entity}', 'velmar tikon')
    encoder, known = Hashing(), priming.handwritten()
    for trigger in (
        'you need the founder of {entity}',
        'the founder is asked for',
        'somebody wants to know the founder',
    ):
        assert encoder.similarity([first, short(trigger, 'velmar tikon')], known)[0, -1] > encoder.threshold
    assert encoder.similarity([first, short(first.trigger, 'dorvin pellak')], known)[0, -1] < 0.6


def table_index(triggers, **sources):
    cards = [
        Card(id=f'c{i}', description='d', trigger=t, queries=('{x}',), source_question_hash=sources.get(t, ''))
        for i, t in enumerate(triggers)
    ]
    return Index(list(reversed(cards)), TableEncoder())


def ids(found):
    return [card.id for card, _ in found]


def test_retrieval_is_best_first_and_ties_go_by_id():
    assert ids(table_index('abcde').retrieve('e=0.5 b=0.5 c=0.9 a=0.1', 4)) == ['c2', 'c1', 'c4', 'c0']


def test_retrieval_returns_the_cosines():
    assert [cosine for _, cosine in table_index('ab').retrieve('a=0.25 b=0.5', 3)] == [0.5, 0.25]


@pytest.mark.parametrize(('size', 'expected'), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_top_three_of_a_small_bank_is_the_bank(size, expected):
    assert len(table_index('abcd'[:size]).retrieve('what?', 3)) == expected
    assert len(index_of(as_cards([draft(t) for t in 'abcd'[:size]])).retrieve('what?', 3)) == expected


def test_a_card_is_never_retrieved_for_its_own_question():
    index = table_index('ab', b=text_hash('b=0.9 Who?'))
    assert ids(index.retrieve('b=0.9 Who?', 2)) == ['c0']
    assert ids(index.retrieve('b=0.9  WHO?', 2)) == ['c0']  # the hash folds case and spaces
    assert ids(index.retrieve('b=0.9 Who then?', 2)) == ['c1', 'c0']


def test_a_card_made_of_several_failures_is_retrieved_for_none_of_their_questions():
    card = Card(
        id='c1',
        description='d',
        trigger='a',
        queries=('{x}',),
        source_question_hashes=(text_hash('one'), text_hash('two')),
    )
    index = Index([card], TableEncoder())
    assert [len(index.retrieve(question, 3)) for question in ('one', 'two', 'three')] == [0, 0, 1]


def test_further_questions_can_be_excluded():
    index = table_index('ab', b=text_hash('other'))
    assert ids(index.retrieve('b=0.9', 2, exclude=[text_hash('other')])) == ['c0']


def test_a_dense_encoder_normalises_and_caches_its_passages():
    calls = []

    def passage(texts):
        calls.append(list(texts))
        return np.array([[3.0, 4.0] if 'a' in text.split() else [0.0, 2.0] for text in texts], np.float32)

    encoder = E5('toy', lambda texts: np.array([[1.0, 0.0]]), passage)
    cards = [draft('a'), draft('b')]
    np.testing.assert_allclose(encoder.index(cards)('question'), [0.6, 0.0])
    np.testing.assert_allclose(encoder.similarity(cards[:1], cards[1:]), [[0.8, 1.0]])
    assert calls == [[card.text for card in cards]]
    assert encoder.threshold == 0.93


def test_no_drafts_have_no_cosines():
    dense = E5('toy', lambda texts: np.ones((1, 2)), lambda texts: np.ones((len(texts), 2)))
    for encoder in (Hashing(), dense):
        assert encoder.similarity([], [draft('a')]).shape == (0, 1)
        assert encoder.index([])('question').shape == (0,)


def test_an_unknown_encoder_is_named():
    with pytest.raises(ValueError, match=r"'bm25'; there are hashing, e5-small and e5-base-v2"):
        get_encoder('bm25')
