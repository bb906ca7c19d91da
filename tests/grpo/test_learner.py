"""`update` against a plain float64-free reference, and what it promises: denominators, purity, skips, counters."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_toy import ALLOWED, toy_arch, toy_params, toy_row

from sesa_jax import config
from sesa_jax.grpo import learner, loss
from sesa_jax.grpo.learner import TrainState, init_state, update
from sesa_jax.grpo.microbatch import Sample
from sesa_jax.policy import sharding, transformer
from sesa_jax.policy.arch import abstract
from sesa_jax.run import checkpoint

ARCH = toy_arch()
GRPO = config.Grpo(micro_batch_tokens=8 * 128, kl=0.02)
OPTIMIZER = config.Optimizer(learning_rate=1e-2, warmup_steps=0, weight_decay=0.01)


def batch(seed=0, problems=4, rollouts=2):
    rng = np.random.default_rng(seed)
    rows = [(f'p{p}', s) for p in range(problems) for s in range(rollouts)]
    return [Sample(toy_row(rng, *row), float(rng.normal())) for row in rows]


@pytest.fixture(scope='module')
def reference():
    return toy_params(ARCH, seed=1)


@pytest.fixture
def state():
    return init_state(toy_params(ARCH, seed=0), OPTIMIZER)


def step(state, reference, samples, *, grpo=GRPO, optimizer=OPTIMIZER, **options):
    options = {'donate': False, 'temperature': 0.7, 'allowed': ALLOWED, 'response_length': 64} | options
    return update(state, reference, samples, arch=ARCH, grpo=grpo, optimizer=optimizer, **options)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# --- the step against a second, plain way of writing it ---------------------------------------------------------------


def plain_loss(params, reference, samples, grpo, temperature=0.7):
    """The whole vocabulary at every token of rows of one length; first pass, so the ratio is 1."""
    ids = jnp.array([s.trajectory.ids for s in samples])
    mask = jnp.array([s.trajectory.is_action[1:] for s in samples])
    advantage = jnp.array([s.advantage for s in samples])[:, None]

    def chosen(p):
        x = transformer.hidden(p, ARCH, ids, jnp.full(len(samples), ids.shape[1]))
        table = jax.nn.log_softmax(transformer.logits(p, ARCH, x)[:, :-1, :ALLOWED] / temperature)
        return jnp.take_along_axis(table, ids[:, 1:, None], -1)[..., 0]

    new, ref = chosen(params), chosen(reference)
    gain = jnp.exp(new - jax.lax.stop_gradient(new)) * advantage
    values = -gain + grpo.kl * (jnp.exp(ref - new) - 1 - (ref - new))
    return (values * mask).sum() / mask.sum()


def test_one_step_equals_a_plain_one(state, reference):
    rng = np.random.default_rng(0)
    samples = [Sample(toy_row(rng, f'p{i}', length=20), (1.0, -0.5, 0.3, 0.0)[i % 4]) for i in range(8)]
    value, gradient = jax.jit(jax.value_and_grad(lambda p: plain_loss(p, reference, samples, GRPO)))(state.params)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.01))
    changes, _ = optimizer.update(gradient, optimizer.init(state.params), state.params)
    got, metrics = step(state, reference, samples)
    np.testing.assert_allclose(metrics['loss'], value, rtol=1e-5)
    np.testing.assert_allclose(metrics['grad_norm'], optax.tree.norm(gradient), rtol=1e-4)
    # Adam's first step is the sign of the gradient where that is not tiny; tiny ones may differ by rounding.
    assert_close(got.params, optax.apply_updates(state.params, changes), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(('rows', 'aggregation'), [(1, 'token'), (2, 'sequence')])
def test_micro_batches_change_nothing(state, reference, rows, aggregation):
    grpo = dataclasses.replace(GRPO, aggregation=aggregation)
    whole = step(state, reference, batch(), grpo=grpo)
    parts = step(state, reference, batch(), grpo=dataclasses.replace(grpo, micro_batch_tokens=rows * 128))
    assert (whole[1]['micro_batches'], parts[1]['micro_batches']) == (1, 8 // rows)
    for name in ('loss', 'kl', 'entropy', 'policy_loss', 'sampler_difference', 'grad_norm'):
        np.testing.assert_allclose(parts[1][name], whole[1][name], rtol=1e-5, err_msg=name)
    assert_close(parts[0].moments, whole[0].moments, rtol=1e-4, atol=1e-7)


def test_permuting_rows_changes_no_bit(state, reference):
    samples = batch()
    order = np.random.default_rng(1).permutation(len(samples))
    plain, shuffled = step(state, reference, samples), step(state, reference, [samples[i] for i in order])
    assert_same(plain[0], shuffled[0])
    assert plain[1] == shuffled[1]


# --- which rows count -------------------------------------------------------------------------------------------------


def test_rows_that_are_left_out_are_as_good_as_absent(state, reference):
    samples = batch()
    out = [dataclasses.replace(s, is_included=i % 4 != 0) for i, s in enumerate(samples)]
    masked, absent = step(state, reference, out), step(state, reference, [s for s in out if s.is_included])
    assert_same(masked[0], absent[0])
    assert masked[1] == absent[1] and masked[1]['rows'] == 6


def test_observations_are_not_trained(state, reference):
    metrics = step(state, reference, batch())[1]
    assert metrics['tokens'] == sum(s.trajectory.is_action.sum() for s in batch())


def half_dead():
    samples = batch()
    dead = {'p0', 'p1'}
    return [
        dataclasses.replace(s, advantage=0.0, is_dead=True) if s.trajectory.problem_id in dead else s for s in samples
    ]


def test_dead_groups_stay_in_the_denominator_unless_dropped(state, reference):
    grpo = dataclasses.replace(GRPO, kl=0.0)
    samples = half_dead()
    live = [s for s in samples if not s.is_dead]
    alone = step(state, reference, live, grpo=grpo)[1]
    kept = step(state, reference, samples, grpo=grpo)[1]
    dropped = step(state, reference, samples, grpo=dataclasses.replace(grpo, drop_dead_groups=True))[1]
    share = alone['tokens'] / kept['tokens']
    np.testing.assert_allclose(kept['policy_loss'], alone['policy_loss'] * share, rtol=1e-5)
    np.testing.assert_allclose(kept['grad_norm'], alone['grad_norm'] * share, rtol=1e-4)
    assert dropped == alone


@pytest.mark.parametrize('samples', ['dead', 'none', 'left out'])
def test_a_step_without_an_advantage_changes_no_bit(state, reference, samples):
    """Although KL against other weights, weight decay and (after a first step) momentum would each move it."""
    state, _ = step(state, reference, batch())
    rows = [dataclasses.replace(s, advantage=0.0) for s in batch(1)]
    rows = {'dead': rows, 'none': [], 'left out': [dataclasses.replace(s, is_included=False) for s in batch(1)]}[
        samples
    ]
    got, metrics = step(state, reference, rows, donate=True)
    assert_same(got, state)
    assert metrics['optimizer_steps'] == 0 and metrics['skipped_steps'] == 0
    assert all(np.isfinite(x) for x in metrics.values())


def test_an_advantage_on_a_left_out_row_does_not_count(state, reference):
    rows = [dataclasses.replace(s, is_included=i > 0, advantage=float(i == 0)) for i, s in enumerate(batch())]
    got, _ = step(state, reference, rows)
    assert_same(got, state)


# --- mini-batches -----------------------------------------------------------------------------------------------------


def test_mini_batches_are_steps_with_the_old_logprobs_of_before(state, reference):
    samples = batch()
    halves = [[s for s in samples if s.trajectory.problem_id in names] for names in ({'p0', 'p1'}, {'p2', 'p3'})]
    both, metrics = step(state, reference, samples, mini_batch=2)
    first, one = step(state, reference, halves[0])
    _, two = step(first, reference, halves[1])
    assert metrics['optimizer_steps'] == 2 and int(both.step) == 2
    # The second gradient is taken at the weights that the first step made ...
    kl = sum(m['kl'] * m['tokens'] for m in (one, two)) / metrics['tokens']
    np.testing.assert_allclose(metrics['kl'], kl, rtol=1e-5)
    # ... but its old log-probs, which the agreement is measured with, are those of the weights that sampled.
    whole = step(state, reference, samples)[1]
    np.testing.assert_allclose(metrics['sampler_difference'], whole['sampler_difference'], rtol=1e-5)
    assert metrics['sampler_difference'] != pytest.approx(
        (one['sampler_difference'] + two['sampler_difference']) / 2, rel=1e-3
    )
    assert metrics['clip_fraction'] > 0 == one['clip_fraction'] == two['clip_fraction']


def test_a_dead_mini_batch_takes_no_step(state, reference):
    got, metrics = step(state, reference, half_dead(), mini_batch=2)
    assert metrics['optimizer_steps'] == 1 and metrics['idle_mini_batches'] == 1
    live = [s for s in half_dead() if not s.is_dead]
    assert_same(got, step(state, reference, live)[0])


# --- the optimizer step -----------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_skipped_and_reported(state, reference, caplog):
    spoiled = dataclasses.replace(state, params=state.params | {'final_norm': state.params['final_norm'] * jnp.nan})
    with caplog.at_level(logging.WARNING):
        got, metrics = step(spoiled, reference, batch())
    assert_same(got, spoiled)
    assert metrics['optimizer_steps'] == 0 and metrics['skipped_steps'] == 1
    assert '1 of 1 optimizer steps were not finite' in caplog.text
    assert all(np.isfinite(x) for x in metrics.values())


def test_a_reference_that_is_not_finite_skips_the_step(state, reference):
    """One row of its embedding overflows: its log-probs are inf and NaN, and so is k3."""
    got, metrics = step(state, reference | {'embed': reference['embed'].at[7].set(jnp.inf)}, batch())
    assert_same(got, state)
    assert (metrics['optimizer_steps'], metrics['skipped_steps']) == (0, 1)


def overflowing():
    """Finite advantages, but the sum over the tokens of one row is not."""
    return [dataclasses.replace(s, advantage=3e38) if i == 0 else s for i, s in enumerate(batch())]


def test_an_overflow_in_one_micro_batch_of_several_skips_the_step(state, reference):
    grpo = dataclasses.replace(GRPO, micro_batch_tokens=128)
    got, metrics = step(state, reference, overflowing(), grpo=grpo)
    assert_same(got, state)
    assert (metrics['micro_batches'], metrics['optimizer_steps'], metrics['skipped_steps']) == (8, 0, 1)


def test_a_mini_batch_behind_one_that_was_skipped_takes_its_step(state, reference):
    got, metrics = step(state, reference, overflowing(), mini_batch=2)
    assert (metrics['optimizer_steps'], metrics['skipped_steps'], int(got.step)) == (1, 1, 1)
    alone, its = step(state, reference, [s for s in batch() if s.trajectory.problem_id in ('p2', 'p3')])
    for name in ('loss', 'grad_norm', 'kl', 'learning_rate'):
        np.testing.assert_allclose(metrics[name], its[name], rtol=1e-5, err_msg=name)
    assert_close(got.moments, alone.moments, rtol=1e-4, atol=1e-7)


def test_moments_and_counters_are_float32_and_own_their_buffers(state):
    params = toy_params(ARCH)
    made = init_state(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), OPTIMIZER)
    floats = [x for x in jax.tree.leaves(made) if x.ndim]
    assert {x.dtype for x in floats} == {np.dtype('float32')}
    again = init_state(params, OPTIMIZER)
    owned = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(again.params)}
    assert not owned & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}


def apply_only(state, gradients, optimizer, count=1.0):
    total = loss.Ratio(jnp.float32(0), jnp.float32(count))
    layout = learner._Layout.of(state)
    return learner._apply(state, gradients, total, optimizer=optimizer, layout=layout)


def test_small_steps_are_not_absorbed():
    """w = 1, constant gradient, rate 1e-6, 1000 Adam steps -> 0.999."""
    optimizer = config.Optimizer(learning_rate=1e-6, warmup_steps=0, weight_decay=0.0)
    state = init_state({'w': jnp.ones(3)}, optimizer)
    for _ in range(1000):
        state, _ = apply_only(state, {'w': jnp.full(3, 0.1)}, optimizer)
    np.testing.assert_allclose(
        state.params['w'], 0.999, atol=2e-5
    )  # float32 rounds each step to 17 units in the last place


def test_warm_up_counts_optimizer_steps_and_goes_on_after_a_restore():
    optimizer = config.Optimizer(learning_rate=1e-3, warmup_steps=5)
    rates = []
    state = init_state({'w': jnp.ones(3)}, optimizer)
    for k in range(7):
        if k == 3:  # through host memory, as a checkpoint does it
            state = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state))
        state, report = apply_only(state, {'w': jnp.ones(3)}, optimizer)
        rates.append(float(report['learning_rate']))
    np.testing.assert_allclose(rates, np.array([1, 2, 3, 4, 5, 5, 5]) * 2e-4, rtol=1e-6)
    assert int(state.step) == 7


def test_a_restored_state_goes_on_with_the_same_bits(state, reference, tmp_path):
    """Types and values of the moments, and the rate of the next step (the warm-up is under way)."""
    optimizer = dataclasses.replace(OPTIMIZER, warmup_steps=5)
    state, _ = step(state, reference, batch(), optimizer=optimizer)
    digest = checkpoint.save(tmp_path, 1, {'solver': state})
    restored = checkpoint.restore(tmp_path, 1, {'solver': state}, digest)['solver']
    assert [x.dtype for x in jax.tree.leaves(restored)] == [x.dtype for x in jax.tree.leaves(state)]
    assert_same(restored, state)
    (on, metrics), (again, others) = (step(s, reference, batch(1), optimizer=optimizer) for s in (state, restored))
    assert_same(on, again)
    assert metrics == others and metrics['learning_rate'] == pytest.approx(2 / 5 * 1e-2)


def test_micro_batches_do_not_advance_the_warm_up(state, reference):
    optimizer = dataclasses.replace(OPTIMIZER, warmup_steps=10)
    grpo = dataclasses.replace(GRPO, micro_batch_tokens=128)
    got, metrics = step(state, reference, batch(), grpo=grpo, optimizer=optimizer)
    assert metrics['micro_batches'] == 8 and int(got.step) == 1
    np.testing.assert_allclose(metrics['learning_rate'], 1e-3, rtol=1e-6)


def test_a_skipped_step_does_not_advance_the_warm_up():
    state = init_state({'w': jnp.ones(3)}, OPTIMIZER)
    got, report = apply_only(state, {'w': jnp.array([1.0, jnp.inf, 0.0])}, OPTIMIZER)
    assert not report['is_finite']
    assert_same(got, state)


@pytest.mark.parametrize(('norm', 'scale'), [(10.0, 0.1), (0.5, 1.0)])
def test_clip_by_global_norm(norm, scale):
    optimizer = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    state = init_state({'a': jnp.zeros(1), 'b': jnp.zeros(1)}, optimizer)
    gradients = {'a': jnp.array([0.6 * norm]), 'b': jnp.array([0.8 * norm])}
    got, report = apply_only(state, jax.tree.map(lambda x: x * 4, gradients), optimizer, count=4.0)
    np.testing.assert_allclose(report['grad_norm'], norm, rtol=1e-6)
    np.testing.assert_allclose(got.moments[0].mu['a'], 0.1 * 0.6 * norm * scale, rtol=1e-5)


def test_weight_decay_is_decoupled():
    optimizer = config.Optimizer(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    state = init_state({'w': jnp.full(2, 2.0)}, optimizer)
    got, _ = apply_only(state, {'w': jnp.zeros(2)}, optimizer)
    np.testing.assert_allclose(got.params['w'], 2.0 - 0.1 * 0.5 * 2.0, rtol=1e-6)


def test_perturbed_moments_change_the_next_step(state, reference):
    state, _ = step(state, reference, batch())
    other = dataclasses.replace(state, moments=jax.tree.map(lambda x: x * 2 if x.ndim else x, state.moments))
    a, b = (step(s, reference, batch(1))[0].params['embed'] for s in (state, other))
    assert np.abs(a - b).max() > 1e-4


# --- purity, metrics, errors ------------------------------------------------------------------------------------------


def test_donation_spares_the_reference_and_the_caller_can_keep_the_state(reference):
    params = toy_params(ARCH)
    kept, given = init_state(params, OPTIMIZER), init_state(params, OPTIMIZER)
    a, _ = step(kept, params, batch(), donate=False)
    b, _ = step(given, params, batch(), donate=True)
    assert_same(a, b)
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, kept)))
    assert any(x.is_deleted() for x in jax.tree.leaves(given))


def test_a_reference_that_is_the_state_itself_is_refused(state):
    with pytest.raises(ValueError, match='shares arrays with the state'):
        step(state, state.params, batch(), donate=True)


def test_rerun_gives_the_same_bits(state, reference):
    a, b = step(state, reference, batch()), step(state, reference, batch())
    assert_same(a[0], b[0])
    assert a[1] == b[1]


def test_equal_policies_have_no_kl(state):
    metrics = step(state, toy_params(ARCH, seed=0), batch())[1]
    np.testing.assert_allclose(metrics['kl'], 0, atol=1e-9)
    assert metrics['clip_fraction'] == 0
    mean = np.average([s.advantage for s in batch()], weights=[s.trajectory.is_action.sum() for s in batch()])
    np.testing.assert_allclose(metrics['policy_loss'], -mean, rtol=1e-5)


def test_without_a_kl_term_no_kl_is_claimed(state, reference):
    metrics = step(state, reference, batch(), grpo=dataclasses.replace(GRPO, kl=0.0))[1]
    assert 'kl' not in metrics


def test_agreement_with_the_sampler_is_measured(state, reference):
    """Rows that carry the learner's own log-probs agree; one token that is off by 0.5 is the maximum."""
    samples = batch()
    true = []

    @jax.jit
    def logits(ids, length):
        return transformer.logits(state.params, ARCH, transformer.hidden(state.params, ARCH, ids, length))

    for s in samples:
        ids = jnp.array(np.pad(s.trajectory.ids, (0, 40 - len(s.trajectory.ids))))[None]
        table = jax.nn.log_softmax(logits(ids, jnp.array([len(s.trajectory.ids)]))[0, :-1, :ALLOWED] / 0.7)
        lp = np.pad(np.asarray(jnp.take_along_axis(table, ids[0, 1:, None], -1))[:, 0], (1, 0))
        lp = np.where(s.trajectory.is_action, lp[: len(s.trajectory.ids)], 0)
        true.append(dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, logprobs=lp)))
    metrics = step(state, reference, true)[1]
    assert metrics['sampler_difference_max'] < 1e-4
    true[3].trajectory.logprobs[true[3].trajectory.is_action.nonzero()[0][2]] += 0.5
    off = step(state, reference, true)[1]
    np.testing.assert_allclose(off['sampler_difference_max'], 0.5, atol=1e-4)
    np.testing.assert_allclose(off['sampler_difference'], 0.5 / off['tokens'], atol=1e-5)


