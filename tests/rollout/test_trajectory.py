import dataclasses
import gzip
import json

import numpy as np
import pytest

from sesa_jax.records import Document, Search, Trajectory, Turn
from sesa_jax.rollout.trajectory import read_trajectories, write_trajectories


def make(sample=0, latency=0.25):
    rng = np.random.default_rng(sample)
    is_action = np.array([0, 0, 1, 1, 0, 1, 1], bool)
    return Trajectory(
        role='solver',
        problem_id='s1-p3',
        sample=sample,
        ids=rng.integers(0, 1000, 7).astype(np.int32),
        is_action=is_action,
        logprobs=np.where(is_action, -rng.exponential(1e-3, 7), 0).astype(np.float32),
        prompt_length=2,
        turns=(Turn('search', 'who ‹x›\n"é"', 2, 4), Turn('answer', '', 5, 7)),
        searches=(Search('who', (Document('d\ud800', 'T', 'x\u2028</answer>'),), 'ok', latency),),
        card_ids=('c1', 'c2'),
        stop_reason='answer',
        weights_version=3,
        bank_version=4,
    )


def assert_equal(one, other):
    for field in dataclasses.fields(Trajectory):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def test_the_round_trip_is_lossless(tmp_path):
    rows = [make(0), make(1), dataclasses.replace(make(2), turns=(), searches=(), card_ids=(), stop_reason='length')]
    write_trajectories(tmp_path / 'r.jsonl.gz', rows)
    back = read_trajectories(tmp_path / 'r.jsonl.gz')
    assert len(back) == 3
    for one, other in zip(rows, back, strict=True):
        assert_equal(one, other)


def test_equal_rollouts_are_equal_bytes_and_latency_stands_under_time(tmp_path):
    write_trajectories(tmp_path / 'a.jsonl.gz', [make()])
    write_trajectories(tmp_path / 'b.jsonl.gz', [make()])
    write_trajectories(tmp_path / 'c.jsonl.gz', [make(latency=9.0)])
    assert (tmp_path / 'a.jsonl.gz').read_bytes() == (tmp_path / 'b.jsonl.gz').read_bytes()
    assert (tmp_path / 'a.jsonl.gz').read_bytes()[4:8] == bytes(4), 'no time in the header of the gzip file'
    a, c = (json.loads(gzip.decompress((tmp_path / f'{name}.jsonl.gz').read_bytes())) for name in 'ac')
    assert (a.pop('time'), c.pop('time')) == ({'latency': [0.25]}, {'latency': [9.0]})
    assert a == c


def test_no_trajectories_is_an_empty_file(tmp_path):
    write_trajectories(tmp_path / 'r.jsonl.gz', [])
    assert read_trajectories(tmp_path / 'r.jsonl.gz') == []


def test_a_logprob_that_is_not_a_number_leaves_the_old_file(tmp_path):
    path = tmp_path / 'r.jsonl.gz'
    write_trajectories(path, [make(0)])
    with pytest.raises(ValueError):
        write_trajectories(path, [dataclasses.replace(make(1), logprobs=np.full(7, np.nan, np.float32))])
    assert_equal(read_trajectories(path)[0], make(0))


def test_a_file_cut_short_is_refused(tmp_path):
    path = tmp_path / 'r.jsonl.gz'
    write_trajectories(path, [make(i) for i in range(50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match='is not a trajectory'):
        read_trajectories(path)
