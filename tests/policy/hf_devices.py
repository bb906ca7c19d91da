"""Imports a folder of a billion parameters over eight devices and prints what memory that took, as JSON; to be run in a
process of its own. The folder is a sparse file of zeros with marks in it: python hf_devices.py FOLDER"""

import json
import pathlib
import sys
import threading
import time

import jax
import numpy as np

from sesa_jax.policy import hf, sharding
from sesa_jax.policy.arch import Architecture, abstract, hf_names, leaves, parameter_count, shapes

ARCH = Architecture(
    vocab=32_000, layers=16, width=2048, hidden=8192, heads=32, kv_heads=8, head_size=64, rope_theta=5e5, eps=1e-5,
    tied=True, max_positions=4096, family='llama', qk_norm=False,
)  # fmt: skip


def write(folder):
    """bfloat16, in one file. The first value of each tensor of `up` is its layer + 1."""
    specs, header, end = dict(leaves(abstract(ARCH))), {}, 0
    for name, (path, _, _) in hf_names(ARCH).items():
        begin, end = end, end + 2 * int(np.prod(specs[path].hf_shape))
        header[name] = {'dtype': 'BF16', 'shape': specs[path].hf_shape, 'data_offsets': [begin, end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(folder / hf.SINGLE, 'wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        file.truncate(8 + len(text) + end)
        for layer in range(ARCH.layers):
            file.seek(8 + len(text) + header[f'model.layers.{layer}.mlp.up_proj.weight']['data_offsets'][0])
            file.write(np.asarray([layer + 1], jax.numpy.bfloat16).tobytes())
    return max(entry['data_offsets'][1] - entry['data_offsets'][0] for entry in header.values())


def anonymous():
    """Bytes of this process that no file backs."""
    status = pathlib.Path('/proc/self/status').read_text()
    line = next(line for line in status.splitlines() if line.startswith('RssAnon'))
    return int(line.split()[1]) * 1024


def main():
    folder = pathlib.Path(sys.argv[1])
    largest = write(folder)
    placed = sharding.shardings(abstract(ARCH), sharding.TRAIN, sharding.make_mesh(8))
    held = sum(
        len(devices.device_set) * int(np.prod(devices.shard_shape(x.shape))) * x.dtype.itemsize
        for devices, x in zip(jax.tree.leaves(placed), jax.tree.leaves(shapes(ARCH, jax.numpy.bfloat16)), strict=True)
    )
    jax.device_put(np.zeros(8), sharding.rows(sharding.make_mesh(8))).block_until_ready()
    before = anonymous()
    peak, done = [before], threading.Event()

    def sample():
        while not done.is_set():
            peak.append(anonymous())
            time.sleep(0.002)

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    params = jax.block_until_ready(hf.load_params(folder, ARCH, placed, jax.numpy.bfloat16))
    seconds = time.perf_counter() - begin
    done.set()
    sampler.join()
    up = params['layers']['up']
    report = {
        'parameters': parameter_count(ARCH), 'target': held, 'largest': largest, 'before': before,
        'peak': max(peak) - before, 'samples': len(peak), 'seconds': round(seconds, 1),
        'marks': [float(x) for x in up.addressable_shards[0].data[:, 0, 0]],
        'shard': up.addressable_shards[0].data.shape, 'devices': len(up.sharding.device_set),
    }  # fmt: skip
    print(json.dumps(report))


main()
