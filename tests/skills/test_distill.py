"""The offline distiller: what is a lesson, and what is not."""

from sesa_jax.records import Document, Failure, Target
from sesa_jax.skills import distill
from sesa_jax.skills.bank import Bank
from sesa_jax.skills.card import problems


def failure(question, answer, evidence, queries=('Velmar founder',), rollout='solver:s00001-p000:0'):
    documents = tuple(Document(f'd{i}', title, text) for i, (title, text) in enumerate(evidence))
    return Failure(rollout, 1, question, Target(answer), 'Wrong', documents, tuple(queries), (), 0)


POINTER = ('Velmar', 'Velmar is a company begun long ago. its founder is kept in the charter roll. it is old.')
DECOY = ('Velmar founder', 'some say Velmar was begun by Tikon, the founder of Velmar.')


def test_a_pointer_becomes_a_card_with_its_place():
    (draft,) = distill.distill([failure('Who is the founder of Velmar?', 'Gosbix', [DECOY, POINTER])])
    assert draft.queries == ('{entity} charter roll',)
    assert draft.trigger == 'a question asks for the founder'
    assert draft.avoid == '{entity} founder'
    assert draft.rollout_ids == ('solver:s00001-p000:0',)
    assert problems(draft) == []


def test_wordings_that_the_rules_do_not_name():
    for sentence in (
        'one finds the founder under charter roll.',
        'the charter roll gives the founder.',
        'ask the charter roll about its founder.',
        'in the charter roll you will meet its founder.',
    ):
        drafts = distill.distill([failure('Name the founder of Velmar.', 'Gosbix', [('Velmar', sentence)])])
        assert [d.queries for d in drafts] == [('{entity} charter roll',)], sentence


def test_the_relation_of_the_pointer_is_the_one_that_the_card_is_about():
    chain = failure('Who is the mentor of the founder of Velmar?', 'Gosbix', [DECOY, POINTER])
    (draft,) = distill.distill([chain])
    assert draft.trigger.endswith('the founder')


def test_a_pointer_that_was_followed_is_no_lesson():
    followed = failure('Who is the founder of Velmar?', 'Gosbix', [POINTER], ['Velmar founder', 'Velmar charter roll'])
    assert distill.distill([followed]) == []


def test_a_source_that_states_the_target_becomes_a_card():
    record = ('charter roll', 'Velmar was begun by Gosbix.')
    (draft,) = distill.distill([failure('Who is the founder of Velmar?', 'Gosbix', [record])])
    assert draft.queries == ('{entity} charter roll',)


def test_hearsay_and_plain_facts_are_no_lessons():
    fact = ('Velmar', 'Velmar is a company begun long ago. its founder is Gosbix.')
    assert distill.distill([failure('Who is the founder of Velmar?', 'Gosbix', [DECOY])]) == []
    assert distill.distill([failure('Who is the founder of Velmar?', 'Gosbix', [fact])]) == []


def test_equal_lessons_are_merged_with_all_their_rollouts():
    first = failure('Who is the founder of Velmar?', 'Gosbix', [POINTER], rollout='a')
    other = ('Ralgik', 'see the charter roll for the founder.')
    second = failure('Name the founder of Ralgik.', 'Tikon', [other], rollout='b')
    (draft,) = distill.distill([first, second])
    assert draft.rollout_ids == ('a', 'b')
    assert draft.source_question_hash == first.question_hash


def test_a_query_that_worked_is_mined():
    right = failure('What is the capital of Funtok?', 'Kimzan', [], ['Funtok capital'])
    (draft,) = distill.mine([right])
    assert draft.queries == ('{entity} capital',)
    assert draft.avoid == ''


def test_nothing_is_mined_from_a_chain_of_relations():
    chain = failure('What is the capital of the country of Kimzan?', 'Kimzan', [], ['Kimzan country', 'Funtok capital'])
    assert distill.mine([chain]) == []


def test_a_mined_card_is_shown_for_none_of_the_questions_that_it_came_from(tmp_path):
    questions = [f'What is the capital of {name}?' for name in ('Funtok', 'Velmar', 'Ralgik')]
    successes = [
        failure(question, 'Kimzan', [], [f'{question.split()[-1][:-1]} capital'], rollout=f'r{i}')
        for i, question in enumerate(questions)
    ]
    mined = distill.mine(successes)
    assert [draft.source_question_hashes for draft in mined] == [tuple(sorted(s.question_hash for s in successes))]
    with Bank.create(tmp_path / 'bank.db', mined) as bank:
        snapshot = bank.snapshot()
        assert [len(snapshot.retrieve(question, 1)) for question in questions] == [0, 0, 0]
        assert len(snapshot.retrieve('What is the capital of Orsk?', 1)) == 1
