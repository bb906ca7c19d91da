import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_toy import FAMILIES, architecture, difference

from sesa_jax.policy import attention, transformer
from sesa_jax.policy.arch import RopeScaling, abstract, is_spec

LLAMA = {**FAMILIES['llama'], 'head_size': 128, 'rope_theta': 5e5, 'rope_scaling': RopeScaling(8.0, 1.0, 4.0, 8192)}


# --- rotary positions -------------------------------------------------------------------------------------------------


def test_the_frequencies_of_llama_3_1():
    scaled = attention.frequencies(architecture(**LLAMA))
    plain = attention.frequencies(architecture(**{**LLAMA, 'rope_scaling': None}))
    np.testing.assert_allclose(plain, 5e5 ** -(np.arange(64) / 64), rtol=2e-7)
    np.testing.assert_array_equal(scaled[:29], plain[:29])
    np.testing.assert_array_equal(scaled[35:], plain[35:] / 8)
    np.testing.assert_allclose([plain[32], scaled[32]], [1.41421e-3, 5.24846e-4], rtol=1e-5)


def test_rotation_turns_pairs_that_lie_half_a_head_apart():
    arch = architecture(head_size=4, rope_theta=100.0)  # 1 and 0.1 radians a position
    x = jnp.array([[1.0, 1.0, 0.0, 0.0]])[None, :, None]  # [B, T, heads, H]
    turned = attention.rotate(x, attention.rotation(arch, jnp.array([[2]])))
    np.testing.assert_allclose(turned[0, 0, 0], [np.cos(2), np.cos(0.2), np.sin(2), np.sin(0.2)], rtol=1e-6)


# --- the plain form ---------------------------------------------------------------------------------------------------


def naive(q, k, v, visible):
    """One product, one mask bool[B or 1, T, S], one softmax."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum('btnh,bnsh->bnts', q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum('bnts,bnsh->btnh', jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1), v)


def one_product(q, k, v, positions, key_positions=None):
    """What `attend` has to give."""
    where = jnp.arange(k.shape[2])[None] if key_positions is None else key_positions
    return naive(q, k, v, where[:, None] <= positions[..., None])


def case(tokens, keys, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in
            ((rows, tokens, 4, 8), (rows, 2, keys, 8), (rows, 2, keys, 8))]  # fmt: skip


@pytest.mark.parametrize('tokens', [1, 64, 65, 511, 512, 1024, 1025, 1500])
def test_spans_and_loops_equal_one_product(tokens):
    given = (*case(tokens, tokens), jnp.arange(tokens)[None])
    assert difference(jax.jit(attention.attend)(*given), jax.jit(one_product)(*given)) <= 1e-5


@pytest.mark.parametrize('tokens', [70, 1100])
def test_keys_may_lie_anywhere_and_nowhere(tokens):
    """Each row has positions of its own, its keys are in no order, and some of them hold nothing."""
    keys = tokens + 400
    rng = np.random.default_rng(1)
    where = np.stack([rng.permutation(keys) for _ in range(2)]).astype(np.int32)
    where[rng.random(where.shape) < 0.2] = attention.NOWHERE
    where[:, 7] = 0  # something that the first query sees
    given = (*case(tokens, keys), jnp.array([[400], [0]]) + jnp.arange(tokens), jnp.asarray(where))
    assert difference(jax.jit(attention.attend)(*given), jax.jit(one_product)(*given)) <= 1e-5


def test_gradients_through_the_loop_equal_those_of_one_product():
    q, k, v = case(1100, 1100, rows=1)
    positions = jnp.arange(1100)[None]
    slopes = [
        jax.jit(jax.grad(lambda *x, f=f: jnp.square(f(*x, positions)).sum(), argnums=(0, 1, 2)))(q, k, v)
        for f in (attention.attend, one_product)
    ]
    for mine, theirs in zip(*slopes, strict=True):
        assert difference(mine, theirs) <= 1e-4 * float(jnp.abs(theirs).max())


def test_gradients_of_values_are_summed_over_blocks_and_spans_in_float32():
    """All queries see the first value alone; the first block's slopes add up to 256, those of the others to 1 each. A sum
    in bfloat16 would stop at 256."""
    tokens, block = 1024, attention.QUERY_BLOCK
    first = jnp.arange(tokens)[None, None, :, None] == 0
    k = jnp.broadcast_to(jnp.where(first, 10, -10), (1, 1, tokens, 8)).astype(jnp.bfloat16)
    q, v = jnp.ones((1, tokens, 1, 8), jnp.bfloat16), jnp.ones_like(k)
    slopes = jnp.where(jnp.arange(tokens) < block, 256 / block, 1 / block)[None, :, None, None]
    loss = lambda v: (attention.attend(q, k, v, jnp.arange(tokens)[None]) * slopes).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss))(v)[0, 0, 0].astype(jnp.float32)
    assert np.abs(found - (256 + tokens // block - 1)).max() <= 1


def pieces_of_memory():
    """For six rows, with a scale for the keys of each: rows 0-2 and 3-5 share the first, all share the last's mask."""
    rng = np.random.default_rng(3)
    masks = [rng.random(shape) < 0.6 for shape in ((2, 11), (6, 7), (1, 4))]
    masks[0][0], masks[1][4], masks[2][0, 0] = False, False, True  # rows 0-2 see nothing of the first, 4 of the second
    return [
        (*(jnp.asarray(rng.normal(size=(rows, 2, mask.shape[1], 8)), jnp.float32) for _ in 'kv'), mask)
        for rows, mask in zip((2, 6, 6), masks, strict=True)
    ]


