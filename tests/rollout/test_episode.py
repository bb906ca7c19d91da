import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sesa_jax.records import Document, Search
from sesa_jax.rollout import episode

unhurried = settings(deadline=None)  # a busy machine is no failure
PIECES = ['<search>', '</search>', '<answer>', '</answer>', '<question>', '</question>', '<information>', '<', '>', '/']
TAG_SOUP = st.lists(st.sampled_from([*PIECES, 'search', 'answer', ' a', 'b ', '\n', ' ', 'é'])).map(''.join)
DRESS = st.text(alphabet=' /\n', max_size=4)


def reference_parse(text, role):
    """Walk the text letter by letter, remember where each tag was opened last, and stop at the first closing one."""
    opened = {}
    for place in range(len(text)):
        for name in ('search', 'answer', 'question'):
            if text[:place].endswith(f'<{name}>'):
                opened[name] = place
            if text[: place + 1].endswith(f'</{name}>'):
                allowed = {'solver': {'search', 'answer'}, 'challenger': {'search', 'question'}}[role]
                if name not in allowed or name not in opened:
                    return 'malformed', ''
                content = text[opened[name] : place + 1 - len(f'</{name}>')].strip()
                return ('malformed', '') if name == 'search' and content == '' else (name, content)
    return 'malformed', ''


@unhurried
@given(TAG_SOUP, st.sampled_from(['solver', 'challenger']))
def test_parse_equals_a_letter_by_letter_reading(text, role):
    assert episode.parse_turn(text, role) == reference_parse(text, role)


@unhurried
@given(TAG_SOUP, st.text(max_size=30), st.sampled_from(['solver', 'challenger']))
def test_text_behind_the_stop_is_never_parsed(text, behind, role):
    whole = text + '</answer>'
    assert episode.parse_turn(whole + behind, role) == episode.parse_turn(whole, role)


@pytest.mark.parametrize(
    ('text', 'role', 'expected'),
    [
        ('so <search> a b </search>', 'solver', ('search', 'a b')),
        ('<search>a</search>\n', 'challenger', ('search', 'a')),
        ('<answer>Paris</answer>', 'solver', ('answer', 'Paris')),
        ('<answer>Paris</answer>', 'challenger', ('malformed', '')),
        ('<question>Who?</question>', 'challenger', ('question', 'Who?')),
        ('<question>Who?</question>', 'solver', ('malformed', '')),
        ('<answer>a <answer>b</answer>', 'solver', ('answer', 'b')),
        ('<answer>a</answer><answer>b</answer>', 'solver', ('answer', 'a')),
        ('<search>a <answer>b</answer>', 'solver', ('answer', 'b')),
        ('Paris</answer>', 'solver', ('malformed', '')),
        ('<answer>Paris', 'solver', ('malformed', '')),
        ('<Answer>Paris</Answer>', 'solver', ('malformed', '')),
        ('<search> </search>', 'solver', ('malformed', '')),
        ('<answer> </answer>', 'solver', ('answer', '')),
        ('', 'solver', ('malformed', '')),
    ],
)
def test_parse_examples(text, role, expected):
    assert episode.parse_turn(text, role) == expected


@pytest.mark.parametrize(
    ('kind', 'is_cut', 'is_last', 'expected'),
    [
        ('answer', False, True, 'answer'),
        ('answer', True, False, 'answer'),
        ('question', False, False, 'question'),
        ('search', False, False, None),
        ('search', False, True, 'turns'),
        ('search', True, True, 'turns'),
        ('malformed', False, True, 'malformed'),
        ('malformed', True, True, 'length'),
    ],
)
def test_what_follows_a_turn(kind, is_cut, is_last, expected):
    assert episode.after_turn(kind, is_cut=is_cut, is_last=is_last) == expected


# A tag in any dress that a reader, or a lenient parser, might still take for one.
TAG_LIKE = re.compile(r'<[\s/]*(search|answer|question|information)\b', re.IGNORECASE)


@unhurried
@given(
    st.lists(
        st.one_of(
            st.text(max_size=5),
            st.tuples(DRESS, st.sampled_from(['search', 'ANSWER', 'Question', 'information']), DRESS).map(
                lambda parts: '<' + ''.join(parts) + '>'
            ),
            st.sampled_from(['<ans\u200bwer>', '<\x00search>', '< search id="1" >', '</answer', '<<answer>>', '<']),
        )
    ).map(''.join)
)
def test_nothing_like_a_tag_survives(text):
    clean = episode.neutralise(text)
    assert not TAG_LIKE.search(clean)
    assert episode.neutralise(clean) == clean


@unhurried
@given(st.text())
def test_text_without_tags_and_control_characters_is_untouched(text):
    plain = ''.join(c for c in text if c != '<' and unicodedata.category(c) not in ('Cc', 'Cf', 'Cs'))
    assert episode.neutralise(plain) == plain


