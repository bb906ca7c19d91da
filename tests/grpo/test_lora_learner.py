"""Updates of adapters over one shared base: the objective of the merged policy, and a base that nothing moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_toy import ALLOWED, toy_arch, toy_params, toy_row

from sesa_jax import config
from sesa_jax.grpo import learner
from sesa_jax.grpo.microbatch import Sample
from sesa_jax.policy import lora, sharding, transformer
from sesa_jax.run import checkpoint

ARCH = toy_arch()
OPTIONS = config.Lora(rank=2, alpha=4.0)
GRPO = config.Grpo(micro_batch_tokens=8 * 128, kl=0.05)
OPTIMIZER = config.Optimizer(learning_rate=1e-2, warmup_steps=0, weight_decay=0.01)


@pytest.fixture(scope='module')
def base():
    return toy_params(ARCH, seed=1)


def adapters(seed=0, moved=0.1):
    """Fresh ones, or, with `moved`, such as training leaves behind."""
    fresh = lora.init(ARCH, OPTIONS, [seed], sharding.make_mesh(1))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + moved * rng.standard_normal(x.shape, np.float32), fresh)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return [Sample(toy_row(rng, f'p{i // 2}', i % 2, length=24), float(rng.normal())) for i in range(8)]


def step(state, base, samples, *, grpo=GRPO, optimizer=OPTIMIZER, **options):
    options = {'temperature': 0.7, 'allowed': ALLOWED, 'response_length': 64} | options
    return learner.update(state, base, samples, arch=ARCH, grpo=grpo, optimizer=optimizer, **options)


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_two_roles_learn_over_one_base_that_stays_as_it_is(base):
    before = jax.tree.map(lambda x: np.asarray(x).tobytes(), base)
    start = {role: adapters(i, moved=0.0) for i, role in enumerate(('solver', 'challenger'))}
    states = {role: learner.init_state(tree, OPTIMIZER) for role, tree in start.items()}
    for number in range(2):
        reports = {}
        for i, role in enumerate(states):
            states[role], reports[role] = step(states[role], base, batch(10 * number + i))
        # The base with its adapters off is the reference; fresh adapters are off.
        assert [abs(r['kl']) > 1e-6 for r in reports.values()] == [number == 1] * 2
        assert all(r['optimizer_steps'] == 1 and r['grad_norm'] > 0 for r in reports.values())
    assert before == jax.tree.map(lambda x: np.asarray(x).tobytes(), base)
    for role, state in states.items():
        changes = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), state.params, start[role])
        assert min(jax.tree.leaves(changes)) > 1e-3, role
    assert float(jnp.abs(states['solver'].params.b['up'] - states['challenger'].params.b['up']).max()) > 1e-3


def test_only_adapters_have_moments(base):
    state = learner.init_state(adapters(), OPTIMIZER)
    d, f, n, k = ARCH.width, ARCH.hidden, ARCH.heads * ARCH.head_size, ARCH.kv_heads * ARCH.head_size
    # query, key, value, output, gate, up, down
    count = ARCH.layers * OPTIONS.rank * ((d + n) + 2 * (d + k) + (n + d) + 3 * (d + f))
    assert size(state.params) == 4 * count
    assert size(state.moments) == 2 * 4 * count + 4  # and the number of steps
    assert jax.tree.structure(state.moments[0].mu) == jax.tree.structure(state.params)
    before = size(state)
    assert size(step(state, base, batch())[0]) == before


def test_the_objective_is_that_of_the_merged_policy(base):
    """Over two mini-batches, the second of which stores its old log-probs; a rate of 0 leaves the policy in place."""
    still = dataclasses.replace(OPTIMIZER, learning_rate=0.0)
    trees = adapters(), jax.jit(lora.merged)(base, adapters())
    ours, merged = (
        step(learner.init_state(tree, still), base, batch(), optimizer=still, mini_batch=2)[1] for tree in trees
    )
    assert ours.keys() == merged.keys() and ours['kl'] > 1e-3 and ours['optimizer_steps'] == 2
    for name in ours.keys() - {'grad_norm'}:
        assert ours[name] == pytest.approx(merged[name], rel=1e-5, abs=1e-6), name


def test_the_gradient_is_that_through_merged_weights(base):
    """From a second, plain way of writing the loss: rows of one length, the whole vocabulary at every token."""
    samples = batch()
    ids = jnp.array([s.trajectory.ids for s in samples])
    mask = jnp.array([s.trajectory.is_action[1:] for s in samples])
    advantage = jnp.array([s.advantage for s in samples])[:, None]

    def loss(tree):
        params = lora.merged(base, tree)
        x = transformer.hidden(params, ARCH, ids, jnp.full(len(samples), ids.shape[1]))
        table = jax.nn.log_softmax(transformer.logits(params, ARCH, x)[:, :-1, :ALLOWED] / 0.7)
        chosen = jnp.take_along_axis(table, ids[:, 1:, None], -1)[..., 0]
        return -(jnp.exp(chosen - jax.lax.stop_gradient(chosen)) * advantage * mask).sum() / mask.sum()

    gradient = jax.jit(jax.grad(loss))(adapters())
    norm = float(jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(gradient))))
    sums_up = dataclasses.replace(OPTIMIZER, clip_norm=1e9, b1=0.0)  # the first moment is the gradient itself
    got, metrics = step(
        learner.init_state(adapters(), sums_up), base, batch(), optimizer=sums_up, grpo=dataclasses.replace(GRPO, kl=0.0)
    )
    assert metrics['grad_norm'] == pytest.approx(norm, rel=1e-5)
    ours, theirs = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (got.moments[0].mu, gradient))
    assert np.linalg.norm(ours - theirs) <= 1e-5 * norm


def test_a_checkpoint_holds_adapters_alone_and_goes_on_bit_for_bit(base, tmp_path):
    states = {'solver': learner.init_state(adapters(), OPTIMIZER)}
    states['solver'], _ = step(states['solver'], base, batch(0))
    digest = checkpoint.save(tmp_path, 1, states)
    leaves = checkpoint.verify(tmp_path, 1, digest)['leaves']
    projections = set(OPTIONS.projections)
    assert {name for name in leaves if '/params/' in name} == {
        f'solver/params/{part}/{name}' for part in 'ab' for name in projections
    }
    assert len(leaves) == 3 * 2 * len(projections) + 2  # parameters and two moments; two counters
    fresh = {'solver': learner.init_state(adapters(moved=0.0), OPTIMIZER)}
    restored = checkpoint.restore(tmp_path, 1, fresh, digest)['solver']
    assert restored.params.scale == 2.0
    on, again = (step(state, base, batch(1)) for state in (states['solver'], restored))
    assert_same(on[0], again[0])
    assert on[1] == again[1]
