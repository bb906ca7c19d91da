"""Hugging Face folders in and out: config.json, safetensors (one file or an index of several), tokenizer files.

A folder is data from outside: pickled weights are never opened, no code in it is run, shard names may not leave it, and
every parameter is filled from a tensor of the expected shape or the load fails with the file and the tensor named.

Weights are mapped, not read: each device's shard is filled from the map, slice by slice, and handed over before the next
one is begun, so that host memory beyond the parameters themselves holds one shard at a time. Writing goes tensor by
tensor too.

Left out: names and downloads (`backbones.py`) and quantised formats (`gguf.py` makes a folder of one).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from sesa_jax.policy.arch import Architecture, ModelError, Spec, abstract, hf_names, is_spec, leaves

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}  # safetensors' names -> ours
TOKENIZER_FILES = (
    'tokenizer.json',
    'tokenizer_config.json',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'chat_template.jinja',
    'generation_config.json',
)


def load_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict."""
    return read_json(Path(folder) / 'config.json')


def load_architecture(folder: Path) -> Architecture:
    return Architecture.from_config(load_config(folder), str(Path(folder) / 'config.json'))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises ModelError naming the file when it is missing or something else."""
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise ModelError(f'{path} is missing') from None
    except (OSError, ValueError) as error:
        raise ModelError(f'{path} cannot be read as JSON: {error}') from None
    if not isinstance(data, dict):
        raise ModelError(f'{path} must hold a JSON object, not {type(data).__name__}')
    return data


# --- loading ----------------------------------------------------------------------------------------------------------


def load_params(folder: Path, arch: Architecture, shardings: Any = None, dtype: Any = np.float32) -> dict[str, Any]:
    """The parameter tree of `arch.abstract`, in `dtype`, from the safetensors of a folder (F32, BF16 or F16).

    shardings: a tree of shardings like the parameters, or None for the default device. Only the slices that the devices
    of this process hold are read.
    Raises ModelError for a missing, short or foreign file and for a missing, extra, misshapen or non-finite tensor.
    """
    folder = Path(folder)
    wanted = hf_names(arch)
    spec_of = dict(leaves(abstract(arch)))
    files = _tensor_files(folder)
    # A tied file may repeat the head; the embedding is what counts.
    spare = {'lm_head.weight'} if arch.tied else set()
    for name in sorted(wanted.keys() - files.keys()):
        where = folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
        raise ModelError(f'{where}: tensor {name} is missing')
    for name in sorted(files.keys() - wanted.keys() - spare):
        raise ModelError(f'{files[name]}: tensor {name} does not belong to this architecture')
    views = {path: _map(path) for path in set(files.values())}
    by_path: dict[tuple[str, ...], list[str]] = {}
    for name, (path, _, _) in wanted.items():  # in layer order
        _check(files[name], name, views[files[name]][name], spec_of[path])
        by_path.setdefault(path, []).append(name)

    def load(path: tuple[str, ...], sharding: Any) -> jax.Array:
        spec = spec_of[path]
        tensors = [(files[name], name, views[files[name]][name].array) for name in by_path[path]]
        holders: dict[tuple[range, ...], list[jax.Device]] = {}  # devices that hold the same part are served together
        for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
            part = tuple(range(size)[piece] for size, piece in zip(spec.shape, index, strict=True))
            holders.setdefault(part, []).append(device)
        shards = []
        for part, devices in holders.items():
            shard = _shard(spec, tensors, part, dtype)
            shards += [jax.device_put(shard, device) for device in devices]
        return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards)

    specs = abstract(arch)
    paths, treedef = jax.tree.flatten(
        jax.tree_util.tree_map_with_path(lambda keys, _: tuple(key.key for key in keys), specs, is_leaf=is_spec),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = [here] * len(paths) if shardings is None else treedef.flatten_up_to(shardings)
    return treedef.unflatten([load(path, sharding) for path, sharding in zip(paths, placed, strict=True)])


def weight_files(folder: Path) -> list[Path]:
    """The files that `load_params` reads."""
    return sorted(set(_tensor_files(Path(folder)).values()))


class _View(NamedTuple):
    """A tensor in a mapped file."""

    kind: str  # safetensors' name of its type
    shape: tuple[int, ...]
    array: np.ndarray | None  # None where the type is not one of `DTYPES`


def _map(path: Path) -> dict[str, _View]:
    """The tensors of a safetensors file without reading them. The file's header was checked by `_keys`."""
    with open(path, 'rb') as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(whole[:8], 'little')
    views = {}
    for name, entry in json.loads(whole[8:begin]).items():
        if name == '__metadata__':
            continue
        kind, shape = entry['dtype'], tuple(entry['shape'])
        array = None
        if kind in DTYPES:
            count, offset = math.prod(shape), begin + entry['data_offsets'][0]
            array = np.frombuffer(whole, jax.numpy.dtype(DTYPES[kind]), count, offset).reshape(shape)
        views[name] = _View(kind, shape, array)
    return views


