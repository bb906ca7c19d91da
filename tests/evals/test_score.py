"""Exact match and F1 after the fixed order of normalisation steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.evals.score import exact, f1, is_blank, normalise


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('The  Beatles!', 'beatles'),
        ('An apple, a pear', 'apple pear'),
        ('«Ça» — l’été…', 'ça lété'),  # Unicode punctuation, composed letters kept
        ('Cafe\u0301', 'café'),  # NFC
        ('$5 + 3^2 = `14`', '5 32 14'),  # ASCII symbols are no Unicode punctuation, and go all the same
        ('10 €', '10 €'),  # a Unicode symbol stays
        ('the-rapist', 'therapist'),  # punctuation goes before articles: the order matters
        ('A\u00a0the\tB\n', 'b'),
        ('İ', 'i̇'),  # lower-casing may lengthen a word
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ('prediction', 'golds', 'expected'),
    [
        ('montreal.', ['Montreal', 'The Montreal'], True),
        ('montreal.', ['The Montreal', 'Montreal'], True),
        ('Paris is in France', ['Paris'], False),
        ('no', ['yes'], False),
        ('yes, it is', ['yes'], False),
        ('3.14', ['314'], True),  # as in SQuAD
        ('The The', ['The The'], True),  # nothing is left without articles
        ('the', ['The The'], False),
        ('The', ['A'], False),
        ('', ['!!!'], False),
        ('...', ['!!!'], False),
        ('the', ['Paris', 'The'], True),
    ],
)
def test_exact(prediction, golds, expected):
    assert exact(prediction, golds) is expected


@pytest.mark.parametrize('text', ['', ' ', ':', '.', '…—«»', '\n\t'])
def test_only_punctuation_is_blank(text):
    assert is_blank(text)
    assert not exact(text, [text or 'x'])


def test_an_article_is_not_blank():
    assert not is_blank('The')


@pytest.mark.parametrize(
    ('prediction', 'golds', 'expected'),
    [
        ('Paris is in France', ['Paris'], 0.4),  # 1 of 4 and 1 of 1
        ('Paris is in France', ['Rome', 'France is Paris'], 6 / 7),
        ('a b b', ['b c'], 0.5),  # the article is dropped and a repeated word counts once: [b b] against [b c]
        ('', ['Paris'], 0.0),
        ('The The', ['The The'], 1.0),
    ],
)
def test_f1(prediction, golds, expected):
    assert f1(prediction, golds) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('golds', [[], (), 'Paris'])
def test_no_gold_is_an_error(golds):
    with pytest.raises(ValueError, match='at least one gold'):
        exact('Paris', golds)
    with pytest.raises(ValueError, match='at least one gold'):
        f1('Paris', golds)


@given(st.text(max_size=30), st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_exact_match_is_never_above_f1_and_order_of_golds_never_matters(prediction, golds):
    assert exact(prediction, golds) <= f1(prediction, golds) <= 1
    assert exact(prediction, golds) == exact(prediction, golds[::-1])
    assert f1(prediction, golds) == f1(prediction, golds[::-1])


@given(st.text(max_size=40).filter(lambda text: not is_blank(text)))
def test_every_answer_with_content_matches_itself(text):
    assert exact(text, [text])
    assert f1(text, [text]) == 1.0
