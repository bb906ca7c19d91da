"""The command line of the main job: flags -> `Run`, and how the processes of one run find each other.

What stands in `Cluster` is no part of the run: it is not saved, and a run may be resumed on another number of processes.
"""

from __future__ import annotations

import argparse
import os.path
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from sesa_jax import config, door
from sesa_jax.config import ConfigError, Run


@dataclass(frozen=True)
class Cluster:
    """Several processes that train as one. They must see the same run folder; process 0 writes it."""

    distributed: bool = False
    """Be one of several processes. JAX finds the others by itself under Slurm, Open MPI, Kubernetes and on cloud TPUs;
    elsewhere give the three flags below."""
    coordinator: str = ''
    """ADDRESS:PORT at which process 0 listens, such as 10.0.0.1:8476, on a network that only you can reach."""
    process: int = -1
    """This process's number, from 0."""
    processes: int = 0
    """How many there are."""


@dataclass(frozen=True)
class Command:
    """One run of the main job."""

    run: Annotated[Run, tyro.conf.arg(name='')] = field(default_factory=Run)
    cluster: Annotated[Cluster, tyro.conf.arg(name='')] = field(default_factory=Cluster)


def from_command_line(arguments: Sequence[str], description: str = '', saved: Run | None = None) -> Run:
    """The run of a command line: the model's preset, in the corner of `--method`, then every flag that was given.

    `saved`: the config of a run that is resumed; then flags are laid over it instead. An unknown flag ends the process
    with the nearest names (tyro); a pair that cannot work raises ConfigError.
    """
    default = _default(arguments) if saved is None else saved
    return _settled(tyro.cli(Run, default=default, args=list(arguments), description=description))


def from_cluster_command_line(
    arguments: Sequence[str], description: str = '', saved: Run | None = None
) -> tuple[Run, Cluster]:
    """The same for a command that several processes may carry out together."""
    default = Command(_default(arguments) if saved is None else saved)
    given = tyro.cli(Command, default=default, args=list(arguments), description=description)
    if given.cluster != Cluster() and not given.cluster.distributed:
        raise ConfigError('--coordinator, --process and --processes need --distributed beside them')
    return _settled(given.run), given.cluster


def _default(arguments: Sequence[str]) -> Run:
    """What flags are laid over: the preset of the model and the world, in the corner of the method."""
    known = first_look(arguments)
    world = 'lab' if known.model == 'tiny' else 'wiki'
    if known.world in typing.get_args(config.WorldName):  # tyro refuses any other with the list of choices
        world = known.world
    run = Run(model=known.model)
    if known.size == 'small':
        run = config.small_preset(run)
    elif known.model == 'tiny' and world == 'lab':
        run = config.lab_preset(run)
    run = replace(run, world=replace(run.world, name=world))
    return config.with_method(run, known.method) if known.method in config.METHODS else run


def _settled(run: Run) -> Run:
    """The run with absolute paths, for it goes on from whatever folder it is resumed in; checked."""
    files = {name: os.path.abspath(os.path.expanduser(path)) for name, path in config.paths(run.world).items() if path}
    run = replace(run, world=replace(run.world, **files))
    door.check(run)
    return run


def folder_to_resume(arguments: Sequence[str]) -> str | None:
    """`--run-dir` where `--resume` stands beside it, before anything else is read."""
    known = first_look(arguments)
    return (known.resume and known.run_dir) or None


def first_look(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags that decide the defaults of all others. Both spellings of a name, as tyro takes them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--world', '--world.name', default='')
    parser.add_argument('--size', default='paper')
    parser.add_argument('--method', default='sesa')
    parser.add_argument('--run-dir', '--run_dir', default='')
    parser.add_argument('--resume', action='store_true')
    try:
        return parser.parse_known_args(arguments)[0]
    except SystemExit as error:  # argparse has said which flag lacks its value
        raise ConfigError('a flag has no value') from error
