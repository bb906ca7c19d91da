"""The planner against numbers worked out by hand, and against the compiler's."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from devices import fake_devices

from sesa_jax import config
from sesa_jax.grpo import learner
from sesa_jax.policy import sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.run import plan

GB = 1e9
QWEN3_8B = 2 * 151936 * 4096 + 4096 + 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
TOKEN = 2 * 36 * 8 * 128 * 2  # bytes of keys and values
HLO = """
  %a = bf16[36,4096,1024]{2,1,0} all-gather(%x), channel_id=1
  %b = (f32[8]{0}, /*index=1*/f32[2,3]{1,0}) all-reduce(%y, %z), to_apply=%add
  ROOT %c = f32[4]{0} all-reduce-start(%w)
  %d = f32[4]{0} add(%p, %q)
"""


def test_the_census_counts_collectives_and_their_bytes():
    assert plan.census(HLO) == {'all-gather': (1, 36 * 4096 * 1024 * 2), 'all-reduce': (2, 4 * (8 + 6 + 4))}


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 8])
def test_the_table_grows_with_the_weights_as_the_compilers_temporaries_do(devices):
    """Eight layers more, and few tokens: the memory that is added is a micro-batch's gradients."""
    command = [sys.executable, pathlib.Path(__file__).parent / 'plan_devices.py']
    done = subprocess.run(command, env=fake_devices(devices), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen['devices'] == devices
    few, many = seen['depths']
    added = {name: many[name] - few[name] for name in many}
    assert added['table'] == pytest.approx(added['compiler'], rel=0.1)
    assert 1 <= added['compiler'] / added['masters'] < 1.2


@pytest.mark.parametrize('kl', [0.0, 0.001])
def test_an_update_with_remat_costs_one_forward_pass_more(kl):
    """By XLA's count. One layer, one chunk of the head and one block of attention, as a loop's body is counted once; and a
    small vocabulary, so that the layer is 92 % of a forward pass: computed again not at all or twice, it fails."""
    arch = Architecture(
        vocab=512, layers=1, width=512, hidden=1536, heads=8, kv_heads=4, head_size=64, rope_theta=1e4, eps=1e-6,
        tied=False, max_positions=512,
    )  # fmt: skip
    mesh = sharding.make_mesh(1)
    params = plan.trained(config.Run(), arch, mesh)
    programs = learner.lowered(
        params, params, (16, 64), arch=arch, grpo=config.Grpo(kl=kl, remat='nothing'), mesh=mesh,
        optimizer=config.Optimizer(), response_length=64, dtype=jnp.float32,
    )  # fmt: skip
    counted = programs['update, one micro-batch'][0]().cost_analysis()['flops']
    # Forward, twice as much backward, and forward again: the layer and the head's chunk. The reference has no more.
    own = (4 + (kl > 0)) * plan.forward_flops(arch, 16 * 64, 64)
    assert 0.9 < counted / own < 1.1  # 0.947 and 0.958: what no gradient needs is not computed again


def planned(tmp_path, *flags):
    """The plan of the command as a user types it, with its highest memory."""
    path = tmp_path / 'plan.json'
    command = [sys.executable, '-m', 'experiments.plan', *flags, '--json', str(path)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False)
    return done, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_qwen3_8b_on_eight_devices_of_80_gb(tmp_path):
    done, found = planned(tmp_path, '--model', 'qwen3-8b')
    assert done.returncode == 0, done.stderr
    assert found['parameters'] == QWEN3_8B
    sizes = {part['name']: part['size'] / GB for part in found['parts']}
    share = QWEN3_8B / 8 / GB  # billions of parameters a device, all but the norms split
    expected = {
        'masters, float32, 2 roles': 8 * share,
        'AdamW moments, float32, 2 roles': 16 * share,
        'gradients, float32': 4 * share,
        'gradients of a micro-batch, float32': 4 * share,
        'reference, bfloat16, shared': 2 * share,
        'decode copy, bfloat16': 2 * share,  # TP8: heads 32 and 8
        # keys and values of 36 layers, 8 heads of 128 in bfloat16, split over 8 devices
        'KV of 125 shared rows': (25 * 4096 + 125 * 2048) * TOKEN / 8 / GB,
        'KV of 64 single rows': 64 * (4096 + 2048) * TOKEN / 8 / GB,
        'KV of 16 long rows': 16 * (4096 + 8192) * TOKEN / 8 / GB,
        # a residual of 4,096 in bfloat16 for each of 36 layers and 12,288 tokens, and one layer's own
        'activations, 12,288 tokens': 12288 * (36 * 4096 * 2 + 250_000) / GB,
        'logits chunk and head': (1024 * 151936 * 12 + 6 * 4096 * 151936) / GB,
    }
    for name, size in expected.items():
        assert sizes[name] == pytest.approx(size, rel=0.02), name
    for program in found['programs']:
        assert program['arguments'] == pytest.approx(program['expected'], rel=0.02), program['name']
    # The head's gradient; tests/grpo/test_head_devices.py looks at what else is sent.
    assert found['programs'][0]['collectives']['reduce-scatter'] == [1, 4 * 512 * 151936]
    assert found['decode_mesh'] == {'data': 1, 'model': 8}
    assert 0.9 < found['flops']['ratio'] < 1.1
    assert found['verdict'].startswith('fits with ')
    spare = float(found['verdict'].split()[2])
    assert spare == pytest.approx(0.92 * 80 - found['peak_bytes'] / GB, abs=0.06)
    assert found['verdict'] in done.stdout


@pytest.mark.slow
def test_a_run_that_misses_says_by_how_much_and_what_makes_it_fit(tmp_path):
    flags = ['--model', 'tiny', '--devices', '1', '--hbm-gb', '0.2', '--grpo.remat', 'none']
    done, found = planned(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    missing = found['peak_bytes'] / GB - 0.92 * 0.2
    assert f'misses by {missing:.1f} GB; --' in found['verdict']
    advice = found['verdict'].split('; ')[1].split(' makes it fit')[0].split()
    done, again = planned(tmp_path, *flags, *advice)
    assert again['verdict'].startswith('fits with ')


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (('--model', 'qwen9-1b'), 'qwen9-1b'),
        (('--model', 'qwen3-8b', '--hbm-gb', '0'), '--hbm-gb is 0'),
        (('--model', 'qwen3-8b', '--tensor-parallel', '3'), '--tensor-parallel 3: 32 query and 8 kv heads'),
    ],
)
def test_bad_flags_are_refused(tmp_path, flags, message):
    done, found = planned(tmp_path, *flags)
    assert (done.returncode, found) == (2, None)
    assert message in done.stderr
