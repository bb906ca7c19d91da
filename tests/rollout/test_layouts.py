"""What the decode program of a real model sends between devices."""

import json
import math
import pathlib
import subprocess
import sys

import pytest
from devices import fake_devices

ROOT = pathlib.Path(__file__).parent


@pytest.mark.devices
def test_a_decode_step_of_qwen3_8b_sends_no_logits_no_cache_and_no_weights():
    """Per device and step: sums of hidden states, the masses of the vocabulary's blocks, and what is smaller still."""
    env = fake_devices(8)
    script = ROOT / 'decode_collectives.py'
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found['vocab'] == 152_576 >= 151_936  # whole blocks of 128 tokens for each of eight devices
    for model in ('8', '4'):
        rows, shapes = found[model]['rows'], found[model]['shapes']
        assert [shape for shape in shapes if 4096 in shape], 'tensor parallelism sums hidden states'
        largest = max(math.prod(shape) for shape in shapes)
        assert largest <= rows * 4096
