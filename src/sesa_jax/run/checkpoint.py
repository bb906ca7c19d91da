"""Checkpoints: a tree of arrays on disk that is complete, durable and the bytes that were saved, or is refused.

Orbax writes and reads the arrays, on any number of devices. It does not notice bit rot (30 of 30 flipped bits in data
files were restored silently, measured on 0.12.8) and leaves its last files unsynced; so each step carries a manifest
with the size and SHA-256 of every file and a digest of every leaf, everything is fsync'd, and only then does the step
get its name. Left out: asynchronous saves.

Of a state that is spread over several processes each writes and reads its own parts (Orbax), in the same calls on all and
on a file system that they share; process 0 does the rest. For the digests every leaf is brought together on all
processes, one after the other (`distributed.whole`), in a save and in a restore: the network carries the whole state,
and each device and each process's memory has room for one whole leaf besides. The files' names differ with the number of
processes; the digest and what is restored do not.

    checkpoints/00012/state/...       what Orbax wrote; a plain Orbax checkpoint of nested dicts
    checkpoints/00012/manifest.json   sealed: a change of any bit in it is noticed as well
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sesa_jax.run import distributed
from sesa_jax.run.crash import crash_point
from sesa_jax.run.files import (
    TEMPORARY,
    canonical,
    digest_bytes,
    digest_file,
    remove,
    seal,
    sync,
    sync_tree,
    unseal,
    write_atomic,
)

MANIFEST = 'manifest.json'
STATE = 'state'
HEADROOM = 1.2
"""Free space asked for before a save, in multiples of the tree's bytes."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or must not be used, with the reason."""


def save(checkpoints: Path, step: int, tree: Any) -> str:
    """Write `tree` as step `step`; returns its digest when it is complete and durable.

    The digest covers names, shapes, dtypes and bytes of all leaves, and nothing else: equal trees have equal digests.
    `tree`: nested dicts, lists, tuples and registered pytrees of arrays. CheckpointError if a leaf is no array, the
    step exists, or the disk has not enough room; nothing of the step is left then.
    """
    place = directory(checkpoints, step)
    leaves = _leaves(tree)
    temporary = checkpoints / (place.name + TEMPORARY)
    distributed.first(_make_way, place, temporary, int(HEADROOM * sum(leaf.nbytes for leaf in leaves.values())))
    try:
        distributed.first(temporary.mkdir)
        _orbax(lambda orbax: orbax.save(temporary / STATE, args=ocp.args.PyTreeSave(_nested(leaves))))
        crash_point('checkpoint.before_manifest')
        sync_tree(temporary / STATE)  # on each machine what it wrote
        digests = {name: _digest_leaf(leaf) for name, leaf in leaves.items()}
        digest = digest_bytes(canonical(digests))
        distributed.agree(0, digest)  # behind this all have come so far
        distributed.first(_complete, temporary, place, {'step': step, 'digest': digest, 'leaves': digests})
    except (OSError, ValueError) as error:  # a full disk reaches Orbax's caller as a ValueError
        if distributed.is_first():
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f'cannot write {place}: {error}') from error
    crash_point('checkpoint.after_rename')
    return digest


def _make_way(place: Path, temporary: Path, need: int) -> None:
    """CheckpointError if the step exists or `need` bytes are not free; removes what a killed save left."""
    if place.exists():
        raise CheckpointError(f'{place} exists already: a step is saved once; recovery removes what was not committed')
    free = shutil.disk_usage(place.parent).free
    if free < need:
        raise CheckpointError(f'{place.parent} has {free / 1e6:.0f} MB free, a checkpoint needs {need / 1e6:.0f} MB')
    remove(temporary)


