"""How rows become micro-batches: few shapes, little padding, nothing lost."""

import numpy as np
import pytest
from grpo_toy import ALLOWED, toy_row

from sesa_jax.grpo import microbatch as M


def samples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [M.Sample(toy_row(rng, f'p{i}', i % 5, length=n), i + 1.0) for i, n in enumerate(lengths)]


def shapes(batches):
    return [batch.ids.shape for batch in batches]


def test_longest_first_and_filled():
    got = M.micro_batches(samples([100, 300, 120, 500, 260]), 1024)
    assert shapes(got) == [(2, 512), (2, 384), (2, 128)]
    assert [b.lengths.tolist() for b in got[:2]] == [[500, 300], [260, 120]]


def test_every_row_is_there_once_with_its_values():
    rows = samples([100, 300, 120, 500, 260, 128, 129])
    got = {}
    for batch in M.micro_batches(rows, 1024):
        for i in np.flatnonzero(batch.is_counted):
            got[float(batch.advantage[i])] = batch, i
    assert len(got) == len(rows)
    for sample in rows:
        batch, i = got[sample.advantage]
        row, size = sample.trajectory, len(sample.trajectory.ids)
        assert batch.lengths[i] == size
        np.testing.assert_array_equal(batch.ids[i, :size], row.ids)
        np.testing.assert_array_equal(batch.is_action[i, :size], row.is_action)
        np.testing.assert_array_equal(batch.sampler[i, :size], row.logprobs)
        assert not batch.is_action[i, size:].any()


def test_padding_rows_do_not_count():
    (batch,) = M.micro_batches(samples([100, 90, 80]), 1024, ways=4)
    assert batch.ids.shape == (4, 128)
    assert batch.is_counted.tolist() == [True, True, True, False]
    assert batch.lengths[3] == 0 and not batch.is_action[3].any() and batch.advantage[3] == 0


def test_rows_are_a_multiple_of_the_devices_even_over_the_budget():
    got = M.micro_batches(samples([2000] * 9), 1024, ways=8)
    assert shapes(got) == [(8, 2176), (8, 2176)]


def test_the_order_of_the_rows_means_nothing():
    rows = samples([100, 300, 120, 100, 260, 100, 129])
    rng = np.random.default_rng(3)
    plain, shuffled = (M.micro_batches(x, 600) for x in (rows, [rows[i] for i in rng.permutation(len(rows))]))
    for a, b in zip(plain, shuffled, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.advantage, b.advantage)


def test_few_shapes_and_little_padding():
    """80 rows of 250-700 tokens, 40 steps."""
    rng = np.random.default_rng(0)
    seen, real, padded = set(), 0, 0
    for step in range(40):
        rows = samples(rng.integers(250, 700, 80), step)
        batches = M.micro_batches(rows, 4096)
        seen |= set(shapes(batches))
        real += sum(b.lengths.sum() for b in batches)
        padded += sum(b.ids.size for b in batches)
    assert len(seen) <= 10
    assert 1 - real / padded < 0.17


def test_a_small_rest_goes_into_a_quarter():
    """Ten rows fill a micro-batch, and three are a quarter of it."""
    assert shapes(M.micro_batches(samples([100] * 13), 1280)) == [(10, 128), (3, 128)]
    assert shapes(M.micro_batches(samples([100] * 14), 1280)) == [(10, 128), (10, 128)]
    assert shapes(M.micro_batches(samples([100] * 20), 1280)) == [(10, 128), (10, 128)]


def log_normal(count, seed, mean=2500, variation=0.6, longest=M.LENGTHS[-1]):
    """i64[count]: lengths of a search agent's rows; variation is the standard deviation over the mean."""
    sigma = np.sqrt(np.log1p(variation**2))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, 64, longest).astype(int)


def test_a_step_at_full_size_pads_little_in_few_shapes():
    """1,280 rows on eight devices of 16,384 tokens each."""
    wastes, seen = [], set()
    for step in range(5):
        lengths = log_normal(1280, step)
        batches = M.micro_batches(samples(lengths, step), 8 * 16384, ways=8)
        wastes.append(1 - lengths.sum() / sum(b.ids.size for b in batches))
        assert len(set(shapes(batches))) <= 13
        assert max(b.ids.size for b in batches) <= 8 * 16384
        seen |= set(shapes(batches))
    assert np.mean(wastes) <= 0.15 and max(wastes) <= 0.16
    assert len(seen) <= 15


def test_one_big_batch_buckets_and_shuffled_buckets_hold_the_same_rows():
    lengths = log_normal(64, 0, mean=300)
    rows = samples(lengths)
    assert len({s.advantage for s in rows}) == 64  # so an advantage names its row

    def content(batches):
        return {
            float(b.advantage[i]): tuple(x[i, : b.lengths[i]].tobytes() for x in (b.ids, b.is_action, b.sampler))
            for b in batches
            for i in np.flatnonzero(b.is_counted)
        }

    big = M.micro_batches(rows, 10**6)
    buckets = M.micro_batches(rows, 2048)
    shuffled = M.micro_batches([rows[i] for i in np.random.default_rng(1).permutation(64)], 2048)
    assert len(big) == 1 and len(buckets) > 5
    assert content(big) == content(buckets) == content(shuffled)
    assert len(content(big)) == 64


@pytest.mark.parametrize('bad', ['length', 'first', 'id', 'advantage', 'flags'])
def test_the_door_names_the_row(bad):
    rng = np.random.default_rng(0)
    row, advantage = toy_row(rng, 's3-p7', 2, length=20), 1.0
    if bad == 'length':
        row = toy_row(rng, 's3-p7', 2, length=M.LENGTHS[-1] + 1)
    elif bad == 'first':
        row.is_action[0] = True
    elif bad == 'id':
        row.ids[19] = ALLOWED
    elif bad == 'flags':
        object.__setattr__(row, 'is_action', row.is_action[:-1])
    else:
        advantage = float('nan')
    with pytest.raises(ValueError, match='solver:s3-p7:2: '):
        M.check([M.Sample(row, advantage)], ALLOWED)


def test_prompt_ids_may_be_control_tokens_that_are_never_sampled():
    row = toy_row(np.random.default_rng(0))
    row.ids[0] = ALLOWED + 1
    M.check([M.Sample(row, 1.0)], ALLOWED)


def test_mini_batches_hold_whole_problems():
    rng = np.random.default_rng(0)
    rows = [M.Sample(toy_row(rng, f'p{i % 5}', i // 5), 0.0) for i in range(15)]
    got = [{s.trajectory.problem_id for s in mini} for mini in M.by_problem(rows, 2)]
    assert got == [{'p0', 'p1'}, {'p2', 'p3'}, {'p4'}]
    assert [len(mini) for mini in M.by_problem(rows, 2)] == [6, 6, 3]
    assert [len(mini) for mini in M.by_problem(rows, None)] == [15]
    assert M.by_problem([], 4) == []
