"""`python -m experiments.skills`: what the bank holds, in words that no document can turn into commands."""

import io
import re

import pytest
from rich.console import Console

from experiments.skills import main
from sesa_jax.skills.bank import Bank


def run(folder, *arguments, code=0):
    out = io.StringIO()
    assert main([str(folder.path), *arguments], Console(file=out, width=220, highlight=False, emoji=False)) == code
    return out.getvalue()


def rows(text):
    """Cells of the table rows, stripped."""
    return [[cell.strip() for cell in re.split('[│┃]', line)[1:-1]] for line in text.splitlines() if line[:1] in '│┃']


def test_show_lists_the_cards_best_first(made_up_memory):
    head, *cards = rows(run(made_up_memory, 'show'))
    assert head == ['card', 'born', 'state', 'retrieved', 'helpful', 'hurt', 'what the solver reads']
    assert cards == [
        ['c00002', '4', 'active', '11', '11', '0', 'when a founder is asked for: search charter roll {entity}'],
        ['c00001', '0', 'seed', '4', '4', '0', 'when a fact is not found: search {entity} again'],
    ]


def test_evicted_cards_are_shown_when_asked_for(made_up_memory):
    with Bank.open(made_up_memory.bank) as bank:
        bank.commit_step(7, {'c00002': 1}, {}, {'c00002': 30})
    assert [row[0] for row in rows(run(made_up_memory, 'show'))[1:]] == ['c00001']
    assert rows(run(made_up_memory, 'show', '--all'))[2][:3] == ['c00002', '4', 'evicted at step 7 (harmful)']


def test_why_shows_the_failures_and_the_rollouts_that_used_it(made_up_memory):
    said = run(made_up_memory, 'why', 'c00002')
    assert 'Founders stand in the charter roll.' in said
    assert '1 failures that it came from' in said
    assert '2 rollouts that were shown it' in said
    table = rows(said)
    assert table[1][:2] == ['3', 'solver:s3-p1:0']
    assert table[1][3] == 'Ossa'
    assert [row[:3] for row in table[-2:]] == [['6', 'solver:s6-p0:0', 'correct'], ['6', 'solver:s6-p0:1', 'wrong']]


def test_why_of_a_seed_says_so_and_names_its_children(made_up_memory):
    said = run(made_up_memory, 'why', 'c00001')
    assert 'It came from no failure: it is a card of the priming.' in said
    assert 'No rollout on disk was shown it.' in said
    assert 'Its children: c00002' in said


def test_history_tells_what_entered_and_the_totals(made_up_memory):
    said = run(made_up_memory, 'history')
    assert [row[1:] for row in rows(said)[1:]] == [
        ['0', 'created', 'admitted 1: c00001'],
        ['3', 'step', '1 failures queued'],
        ['3', 'started', '1 failures to the distiller'],
        ['4', 'finished', 'admitted 1: c00002'],
    ]
    assert 'active 2, seeds 1, tombstones 0, queue 0' in said


@pytest.mark.parametrize('command', [('show',), ('why', 'c00002'), ('history',)])
def test_no_control_character_and_no_markup_of_a_document_is_obeyed(made_up_memory, command):
    said = run(made_up_memory, *command)
    assert not re.search('[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]', said)
    if command[0] == 'why':
        assert '<script>alert("x")</script> \ufffd[31m' in said


def test_an_unknown_card_and_a_run_without_a_bank_are_named(made_up_memory, capsys):
    run(made_up_memory, 'why', 'c99999', code=2)
    assert 'has no card c99999' in capsys.readouterr().err
    made_up_memory.bank.unlink()
    run(made_up_memory, 'show', code=2)
    assert 'has no skill bank' in capsys.readouterr().err


def test_looking_changes_nothing(made_up_memory):
    before = {file.name: file.read_bytes() for file in made_up_memory.path.iterdir() if file.is_file()}
    for command in (('show',), ('why', 'c00002'), ('history',)):
        run(made_up_memory, *command)
    assert {file.name: file.read_bytes() for file in made_up_memory.path.iterdir() if file.is_file()} == before
