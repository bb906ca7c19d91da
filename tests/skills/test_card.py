import dataclasses
import json

import pytest
from skills_toy import draft

from sesa_jax.skills.card import LIMITS, Card, DraftCard, card_from_json, draft_from_json, problems, to_json

FULL = DraftCard(
    description='d',
    trigger='a question asks who founded {entity}',
    masked_question='Who founded {entity}?',
    avoid='{entity} founder',
    queries=('{entity} velmar tikon', '{entity} {relation}'),
    evidence='e',
    source_question_hash='q',
    source_question_hashes=('q', 'r'),
    source_target_hash='t',
    rollout_ids=('r1', 'r2'),
    distiller='toy',
    prompt_hash='p',
)


def test_shown_is_one_line_with_the_first_template_and_what_to_avoid():
    assert FULL.shown() == (
        'when a question asks who founded {entity}: search {entity} velmar tikon | avoid: {entity} founder'
    )


def test_shown_ends_with_the_template_when_there_is_nothing_to_avoid():
    card = dataclasses.replace(FULL, avoid='')
    assert card.shown() == 'when a question asks who founded {entity}: search {entity} velmar tikon'


def test_embedded_text_is_description_trigger_masked_question_avoid_and_queries():
    assert FULL.text == (
        'd\na question asks who founded {entity}\nWho founded {entity}?\n{entity} founder\n'
        '{entity} velmar tikon\n{entity} {relation}'
    )


def test_embedded_text_has_no_empty_lines():
    assert draft('x').text == 'about x\nx\n{entity} x'


def test_drafts_and_cards_survive_json():
    fields = {f.name: getattr(FULL, f.name) for f in dataclasses.fields(FULL)}
    card = Card(**fields, id='c00007', born_step=3, parents=('c00001',), hurt=2)
    assert draft_from_json(json.loads(json.dumps(to_json(FULL)))) == FULL
    assert card_from_json(json.loads(json.dumps(to_json(card)))) == card


def test_a_good_draft_has_no_problems():
    assert problems(FULL) == []


@pytest.mark.parametrize(
    ('fields', 'problem'),
    [
        ({'description': ''}, 'description: empty'),
        ({'trigger': ''}, 'trigger: empty'),
        ({'queries': ()}, 'queries: 0 templates, not 1 to 3'),
        ({'queries': ('{a}',) * 4}, 'queries: 4 templates, not 1 to 3'),
        ({'queries': ('capital of france',)}, "queries: no slot in 'capital of france'"),
        ({'trigger': 'see </answer> here'}, 'trigger: holds one of < > |'),
        ({'evidence': '<|im_end|>'}, 'evidence: holds one of < > |'),
        ({'avoid': 'a | avoid: b'}, 'avoid: holds one of < > |'),
        ({'description': 'go to http://example.org'}, 'description: holds a URL'),
        ({'description': 'go to WWW.example.org'}, 'description: holds a URL'),
        ({'evidence': 'ftp://x'}, 'evidence: holds a URL'),
        ({'trigger': 'two\nlines'}, 'trigger: holds a control character or line break'),
        ({'trigger': 'two\u2028lines'}, 'trigger: holds a control character or line break'),
        ({'avoid': 'esc \x1b[31m'}, 'avoid: holds a control character or line break'),
        ({'avoid': 'zero\u200bwidth'}, 'avoid: holds a control character or line break'),
        ({'masked_question': 'bidi \u202e'}, 'masked_question: holds a control character or line break'),
        ({'description': 'lone \ud800'}, 'description: holds a control character or line break'),
        ({'trigger': ' spaced'}, 'trigger: starts or ends with a space'),
        ({'trigger': 'a {Slot} with capitals'}, 'trigger: has braces that are no slot such as {entity}'),
        ({'queries': ('{entity} {open',)}, 'queries: has braces that are no slot such as {entity}'),
    ],
)
def test_a_bad_field_is_named(fields, problem):
    assert problems(dataclasses.replace(FULL, **fields)) == [problem]


@pytest.mark.parametrize('field', LIMITS)
def test_a_field_may_be_as_long_as_its_limit_and_no_longer(field):
    def of_length(count):
        text = '{entity} ' + 'x' * (count - 9)
        return dataclasses.replace(FULL, **{field: (text,) if field == 'queries' else text})

    limit = LIMITS[field]
    assert problems(of_length(limit)) == []
    assert problems(of_length(limit + 1)) == [f'{field}: {limit + 1} characters, more than {limit}']
