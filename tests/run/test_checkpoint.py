"""What was saved comes back bit for bit, or not at all."""

import dataclasses
import os
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import fake_devices

from sesa_jax.run import checkpoint
from sesa_jax.run.checkpoint import CheckpointError, prune, restore, save, steps, verify


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: dict
    moments: tuple
    step: jax.Array


def make(seed=0, width=8):
    """A state as the learner has it: nested dicts, optimizer moments, counters, two dtypes."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        'embed': jax.random.normal(keys[0], (16, width)),
        'layers': {'q': jax.random.normal(keys[1], (2, width, 4)), 'gate': jnp.full((3,), 1.5, jnp.bfloat16)},
    }
    moments = optax.adamw(1e-3).init(params)
    moments = jax.tree.map(lambda leaf: leaf + 1, moments)
    return {'solver': State(params, moments, jnp.int32(3 + seed)), 'flags': np.array([True, False])}


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_round_trip_is_bitwise(tmp_path):
    tree = make()
    digest = save(tmp_path, 3, tree)
    same(restore(tmp_path, 3, tree, digest), tree)
    assert sorted(child.name for child in tmp_path.iterdir()) == ['00003']


def test_a_part_is_restored_alone(tmp_path):
    tree = make()
    digest = save(tmp_path, 3, tree)
    part = {'solver': {'params': tree['solver'].params}}
    same(restore(tmp_path, 3, part, digest, part=True), part)
    with pytest.raises(CheckpointError, match='challenger/x is not in it'):
        restore(tmp_path, 3, {'challenger': {'x': np.zeros(1)}}, digest, part=True)


def test_the_digest_is_of_the_content_alone(tmp_path):
    digest = save(tmp_path, 1, make())
    assert save(tmp_path, 2, make()) == digest
    assert save(tmp_path, 3, make(seed=1)) != digest


def test_a_last_bit_of_one_moment_changes_the_digest(tmp_path):
    tree = make()
    mu = tree['solver'].moments[0].mu['embed']
    nudged = optax.tree_utils.tree_set(
        tree['solver'].moments, mu={**tree['solver'].moments[0].mu, 'embed': jnp.nextafter(mu, jnp.inf)}
    )
    other = {**tree, 'solver': dataclasses.replace(tree['solver'], moments=nudged)}
    assert save(tmp_path, 1, tree) != save(tmp_path, 2, other)


def test_a_flipped_bit_in_any_file_is_refused(tmp_path):
    tree = make()
    digest = save(tmp_path, 3, tree)
    files = [path for path in sorted((tmp_path / '00003').rglob('*')) if path.is_file() and path.stat().st_size]
    assert len(files) > 8
    rng = np.random.default_rng(0)
    for file in files:
        good = file.read_bytes()
        for position in rng.integers(0, 8 * len(good), size=4):
            bad = bytearray(good)
            bad[position // 8] ^= 1 << int(position % 8)
            file.write_bytes(bytes(bad))
            with pytest.raises(CheckpointError, match='damaged'):
                restore(tmp_path, 3, tree, digest)
        file.write_bytes(good)
    same(restore(tmp_path, 3, tree, digest), tree)


def test_missing_short_and_foreign_parts_are_named(tmp_path):
    tree = make()
    digest = save(tmp_path, 3, tree)
    file = max((tmp_path / '00003' / 'state').rglob('*'), key=lambda path: path.stat().st_size if path.is_file() else 0)
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=f'has {len(good) - 1} bytes, not {len(good)}'):
        verify(tmp_path, 3, read_files=False)
    file.unlink()
    with pytest.raises(CheckpointError, match='is missing'):
        verify(tmp_path, 3)
    file.write_bytes(good)
    with pytest.raises(CheckpointError, match='not the checkpoint that was committed'):
        verify(tmp_path, 3, 'f' * 64)
    assert verify(tmp_path, 3, digest)['step'] == 3
    (tmp_path / '00003').rename(tmp_path / '00004')
    with pytest.raises(CheckpointError, match='holds step 3, not step 4'):
        verify(tmp_path, 4)
    (tmp_path / '00004' / 'manifest.json').unlink()
    with pytest.raises(CheckpointError, match='not a complete checkpoint'):
        verify(tmp_path, 4)


def test_values_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    tree = make()
    save(tmp_path, 3, tree)
    honest = checkpoint._orbax

    def wrong(work):
        tree = honest(work)
        tree['solver']['step'] = tree['solver']['step'] + 1
        return tree

    monkeypatch.setattr(checkpoint, '_orbax', wrong)
    with pytest.raises(CheckpointError, match='the leaf solver/step was read with other values'):
        restore(tmp_path, 3, tree)


def test_a_tree_of_another_shape_dtype_or_structure_is_refused_by_name(tmp_path):
    save(tmp_path, 3, make())
    with pytest.raises(
        CheckpointError, match=r'solver/params/embed is float32\(16, 8\), this run needs float32\(16, 9\)'
    ):
        restore(tmp_path, 3, make(width=9))
    tree = make()
    with pytest.raises(CheckpointError, match=r'flags is bool.*needs int32'):
        restore(tmp_path, 3, {**tree, 'flags': np.array([1, 0], np.int32)})
    with pytest.raises(CheckpointError, match='the leaf extra is not in it'):
        restore(tmp_path, 3, {**tree, 'extra': np.zeros(1)})
    del tree['flags']
    with pytest.raises(CheckpointError, match='the leaf flags is unasked'):
        restore(tmp_path, 3, tree)


def test_only_arrays_are_saved_and_a_refusal_leaves_nothing(tmp_path):
    for leaf in (3, 'text', jax.random.key(0)):
        with pytest.raises(CheckpointError, match='the leaf a/b is a'):
            save(tmp_path, 1, {'a': {'b': leaf}})
    with pytest.raises(CheckpointError, match='no usable name'):
        save(tmp_path, 1, {'a/b': np.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_saved_once(tmp_path):
    save(tmp_path, 1, make())
    with pytest.raises(CheckpointError, match='exists already'):
        save(tmp_path, 1, make(seed=1))
    same(restore(tmp_path, 1, make()), make())


def test_a_leftover_does_not_block_its_step(tmp_path):
    (tmp_path / '00001.tmp' / 'state').mkdir(parents=True)
    (tmp_path / '00001.tmp' / 'state' / 'x').write_text('half')
    save(tmp_path, 1, make())
    assert sorted(child.name for child in tmp_path.iterdir()) == ['00001']
    same(restore(tmp_path, 1, make()), make())


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr('shutil.disk_usage', lambda _: types.SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match='0 MB free'):
        save(tmp_path, 1, make())
    assert list(tmp_path.iterdir()) == []


FULL = """
import pathlib, resource, sys
import numpy as np
from sesa_jax.run.checkpoint import CheckpointError, save
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    save(pathlib.Path(sys.argv[1]), 2, {'x': np.random.default_rng(0).normal(size=100_000)})
except CheckpointError as error:
    print(str(error)[:40])