@pytest.mark.parametrize('temperature', [0.0, -1.0, float('nan')])
def test_greedy_rows_are_refused(state, reference, temperature):
    with pytest.raises(ValueError, match='sampled greedily'):
        step(state, reference, batch(), temperature=temperature)


@pytest.mark.parametrize('has_mesh', [False, True])
def test_shapes_are_compiled_once_for_both_roles_and_all_steps(has_mesh):
    """Also on a mesh of one device, where every way to lie is the same and only its spelling differs."""
    mesh = sharding.make_mesh(1) if has_mesh else None
    place = sharding.shardings(abstract(ARCH), sharding.TRAIN, mesh) if mesh else None
    one, two, reference = (jax.device_put(toy_params(ARCH, seed), place) for seed in range(3))
    states = {'one': init_state(one, OPTIMIZER), 'two': init_state(two, OPTIMIZER)}
    sizes = []
    for seed, temperature in ((0, 0.7), (1, 1.0), (2, 1.3)):
        for role, state in states.items():
            states[role], metrics = step(state, reference, batch(seed), temperature=temperature, mesh=mesh)
            assert metrics['optimizer_steps'] == 1
            sizes.append([f._cache_size() for f in (learner._accumulate, learner._apply)])
    assert sizes == sizes[:1] * 6


@pytest.mark.parametrize(
    ('asked', 'bf16', 'f32'),
    [('auto', 'token', 'off'), ('token', 'token', 'token'), ('sequence', 'sequence', 'sequence'), ('off', 'off', 'off')],
)
def test_importance_weights_follow_the_compute_type(asked, bf16, f32):
    grpo = config.Grpo(importance_weights=asked)
    got = [learner._Options.of(grpo, 64, dtype).importance_level for dtype in (jnp.bfloat16, jnp.float32)]
    assert got == [bf16, f32]


def test_the_state_is_a_pytree_with_named_parts(state):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".params['embed']" in paths and '.step' in paths
    assert isinstance(jax.tree.map(lambda x: x, state), TrainState)