@pytest.mark.parametrize('loud', [None, 0, 1, 2])
def test_a_step_over_pieces_is_one_softmax(loud):
    """Also where the scores of one piece are far above those of the others."""
    q, _, _ = case(1, 1, rows=6)
    pieces = [(k * 30 if i == loud else k, v, seen) for i, (k, v, seen) in enumerate(pieces_of_memory())]
    k, v, visible = (
        jnp.concatenate([np.repeat(piece[i], 6 // len(piece[i]), axis=0) for piece in pieces], axis)
        for i, axis in enumerate((2, 2, 1))
    )
    assert difference(jax.jit(attention.step)(q, pieces), naive(q, k, v, visible[:, None])) <= 1e-5


def test_a_step_that_sees_nothing_is_finite():
    q, k, v = case(1, 5)
    assert np.isfinite(attention.step(q, [(k, v, jnp.zeros((1, 5), bool))] * 2)).all()


def test_a_step_adds_its_pieces_in_float32():
    """320 equal keys, 64 of them in pieces of their own; a sum in bfloat16 would stop at 256."""
    q, k, v = (x.astype(jnp.bfloat16) for x in case(1, 1))
    many = (*(jnp.repeat(x, 256, axis=2) for x in (k, v)), jnp.ones((1, 256), bool))
    out = attention.step(q, [many] + [(k, v, jnp.ones((1, 1), bool))] * 64)
    assert out.dtype == jnp.bfloat16
    assert difference(out, attention.step(q, [(k, v, jnp.ones((1, 1), bool))])) == 0


def shapes(text):
    """Shape of each array in a lowered program."""
    return {tuple(map(int, found.rstrip('x').split('x'))) for found in re.findall(r'tensor<((?:\d+x)+)[a-z]', text)}


def lowered(arch, rows, tokens, dtype, platform='cpu'):
    """Forward and backward of `hidden` as StableHLO text for a platform, from shapes alone."""
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), abstract(arch), is_leaf=is_spec)
    ids, lengths = jax.ShapeDtypeStruct((rows, tokens), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)

    def loss(params, ids, lengths):
        return jnp.square(transformer.hidden(params, arch, ids, lengths, remat='nothing', dtype=dtype)).mean()

    step = jax.jit(jax.value_and_grad(loss))
    return step.trace(params, ids, lengths).lower(lowering_platforms=(platform,)).as_text()


def test_no_program_of_a_long_row_holds_all_scores_or_unrolls_with_its_length():
    rows, tokens = 2, 4096
    arch = architecture(heads=4, kv_heads=2, head_size=16)
    text = lowered(arch, rows, tokens, jnp.float32)
    assert max(map(math.prod, shapes(text))) <= rows * arch.heads * attention.QUERY_BLOCK * tokens
    longer = lowered(arch, rows, 3 * tokens, jnp.float32)
    assert len(longer.splitlines()) <= 1.05 * len(text.splitlines())


# --- the fused kernel -------------------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch):
    """What this project and JAX ask the machine before they lower the kernel, answered as an A100 would."""
    monkeypatch.setattr(attention, 'device', lambda: ('cuda', '8.0'))
    monkeypatch.setattr('jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version', lambda: 91000)
    attention._say_once.cache_clear()
    yield
    attention._say_once.cache_clear()


def is_guarded(text, call, number):
    """Whether the first thing that is done with result `number` of the call is to choose between it and something else;
    its axes may be exchanged before."""
    body = next(part for part in text.split('func.func ') if call in part).split(call)[1].splitlines()
    name = f'{call.strip().partition(":")[0]}#{number}'
    read = [line for line in body if re.search(rf'{re.escape(name)}\b', line)]
    while read and all('stablehlo.transpose' in line for line in read):
        names = [line.strip().partition(' ')[0] for line in read]
        read = [line for line in body if any(re.search(rf'{name}\b[^#:]', line.partition('=')[2]) for name in names)]
    return any('call @_where' in line or 'stablehlo.select' in line for line in read)


@pytest.mark.parametrize('family', FAMILIES)
def test_the_fused_kernel_is_lowered_for_cuda_forward_and_backward(family, a_gpu, caplog):
    rows, tokens = 2, 1024
    arch = architecture(**{**FAMILIES[family], 'head_size': 64, 'heads': 4, 'kv_heads': 2, 'width': 64, 'layers': 2})
    with caplog.at_level(logging.INFO):
        text = lowered(arch, rows, tokens, jnp.bfloat16, 'cuda')
    assert 'training attention: cuDNN' in caplog.messages
    calls = [line for line in text.splitlines() if '__cudnn$fmha' in line]
    forward = [line for line in calls if '@__cudnn$fmhaSoftmax(' in line]
    backward = [line for line in calls if '@__cudnn$fmhaSoftmaxBackward(' in line]
    assert forward and backward and len(forward) + len(backward) == len(calls)  # no call with a bias, that is a mask
    for line in calls:
        assert 'PADDING_CAUSAL' in line
        assert line.count(f'tensor<{rows}xi32>') >= 2  # the lengths of queries and of keys
    assert not [shape for shape in shapes(text) if shape.count(tokens) > 1]
    assert max(map(math.prod, shapes(text))) <= rows * tokens * arch.heads * arch.head_size
    for call, results in [(line, 1) for line in forward] + [(line, 3) for line in backward]:
        for number in range(results):
            assert is_guarded(text, call, number)


@pytest.mark.parametrize(
    ('platform', 'capability', 'dtype', 'head_size', 'reason'),
    [
        ('cpu', '', 'bfloat16', 128, 'platform cpu has no cuDNN'),
        ('rocm', '', 'bfloat16', 128, 'platform rocm has no cuDNN'),
        ('cuda', '7.5', 'bfloat16', 128, 'needs compute capability 8.0 (Ampere) or newer, not 7.5'),
        ('cuda', '', 'bfloat16', 128, 'not unknown'),
        ('cuda', '8.0', 'float32', 128, 'needs bfloat16 or float16, not float32'),
        ('cuda', '8.0', 'bfloat16', 256, 'head size of at most 128'),
        ('cuda', '8.0', 'bfloat16', 12, 'a multiple of 8, not 12'),
        ('cuda', '8.0', 'bfloat16', 128, None),
        ('cuda', '10.0', 'float16', 64, None),
    ],
)
def test_why_the_fused_kernel_is_not_used(platform, capability, dtype, head_size, reason):
    answer = attention.why_not_fused(platform, capability, jnp.dtype(dtype), head_size)
    assert answer is reason is None or reason in answer


def test_where_the_kernel_cannot_serve_the_plain_form_is_lowered_with_a_reason(a_gpu, caplog):
    arch = architecture(head_size=12, layers=1)
    with caplog.at_level(logging.INFO):
        text = lowered(arch, 1, 64, jnp.bfloat16, 'cuda')
    assert '__cudnn' not in text
    reason = 'cuDNN attention needs a head size of at most 128 and a multiple of 8, not 12'
    assert f'training attention: plain XLA ({reason})' in caplog.messages


def test_the_choice_of_kernel_is_said_once(caplog):
    attention._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            attention.causal(jnp.array([3]), 3, 64, jnp.dtype('float32'))
    said = [message for message in caplog.messages if 'attention' in message]
    assert said == ['training attention: plain XLA (platform cpu has no cuDNN)']


def test_this_machine_names_its_platform():
    assert attention.device() == ('cpu', '')
