"""Loss and gradient of one optimizer step hang on the rows alone: not on their order, nor on how they are cut and padded."""

import dataclasses

import jax
import numpy as np
import pytest
from grpo_toy import ARCH, ONE_STEP, distance, gradient, toy_params, toy_samples

from sesa_jax.grpo import learner, microbatch
from sesa_jax.grpo.learner import init_state, update

ROWS = toy_samples(rows=8)


def run(samples=ROWS, tokens=8 * 128):
    """(gradient, metrics) at the same weights."""
    options = ONE_STEP | {'grpo': dataclasses.replace(ONE_STEP['grpo'], micro_batch_tokens=tokens)}
    state = init_state(toy_params(ARCH, 0), options['optimizer'])
    state, metrics = update(state, toy_params(ARCH, 1), samples, **options)
    return gradient(state), metrics


@pytest.fixture(scope='module')
def whole():
    return run()


def assert_equal(got, whole):
    assert distance(got[0], whole[0]) < 1e-6
    for name in ('loss', 'policy_loss', 'kl', 'entropy', 'grad_norm', 'sampler_difference', 'sampler_difference_max'):
        assert got[1][name] == pytest.approx(whole[1][name], rel=2e-6, abs=1e-6), name  # terms of size 1 may cancel
    for name in ('tokens', 'rows', 'optimizer_steps', 'clip_fraction'):
        assert got[1][name] == whole[1][name], name


def test_the_gradient_is_that_of_the_loss(whole):
    """Of what the moments hand out: its norm is the norm reported, and it is not that of fewer rows."""
    assert np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(whole[0]))) == pytest.approx(whole[1]['grad_norm'], rel=1e-5)
    assert distance(run(ROWS[:7])[0], whole[0]) > 1e-2


@pytest.mark.parametrize('rows', [1, 2, 4])
def test_the_size_of_micro_batches_changes_nothing(whole, rows):
    got = run(tokens=rows * 128)
    assert got[1]['micro_batches'] == 8 // rows
    assert_equal(got, whole)


@pytest.mark.parametrize(('table', 'tokens', 'micros'), [((256,), 8 * 256, 1), ((24, 40), 160, 2)])
def test_padding_and_buckets_change_nothing(whole, table, tokens, micros, monkeypatch):
    """200 more columns of padding; and two short buckets: four rows of 40 columns, then six of 24, two of them empty."""
    monkeypatch.setattr(microbatch, 'LENGTHS', table)
    got = run(tokens=tokens)
    assert got[1]['micro_batches'] == micros
    assert abs(got[1]['padding_waste'] - whole[1]['padding_waste']) > 0.05
    assert_equal(got, whole)


def test_the_order_of_micro_batches_and_of_the_rows_in_them_changes_nothing(whole, monkeypatch):
    rng = np.random.default_rng(5)

    def shuffled(*arguments):
        plan = []
        for micro in microbatch.micro_batches(*arguments):
            order = rng.permutation(len(micro.lengths))
            plan.append(microbatch.MicroBatch(**{name: array[order] for name, array in vars(micro).items()}))
        return [plan[i] for i in rng.permutation(len(plan))]

    monkeypatch.setattr(learner, 'micro_batches', shuffled)
    assert_equal(run(tokens=4 * 128), whole)
    assert_equal(run([ROWS[i] for i in rng.permutation(8)]), whole)