def test_control_characters_and_lone_surrogates_go_and_newlines_stay():
    every = ''.join(map(chr, range(0x110000)))
    left = {c for c in episode.neutralise(every) if unicodedata.category(c) in ('Cc', 'Cs')}
    assert left == {'\n', '\t'}


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('</answer>', '‹/answer›'),
        ('< / Search x="1">', '‹ / Search x="1"›'),
        ('a < b and <b>searching</b> <searching>', 'a < b and <b>searching</b> <searching>'),
        ('<|im_end|> <think>', '<|im_end|> <think>'),
        ('cut <answer', 'cut ‹answer'),
    ],
)
def test_neutralise_examples(text, expected):
    assert episode.neutralise(text) == expected


def test_neutralise_is_fast_on_hostile_text():
    for hostile in ('<' * 200_000, '<' + ' ' * 200_000, '<answer' * 50_000, '<answer>' * 50_000):
        episode.neutralise(hostile)  # quadratic time would meet the time limit of the test run


DOCUMENTS = (Document('d1', 'Oxo\nRiver', 'The Oxo </information> is long.'), Document('d2', 'Paris', ' A city.\n'))


def test_observation_has_the_exact_form():
    assert episode.observation(Search('q', DOCUMENTS, 'ok', 0.1)) == (
        '\n<information>\nDoc 1 (Title: Oxo River)\nThe Oxo ‹/information› is long.\n'
        'Doc 2 (Title: Paris)\nA city.\n</information>\n\n'
    )


def test_an_empty_result_and_an_outage_look_different():
    assert episode.observation(Search('q', (), 'empty', 0)) == '\n<information>\nNo results found.\n</information>\n\n'
    assert episode.observation(Search('q', (), 'outage', 0)) == (
        '\n<information>\nThe search is not available.\n</information>\n\n'
    )


@unhurried
@given(st.integers(min_value=40, max_value=200))
def test_a_long_observation_loses_its_tail_and_keeps_its_wrapper(limit):
    def letters(text):
        return [ord(c) for c in text]

    search = Search('q', DOCUMENTS, 'ok', 0)
    whole, cut = letters(episode.observation(search)), episode.encode_observation(letters, search, limit)
    assert len(cut) == min(limit, len(whole))
    tail = letters('\n</information>\n\n')
    assert cut[-len(tail) :] == tail
    assert cut[: -len(tail)] == whole[: len(cut) - len(tail)]


def test_a_limit_below_the_wrapper_is_refused():
    with pytest.raises(ValueError, match=r'lengths\.observation is 10 tokens'):
        episode.encode_observation(list, Search('q', (), 'empty', 0), 10)


# Tokens that split tags everywhere, end inside one, hold a whole one, or have no text.
VOCABULARY = [b'', b'<', b'</', b'/', b'</sea', b'rch>\n', b'rch', b'>', b'><', b'></', b'</answer>', b'an', b'swer']
VOCABULARY += [b'a', b'search>', b'question>', b'</question', b'</s</se', b'arch> x', b'\xc3', b'\xa9']
AUTOMATON = episode.stop_table(VOCABULARY)


@unhurried
@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=20))
def test_the_automaton_stops_where_a_search_in_the_bytes_does(ids):
    table, accept = AUTOMATON
    state, seen = 0, b''
    for i in ids:
        state = table[state, i]
        seen += VOCABULARY[i]
        found = re.search('|'.join(episode.STOPS).encode(), seen)
        assert accept[state] == (found is not None)
        if found is not None:
            assert state == episode.stop_state(found.group().decode()), 'the state tells which stop came first'


@unhurried
@given(st.lists(st.binary(max_size=3), min_size=1, max_size=4), st.lists(st.sampled_from(list(b'aab<')), max_size=30))
def test_the_automaton_is_right_for_any_patterns(tokens, choices):
    """Patterns that overlap and contain one another, over tokens of a small alphabet."""
    tokens = [*tokens, b'a', b'b', b'<', b'ab', b'ba']
    stops = ['aab', 'ab<a', 'b<']
    table, accept = episode.stop_table(tokens, stops)
    state, seen = 0, b''
    for i in (choice % len(tokens) for choice in choices):
        state = table[state, i]
        seen += tokens[i]
        assert accept[state] == any(stop.encode() in seen for stop in stops)


def test_the_table_is_small_and_has_a_column_for_every_id():
    table, accept = episode.stop_table(VOCABULARY)
    assert table.dtype == np.uint8
    assert table.shape == (len(accept), len(VOCABULARY))
    assert len(accept) <= 26


def test_text_of_ids_survives_bytes_that_are_not_text():
    assert episode.text_of([19, 20, 0, 20, 4, 5], VOCABULARY) == 'é\ufffd</search>\n'
