"""A checkpoint's policy as a Hugging Face folder: `python -m experiments.export RUN --role solver DIR`.

Reads the newest committed step of a run, or `--step N`, and writes weights, config, generation config, tokenizer and
chat template into DIR, which transformers loads and `--model DIR` takes. Adapters are merged into their base. What was
written is read back and compared with the checkpoint, tensor by tensor and bit by bit, before the folder gets its name.
RUN is only read. Needs no accelerator, and twice the model in host memory: for 8 billion parameters 65 GB, and 33 GB of
disk in float32.
"""

from __future__ import annotations

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from sesa_jax import config
from sesa_jax.config import ConfigError
from sesa_jax.policy import backbones, hf, lora
from sesa_jax.policy.arch import Architecture, shapes
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Role
from sesa_jax.run import checkpoint, commit
from sesa_jax.run.files import TEMPORARY, sync, sync_tree
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.process import prepare
from sesa_jax.selfplay import setup

Kind = Literal['float32', 'bfloat16']


def export(
    run_dir: pathlib.Path, role: Role, target: pathlib.Path, step: int | None = None, kind: Kind = 'float32'
) -> int:
    """Writes `target`; returns the step. ConfigError or CheckpointError says what cannot be had, and leaves nothing."""
    folder = RunFolder.read(run_dir)
    run = config.from_json(folder.read_config())
    if role not in setup.roles(run):
        raise ConfigError(f'{run_dir} has no {role}: its method is {run.method}, which trains the solver alone')
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f'{target} exists and is not an empty folder; choose another one')
    record = _record(folder, step)
    source = backbones.resolve(run.model)
    if (source / 'tokenizer.json').read_bytes() != folder.tokenizer.read_bytes():
        raise ConfigError(f'{source} is not the model that {run_dir} began with: its tokenizer.json has changed')
    arch = hf.load_architecture(source)
    setup.refuse_other_base(run, source)
    wanted = {role: {'params': lora.shapes(arch, run.lora) if run.lora.rank else shapes(arch, jnp.float32)}}
    params = checkpoint.restore(folder.checkpoints, record.step, wanted, record.checkpoint, part=True)[role]['params']
    if run.lora.rank:
        params = lora.merged(hf.load_params(source, arch), params)
    half = target.with_name(target.name + TEMPORARY)
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        template = backbones.template_of(run.model)
        hf.save(half, arch, params, hf.load_config(source), source, dtype=kind)
        if template and not _has_template(source):
            (half / 'chat_template.jinja').write_text(template, encoding='utf-8')
        compare(half, arch, params, kind)
        sync_tree(half)
        os.replace(half, target)  # onto nothing, or an empty folder
        sync(target.parent)
    except OSError as error:
        raise ConfigError(f'cannot write {target}: {error.strerror or error}') from error
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return record.step


def compare(folder: pathlib.Path, arch: Architecture, params: Params, kind: Kind) -> None:
    """ConfigError unless the folder's tensors are `params`, rounded once to `kind`, bit by bit."""
    written = jax.tree_util.tree_leaves_with_path(hf.load_params(folder, arch))
    for (path, there), ours in zip(written, jax.tree.leaves(params), strict=True):
        expected = np.asarray(ours).astype(jnp.dtype(kind)).astype(np.float32)
        if not np.array_equal(np.asarray(there).view(np.uint32), expected.view(np.uint32)):
            name = '/'.join(str(key.key) for key in path)
            raise ConfigError(f'{folder}: {name} was read back with other values than the checkpoint has')


def _record(folder: RunFolder, step: int | None) -> commit.CommitRecord:
    """The record of a step that is committed and whose checkpoint is still kept; of the newest one by default."""
    there = sorted(set(commit.recorded(folder)) & set(checkpoint.steps(folder.checkpoints)))
    if not there:
        raise ConfigError(f'{folder.path} has no committed step with a checkpoint to export')
    if step is not None and step not in there:
        raise ConfigError(f'{folder.path} has no checkpoint of step {step}; there are {", ".join(map(str, there))}')
    try:
        return commit.read(folder, there[-1] if step is None else step)
    except (OSError, ValueError) as error:
        raise ConfigError(f'this step cannot be exported: {error}') from error


def _has_template(folder: pathlib.Path) -> bool:
    settings = folder / 'tokenizer_config.json'
    return (folder / 'chat_template.jinja').is_file() or (
        settings.is_file() and bool(hf.read_json(settings).get('chat_template'))
    )


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See the module's docstring."""

    run: tyro.conf.Positional[pathlib.Path]
    """Run folder."""
    target: tyro.conf.Positional[pathlib.Path]
    """Folder to write: new, or empty."""
    step: int | None = None
    """A committed step whose checkpoint is kept; the newest by default."""
    role: Role = 'solver'
    """Whose policy."""
    dtype: Kind = 'float32'
    """bfloat16 is half as large, and rounds."""


def main(arguments: Sequence[str] | None = None) -> int:
    prepare()
    given = tyro.cli(Arguments, args=arguments, description=__doc__)
    try:
        step = export(given.run, given.role, given.target, given.step, given.dtype)
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(f'{given.target}: the {given.role} of step {step} in {given.dtype}, read back and equal to the checkpoint')
    return 0


if __name__ == '__main__':
    sys.exit(main())
