"""People's own files: each format that is promised, each fault with its place, and a split that does not leak."""

import json
import pathlib

import pytest
from assets import QA, needs_qa

from sesa_jax.config import ConfigError
from sesa_jax.evals import dual_path
from sesa_jax.records import Document, Question, Target
from sesa_jax.worlds import files
from sesa_jax.worlds.naming import names_one_of


def lines(path: pathlib.Path, *rows) -> str:
    path.write_text('\n'.join(json.dumps(row) for row in rows) + '\n')
    return str(path)


CORPORA = {
    'search-r1': ({'id': '7', 'contents': '"Evan Morris"\nHe was a lobbyist.'}, [('7', 'Evan Morris', 'He was a lobbyist.')]),
    'one line': ({'id': 7, 'contents': 'only text'}, [('7', '', 'only text')]),
    'title, text': ({'title': 'Velmar', 'text': 'A city.'}, [('p0-0', 'Velmar', 'A city.')]),
    'hotpot': ({'context': [['A', ['One.', ' Two.']], ['B', ['Three.']], ['A', ['One.', 'Two.']]]},
               [('p0-0', 'A', 'One. Two.'), ('p0-1', 'B', 'Three.')]),
    'hotpot of datasets': ({'context': {'title': ['A'], 'sentences': [['One.']]}}, [('p0-0', 'A', 'One.')]),
    'musique': ({'id': '2hop', 'paragraphs': [{'title': 'A', 'paragraph_text': 'x'}, {'title': 'B', 'paragraph_text': 'y'}]},
                [('p0-0', 'A', 'x'), ('p0-1', 'B', 'y')]),
    'popqa': ({'paragraphs': [{'title': 'A', 'text': 'x'}, {'title': 'C', 'text': 'z'}]},
              [('p0-0', 'A', 'x'), ('p0-1', 'C', 'z')]),
}  # fmt: skip


@pytest.mark.parametrize('name', CORPORA)
def test_each_format_of_a_corpus(name, tmp_path):
    row, expected = CORPORA[name]
    assert files.read_corpus(lines(tmp_path / 'c.jsonl', row)) == tuple(Document(*d) for d in expected)


ANSWERED = {
    'golden_answers': ({'golden_answers': ['a', 'b']}, ('a', 'b'), 1),
    'answers': ({'answers': ['a']}, ('a',), 1),
    'possible_answers': ({'possible_answers': '["a", "b"]', 'obj': 'c'}, ('a', 'b'), 1),
    'answer': ({'answer': 'a', 'answer_aliases': ['b', 'a'], 'question_decomposition': [1, 2, 3]}, ('a', 'b'), 3),
    'list as text': ({'answer': "['Mr Antolini', \"Salinger's\"]"}, ('Mr Antolini', "Salinger's"), 1),
    'brackets that are no list': ({'answer': '[sic] a]'}, ('[sic] a]',), 1),
    'triviaqa': ({'answer': {'value': 'a', 'aliases': ['b']}}, ('a', 'b'), 1),
    'number': ({'answer': 1969, 'hops': 2}, ('1969',), 2),
    'short_answers': ({'short_answers': ['a']}, ('a',), 1),
    'ssp': ({'ground_truth': 'a', 'search_turns': 4}, ('a',), 4),
    'ssp list': ({'ground_truth': {'target': ['a', 'b']}}, ('a', 'b'), 1),
    'search-r1': ({'reward_model': {'style': 'rule', 'ground_truth': {'target': ['a']}}}, ('a',), 1),
    'hotpot': ({'answer': 'a', 'supporting_facts': [['A', 0], ['B', 1], ['A', 2]]}, ('a',), 2),
    'hotpot of datasets': ({'answer': 'a', 'supporting_facts': {'title': ['A', 'B'], 'sent_id': [0, 1]}}, ('a',), 2),
}  # fmt: skip


@pytest.mark.parametrize('name', ANSWERED)
def test_each_format_of_an_answer(name, tmp_path):
    row, golds, hops = ANSWERED[name]
    assert files.read_answers(lines(tmp_path / 'a.jsonl', row)) == (Target(golds[0], golds[1:], hops, 'files'),)
    asked = files.read_questions(lines(tmp_path / 'q.jsonl', {'question': 'Who?', 'dataset': 'nq', '_id': 'x1', **row}))
    assert asked == ((Question('q000000', 'Who?', golds, 'nq', hops, ('x1',)), ''),)


def test_a_list_is_read_as_lines_are(tmp_path):
    rows = [{'question': 'A?', 'answer': 'a'}, {'question': 'B?', 'answer': 'b', 'split': 'train'}]
    as_list = tmp_path / 'q.json'
    as_list.write_text(json.dumps(rows, indent=2))
    assert files.read_questions(as_list) == files.read_questions(lines(tmp_path / 'q.jsonl', *rows))
    assert files.read_questions(as_list)[1] == (Question('q000001', 'B?', ('b',), 'all', 1), 'train')


