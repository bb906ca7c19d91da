"""The corpus index: what is found, in which order, and that the order is always the same."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sesa_jax.records import Document
from sesa_jax.worlds.search import Corpus, Ranking, words


def corpus(*texts: str) -> Corpus:
    return Corpus([Document(str(i), f'Title{i}', text) for i, text in enumerate(texts)])


def ids(found) -> list[list[str]]:
    return [[document.id for document in documents] for documents in found]


def test_words_are_lower_cased_composed_and_neither_stemmed_nor_stopped():
    assert words('The Cafe\u0301s of St. Mary_Ann, 3.14!') == [
        'the',
        'caf\u00e9s',
        'of',
        'st',
        'mary',
        'ann',
        '3',
        '14',
    ]


def test_title_and_text_are_both_searched():
    index = Corpus(
        [Document('a', 'Velmar', 'a city'), Document('b', 'Orsk', 'founded near Velmar'), Document('c', 'X', 'y')]
    )
    assert ids(index.search(['velmar', 'FOUNDED'], 3)) == [['a', 'b'], ['b']]


def test_rare_words_outweigh_common_ones():
    index = corpus('red red red red', 'red blue', 'red green')
    assert ids(index.search(['red blue'], 1)) == [['1']]


def test_ties_go_to_the_first_document_at_the_cut_too():
    index = corpus(*['same words'] * 40, 'same words words')
    assert ids(index.search(['words same'], 3)) == [['40', '0', '1']]


def test_a_query_without_a_known_word_finds_nothing():
    index = corpus('red', 'blue')
    assert index.search(['green', '', ' .,! ', 'red'], 2) == [(), (), (), (index.documents[0],)]


def test_fewer_documents_than_asked_for_are_returned_without_padding():
    assert ids(corpus('red', 'blue').search(['red'], 5)) == [['0']]


def test_k_of_zero_returns_nothing():
    assert corpus('red').search(['red'], 0) == [()]


def test_an_unknown_word_does_not_change_the_ranking():
    index = corpus('red blue', 'red red', 'blue')
    assert index.search(['red'], 3) == index.search(['red zyx'], 3)


def test_a_corpus_without_words_is_refused():
    with pytest.raises(ValueError, match='nothing to rank'):
        Ranking([' ', '!'])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text('abc ', max_size=12), min_size=1, max_size=12), st.text('abcd ', max_size=8), st.integers(1, 5))
def test_the_cut_never_changes_what_stands_before_it(texts, query, k):
    ranking = Ranking([*texts, 'a'])
    assert ranking.top(query, k) == ranking.top(query, 100)[:k]


def test_scores_are_those_of_the_formula():
    texts = ['a b', 'a a c c', 'c']
    n, average, k1, b = 3, 7 / 3, 1.5, 0.75
    idf = np.log(1 + (n - 2 + 0.5) / (2 + 0.5))  # 'a' is in two of three
    expected = [idf * tf / (tf + k1 * (1 - b + b * length / average)) for tf, length in ((1, 2), (2, 4))]
    index = Ranking(texts)._index
    np.testing.assert_allclose(index.get_scores_from_ids([0]), [*expected, 0.0], rtol=1e-6)


PROBE = """
import random, sys
from sesa_jax.worlds.search import Corpus
from sesa_jax.records import Document
rng = random.Random(1)
pool = [''.join(rng.choices('abcdefg', k=2)) for _ in range(30)]
index = Corpus([Document(str(i), pool[i % 30], ' '.join(rng.choices(pool, k=6))) for i in range(300)])
found = index.search([' '.join(rng.choices(pool, k=4)) for _ in range(50)], 5)
print([[d.id for d in documents] for documents in found], any(name.startswith('jax') for name in sys.modules))
"""


def test_rankings_are_the_same_in_processes_with_other_hash_seeds_and_need_no_jax():
    outputs = {
        subprocess.run(
            [sys.executable, '-c', PROBE],
            env={**os.environ, 'PYTHONHASHSEED': seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ('0', '1')
    }
    assert len(outputs) == 1
    assert outputs.pop().endswith('False\n')
