import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sesa_jax.rollout import sampling

V = 300  # not a multiple of the block
sample = jax.jit(sampling.sample, static_argnames='allowed')
row_keys, token_uniforms, invert = (jax.jit(f) for f in (sampling.row_keys, sampling.token_uniforms, sampling._invert))


def draw(logits, count, temperature=1.0, allowed=V, seed=0):
    """`count` independent draws from one row of logits, as the engine draws them: one key, positions 0, 1, ..."""
    keys = jnp.tile(row_keys(seed, 0, *jnp.zeros((3, 1), jnp.int32)), (count, 1))
    rows = jnp.tile(logits, (count, 1))
    return sample(rows, token_uniforms(keys, jnp.arange(count)), jnp.full(count, temperature), allowed=allowed)


@pytest.mark.parametrize(('spread', 'temperature'), [(1.0, 1.0), (4.0, 1.0), (3.0, 0.7)])
def test_draws_follow_the_softmax(spread, temperature):
    logits = spread * np.random.default_rng(1).standard_normal(V).astype(np.float32)
    count = 40_000
    token, _ = draw(jnp.asarray(logits), count, temperature)
    weight = np.exp(logits.astype(np.float64) / temperature)
    expected = count * weight / weight.sum()
    observed = np.bincount(token, minlength=V)
    is_rare = expected < 5
    if is_rare.any():
        observed = np.append(observed[~is_rare], observed[is_rare].sum())
        expected = np.append(expected[~is_rare], expected[is_rare].sum())
    assert stats.chisquare(observed, expected).pvalue > 0.01


@pytest.mark.parametrize('temperature', [1.0, 0.5])
def test_the_logprob_is_that_of_the_scaled_unfiltered_distribution(temperature):
    logits = 5 * np.random.default_rng(2).standard_normal(V).astype(np.float32)
    token, logprob = draw(jnp.asarray(logits), 500, temperature, allowed=290)
    exact = logits[:290].astype(np.float64) / temperature
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    np.testing.assert_allclose(logprob, exact[np.asarray(token)], atol=1e-6 * np.abs(exact).max())


def test_temperature_scales_the_logits_before_the_softmax():
    logprob = sample(jnp.array([[2.0, 0.0]]), jnp.zeros((1, 2)), jnp.array([0.5]), allowed=2)[1]
    assert logprob[0] == pytest.approx(-0.01815, abs=1e-5)


def test_temperature_zero_is_argmax_with_the_logprob_of_temperature_one():
    logits = np.random.default_rng(3).standard_normal((20, V)).astype(np.float32)
    uniforms = jax.random.uniform(jax.random.key(0), (20, 2))
    token, logprob = sample(jnp.asarray(logits), uniforms, jnp.zeros(20), allowed=V)
    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[np.arange(20), logits.argmax(-1)], atol=1e-6)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_padded_ids_are_never_drawn(temperature):
    logits = jnp.zeros(V).at[290:].set(50.0)
    token, logprob = draw(logits, 2000, temperature, allowed=290)
    assert int(token.max()) < 290
    np.testing.assert_allclose(logprob, -np.log(290), atol=1e-5)


def test_the_ends_of_the_uniforms_give_the_first_and_the_last_token_with_mass():
    logits = jnp.full((2, V), -jnp.inf).at[:, jnp.array([5, 200])].set(0.0)
    uniforms = jnp.array([[0.0, 0.0], [1 - 2**-23, 1 - 2**-23]])
    token, logprob = sample(logits, uniforms, jnp.ones(2), allowed=V)
    assert token.tolist() == [5, 200]
    np.testing.assert_allclose(logprob, np.log(0.5), atol=1e-6)


def test_a_token_of_tiny_probability_has_a_finite_logprob():
    """Token 7 has p of about 1e-12; the second uniform reaches it inside a block that is as light."""
    logits = jnp.full((1, V), -jnp.inf).at[0, jnp.array([7, 299])].set(jnp.array([np.log(1e-12), 0.0]))
    token, logprob = sample(logits, jnp.zeros((1, 2)), jnp.ones(1), allowed=V)
    assert token[0] == 7
    assert logprob[0] == pytest.approx(np.log(1e-12), abs=1e-5)


