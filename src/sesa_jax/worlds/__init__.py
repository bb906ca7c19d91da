"""Worlds: a corpus to search, targets to ask about, questions to train on and to measure with.

`build` is the one place that knows their names. A world is a pure function of the run's config and the files that it
names, so the trainer and the host process each build the same one. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal, Protocol

from sesa_jax.config import ConfigError, Run
from sesa_jax.records import Document, Question, Target

Part = Literal['train', 'held_out']
TRAINING_PER_CELL = 200  # questions a class and number of hops, where a world can make more than anybody needs


class World(Protocol):
    """What a game needs of a world."""

    @property
    def documents(self) -> tuple[Document, ...]:
        """The passages that can be searched, in a fixed order."""

    @property
    def held_out_names(self) -> frozenset[str]:
        """Names that only measurement may ask about (see `naming.names_one_of`)."""

    def questions(self, part: Part, per_cell: int, seed: int) -> tuple[Question, ...]:
        """Up to `per_cell` questions of each class and number of hops; the two parts share no question and no answer."""

    def targets(self, count: int, step: int, seed: int) -> tuple[Target, ...]:
        """The target answers of one training step."""


def build(run: Run) -> World:
    """The world that a run plays in. ConfigError for a file or a package that is missing, malformed or changed."""
    world, digests = run.world, _digests(run)
    if world.digests and world.digests != digests:
        changed = [name for name, old, new in zip(FILES, world.digests, digests, strict=True) if old != new]
        raise ConfigError(
            f'the {" and the ".join(changed)} of --world {world.name} changed since this run began '
            f'({", ".join(getattr(world, n) or n for n in changed)}); put the old files back, or begin another run'
        )
    match world.name:
        case 'lab':
            from sesa_jax.worlds import lab

            return lab.build(run.seed, pointer_share=world.pointer_share)
        case 'wiki':
            from sesa_jax.worlds import wiki

            return wiki.build(run.seed)
        case 'files':
            from sesa_jax.worlds import files

            return files.build(run.seed, world.corpus, world.answers, world.questions)
    raise ConfigError(f'there is no world named {world.name!r}')


def training_questions(run: Run, world: World) -> tuple[Question, ...]:
    """The fixed set of a method without self-play; a set of people's own is taken whole. ConfigError if it is empty."""
    per_cell = TRAINING_PER_CELL if run.world.name != 'files' else 10**9
    questions = world.questions('train', per_cell, run.seed)
    if not questions:
        raise ConfigError(
            f'--method {run.method} trains on fixed questions, but {run.world.questions or run.world.name} has none '
            'to train on: all of them are held out'
        )
    return questions


FILES = ('corpus', 'answers', 'questions')


def pin(run: Run) -> Run:
    """The run with the digests of what its world reads, which a resumed run must find unchanged. Raises as `build`."""
    build(run)
    return dataclasses.replace(run, world=dataclasses.replace(run.world, digests=_digests(run)))


def _digests(run: Run) -> tuple[str, ...]:
    """SHA-256 of each of FILES, '' for none; () for a world that reads no file."""
    match run.world.name:
        case 'wiki':
            from sesa_jax.worlds import wiki

            return (wiki.SHA256, '', '')
        case 'files':
            return tuple(_digest(name, getattr(run.world, name)) for name in FILES)
    return ()


def _digest(name: str, path: str) -> str:
    if not path:
        return ''
    try:
        with open(path, 'rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest()
    except OSError as error:
        raise ConfigError(f'--{name} {Path(path)} cannot be read: {error.strerror}') from error
