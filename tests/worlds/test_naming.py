"""Names in texts: whole words, any case, the longest first."""

import pytest

from sesa_jax.worlds.naming import Phrases, names_one_of

NAMES = frozenset({'Velmar', 'New York City', 'York', "Hawai'i"})


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('Who founded Velmar?', True),
        ("VELMAR's founder", True),
        ('Who founded Velmark?', False),
        ('the mayor of new  york-city', True),
        ('the new city', False),
        ('ends with new york', True),  # York
        ('ends with new', False),
        ('', False),
    ],
)
def test_a_name_is_found_as_whole_words(text, expected):
    assert names_one_of(text, NAMES) == expected


def test_no_names_are_never_found():
    assert not names_one_of('anything', frozenset())


def test_the_longest_name_at_a_place_wins():
    tokens = ['in', 'new', 'york', 'city', 'and', 'york']
    phrases = Phrases(NAMES)
    assert [phrases.at(tokens, i) for i in range(6)] == [
        None,
        ('New York City', 3),
        ('York', 1),
        None,
        None,
        ('York', 1),
    ]