"""


@pytest.mark.parametrize('limit', [100, 400_000])  # in the first small file, in the arrays
def test_a_write_that_fails_is_said_and_leaves_nothing(tmp_path, limit):
    fake(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, '-c', FULL, str(tmp_path), str(limit)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(f'cannot write {tmp_path}'[:40]), done.stderr
    assert sorted(child.name for child in tmp_path.iterdir()) == ['00001']


def fake(root, *numbers):
    """Complete checkpoints of a trivial tree."""
    for number in numbers:
        save(root, number, {'x': np.zeros(1)})


def test_prune_keeps_the_newest_committed_and_what_is_newer(tmp_path):
    fake(tmp_path, 1, 2, 3, 4, 5)
    assert prune(tmp_path, 2, committed=[1, 2, 3, 4]) == [1, 2]
    assert steps(tmp_path) == [3, 4, 5]  # 5 waits for its record


def test_prune_counts_only_steps_with_a_record(tmp_path):
    fake(tmp_path, 1, 2, 3)
    assert prune(tmp_path, 1, committed=[1]) == []
    assert prune(tmp_path, 1, committed=[]) == []
    assert steps(tmp_path) == [1, 2, 3]


def test_prune_removes_nothing_when_the_newest_is_broken(tmp_path):
    fake(tmp_path, 1, 2)
    (tmp_path / '00002' / 'manifest.json').unlink()
    assert prune(tmp_path, 1, committed=[1, 2]) == []
    assert steps(tmp_path) == [1, 2]


def test_prune_never_removes_all(tmp_path):
    with pytest.raises(ValueError, match='at least one'):
        prune(tmp_path, 0, committed=[1])


CHILD = """
import pathlib, sys
import numpy as np
from sesa_jax.run.checkpoint import save
save(pathlib.Path(sys.argv[1]), 2, {'x': np.arange(1000.0)})
"""


@pytest.mark.parametrize(
    ('point', 'left'),
    [
        ('checkpoint.before_manifest', ['00001', '00002.tmp']),
        ('checkpoint.before_rename', ['00001', '00002.tmp']),
        ('checkpoint.after_rename', ['00001', '00002']),
    ],
)
def test_killed_in_a_save_the_step_is_whole_or_not_there(tmp_path, point, left):
    fake(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, '-c', CHILD, str(tmp_path)], env={**os.environ, 'SESA_CRASH_AT': point}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert sorted(child.name for child in tmp_path.iterdir()) == left
    for step in steps(tmp_path):
        verify(tmp_path, step)
    if left[-1].endswith('.tmp'):
        fake(tmp_path, 2)
        assert steps(tmp_path) == [1, 2]


DEVICES = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from sesa_jax.run.checkpoint import restore, save
root = pathlib.Path(sys.argv[1])
def on(count):
    mesh = Mesh(np.array(jax.devices()[:count]), ('data',))
    return {'w': NamedSharding(mesh, P('data')), 'n': NamedSharding(mesh, P())}
values = {'w': np.arange(32.0, dtype=np.float32).reshape(8, 4), 'n': np.int32(7)}
digests = set()
for step, count in enumerate((4, 1, 2), 1):
    tree = jax.tree.map(lambda v, s: jax.device_put(jnp.asarray(v), s), values, on(count))
    digests.add(save(root, step, tree))
    for other in (1, 2, 4):
        struct = lambda v, s: jax.ShapeDtypeStruct(np.shape(v), v.dtype, sharding=s)
        want = jax.tree.map(struct, values, on(other))
        back = restore(root, step, want)
        assert back['w'].sharding.is_equivalent_to(on(other)['w'], 2) and len(back['w'].sharding.device_set) == other
        assert all(np.array_equal(back[k], values[k]) and back[k].dtype == np.asarray(values[k]).dtype for k in values)
assert len(digests) == 1
print('fine')
"""


@pytest.mark.devices
def test_saved_on_some_devices_restored_on_others(tmp_path):
    done = subprocess.run(
        [sys.executable, '-c', DEVICES, str(tmp_path)], env=fake_devices(4), capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == 'fine', done.stderr