def test_what_comes_again_is_kept_once_with_all_answers(tmp_path):
    path = lines(
        tmp_path / 'q', {'question': 'Who?', 'answer': 'The A'}, {'question': ' who? ', 'answers': ['b', 'The A']}
    )
    assert [(q.id, q.answers) for q, _ in files.read_questions(path)] == [('q000000', ('The A', 'b'))]
    path = lines(tmp_path / 'a', {'answer': 'The A', 'hops': 2}, {'answer': 'a!', 'aliases': ['B']})
    assert files.read_answers(path) == (Target('The A', ('a!', 'B'), 2, 'files'),)


FAULTS = {
    'no answer': ('questions', {'question': 'x'}, 'line 2: has none of the fields `golden_answers`'),
    'empty answers': ('questions', {'question': 'x', 'answers': []}, 'line 2: `answers` holds no answer'),
    'answer of another type': ('answers', {'answer': [['a']]}, 'line 2: `answer` must hold text: ["a"]'),
    'answer true': ('answers', {'answer': True}, 'line 2: `answer` must hold text: true'),
    'object answer': ('answers', {'answer': {'x': 1}}, 'line 2: `answer` is an object without'),
    'no question': ('questions', {'answer': 'x'}, 'line 2: `question` is missing'),
    'empty question': ('questions', {'question': ' ', 'answer': 'x'}, 'line 2: `question` must be text'),
    'hops': ('answers', {'answer': 'x', 'hops': 'two'}, 'line 2: `hops` must be a whole number of at least 1: "two"'),
    'hops 0': ('answers', {'ground_truth': 'x', 'search_turns': 0}, 'line 2: `search_turns` must be'),
    'no text': ('corpus', {'id': '3', 'title': 'x'}, 'line 2: has no passage'),
    'empty text': ('corpus', {'title': 'x', 'text': ''}, 'line 2: `text` must be text, and not empty'),
    'context': ('corpus', {'context': [['A', 'text']]}, 'line 2: `context` must hold [title, [sentence, ...]]'),
    'paragraphs': ('corpus', {'paragraphs': [{'title': 'A'}]}, 'line 2: `paragraphs` must hold `title` and'),
    'same id': ('corpus', {'id': '1', 'contents': 'c'}, "line 2: `id` '1' was there before"),
    'no object': ('corpus', 'text', 'line 2: must be an object, not "text"'),
}  # fmt: skip
GOOD = {'id': '1', 'contents': '"A"\nb', 'question': 'A?', 'answer': 'b'}


@pytest.mark.parametrize('name', FAULTS)
def test_a_malformed_row_is_named_by_file_line_and_field(name, tmp_path):
    what, row, said = FAULTS[name]
    path = lines(tmp_path / 'rows.jsonl', GOOD, row)
    with pytest.raises(ConfigError) as error:
        getattr(files, f'read_{what}')(path)
    assert str(error.value).startswith(f'{path}, {said}')


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('{"a": 1}\n{"a": \n', 'line 2: is not JSON'),
        ('{"skills": [],\n "mistakes": []}', r'is one JSON object \(skills, mistakes\), not rows'),
        ('', 'has no rows'),
        ('[1]', 'row 1: must be an object, not 1'),
    ],
)
def test_a_file_that_is_no_rows_says_what_it_is(text, said, tmp_path):
    path = tmp_path / 'x.json'
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(files.rows(path))


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='No such file'):
        list(files.rows(tmp_path / 'none'))
    (tmp_path / 'x').write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match='not UTF-8 at byte 7'):
        list(files.rows(tmp_path / 'x'))


# --- the split --------------------------------------------------------------------------------------------------------


def world_of(rows, answers=(), seed=0) -> files.World:
    asked = tuple(
        (Question(f'q{i}', text, tuple(golds), 'all', 1), split) for i, (text, golds, split) in enumerate(rows)
    )
    targets = tuple(Target(answer, tuple(aliases)) for answer, *aliases in answers)
    return files.World(seed, (Document('d', 't', 'x'),), targets, asked)


def test_a_rows_own_split_decides_and_nothing_held_out_leaks_into_training():
    world = world_of(
        [
            ('Who wrote it?', ['Ada Lovelace', 'Countess'], 'test'),
            ('Is it so?', ['yes'], 'test'),
            ('When?', ['1969'], 'test'),
            ('Where is Ada  LOVELACE buried?', ['Hucknall'], 'train'),  # names a held-out answer
            ('Who was she?', ['a countess'], 'train'),  # has one
            ('Is that so?', ['yes'], 'train'),
            ('Who else?', ['Babbage'], 'train'),
        ],
        answers=[('Ada Lovelace',), ('Babbage', 'Countess'), ('House of Lovelace',), ('the works of Ada Lovelace',), ('yes',)],
    )  # fmt: skip
    assert [q.text for q in world.questions('held_out', 9, 0)] == ['Who wrote it?', 'Is it so?', 'When?']
    assert [q.text for q in world.questions('train', 9, 0)] == ['Is that so?', 'Who else?']
    assert world.held_out_names == {'Ada Lovelace', 'Countess'}
    assert {t.answer for t in world.targets(9, 1, 0)} == {'House of Lovelace', 'yes'}