def test_rounding_never_picks_an_entry_without_mass():
    """1187 blocks, as in a vocabulary of 152,000, half of them empty, probed where the sum steps. XLA's cumulative sum
    rises over empty blocks by rounding there: without the guard some 70 of these draws would be impossible tokens."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        mass = (rng.exponential(size=1187) * (rng.random(1187) < 0.5)).astype(np.float32)
        rows = np.tile(mass, (1187, 1))
        cumulative = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=-1))(rows))[0]
        below = np.nextafter(cumulative / cumulative[-1], np.float32(0))
        assert (mass[np.asarray(invert(rows, below)[0])] > 0).all()


def test_nan_logits_give_a_real_id_and_a_nan_logprob():
    token, logprob = sample(jnp.full((1, V), jnp.nan), jnp.ones((1, 2)) / 2, jnp.ones(1), allowed=290)
    assert 0 <= int(token[0]) < 290
    assert np.isnan(logprob[0])


def test_keys_differ_in_every_part_and_not_by_place():
    role, problem, number = (jnp.array(x, jnp.int32) for x in ([0, 1, 1, 1], [3, 3, 4, 3], [2, 2, 2, 1]))
    keys = np.asarray(row_keys(7, 5, role, problem, number))
    assert keys.shape == (4, 2)
    assert len({tuple(key) for key in keys}) == 4
    alone = np.asarray(row_keys(7, 5, role[2:3], problem[2:3], number[2:3]))
    np.testing.assert_array_equal(alone[0], keys[2])
    for other in (row_keys(8, 5, role, problem, number), row_keys(7, 6, role, problem, number)):
        assert not (np.asarray(other) == keys).all(axis=1).any()


def test_uniforms_depend_on_the_position_only():
    keys = row_keys(0, 0, *jnp.zeros((3, 3), jnp.int32))
    uniforms = np.asarray(token_uniforms(keys, jnp.array([4, 5, 4])))
    np.testing.assert_array_equal(uniforms[0], uniforms[2])
    assert (uniforms[0] != uniforms[1]).all()


# --- filters, for evaluation ------------------------------------------------------------------------------------------

LOGITS = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))


def kept(top_k=0, top_p=1.0, logits=LOGITS, count=4000):
    """Tokens that are drawn under filters, and their log-probs."""
    uniforms = jax.random.uniform(jax.random.key(1), (count, 2))
    rows, ones = jnp.tile(logits, (count, 1)), jnp.ones(count)
    keep = (jnp.full(count, top_k), jnp.full(count, top_p))
    return (np.asarray(x) for x in sample(rows, uniforms, ones, allowed=logits.shape[1], keep=keep))


@pytest.mark.parametrize(
    ('top_k', 'top_p', 'among'),
    [
        (1, 1.0, [1]), (3, 1.0, [4, 3, 2]), (0, 0.3, [1]), (0, 0.69, [4, 3]), (0, 0.71, [4, 3, 2]),
        (2, 0.57, [1]), (2, 0.58, [4, 3]),  # top-p counts among what top-k has left: 4/7 of it is the first token
        (0, 1.0, [4, 3, 2, 1]), (9, 1.0, [4, 3, 2, 1]),
    ],
)  # fmt: skip
def test_filters_keep_the_likeliest_in_proportion(top_k, top_p, among):
    token, _ = kept(top_k, top_p)
    share = np.bincount(token, minlength=4) / len(token)
    expected = np.zeros(4)
    expected[: len(among)] = np.array(among) / sum(among)
    np.testing.assert_allclose(share, expected, atol=0.03)


def test_the_logprob_under_a_filter_is_that_of_the_whole_distribution():
    """ln .4, not the .571 that the first token has among the two that are left."""
    token, logprob = kept(top_k=2)
    np.testing.assert_allclose(logprob[token == 0], np.log(0.4), atol=1e-6)
    assert (token == 0).any()


def test_equals_at_the_edge_stay_together():
    token, _ = kept(top_k=2, logits=jnp.zeros((1, 4)))
    assert set(token) == {0, 1, 2, 3}


def test_without_filters_the_same_tokens_are_drawn():
    logits = jnp.asarray(3 * np.random.default_rng(5).standard_normal((1, V)).astype(np.float32))
    token, logprob = kept(logits=logits, count=300)
    uniforms = jax.random.uniform(jax.random.key(1), (300, 2))
    plain = sample(jnp.tile(logits, (300, 1)), uniforms, jnp.ones(300), allowed=V)
    np.testing.assert_array_equal(token, plain[0])
    np.testing.assert_allclose(logprob, plain[1], atol=1e-6)


@pytest.mark.parametrize('top_k', [0, 45_000])
def test_the_filter_of_a_neighbour_takes_no_tail_from_a_row_without_top_p(top_k):
    """Of 50,000 tokens the first 40,000 hold half a millionth of the mass. The sum over the likelier ones reaches 1 in
    float32 with most of them still to come; the smallest uniforms draw the first token that is kept."""
    size, likely = 50_000, 10_000
    ids = np.arange(size)
    logits = jnp.asarray(np.where(ids < size - likely, -16, 0) + 1e-5 * ids, jnp.float32)
    keep = jnp.array([top_k, 0]), jnp.array([1.0, 0.5])
    token, logprob = sample(jnp.tile(logits, (2, 1)), jnp.zeros((2, 2)), jnp.ones(2), allowed=size, keep=keep)
    assert int(token[0]) == (size - top_k if top_k else 0)
    assert int(token[1]) >= size - likely
    np.testing.assert_allclose(logprob[0], jax.nn.log_softmax(logits)[token[0]], atol=1e-4)


def test_tails_are_finite():
    logits = jnp.array([[0.0, -27.6, -80.0, -np.inf]])  # 1, 1e-12, 1e-35 and nothing
    token, logprob = draw(logits[0], 50, allowed=4)
    assert np.isfinite(logprob).all() and set(np.asarray(token)) == {0}
    token, logprob = sample(logits[:, 1:3], jnp.array([[0.999999, 0.5]]), jnp.ones(1), allowed=2)
    assert np.isfinite(logprob).all()