def _check(path: Path, name: str, view: _View, spec: Spec) -> None:
    if view.shape != spec.hf_shape:
        raise ModelError(f'{path}: tensor {name} has shape {list(view.shape)}, expected {list(spec.hf_shape)}')
    if view.array is None:
        raise ModelError(f'{path}: tensor {name} has type {view.kind}, supported: {", ".join(DTYPES)}')


def _shard(spec: Spec, tensors: list[tuple[Path, str, np.ndarray]], part: tuple[range, ...], dtype: Any) -> np.ndarray:
    """One part of a parameter, from its tensors (one, or one a layer)."""
    shard = _empty(tuple(map(len, part)), np.dtype(jax.numpy.dtype(dtype)))
    stacked = spec.axes[0] == 'layers'
    inner = tuple(slice(piece.start, piece.stop) for piece in (part[1:] if stacked else part))
    for layer, target in zip(part[0], shard, strict=True) if stacked else [(0, shard)]:
        path, name, tensor = tensors[layer]
        target[...] = (tensor.T if spec.transpose else tensor)[inner]
        if not np.isfinite(target).all():
            raise ModelError(f'{path}: tensor {name} holds values that are not finite')
    return shard


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Fresh memory at a multiple of 64 bytes, which a CPU device takes over as it is instead of copying it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            pickled = sorted(p.name for p in folder.glob('*.bin')) + sorted(p.name for p in folder.glob('*.pt*'))
            hint = f' ({pickled[0]} is a pickle, which is never opened)' if pickled else ''
            raise ModelError(f'{folder} has neither {SINGLE} nor {INDEX}{hint}')
        path = _inside(folder, SINGLE, folder)
        return dict.fromkeys(_keys(path), path)
    weight_map = read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f'{index}: weight_map must map tensor names to file names')
    files: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        path = _inside(folder, shard, index)
        listed = {name for name, file in weight_map.items() if file == shard}
        held = set(_keys(path))
        for name in sorted(listed - held):
            raise ModelError(f'{path}: tensor {name} is missing, though {INDEX} places it there')
        for name in sorted(held - listed):
            raise ModelError(f'{path}: tensor {name} is not placed there by {INDEX}')
        files |= dict.fromkeys(listed, path)
    return files


def _inside(folder: Path, name: str, where: Path) -> Path:
    """The path of a file of the folder. Names must be base names, links must stay in the folder or in the blob store
    that a Hugging Face cache keeps beside its snapshots."""
    if name != os.path.basename(name) or name in ('', '.', '..') or '\\' in name or '\0' in name:
        raise ModelError(f'{where}: file name {name!r} leads out of the folder')
    path = folder / name
    if not path.is_file():
        raise ModelError(f'{path} is missing' + (f', though {where.name} names it' if where != folder else ''))
    root, real = folder.resolve(), path.resolve()
    allowed = [root, root.parent.parent / 'blobs'] if root.parent.name == 'snapshots' else [root]
    if real.parent not in allowed:
        raise ModelError(f'{path} is a link that leads out of the folder, to {real}')
    return path


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework='numpy') as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f'{path} is damaged or cut short: {error}') from None


