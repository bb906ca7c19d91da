"""Bytes that survive a power cut: atomic writes, and fsync of files, folders and whole trees.

A name that was written here is either the old content or the whole new content, whenever the machine stops.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sesa_jax.run.crash import crash_point

TEMPORARY = '.tmp'
"""Suffix of what is half-made. Whatever carries it may be removed by the holder of the run folder's lock."""


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """fsync every file and folder under `root`, `root` last."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))


def write_atomic(path: Path, data: bytes, crash: str = '') -> None:
    """Replace `path` by `data`: temporary file, fsync, rename, fsync of the folder.

    `crash` names the crash points `<crash>.before_rename` and `<crash>.after_rename`.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if crash:
        crash_point(f'{crash}.before_rename')
    os.replace(temporary, path)
    sync(path.parent)
    if crash:
        crash_point(f'{crash}.after_rename')


def remove(path: Path) -> None:
    """Remove a file or a folder. A folder is renamed first, so that half of it never stands under its own name."""
    if path.is_dir() and not path.is_symlink():
        doomed = path if path.name.endswith(TEMPORARY) else path.with_name(path.name + '.removed' + TEMPORARY)
        if doomed != path:
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def digest_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def canonical(data: Any) -> bytes:
    """JSON with sorted keys, no spaces to choose, a newline at the end: equal data are equal bytes."""
    return json.dumps(data, sort_keys=True, separators=(',', ':'), ensure_ascii=False, allow_nan=False).encode() + b'\n'


def seal(data: Mapping[str, Any]) -> bytes:
    """`data` as canonical JSON with its own digest under `seal`."""
    return canonical({**data, 'seal': digest_bytes(canonical(dict(data)))})


def unseal(raw: bytes, what: str) -> dict[str, Any]:
    """Inverse of `seal`. Any changed bit is a ValueError that names `what`."""
    try:
        data = json.loads(raw)
        claimed = data.pop('seal')
        good = seal(data) == raw and isinstance(claimed, str)
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ValueError(f'{what} is damaged: its content does not match its own digest')
    return data


def write_jsonl_gz(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, compressed, durable, with bytes that repeat (no time and no name in the header)."""
    lines = b''.join(canonical(dict(row)) for row in rows)
    write_atomic(path, gzip.compress(lines, compresslevel=6, mtime=0))


def read_jsonl_gz(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        for line in file:
            yield json.loads(line)


def cache_folder() -> Path:
    """Where a user keeps what can be made again: $XDG_CACHE_HOME/sesa-jax, else ~/.cache/sesa-jax."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'sesa-jax'
