"""Adapters in the forward pass: nothing at first, merged weights in another form, and nothing that touches the base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from policy_toy import difference, full_logits, tokens

from sesa_jax import config
from sesa_jax.policy import lora, sharding, transformer
from sesa_jax.policy.arch import ModelError

OPTIONS = config.Lora(rank=4, alpha=6.0)
ALL = config.Lora().projections
LENGTHS = jnp.array([12, 7, 1])


def fresh(arch, options=OPTIONS, seed=3):
    return lora.init(arch, options, [seed], sharding.make_mesh(1))


def trained(arch, options=OPTIONS, seed=3, size=0.3):
    """Adapters whose B is as far from 0 as A is."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(size * rng.standard_normal(x.shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, fresh(arch, options))


@pytest.fixture(scope='module')
def model(make_arch, random_params):
    """With all that a layer may have: biases behind the products."""
    arch = make_arch(family='qwen2', qkv_bias=True, qk_norm=False, layers=2)
    return arch, random_params(arch)


merged = jax.jit(lora.merged)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_fresh_policy_is_its_base_bit_for_bit(model, dtype):
    arch, base = model
    ids = tokens(arch, 3, 12)
    ours = full_logits(lora.applied(base, fresh(arch)), arch, ids, LENGTHS, dtype=dtype)
    plain = full_logits(base, arch, ids, LENGTHS, dtype=dtype)
    assert np.array_equal(np.asarray(ours).view(np.uint32), np.asarray(plain).view(np.uint32))
    assert jax.tree.all(jax.tree.map(np.array_equal, merged(base, fresh(arch)), base))


def test_what_is_drawn(make_arch):
    arch = make_arch(width=400)
    one, other = fresh(arch), fresh(arch, seed=4)
    assert one.scale == 1.5
    assert {name: x.shape for name, x in one.a.items()} == {
        'query': (3, 400, 4), 'key': (3, 400, 4), 'value': (3, 400, 4), 'output': (3, 72, 4),
        'gate': (3, 400, 4), 'up': (3, 400, 4), 'down': (3, 56, 4),
    }  # fmt: skip
    assert one.b['query'].shape == (3, 4, 72) and one.b['down'].shape == (3, 4, 400)
    assert not any(x.any() for x in one.b.values())
    assert float(one.a['query'].std()) == pytest.approx(400**-0.5, rel=0.03)
    assert difference(one.a['query'], other.a['query']) > 0.01
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(one))


@pytest.mark.parametrize('remat', ['none', 'nothing', 'projections'])
def test_adapters_compute_what_merged_weights_do(model, remat):
    arch, base = model
    ids, adapters = tokens(arch, 3, 12), trained(arch, size=0.1)
    beside = full_logits(lora.applied(base, adapters), arch, ids, LENGTHS, remat=remat)
    inside = full_logits(merged(base, adapters), arch, ids, LENGTHS)
    moved = full_logits(base, arch, ids, LENGTHS)
    assert difference(beside, inside) <= 1e-5 * float(jnp.abs(inside).max())
    assert difference(inside, moved) > 0.1


@pytest.mark.parametrize('name', ALL)
def test_each_projection_alone(model, name):
    """So that none is forgotten, and each takes its own input."""
    arch, base = model
    ids, adapters = tokens(arch, 3, 12), trained(arch, config.Lora(rank=3, alpha=3.0, projections=(name,)))
    assert set(adapters.a) == set(adapters.b) == {name}
    beside = full_logits(lora.applied(base, adapters), arch, ids, LENGTHS)
    inside = full_logits(merged(base, adapters), arch, ids, LENGTHS)
    assert difference(beside, inside) <= 1e-5 * float(jnp.abs(inside).max())
    assert difference(inside, full_logits(base, arch, ids, LENGTHS)) > 0.1


def loss(params, arch, ids):
    x = transformer.hidden(params, arch, ids, LENGTHS)
    return jnp.square(transformer.logits(params, arch, x)).mean()


def test_gradients_equal_those_through_merged_weights(model):
    arch, base = model
    ids, adapters = tokens(arch, 3, 12), trained(arch, size=0.1)

    def gradient(join):
        return jax.jit(jax.grad(lambda adapters: loss(join(base, adapters), arch, ids)))(adapters)

    beside, inside = gradient(lora.applied), gradient(lora.merged)
    assert beside.scale == adapters.scale
    for part in ('a', 'b'):
        for name in ALL:
            ours, theirs = getattr(beside, part)[name], getattr(inside, part)[name]
            norm = float(jnp.linalg.norm(theirs))
            assert norm > 0
            assert float(jnp.linalg.norm(ours - theirs)) <= 1e-5 * norm, (part, name)


def test_no_matrix_of_the_base_gets_a_gradient(model):
    """The backward pass multiplies with each W once, for x; a gradient of W would be one more product."""
    arch, base = model
    ids = tokens(arch, 3, 12)

    def products(trains_base):
        def value(adapters, base):
            return loss(lora.applied(base, adapters), arch, ids)

        wanted = (0, 1) if trains_base else 0
        jaxpr = jax.make_jaxpr(jax.grad(value, argnums=wanted))(fresh(arch), base)
        return shapes_of_products(jaxpr.jaxpr)

    frozen, whole = products(False), products(True)
    for name in ('query', 'gate', 'down'):
        shape = base['layers'][name].shape[1:]
        assert shape in whole or shape[::-1] in whole
        assert shape not in frozen and shape[::-1] not in frozen


def shapes_of_products(jaxpr):
    """Result shapes of all products in a jaxpr, inner ones included."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            found.add(equation.outvars[0].aval.shape)
        for inner in jaxprs_in_params(equation.params):
            found |= shapes_of_products(inner)
    return found


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'rank': 25}, r'--lora.rank 25: the matrix key \[40, 24\] has ranks from 1 to 24'),
        ({'rank': -1}, '--lora.rank -1'),
        ({'alpha': 0.0}, '--lora.alpha must be a number above 0'),
        ({'projections': ()}, '--lora.projections name one'),
    ],
)
def test_what_cannot_be_is_refused(make_arch, changes, message):
    with pytest.raises(ModelError, match=message):
        lora.abstract(make_arch(), dataclasses.replace(OPTIONS, **changes))


def test_a_rank_that_only_the_named_matrices_have(make_arch):
    assert set(lora.shapes(make_arch(), config.Lora(rank=40, projections=('query', 'up'))).a) == {'query', 'up'}
