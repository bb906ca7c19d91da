"""The driver: what happens between chunks and what while they run, searches, places and counters."""

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
import time

import jax
import numpy as np
import pytest
from rollout_toy import ARCH, ID, PLAY, SEARCH, World, always, engine, play, policy, requests, tokens

from sesa_jax.host.client import _SharedFuture
from sesa_jax.policy import transformer
from sesa_jax.rollout.driver import Driver
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Row, Rules


def late(world, seconds):
    """A search that takes a while, in a thread of its own."""
    pool = concurrent.futures.ThreadPoolExecutor()

    def search(queries):
        time.sleep(seconds(queries))
        return world(queries)

    return lambda queries: pool.submit(search, queries)


def play_late(rows, seconds, sampler, params=None, seed=0):
    params = transformer.unstack(params or policy(), ARCH)
    return sampler.rollout(params, rows, late(World(), seconds), seed=seed, step=0, weights_version=3, bank_version=4)


def bits(trajectories):
    return [(row.ids.tobytes(), row.logprobs.tobytes(), row.turns, row.stop_reason) for row in trajectories]


@pytest.mark.parametrize('is_deterministic', [True, False])
def test_the_latency_of_searches_changes_no_token_and_deterministically_no_bit(is_deterministic):
    rows, sampler = requests(6, 2), engine(deterministic=is_deterministic)
    expected = play(rows)
    for seconds in (lambda queries: 0, lambda queries: 0.03, lambda queries: 0.01 * (len(queries) % 3)):
        slow = play_late(rows, seconds, sampler)
        assert tokens(slow) == tokens(expected)
        np.testing.assert_allclose([r.logprobs.sum() for r in slow], [r.logprobs.sum() for r in expected], rtol=1e-4)
        if is_deterministic:
            assert bits(slow) == bits(expected)


def test_the_device_computes_while_searches_run():
    sampler = engine()
    before = dict(sampler.seconds)
    play_late(requests(16, 2, max_turns=9), lambda queries: 0.002, sampler)
    spent = {name: sampler.seconds[name] - before.get(name, 0) for name in ('search', 'search_hidden', 'host')}
    assert 0 < spent['search_hidden'] <= spent['search']
    assert spent['host'] > 0


@pytest.mark.parametrize(
    ('is_deterministic', 'others', 'turn_tokens', 'waits'),
    [
        (True, 7, 16, 'waited'),  # behind the launch of a prompt: a place has become free just before
        (True, 1, 40, 'waited'),  # another row could decode on
        (True, 1, 16, 'stalled'),
        (False, 1, 24, 'stalled'),
        (False, 1, 200, None),  # twenty-five chunks hide all
    ],
)
def test_waiting_for_searches_counts_as_waiting_alone(monkeypatch, is_deterministic, others, turn_tokens, waits):
    """Two rows search for half a second, one from the end of the first chunk on, one from the end of the second on; the
    others write until they are cut. A chunk has 8 tokens and takes 30 ms longer than it does."""
    read = jax.device_get
    monkeypatch.setattr(jax, 'device_get', lambda outputs: (time.sleep(0.03), read(outputs))[1])
    params, letters = policy(SEARCH | {'hm': {'hm': 1}}, noise=0), np.frombuffer(b'abcdefghi', np.uint8)
    params['head'] = params['head'].at[letters[:-1], letters[1:]].set(2.0)  # before it searches
    rows = requests(2 + others, max_turns=2)
    rows[1] = dataclasses.replace(rows[1], prompt=[*rows[1].prompt, letters[0]])
    rows[2:] = [dataclasses.replace(row, prompt=[*row.prompt, ID['hm']], turn_tokens=turn_tokens) for row in rows[2:]]
    sampler = engine(deterministic=is_deterministic)
    play_late(rows, lambda queries: 0, sampler, params)  # compiles
    sampler.seconds.clear()
    began = time.monotonic()
    played = play_late(rows, lambda queries: 0.5, sampler, params)
    wall, spent = time.monotonic() - began, sampler.seconds
    assert [row.turns[0].end - row.turns[0].start for row in played] == [4, 12] + others * [turn_tokens]
    assert spent['search'] >= 1
    if waits:
        assert 0.02 < spent['search_hidden'] < 0.3
        assert spent[waits] > 0.2
    else:
        assert 0.7 < spent['search_hidden'] <= spent['search']
    assert {kind for kind in ('waited', 'stalled') if spent[kind]} == ({waits} if waits else set())
    assert spent['device'] + spent['waited'] + spent['stalled'] <= wall