def _complete(temporary: Path, place: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, make everything durable, and give the step its name."""
    write_atomic(temporary / MANIFEST, seal({**manifest, 'files': _measure(temporary)}))
    sync_tree(temporary)
    crash_point('checkpoint.before_rename')
    os.replace(temporary, place)
    sync(place.parent)


def verify(checkpoints: Path, step: int, digest: str | None = None, *, read_files: bool = True) -> dict[str, Any]:
    """The manifest of a step whose files are all there and unchanged, and whose digest is `digest` if given.

    Reads every byte (about 1 GiB/s); with `read_files=False` only names and sizes are compared. CheckpointError
    otherwise.
    """
    place = directory(checkpoints, step)
    try:
        raw = (place / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f'{place} is not a complete checkpoint: it has no readable {MANIFEST}') from error
    try:
        manifest = unseal(raw, str(place / MANIFEST))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if manifest['step'] != step:
        raise CheckpointError(f'{place} holds step {manifest["step"]}, not step {step}')
    if digest is not None and manifest['digest'] != digest:
        raise CheckpointError(f'{place} is not the checkpoint that was committed: its digest differs')
    for name, expected in manifest['files'].items():
        file = place / name
        if not file.is_file():
            raise CheckpointError(f'{place}: {name} is missing')
        if file.stat().st_size != expected['size']:
            raise CheckpointError(f'{place}: {name} has {file.stat().st_size} bytes, not {expected["size"]}')
        if read_files and digest_file(file) != expected['sha256']:
            raise CheckpointError(f'{place}: {name} is damaged: its bytes do not match their digest')
    return manifest


def restore(checkpoints: Path, step: int, abstract: Any, digest: str | None = None, *, part: bool = False) -> Any:
    """The tree of a step, verified before and after reading.

    `abstract` has the structure that was saved, with `jax.ShapeDtypeStruct` leaves (or arrays); where a leaf has a
    sharding the restored one lies so, whatever devices wrote it, else on the first device. Arrays would take their room
    beside the restored ones, so let them go first. With `part` it may have fewer leaves, and only those are read into
    memory. CheckpointError names the file or the leaf that is wrong.
    """
    manifest = distributed.shared(verify, checkpoints, step, digest)
    place = directory(checkpoints, step)
    wanted = {name: _struct(leaf) for name, leaf in _named(abstract).items()}
    saved = manifest['leaves']
    for names, problem in (
        (wanted.keys() - saved.keys(), 'is not in it'),
        (set() if part else saved.keys() - wanted.keys(), 'is unasked'),
    ):
        if names:
            raise CheckpointError(f'{place} does not fit this run: the leaf {min(names)} {problem}')
    for name, leaf in wanted.items():
        have = (tuple(saved[name]['shape']), saved[name]['dtype'])
        if have != (leaf.shape, leaf.dtype.name):
            raise CheckpointError(
                f'{place}: {name} is {have[1]}{have[0]}, this run needs {leaf.dtype.name}{leaf.shape}'
            )
    nested = _nested(wanted)
    arguments = ocp.args.PyTreeRestore(
        nested, restore_args=ocp.checkpoint_utils.construct_restore_args(nested), partial_restore=part
    )
    restored = _named(_orbax(lambda orbax: orbax.restore(place / STATE, args=arguments)))
    for name in wanted:
        if _digest_leaf(restored[name]) != saved[name]:
            raise CheckpointError(f'{place}: the leaf {name} was read with other values than it was saved with')
    return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in wanted])


def abstract(tree: Any) -> Any:
    """The tree with shapes, dtypes and places in place of its arrays: what `restore` needs to know of it."""
    return jax.tree.map(_struct, tree)


def directory(checkpoints: Path, step: int) -> Path:
    return checkpoints / f'{step:05d}'


def steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder of their own name, complete or damaged, in order."""
    return sorted(int(child.name) for child in checkpoints.iterdir() if child.name.isdigit() and child.is_dir())


def prune(checkpoints: Path, keep: int, committed: Iterable[int]) -> list[int]:
    """Remove all but the newest `keep` (>= 1) of the committed steps; returns the removed steps.

    Steps newer than the newest committed one are left alone. Nothing is removed unless the newest committed step is
    there with all its files, so that the only good checkpoint is never the one that goes.
    """
    if keep < 1:
        raise ValueError(f'keep is {keep}: at least one checkpoint must stay')
    there = steps(checkpoints)
    good = sorted(set(committed) & set(there))
    if not good:
        return []
    try:
        verify(checkpoints, good[-1], read_files=False)
    except CheckpointError:
        return []
    stay = set(good[-keep:])
    gone = [step for step in there if step not in stay and step < good[-1]]
    for step in gone:
        remove(directory(checkpoints, step))
    return gone


def _orbax(work: Any) -> Any:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as orbax:
        return work(orbax)


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by name: the keys of the path with '/' between them."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = _parts(path)
        if not parts or any('/' in part or not part for part in parts) or '/'.join(parts) in named:
            raise CheckpointError(f'the leaf at {jax.tree_util.keystr(path)} has no usable name of its own')
        named['/'.join(parts)] = leaf
    return named


def _leaves(tree: Any) -> dict[str, Any]:
    named = _named(tree)
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array | np.ndarray) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise CheckpointError(f'the leaf {name} is a {type(leaf).__name__}: only plain arrays can be saved')
    return named


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split('/')
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _digest_leaf(leaf: Any) -> dict[str, Any]:
    array = np.ascontiguousarray(distributed.whole(leaf))
    return {
        'shape': list(leaf.shape),
        'dtype': array.dtype.name,
        'sha256': digest_bytes(memoryview(array.reshape(-1).view(np.uint8))),
    }


def _measure(root: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in root.rglob('*') if path.is_file())
    return {
        path.relative_to(root).as_posix(): {'size': path.stat().st_size, 'sha256': digest_file(path)} for path in files
    }