# --- saving -----------------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    arch: Architecture,
    params: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    *,
    dtype: str = 'float32',
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `load_params` and transformers load: weights, config.json, tokenizer files.

    config: the config.json to keep (its ids and extra keys); None writes `arch.to_config()`. It must describe `arch`.
    tokenizer: a folder to copy the tokenizer's files, chat template and generation config from, or a transformers
    tokenizer; None writes none.
    Weights go into one file, or into shards of at most `shard_bytes` with an index. config.json is written last, so a
    folder without it is one whose save did not finish.
    """
    folder = Path(folder)
    if dtype not in DTYPES.values():
        raise ModelError(f'{folder}: weights cannot be saved as {dtype!r}; supported: {", ".join(DTYPES.values())}')
    config = {**(config or arch.to_config()), 'dtype': dtype}
    config.pop('torch_dtype', None)
    if Architecture.from_config(config, 'the config to save') != arch:
        raise ModelError(f'{folder}: the config to save describes another architecture than the parameters')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').unlink(missing_ok=True)
    for old in folder.glob('model*.safetensors*'):
        old.unlink()
    _save_tokenizer(folder, tokenizer)
    _save_weights(folder, arch, params, dtype, shard_bytes)
    _write_json(folder / 'config.json', config)


def _save_weights(folder: Path, arch: Architecture, params: Mapping[str, Any], dtype: str, shard_bytes: int) -> None:
    kind = np.dtype(jax.numpy.dtype(dtype))
    spec_of = dict(leaves(abstract(arch)))
    names = list(hf_names(arch).items())
    sizes = {name: int(np.prod(spec_of[path].hf_shape)) * kind.itemsize for name, (path, _, _) in names}
    shards: list[list[tuple[str, Any]]] = [[]]
    filled = 0
    for name, place in names:
        if shards[-1] and filled + sizes[name] > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, place))
        filled += sizes[name]

    def tensor(path: tuple[str, ...], layer: int | None, transpose: bool) -> np.ndarray:
        value: Any = params
        for key in path:
            value = value[key]
        if value.shape != spec_of[path].shape:
            raise ModelError(f'parameter {"/".join(path)} has shape {value.shape}, expected {spec_of[path].shape}')
        array = np.asarray(value if layer is None else value[layer]).astype(kind)
        return np.ascontiguousarray(array.T if transpose else array)

    code = next(code for code, name in DTYPES.items() if name == kind.name)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors'
        header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
        end = 0
        for name, (path, _, _) in shard:
            begin, end = end, end + sizes[name]
            header[name] = {'dtype': code, 'shape': spec_of[path].hf_shape, 'data_offsets': [begin, end]}
        _write_tensors(folder / file, header, (tensor(*place) for _, place in shard))
        weight_map |= {name: file for name, _ in shard}
    if len(shards) > 1:
        _write_json(folder / INDEX, {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': weight_map})


def _write_tensors(path: Path, header: Mapping[str, Any], tensors: Iterable[np.ndarray]) -> None:
    """A safetensors file: the header's length, the header as JSON in a multiple of 8 bytes, the tensors."""
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for tensor in tensors:
            file.write(tensor.view(np.uint8).data)  # bfloat16 has no buffer of its own


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if hasattr(tokenizer, 'save_pretrained'):
        tokenizer.save_pretrained(folder)
        return
    source = Path(tokenizer)
    if not (source / 'tokenizer.json').is_file():
        raise ModelError(f'{source / "tokenizer.json"} is missing, so the tokenizer cannot be copied')
    if source.resolve() != folder.resolve():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(_inside(source, name, source), folder / name)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
