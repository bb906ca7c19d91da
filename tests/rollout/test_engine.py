"""The engine as a whole: tokens and log-probs are right, whatever the place, the neighbours and the devices."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from devices import fake_devices
from rollout_toy import (
    ARCH,
    LENGTHS,
    TOKENIZER,
    World,
    assert_equal_to_full_forward,
    engine,
    full_forward,
    lengths,
    play,
    policy,
    requests,
    tokens,
)  # fmt: skip

from sesa_jax.config import ConfigError
from sesa_jax.policy.sharding import make_mesh
from sesa_jax.rollout import episode
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Request


@pytest.mark.parametrize('temperature', [1.0, 0.6, 0.0])
def test_logprobs_equal_a_full_forward_of_the_finished_row(temperature):
    params = policy()
    rows = play(requests(7, 2, temperature=temperature), params=params)
    assert temperature == 0 or len({len(row.turns) for row in rows}) > 1, 'rows of one and of several turns'
    assert_equal_to_full_forward(params, rows, temperature)


def test_the_noise_of_the_test_policy_hangs_on_the_context():
    """Otherwise the test above could not see a broken cache."""
    params = policy()
    row = max(play(requests(7, 2), params=params), key=lambda row: len(row.ids))
    other = dataclasses.replace(row, ids=np.concatenate([row.ids[:1] + 1, row.ids[1:]]))
    one, two = full_forward(params, [row, other])
    change = np.abs(one - two)[row.is_action]
    assert change[-1] > 1e-3
    assert change.max() > 1e-2


def test_a_row_cut_by_the_response_budget_still_equals_a_full_forward():
    params = policy()
    rows = play(requests(6, 2, max_turns=9), on=engine(lengths(response=120)), params=params)
    assert any(row.stop_reason == 'length' for row in rows)
    assert_equal_to_full_forward(params, rows)


def test_a_prompt_of_one_token_works():
    params = policy()
    request = Request('solver', 'p', 0, 0, [65], 1.0, 4)
    assert_equal_to_full_forward(params, play([request], params=params))


def test_a_row_has_the_same_tokens_alone_among_others_and_in_another_order():
    rows = requests(6, 2)
    together = tokens(play(rows))
    assert tokens(play(rows[::-1])) == together
    for row in rows[3:9]:
        (alone,) = play([row])
        assert alone.ids.tolist() == together[alone.rollout_id]
    for group in (rows[2:4], rows[8:10]):
        assert tokens(play(group)).items() <= together.items()


@pytest.mark.parametrize('chunk', [1, 3, 4, 16])
def test_the_length_of_a_chunk_changes_no_token(chunk):
    rows = requests(6, 2)
    assert tokens(play(rows, on=engine(chunk=chunk))) == tokens(play(rows))


def test_no_place_changes_a_token():
    """Two groups at a time, single rows only, and places that rows outgrow, each with log-probs that are right."""
    params, rows = policy(), requests(6, 2)
    expected = play(rows, params=params)
    assert max(len(row.ids) - row.prompt_length for row in expected) > 80
    for places in ({'rows': 4, 'single': 2}, {'group_size': 1}, {'short': 80, 'long': 2}, {'single': 16, 'chunk': 3}):
        found = play(rows, params=params, on=engine(**places))
        assert tokens(found) == tokens(expected), places
        assert_equal_to_full_forward(params, found)


def test_rows_move_when_they_outgrow_their_place_and_when_few_are_left():
    for sampler, moves in (
        (engine(short=80, long=2), {('move', 'shared', 'long')}),
        (engine(), {('move', 'shared', 'single')}),
    ):
        play(requests(6, 2), on=sampler)
        assert moves <= sampler.programs.held.keys()


def test_group_members_differ_and_so_do_steps_seeds_and_roles():
    row = requests(1)[0]
    variants = play([dataclasses.replace(row, sample=sample) for sample in range(5)])
    variants += play([row], seed=1) + play([row], step=1)
    variants += play([dataclasses.replace(row, role='challenger')])
    assert len({tuple(variant.ids[variant.prompt_length :]) for variant in variants}) == len(variants)


def test_greedy_rows_do_not_depend_on_the_seed():
    rows = requests(3, temperature=0.0)
    assert tokens(play(rows, seed=0)) == tokens(play(rows, seed=9, step=4))


def test_filters_of_a_request_are_heeded_by_its_row_alone():
    rows = requests(4, 2, temperature=1.0)
    plain = play(rows)
    greedy = play([dataclasses.replace(row, temperature=0.0) for row in rows])
    mixed = play([dataclasses.replace(row, top_k=1) if i % 2 else row for i, row in enumerate(rows)])
    for i, row in enumerate(mixed):
        assert row.ids.tolist() == (greedy if i % 2 else plain)[i].ids.tolist()


def test_padded_ids_are_never_sampled():
    params = policy(noise=0)
    params['head'] = params['head'].at[:, TOKENIZER.vocab_size :].set(3.0)
    for temperature in (0.0, 1.0):
        for row in play(requests(4, 2, temperature=temperature), params=params):
            assert row.ids.max() < TOKENIZER.vocab_size


def test_ids_are_prompt_actions_and_observations_exactly():
    world = World()
    for request, row in zip(requests(7, 2), play(requests(7, 2), world), strict=True):
        ids, is_action = list(request.prompt), [False] * len(request.prompt)
        for number, turn in enumerate(row.turns):
            assert turn.start == len(ids)
            ids += row.ids[turn.start : turn.end].tolist()
            is_action += [True] * (turn.end - turn.start)
            if number < len(row.searches):
                block = episode.encode_observation(TOKENIZER.encode, row.searches[number], LENGTHS.observation)
                ids, is_action = ids + block, is_action + [False] * len(block)
        assert row.ids.tolist() == ids
        assert row.is_action.tolist() == is_action
        assert (row.logprobs[~row.is_action] == 0).all()
        assert row.prompt_length == len(request.prompt)
        assert (row.weights_version, row.bank_version, row.sample) == (3, 4, request.sample)


def test_a_policy_of_nan_is_an_error():
    params = policy()
    params['embed'] = params['embed'] * jnp.nan
    with pytest.raises(FloatingPointError, match='solver p0'):
        play(requests(1), params=params)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'prompt': [1] * 41}, 'has 41 tokens; 1 to lengths.prompt = 40'),
        ({'prompt': []}, 'has 0 tokens'),
        ({'max_turns': 0}, 'at least one turn'),
        ({'turn_tokens': 0}, 'at least one turn'),
    ],
)
def test_a_request_that_cannot_be_played_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        play([dataclasses.replace(requests(1)[0], **changes)])


@pytest.mark.parametrize(
    ('changes', 'message'),
    [({'response': 500}, '40 .* 500 .* 512 positions'), ({'observation': 31}, '31 tokens.* 32; raise it')],
)
def test_lengths_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Engine(ARCH, TOKENIZER, make_mesh(1), dataclasses.replace(LENGTHS, **changes))


def test_no_requests_give_no_rows():
    assert play([]) == []


@pytest.mark.devices
def test_eight_devices_give_the_same_rows():
    """The same tokens and turns at temperature 0 and 1, log-probs to 1e-5, with 11 rows that 8 does not divide."""
    env = fake_devices(8)
    script = pathlib.Path(__file__).parent / 'rollout_devices.py'
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen['devices'] == 8
    assert seen['many'] == seen['split'] == seen['one']
    assert len(seen['one']) == 11
    assert seen['largest_logprob_difference'] < 1e-5
    assert seen['cache'] == ['data', 'model']