def test_without_one_two_fifths_are_held_out_by_answer_whatever_the_order():
    rows = [(f'Question {i}?', [f'Answer{i % 500}'], '') for i in range(1000)]
    held = {q.text for q in world_of(rows).questions('held_out', 10**6, 0)}
    assert 330 < len(held) < 470
    assert {q.text for q in world_of(rows[::-1]).questions('held_out', 10**6, 0)} == held
    assert {q.text for q in world_of(rows, seed=1).questions('held_out', 10**6, 0)} != held
    assert len(world_of(rows).questions('train', 10**6, 0)) == 1000 - len(held)
    part = {q.answers: 'held_out' for q in world_of(rows).questions('held_out', 10**6, 0)}
    assert not any(q.answers in part for q in world_of(rows).questions('train', 10**6, 0))


def test_per_cell_counts_by_class_and_hops_and_draws_by_seed():
    asked = tuple((Question(f'q{i}', f'{i}?', (f'x{i}',), f'k{i % 2}', 1 + i % 3), 'test') for i in range(60))
    world = files.World(0, (), (), asked)
    drawn = world.questions('held_out', 2, seed=1)
    cells = [(q.kind, q.hops) for q in drawn]
    assert len(drawn) == 12 and all(cells.count(cell) == 2 for cell in cells)
    assert drawn == world.questions('held_out', 2, seed=1) != world.questions('held_out', 2, seed=2)


def test_targets_are_drawn_by_seed_and_step_each_once():
    world = world_of([], answers=[(f'Answer{i}',) for i in range(20)])
    assert len({t.answer for t in world.targets(20, 1, 0)}) == 20
    assert world.targets(5, 1, 0) == world.targets(5, 1, 0) != world.targets(5, 2, 0)
    assert len(world.targets(30, 1, 0)) == 30  # fewer answers than places: some come again


def test_answers_that_are_all_held_out_are_refused(tmp_path):
    corpus = lines(tmp_path / 'c', {'title': 'A', 'text': 'x'})
    asked = lines(tmp_path / 'q', {'question': 'Who?', 'answer': 'Babbage', 'split': 'test'})
    answers = lines(tmp_path / 'a', {'answer': 'Babbage'})
    with pytest.raises(ConfigError, match='each of the 1 rows of --answers is an answer of a held-out question'):
        files.build(0, corpus, answers, asked)


def test_without_questions_there_is_nothing_to_measure_and_nothing_held_out(tmp_path):
    corpus, answers = lines(tmp_path / 'c', {'title': 'A', 'text': 'x'}), lines(tmp_path / 'a', {'answer': 'A'})
    world = files.build(0, corpus, answers)
    assert (world.questions('held_out', 9, 0), world.questions('train', 9, 0), world.held_out_names) == ((), (), set())
    result = dual_path.evaluate((), {'base': {}, 'off': {}}, step=1)
    assert '-' in dual_path.summary(result) and dual_path.table(result)


# --- real files -------------------------------------------------------------------------------------------------------

# name: (passages or what it lacks, answers, questions)
REAL = {
    'migres_hotpot_200.jsonl': (1971, 184, 200),
    'migres_musique_200.jsonl': (3141, 142, 200),
    'migres_wikihop_200.jsonl': ('line 107: has no passage', 177, 200),
    'migres_odqa_400.jsonl': ('line 1: has no passage', 395, 400),
    'neuropath_popqa_1000.jsonl': (1475, 468, 999),
    'nq_open_dev_3610.jsonl': ('line 1: has no passage', 3178, 3610),
    'r1searcher_bamboogle_125.jsonl': ('line 1: has no passage', 122, 125),
    'searchr1_example_corpus.jsonl': (10, 'line 1: has none of the fields', 'line 1: `question` is missing'),
    'skillrl_search_skills.json': ('is one JSON object', 'is one JSON object', 'is one JSON object'),
}


@needs_qa
@pytest.mark.parametrize('name', REAL)
def test_each_real_file_loads_or_says_what_it_lacks(name):
    path = QA / name
    for what, expected in zip(('corpus', 'answers', 'questions'), REAL[name], strict=True):
        read = getattr(files, f'read_{what}')
        if isinstance(expected, int):
            assert len(read(path)) == expected
        else:
            with pytest.raises(ConfigError, match=expected):
                read(path)


@needs_qa
@pytest.mark.parametrize('name', [name for name, (_, _, questions) in REAL.items() if isinstance(questions, int)])
def test_the_split_of_real_questions_does_not_leak(name):
    world = files.World(0, (), (), files.read_questions(QA / name))
    train = world.questions('train', 10**6, 0)
    assert len(train) >= 70 and len(world.questions('held_out', 10**6, 0)) >= 50
    assert not any(names_one_of(question.text, world.held_out_names) for question in train)
