"""From a config to the parts of a run: mesh, policies, engine and game. Nothing here is half-made when it refuses.

Left out: the run folder, recovery and the loop (`experiments/train.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sesa_jax import worlds
from sesa_jax.config import ConfigError, Run
from sesa_jax.grpo import learner
from sesa_jax.host.client import HostClient
from sesa_jax.policy import hf, sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Role
from sesa_jax.rollout.engine import Engine
from sesa_jax.selfplay.game import Game


@dataclass(frozen=True)
class Backbone:
    """A model folder on a mesh: what both policies start from."""

    folder: Path
    arch: Architecture
    tokenizer: Tokenizer
    mesh: Mesh
    dtype: Any  # of the arithmetic; parameters and moments are float32
    params: Params  # initial weights, frozen: the reference of the KL term, shared by both roles


def load(run: Run) -> Backbone:
    """Read the model of a run onto its devices. ConfigError names what is wrong with the folder or the device count."""
    folder = hf.resolve_model(run.model)
    if run.devices > len(jax.devices()):
        raise ConfigError(f'--devices {run.devices}: this machine has {len(jax.devices())}')
    arch = hf.load_architecture(folder)
    tokenizer = Tokenizer(folder)
    mesh = sharding.make_mesh(run.devices or None)
    places = sharding.shardings(abstract(arch), sharding.TRAIN, mesh)
    dtype = jnp.bfloat16 if jax.default_backend() == 'gpu' else jnp.float32
    return Backbone(folder, arch, tokenizer, mesh, dtype, hf.load_params(folder, arch, places))


def roles(run: Run) -> tuple[Role, ...]:
    """The policies of a run; without self-play there is no challenger."""
    return ('solver', 'challenger') if run.self_play else ('solver',)


def initial_states(run: Run, backbone: Backbone) -> dict[Role, learner.TrainState]:
    """Both policies as copies of the backbone, with fresh moments."""
    return {role: learner.init_state(backbone.params, run.optimizer) for role in roles(run)}


def make_game(run: Run, backbone: Backbone, host: HostClient) -> Game:
    """The parts of the game. The world is a pure function of the run, so the host process has the same one."""
    world = worlds.build(run)
    placed = sharding.replicated(backbone.mesh)
    deployed = jax.jit(
        lambda params: transformer.unstack(params, backbone.arch, backbone.dtype), out_shardings=placed
    )
    return Game(
        run=run,
        world=world,
        tokenizer=backbone.tokenizer,
        engine=Engine(
            backbone.arch, backbone.tokenizer, backbone.mesh, run.lengths, backbone.dtype, row_buckets=run.row_buckets
        ),
        host=host,
        deployed=deployed,
        training_questions=() if run.self_play else worlds.training_questions(run, world),
    )
