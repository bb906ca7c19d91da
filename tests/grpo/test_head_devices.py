"""The log-probs' head on eight fake devices, in a process of its own: numbers, and what travels between the devices."""

import json
import pathlib
import subprocess
import sys

import pytest
from devices import fake_devices

FOLDER = pathlib.Path(__file__).parent
CASES = {'tied': ([32, 16], [32, 2]), 'untied': ([16, 32], [2, 32])}


def seen_by(script):
    command = [sys.executable, FOLDER / script]
    done = subprocess.run(command, env=fake_devices(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def seen():
    return seen_by('head_devices.py')


@pytest.mark.devices
@pytest.mark.parametrize('name', [*CASES, 'whole'])
def test_eight_devices_equal_one(seen, name):
    assert seen['devices'] == 8
    assert seen[name]['logprobs'] <= 1e-6
    for difference, scale in seen[name]['gradient'].values():
        assert difference <= 1e-5 * scale


@pytest.mark.devices
@pytest.mark.parametrize('name', CASES)
def test_the_head_travels_once_each_way_and_not_in_the_loop(seen, name):
    """In five chunks a device. XLA:CPU widens bfloat16 on the way; the program that it is given does not."""
    whole, share = CASES[name]
    assert seen[name]['collectives'] == [['all-gather', True, 'f32', whole], ['reduce-scatter', True, 'f32', share]]
    kind = 'f32' if name == 'tied' else 'bf16'
    assert seen[name]['asked'] == [['all_gather', f'{whole[0]}x{whole[1]}x{kind}'],
                                   ['reduce_scatter', f'{share[0]}x{share[1]}xf32']]  # fmt: skip


@pytest.mark.devices
def test_a_head_that_cannot_be_split_is_never_gathered(seen):
    assert {name for name, *_ in seen['whole']['collectives']} == {'all-reduce'}
    assert all(is_outside for _, is_outside, *_ in seen['whole']['collectives'])


@pytest.mark.devices
@pytest.mark.slow
def test_an_update_of_qwen3_8b_gathers_its_head_once_and_sends_its_gradient_once():
    """Twelve chunks a device; with a KL term the reference gathers its own head. Embeddings [V, D] never travel whole."""
    seen = seen_by('qwen3_devices.py')
    assert (seen['devices'], seen['micro_batch'], seen['layers']) == (8, [8, 12288], 36)
    gather = ['all-gather', True, 'f32', [4096, 151936]]  # bfloat16, widened by XLA:CPU
    scatter = ['reduce-scatter', True, 'f32', [512, 151936]]
    for name, expected in (('plain', [gather, scatter]), ('with a KL term', [gather, gather, scatter])):
        assert sorted(seen[name]['vocabulary']) == expected, name
        assert sorted(seen[name]['head']) == [kind for kind, *_ in expected], name