@pytest.fixture
def events(monkeypatch):
    """A list that gets 'launch' and 'read' for each chunk of the shared rows, and what else a test puts there."""
    seen, launch, read = [], Engine.decode, jax.device_get

    def launched(self, params, pool, places):
        seen.append('launch')
        return launch(self, params, pool, places)

    def got(tree):
        seen.append('read')
        return read(tree)

    monkeypatch.setattr(Engine, 'decode', launched)
    monkeypatch.setattr(jax, 'device_get', got)
    return seen


def test_turns_are_read_while_the_next_chunk_runs(events, monkeypatch):
    """Rows that answer after turns of different lengths: none is read between two chunks, the last ones when all is over."""
    close = Row.close_turn
    monkeypatch.setattr(Row, 'close_turn', lambda row: (events.append('close'), close(row)))
    table = always('<answer>', ' red', end='</answer>') | {'start': {'hm': 1}, 'hm': {'hm': 3, '<answer>': 1}}
    rows = play(requests(8, 2), table=table)
    assert len(rows) == events.count('close')
    before = [one for one, two in itertools.pairwise(events) if two == 'close' != one]
    assert before[:-1] == (len(before) - 1) * ['launch']
    assert len(before) >= 2


def test_searches_are_sent_behind_the_next_launch(events):
    """Nothing is under way yet when the first rows want to search, so their turns wait for the launch."""
    world = World()
    play(requests(8, 2), lambda queries: (events.append('search'), world(queries))[1])
    first = events.index('search')
    assert 0 < len(world.calls[0]) < 16, 'some rows could decode on'
    assert events[first - 1] == 'launch'
    assert 'read' in events[:first]


def test_no_latency_changes_which_rows_decode_where_and_when(monkeypatch):
    """Rows whose search tag opens nothing end late, when their turn is read; when that happens depends on the latency.
    With this seed one of them ends just where the last rows move to single places."""
    launches, launch = [], Engine.decode

    def launched(self, params, pool, places):
        launches.append((pool.shape.name, places))
        return launch(self, params, pool, places)

    monkeypatch.setattr(Engine, 'decode', launched)
    params = policy(PLAY | {'hm': {'hm': 3, '<search>': 2, '</sea': 3}})
    schedules = []
    for seconds in (0.0, 0.05):
        rows = play_late(requests(9, 2), lambda queries, seconds=seconds: seconds, engine(), params, seed=5)
        assert any(row.stop_reason == 'malformed' for row in rows)
        schedules.append(launches.copy())
        launches.clear()
    assert schedules[0] == schedules[1]


def test_observations_are_encoded_in_a_thread_of_their_own(monkeypatch):
    threads, encode = set(), Rules.observation
    monkeypatch.setattr(
        Rules,
        'observation',
        lambda rules, found: (threads.add(threading.current_thread().name), encode(rules, found))[1],
    )
    rows = play(requests(4, 2))
    assert any(row.searches for row in rows)
    assert {name.partition('_')[0] for name in threads} == {'observations'}


def test_the_place_of_a_row_that_is_over_is_taken_before_the_next_chunk():
    """Seven of eight groups write for three chunks; in the eighth place, three groups of one chunk follow each other."""
    asked = requests(10, 2, turn_tokens=24)
    asked[14:] = [dataclasses.replace(row, turn_tokens=8) for row in asked[14:]]
    before = engine().counters['decode_steps']
    rows = play(asked, table={'start': {'hm': 1}, 'hm': {'hm': 1}}, noise=0)
    assert [int(row.is_action.sum()) for row in rows] == 14 * [24] + 6 * [8]
    assert engine().counters['decode_steps'] - before == 24


