"""From a config to the parts of a run: mesh, policies, engine and game. Nothing here is half-made when it refuses.

Left out: the run folder, recovery and the loop (`experiments/train.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sesa_jax import worlds
from sesa_jax.config import ConfigError, Run
from sesa_jax.grpo import learner
from sesa_jax.host.client import HostClient
from sesa_jax.policy import backbones, hf, lora, sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Role
from sesa_jax.rollout.engine import Engine
from sesa_jax.run import distributed
from sesa_jax.run.files import canonical, digest_bytes, digest_file
from sesa_jax.selfplay.game import Game


@dataclass(frozen=True)
class Backbone:
    """A model folder on a mesh: what both policies start from."""

    folder: Path
    arch: Architecture
    tokenizer: Tokenizer
    mesh: Mesh  # of the train layout
    decode_mesh: Mesh  # the same devices in the decode layout
    dtype: Any  # of the arithmetic; masters and moments are float32
    params: Params  # initial weights in `dtype`, frozen, one for both roles: the KL term's reference, adapters' base

    @property
    def decode_arch(self) -> Architecture:
        """That of the decode copy, whose vocabulary is padded."""
        return sharding.decode_arch(self.arch, self.decode_mesh)


def load(run: Run) -> Backbone:
    """Read the model of a run onto its devices. ConfigError names what is wrong with the folder or the device count."""
    distributed.first(backbones.resolve, run.model)  # one downloads or converts, the others find it in the cache
    folder = backbones.resolve(run.model)
    present = len(jax.devices())
    if run.devices > present:
        raise ConfigError(f'--devices {run.devices}: this machine has {present}')
    if jax.process_count() > 1 and run.devices not in (0, present):
        raise ConfigError(f'--devices {run.devices}: with several processes all of their {present} devices take part')
    if jax.process_count() > 1 and not run.rollout.deterministic:
        raise ConfigError('--no-deterministic: several processes must take in the results of searches in one order')
    arch = hf.load_architecture(folder)
    if run.lora.rank:
        lora.abstract(arch, run.lora)  # refuses what its matrices cannot have
    tokenizer = Tokenizer(folder, thinking=run.thinking, template=backbones.template_of(run.model))
    if run.base:
        distributed.first(refuse_other_base, run, folder)
    mesh = sharding.make_mesh(run.devices)
    decode_mesh = sharding.decode_mesh(arch, run.devices, run.tensor_parallel)
    dtype = jnp.bfloat16 if jax.default_backend() == 'gpu' else jnp.float32
    params = hf.load_params(folder, arch, sharding.shardings(abstract(arch), sharding.TRAIN, mesh), dtype)
    return Backbone(folder, arch, tokenizer, mesh, decode_mesh, dtype, params)


def base_digest(folder: Path) -> str:
    """SHA-256 of a model's architecture, weight files and tokenizer. Reads about 1 GB a second."""
    files = {path.name: digest_file(path) for path in [*hf.weight_files(folder), folder / 'tokenizer.json']}
    return digest_bytes(canonical({'architecture': asdict(hf.load_architecture(folder)), 'files': files}))


def pin(run: Run, folder: Path) -> Run:
    """The run with the digest of its base, which is read again whenever the run is taken up: as the reference of the KL
    term, as the arm `base` of the evaluation, and below adapters."""
    return replace(run, base=base_digest(folder))


def refuse_other_base(run: Run, folder: Path) -> None:
    """ConfigError unless the model in `folder` is still the one that the run began with."""
    if run.base and run.base != base_digest(folder):
        raise ConfigError(
            f'{folder} is not the base that this run began with: its weights, architecture or tokenizer have changed; '
            'put the old files back, or begin another run'
        )


def roles(run: Run) -> tuple[Role, ...]:
    """The policies of a run; without self-play there is no challenger."""
    return ('solver', 'challenger') if run.self_play else ('solver',)


def initial_states(run: Run, backbone: Backbone) -> dict[Role, learner.TrainState]:
    """Both policies, copies of the backbone or adapters of it, with fresh moments; in host memory with `offload`."""
    params = backbone.params
    if backbone.dtype != jnp.float32 and not run.lora.rank:  # masters keep what the file has beyond the arithmetic's precision
        places = jax.tree.map(lambda x: x.sharding, params)
        params = hf.load_params(backbone.folder, backbone.arch, places)
    states: dict[Role, learner.TrainState] = {}
    for number, role in enumerate(roles(run)):
        if run.lora.rank:
            params = lora.init(backbone.arch, run.lora, [run.seed, number, 47], backbone.mesh)
        state = learner.init_state(params, run.optimizer)
        states[role] = sharding.offload(state) if run.offload else state
    return states


def abstract_states(run: Run, backbone: Backbone) -> dict[Role, learner.TrainState]:
    """What `initial_states` gives, as jax.ShapeDtypeStruct where it has arrays, and as that places them: the target of a
    checkpoint restore, which takes no memory."""
    if run.lora.rank:
        params = lora.shapes(backbone.arch, run.lora, backbone.mesh)
    else:
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), backbone.params
        )
    state = learner.abstract_state(params, run.optimizer)
    if run.offload:
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind('pinned_host')), state
        )
    return dict.fromkeys(roles(run), state)


def deployment(backbone: Backbone) -> Callable[[lora.Policy], Params]:
    """From parameters in the train layout, on the devices or in host memory, to the decode layout in `dtype`."""
    train = sharding.shardings(abstract(backbone.arch), sharding.TRAIN, backbone.mesh)
    arch = backbone.decode_arch
    decode = sharding.shardings(abstract(arch), sharding.DECODE, backbone.decode_mesh)

    def cast_then_move(params: Params) -> Params:
        cast = jax.tree.map(lambda x: x.astype(backbone.dtype), params)
        return transformer.unstack(jax.lax.with_sharding_constraint(cast, train), arch)

    def merge_then_move(base: Params, adapters: lora.Adapters) -> Params:
        return cast_then_move(lora.merged(base, adapters))

    places = sharding.unstacked(decode, arch.layers)
    whole, adapted = (jax.jit(make, out_shardings=places) for make in (cast_then_move, merge_then_move))

    def deployed(params: lora.Policy) -> Params:
        params = sharding.onload(params)
        return adapted(backbone.params, params) if isinstance(params, lora.Adapters) else whole(params)

    return deployed


def make_game(run: Run, backbone: Backbone, host: HostClient) -> Game:
    """The parts of the game. The world is a pure function of the run, so the host process has the same one."""
    world = worlds.build(run)
    return Game(
        run=run,
        world=world,
        tokenizer=backbone.tokenizer,
        engine=Engine(
            backbone.decode_arch,
            backbone.tokenizer,
            backbone.decode_mesh,
            run.lengths,
            backbone.dtype,
            places=run.rollout,
            group_size=run.solver.rollouts,
        ),
        host=host,
        mesh=backbone.mesh,
        deployed=deployment(backbone),
        training_questions=() if run.self_play else worlds.training_questions(run, world),
    )
