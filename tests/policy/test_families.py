"""Qwen3, Qwen2.5 and Llama 3.1 against transformers, in float32, from folders that `hf.save` wrote."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_toy import FAMILIES, architecture, decode_rows, difference, full_logits, grouped_tokens, logits, tokens
from transformers import AutoModelForCausalLM

from sesa_jax.policy import hf
from sesa_jax.policy.arch import abstract, leaves

torch = pytest.importorskip('torch')

CASES = {
    'qwen3, tied': ('qwen3', {'rope_theta': 1e6}),
    'qwen3, untied, one kv head': ('qwen3', {'tied': False, 'kv_heads': 1, 'rope_theta': 5e6, 'eps': 1e-5}),
    'qwen2, untied': ('qwen2', {'tied': False, 'rope_theta': 1e6}),
    'qwen2, tied, every head its own': ('qwen2', {'kv_heads': 6, 'rope_theta': 5e5}),
    'llama, untied': ('llama', {'tied': False, 'rope_theta': 5e5, 'eps': 1e-5}),
    'llama, tied, not scaled, H = D / N': ('llama', {'rope_theta': 1e6, 'rope_scaling': None, 'head_size': 8}),
}
SEEDS = (0, 1, 2)
MATRICES = 0.15
"""Standard deviation of the projections, as of real weights: about 1 / sqrt(D). At twice that size softmaxes are so sharp
that either side is 1e-4 from float64 (measured over 8,197 keys: ours 1.0e-4, theirs 0.5e-4; at this size both 7e-6)."""
LENGTHS = (90, 71, 64, 5, 1)
PLAN = {
    'prompts': (9, 3), 'group_size': 2, 'first': (7, 2, 5, 9), 'observed': (4, 8, 0, 6), 'second': (20, 14, 25, 22),
    'blocks': (8, 29), 'chunk': 4,
}  # fmt: skip
"""Two groups of two rows. Decoded and observed tokens of some rows straddle the two blocks, those of others do not."""


def torch_model(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)


def torch_logits(model, ids, lengths=None):
    """f32[B, T, V] of right-padded rows."""
    ids = torch.tensor(np.asarray(ids))
    mask = None if lengths is None else (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits.numpy()


@pytest.fixture(scope='module', params=CASES)
def case(request, make_arch, random_params, tmp_path_factory):
    """An architecture, and for each seed its parameters and the same model in torch."""
    family, changes = CASES[request.param]
    arch = make_arch(**FAMILIES[family] | changes)
    models = []
    for seed in SEEDS:
        folder, params = tmp_path_factory.mktemp('model'), random_params(arch, seed, MATRICES)
        hf.save(folder, arch, params)
        models.append((params, torch_model(folder, attn_implementation='eager')))
    return arch, models


def test_logits_equal_the_reference_on_padded_rows(case):
    arch, models = case
    ids = tokens(arch, len(LENGTHS), max(LENGTHS))
    for params, reference in models:
        ours = full_logits(params, arch, ids, jnp.array(LENGTHS))
        theirs = torch_logits(reference, ids, LENGTHS)
        assert float(np.abs(theirs).max()) > 1
        for row, length in enumerate(LENGTHS):
            assert difference(ours[row, :length], theirs[row, :length]) <= 1e-4


def test_cached_passes_equal_the_reference_at_every_own_token(case):
    arch, models = case
    ids = grouped_tokens(arch, PLAN['prompts'], PLAN['group_size'], 40)
    for params, reference in models:
        states, own, _ = decode_rows(params, arch, ids, **PLAN)
        ours, theirs = logits(params, arch, states), torch_logits(reference, ids, [places.stop for places in own])
        for row, places in enumerate(own):
            assert difference(ours[row, places], theirs[row, places]) <= 1e-4


@pytest.mark.parametrize('family', FAMILIES)
def test_positions_up_to_8192(family, make_arch, random_params, tmp_path):
    """Beyond the original context of the Llama (here 4,096), for the full forward and for prefill and decode."""
    changes = {'layers': 2, 'heads': 2, 'kv_heads': 1, 'rope_theta': 5e5, 'max_positions': 16384} | FAMILIES[family]
    arch, length = make_arch(**changes), 8197
    if arch.rope_scaling:
        arch = dataclasses.replace(
            arch, rope_scaling=dataclasses.replace(arch.rope_scaling, original_max_positions=4096)
        )
    params, ids = random_params(arch, matrices=MATRICES), tokens(arch, 1, length)
    hf.save(tmp_path, arch, params)
    theirs = torch_logits(torch_model(tmp_path, attn_implementation='sdpa'), ids)
    assert float(np.abs(theirs[0, 8192:]).max()) > 1
    assert difference(full_logits(params, arch, ids, jnp.array([length])), theirs) <= 1e-4
    plan = {'prompts': (length - 12,), 'first': (4,), 'observed': (4,), 'second': (4,), 'blocks': (6, 6), 'chunk': 4}
    states, (own,), _ = decode_rows(params, arch, ids, **plan)
    assert own == slice(length - 12, length)
    assert difference(logits(params, arch, states[:, own]), theirs[:, own]) <= 1e-4


def untied(make_arch, family):
    return make_arch(**FAMILIES[family], layers=2, tied=False)


def kinds():
    """Every parameter of every family."""
    return [(family, path) for family in FAMILIES for path, _ in leaves(abstract(untied(architecture, family)))]


@pytest.mark.parametrize(('family', 'path'), kinds(), ids=lambda x: x if isinstance(x, str) else '/'.join(x))
def test_every_kind_of_parameter_counts_on_both_sides(family, path, make_arch, random_params, tmp_path):
    arch = untied(make_arch, family)
    params, ids = random_params(arch), tokens(arch, 1, 9)
    changed = jax.tree_util.tree_map_with_path(
        lambda keys, x: (
            x + 0.2 * np.cos(np.arange(x.size)).reshape(x.shape) if tuple(k.key for k in keys) == path else x
        ),
        params,
    )
    hf.save(tmp_path, arch, changed)
    before, after = (full_logits(p, arch, ids, jnp.array([9])) for p in (params, changed))
    assert difference(before, after) > 1e-2
    assert difference(after, torch_logits(torch_model(tmp_path), ids)) <= 1e-4


@pytest.mark.parametrize('shard_bytes', [5_000_000_000, 60_000], ids=['one file', 'two shards'])
@pytest.mark.parametrize('family', FAMILIES)
def test_import_export_import_is_identical_in_bfloat16(family, shard_bytes, make_arch, random_params, tmp_path):
    arch = untied(make_arch, family)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(arch))
    hf.save(tmp_path / 'a', arch, params, dtype='bfloat16', shard_bytes=shard_bytes)
    assert len(list((tmp_path / 'a').glob('*.safetensors'))) == (1 if shard_bytes > 100_000 else 2)
    first = hf.load_params(tmp_path / 'a', hf.load_architecture(tmp_path / 'a'), dtype=jnp.bfloat16)
    hf.save(tmp_path / 'b', arch, first, hf.load_config(tmp_path / 'a'), dtype='bfloat16', shard_bytes=shard_bytes)
    second = hf.load_params(tmp_path / 'b', hf.load_architecture(tmp_path / 'b'), dtype=jnp.bfloat16)
    for loaded in (first, second):
        assert jax.tree.structure(loaded) == jax.tree.structure(params)
        for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
            assert x.dtype == jnp.bfloat16 and (np.asarray(x) == np.asarray(y)).all()
    files = [{p.name: p.read_bytes() for p in (tmp_path / folder).iterdir()} for folder in 'ab']
    assert files[0] == files[1]
    ids = tokens(arch, 1, 9)
    ours = full_logits(jax.tree.map(lambda x: x.astype(jnp.float32), second), arch, ids, jnp.array([9]))
    theirs = [torch_logits(torch_model(tmp_path / folder), ids) for folder in 'ab']
    assert (theirs[0] == theirs[1]).all() and difference(ours, theirs[1]) <= 1e-4