@pytest.mark.parametrize('table', [always('hm', end='end'), always('</sea', end='rch>')])
def test_rows_that_all_end_at_once_make_room_for_the_next(table):
    """With an end id, which is the end of a row, and with a search tag, which must be read first: nothing opens it."""
    rows = play(requests(20, 2), table=table, noise=0)
    assert [row.stop_reason for row in rows] == 40 * ['malformed']


def test_every_search_is_made_once_and_those_of_a_chunk_together_in_row_order():
    world = World()
    rows = play(requests(6, 2), world)
    made = [query for call in world.calls for query in call]
    assert sorted(made) == sorted(search.query for row in rows for search in row.searches)
    assert len(world.calls) < len(made)
    order = {search.query: i for i, row in enumerate(rows) for search in row.searches}
    only_once = [[q for q in call if made.count(q) == 1] for call in world.calls]
    assert any(len(call) > 1 for call in only_once)
    for call in only_once:
        assert [order[query] for query in call] == sorted(order[query] for query in call)


def test_more_rows_than_places_wait_for_a_free_one():
    rows = requests(21, 1, temperature=0.0)
    result = play(rows)
    assert [row.problem_id for row in result] == [row.problem_id for row in rows]
    assert tokens(result) == tokens(play(rows[:5])) | tokens(play(rows[5:]))


def test_counters_add_up(monkeypatch):
    rows = requests(7, 2)
    play([rows[0]])
    steps, take_out = collections.Counter(), Driver._take_out

    def taken_out(self, pool, places, out):
        for place, row in enumerate(pool.rows):
            steps['decoding' if place in places else 'waiting' if row else 'empty'] += int(out.steps)
        steps['all'] += pool.shape.rows * int(out.steps)
        take_out(self, pool, places, out)

    monkeypatch.setattr(Driver, '_take_out', taken_out)
    before = collections.Counter(engine().counters)
    result = play(rows)
    spent = {name: engine().counters[name] - before[name] for name in engine().counters}
    assert spent['rollouts'] == 14
    assert spent['prompt_tokens'] == sum(row.prompt_length for row in result)
    assert spent['action_tokens'] == sum(int(row.is_action.sum()) for row in result)
    assert spent['observation_tokens'] == sum(int((~row.is_action).sum()) - row.prompt_length for row in result)
    assert spent['searches'] == sum(len(row.searches) for row in result)
    assert spent['prefill_tokens'] == sum(row.prompt_length - 1 for row in result[::2]), 'each prompt once'
    assert spent['append_tokens'] == spent['observation_tokens'] > 0
    idle = [spent[name] for name in ('idle_stopped', 'idle_waiting', 'idle_empty')]
    assert min(idle) > 0
    assert idle == [steps['decoding'] - spent['action_tokens'], steps['waiting'], steps['empty']]
    assert spent['action_tokens'] + sum(idle) == steps['all']


def test_a_search_that_loses_a_result_is_an_error():
    with pytest.raises(ValueError, match='0 results for 1 queries'):
        play(requests(1), lambda queries: [], table=SEARCH, noise=0)


def test_what_a_search_raises_is_raised():
    def broken(queries):
        raise OSError('the wire is cut')

    with pytest.raises(OSError, match='the wire is cut'):
        play_late(requests(3, 2), broken, engine())


def test_what_comes_only_when_asked_for_is_asked_for_by_the_main_thread_in_order():
    """As the answers do that several processes share: asking for one is a meeting of all of them."""
    world, asked = World(), []

    def search(queries):
        def meet():
            asked.append((threading.current_thread(), queries))
            return world(queries)

        return _SharedFuture(meet)

    rows, params = requests(6, 2), transformer.unstack(policy(), ARCH)
    played = engine().rollout(params, rows, search, seed=0, step=0, weights_version=3, bank_version=4)
    assert tokens(played) == tokens(play(rows))
    assert {thread for thread, _ in asked} == {threading.main_thread()}
    assert [queries for _, queries in asked] == world.calls
