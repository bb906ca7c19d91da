"""Does a run fit, before anything is paid for? Bytes per device of each part, without allocating any of them.

Every number comes from one of three places, and the table says which: *tree*, the shapes and shardings of the abstract
parameter tree (exact); *program*, the real update and decode programs compiled ahead of time for as many fake devices
(exact for arguments; their temporary memory is that of a CPU, which computes bfloat16 in float32 and has no fused
attention, so it is shown and not counted); *count*, the arithmetic of activations, logits and caches written out below.

Left out: the memory of the CUDA context and of cuDNN's workspaces, for which `RESERVED` of the device is kept back.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sesa_jax.config import Run
from sesa_jax.grpo import learner
from sesa_jax.grpo.logprob import HEAD_CHUNK
from sesa_jax.grpo.microbatch import LENGTHS
from sesa_jax.policy import lora, sharding, transformer
from sesa_jax.policy.arch import Architecture, abstract, parameter_count, shapes
from sesa_jax.rollout import decode as decoding
from sesa_jax.rollout.cache import PoolShape, pool_shapes

RESERVED = 0.08
"""Share of a device that is not planned for: CUDA context, cuDNN workspaces, fragments."""
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')
SIZES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'f64': 8}


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that lies on every device."""

    name: str
    size: int  # bytes per device
    source: Literal['tree', 'count']
    update: bool  # is there while a policy is updated
    rollout: bool  # is there while a policy plays


@dataclasses.dataclass(frozen=True)
class Program:
    """A program compiled for the run's mesh."""

    name: str
    arguments: int  # bytes per device, from the compiler
    expected: int  # the same from the abstract trees
    temporary: int  # bytes per device on a CPU
    collectives: dict[str, tuple[int, int]]  # name -> (places in the program, bytes of their results per device)


def parts(run: Run, arch: Architecture, train: sharding.Mesh, decode: sharding.Mesh) -> list[Part]:
    """What lies on one device, in bytes, in bfloat16 compute over float32 masters."""
    masters = tree_bytes(trained(run, arch, train))
    what = 'adapters' if run.lora.rank else 'masters'
    reference = tree_bytes(frozen(arch, train))
    copy = tree_bytes(deployed_shapes(arch, decode))
    roles = 2 if run.self_play else 1
    rows, tokens = micro_batch_shape(run, train)
    local = rows // train.shape['data'] * tokens
    if run.offload:
        states = [Part(f'{what} and moments of the role in its update', 3 * masters, 'tree', True, False)]
    else:
        states = [
            Part(f'{what}, float32, {roles} roles', roles * masters, 'tree', True, True),
            Part(f'AdamW moments, float32, {roles} roles', roles * 2 * masters, 'tree', True, True),
        ]
    return [
        *states,
        Part('gradients, float32', masters, 'tree', True, False),
        # A micro-batch's gradients are whole (outputs of the loop over layers) before they are added to the others.
        Part('gradients of a micro-batch, float32', masters, 'tree', True, False),
        Part(f'{"base and " if run.lora.rank else ""}reference, bfloat16, shared', reference, 'tree', True, True),
        Part('decode copy, bfloat16', copy, 'tree', False, True),
        *(
            Part(f'KV of {shape.rows} {name} rows', tree_bytes(slot_shapes(shape, arch, decode)), 'tree', False, True)
            for name, shape in rollout_pools(run, decode).items()
        ),
        Part(f'activations, {local:,} tokens', local * activation_bytes(run, arch), 'count', True, False),
        Part('logits chunk and head', head_bytes(arch, is_trained=not run.lora.rank), 'count', True, False),
        Part('decode step: logits, staging', decode_step_bytes(run, arch, decode), 'count', False, True),
    ]


def activation_bytes(run: Run, arch: Architecture) -> int:
    """Bytes a token in the backward pass: what each layer keeps, and what one layer needs for a moment."""
    query, keys, width, hidden = arch.heads * arch.head_size, arch.kv_heads * arch.head_size, arch.width, arch.hidden
    inner = 6 * width + 3 * (query + 2 * keys) + 2 * query + 6 * hidden
    specs = lora.abstract(arch, run.lora) if run.lora.rank else {'a': {}, 'b': {}}
    thin = run.lora.rank * len(specs['a'])  # x A of each adapter
    added = sum(spec.shape[-1] for spec in specs['b'].values())  # (x A) B, which is a matrix's output as well
    inner += thin + added
    kept = {
        'nothing': width,  # the residual stream alone
        'projections': width + query + 2 * keys + 2 * width + 2 * hidden + thin + added,
        'none': inner,
    }[run.grpo.remat]
    return 2 * (arch.layers * kept + inner)


def head_bytes(arch: Architecture, is_trained: bool = True) -> int:
    """Logits of one chunk, their softmax and gradient in float32; the head's weights in bfloat16, gradient in float32."""
    return 3 * 4 * HEAD_CHUNK * arch.vocab + (6 if is_trained else 2) * arch.width * arch.vocab


def decode_step_bytes(run: Run, arch: Architecture, mesh: sharding.Mesh) -> int:
    """Logits of a step with their softmax in float32, and the staging buffers of a chunk."""
    rows = decode_rows(run, mesh) // mesh.shape['data']
    staging = 2 * 2 * arch.layers * arch.kv_heads * arch.head_size * run.rollout.chunk // mesh.shape['model']
    return rows * (3 * 4 * arch.vocab + staging)


def micro_batch_shape(run: Run, mesh: sharding.Mesh) -> tuple[int, int]:
    """(rows, tokens) of the micro-batch of the longest rows, over all devices."""
    longest = run.lengths.prompt + run.lengths.response
    tokens = next(size for size in LENGTHS if size >= longest)
    ways = mesh.shape['data']
    return max(run.grpo.micro_batch_tokens // tokens // ways, 1) * ways, tokens


def rollout_pools(run: Run, mesh: sharding.Mesh) -> dict[str, PoolShape]:
    return pool_shapes(run.rollout, run.lengths, run.solver.rollouts, mesh)


def decode_rows(run: Run, mesh: sharding.Mesh) -> int:
    """Rows of the largest decode program."""
    return max(shape.rows for shape in rollout_pools(run, mesh).values())


# --- abstract arguments ----------------------------------------------------------------------------------------------


def trained(run: Run, arch: Architecture, mesh: sharding.Mesh) -> Any:
    """What has gradients and moments: float32 masters, or adapters."""
    if run.lora.rank:
        return lora.shapes(arch, run.lora, mesh)
    return placed(shapes(arch, jnp.float32), sharding.shardings(abstract(arch), sharding.TRAIN, mesh))


def frozen(arch: Architecture, mesh: sharding.Mesh) -> Any:
    """The reference of the KL term, and the base of adapters."""
    return placed(shapes(arch, jnp.bfloat16), sharding.shardings(abstract(arch), sharding.TRAIN, mesh))


def placed(tree: Any, layout: Any) -> Any:
    """Abstract arrays with their shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, layout)


def deployed_shapes(arch: Architecture, mesh: sharding.Mesh) -> Any:
    arch = sharding.decode_arch(arch, mesh)
    layout = sharding.shardings(abstract(arch), sharding.DECODE, mesh)
    stacked = shapes(arch, jnp.bfloat16)
    layered = jax.eval_shape(lambda tree: transformer.unstack(tree, arch), stacked)
    return placed(layered, sharding.unstacked(layout, arch.layers))


def slot_shapes(shape: PoolShape, arch: Architecture, mesh: sharding.Mesh) -> transformer.Slots:
    def make() -> transformer.Slots:
        return transformer.init_slots(arch, shape.groups, shape.group_size, shape.prompt, shape.blocks, jnp.bfloat16)

    layout = sharding.cache(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), jax.eval_shape(make))


def tree_bytes(tree: Any) -> int:
    """Bytes of one device's shards."""
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf.sharding, NamedSharding) else leaf.shape
    return int(np.prod(shape)) * leaf.dtype.itemsize


# --- programs --------------------------------------------------------------------------------------------------------


def programs(
    run: Run, arch: Architecture, train: sharding.Mesh, decode: sharding.Mesh, say: Callable[[str], None]
) -> list[Program]:
    """The update and decode programs of the run, compiled; `say` is told before each."""
    rows, tokens = micro_batch_shape(run, train)
    lowered = learner.lowered(
        trained(run, arch, train), frozen(arch, train), (rows, tokens), arch=arch, grpo=run.grpo, mesh=train,
        optimizer=run.optimizer, response_length=run.lengths.response, dtype=jnp.bfloat16,
    )  # fmt: skip
    arguments, lower = decode_program(run, arch, decode)
    lowered['decode'] = lower, arguments
    found = []
    for name, (lower, trees) in lowered.items():
        say(f'compiling {name}')
        compiled = lower().compile()
        memory = compiled.memory_analysis()
        expected = sum(tree_bytes(tree) for tree in trees)
        found.append(
            Program(
                name, memory.argument_size_in_bytes, expected, memory.temp_size_in_bytes, census(compiled.as_text())
            )
        )
    return found


def decode_program(
    run: Run, arch: Architecture, mesh: sharding.Mesh
) -> tuple[tuple[Any, ...], Callable[[], jax.stages.Lowered]]:
    """Abstract arguments of the chunk that decodes the solver's groups, all blocks in use, and its lowering."""
    arch = sharding.decode_arch(arch, mesh)
    shape, chunk, vocab = rollout_pools(run, mesh)['shared'], run.rollout.chunk, arch.vocab
    slots = slot_shapes(shape, arch, mesh)
    whole = sharding.replicated(mesh)

    def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

    inputs = decoding.Inputs(
        prompt_length=array(shape.groups),
        token=array(shape.rows),
        start=array(shape.rows),
        state=array(shape.rows),
        budget=array(shape.rows),
        uniforms=array(chunk, shape.rows, 2, dtype=jnp.float32),
        temperature=array(shape.rows, dtype=jnp.float32),
        top_k=array(shape.rows),
        top_p=array(shape.rows, dtype=jnp.float32),
    )
    stops = (array(32, vocab, dtype=jnp.uint8), array(32, dtype=jnp.bool), array(vocab, dtype=jnp.bool))
    arguments = (deployed_shapes(arch, mesh), slots.prompt, slots.own, inputs, stops)
    return arguments, lambda: decoding.decode.lower(*arguments, arch=arch, mesh=mesh, allowed=vocab)


def census(text: str) -> dict[str, tuple[int, int]]:
    """Collectives of an HLO module: how often each is written, and the bytes of their results on one device."""
    places: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    text = re.sub(r'/\*.*?\*/', '', text)  # long tuples have comments between their types
    for result, name in re.findall(rf'= (\(?[^=()]*\)?) ({"|".join(COLLECTIVES)})(?:-start)?\(', text):
        places[name] += 1
        for kind, shape in re.findall(r'([a-z0-9]+)\[([0-9,]*)\]', result):
            sizes[name] += SIZES.get(kind, 4) * int(np.prod([int(n) for n in shape.split(',') if n] or [1]))
    return {name: (places[name], sizes[name]) for name in COLLECTIVES if places[name]}


def flops(run: Run, arch: Architecture) -> tuple[float, float]:
    """(XLA's, our own) FLOPs of a forward and backward pass over 1,024 tokens of a one-layer model, without remat.

    A compiler counts a loop's body once, and the layers are a loop: so the count is checked where both loops, over
    layers and over chunks of the head, have one turn.
    """
    one = dataclasses.replace(arch, layers=1)
    grpo = dataclasses.replace(run.grpo, kl=0.0, remat='none')
    mesh = sharding.make_mesh(1)
    layout = sharding.shardings(abstract(one), sharding.TRAIN, mesh)
    params = placed(shapes(one, jnp.float32), layout)
    lower, _ = learner.lowered(
        params, None, (1, HEAD_CHUNK), arch=one, grpo=grpo, optimizer=run.optimizer, mesh=mesh,
        response_length=run.lengths.response, dtype=jnp.float32,
    )['update, one micro-batch']  # fmt: skip
    counted = lower().cost_analysis()['flops']
    return float(counted), float(3 * forward_flops(one, HEAD_CHUNK, HEAD_CHUNK) + recomputed_head(one))


def recomputed_head(arch: Architecture) -> int:
    """The head of a chunk is computed again in the backward pass."""
    return 2 * arch.width * arch.vocab * HEAD_CHUNK


def forward_flops(arch: Architecture, tokens: int, context: int) -> int:
    """Multiply-adds, times two, of one row's forward pass: matrices, and attention without the masked half's saving."""
    matrices = parameter_count(arch) - (0 if arch.tied else arch.vocab * arch.width)
    attention = 4 * arch.layers * arch.heads * arch.head_size * context
    return tokens * (2 * matrices + attention)


# --- the verdict -----------------------------------------------------------------------------------------------------


def peak(found: Iterable[Part]) -> tuple[int, str]:
    """(bytes per device, phase) of the fuller phase."""
    found = list(found)
    update = sum(part.size for part in found if part.update)
    rollout = sum(part.size for part in found if part.rollout)
    return max((update, 'update'), (rollout, 'rollout'))


def ways_out(run: Run) -> list[tuple[list[str], Run]]:
    """Flags that need less memory and the run with them: what costs only time first, then shorter answers, and what
    trains adapters alone last."""
    rows = [most for n in range(6) if (most := run.rollout.rows >> n) >= run.solver.rollouts]
    options = []
    ranks = dict.fromkeys((run.lora.rank, run.lora.rank or 16))
    for rank, shrink, micro, offload, count in itertools.product(ranks, (1, 2, 4), (1, 4), (run.offload, True), rows):
        response, tokens = run.lengths.response // shrink, run.grpo.micro_batch_tokens // micro
        flags = {
            '--offload': offload and not run.offload,
            f'--rollout.rows {count}': count != run.rollout.rows,
            f'--rollout.single {min(count, run.rollout.single)}': count < run.rollout.single,
            f'--grpo.micro-batch-tokens {tokens}': micro > 1,
            f'--lengths.response {response}': shrink > 1,
            f'--lora.rank {rank}': rank != run.lora.rank,
        }
        smaller = dataclasses.replace(
            run,
            rollout=dataclasses.replace(run.rollout, rows=count, single=min(count, run.rollout.single)),
            offload=offload,
            lengths=dataclasses.replace(run.lengths, response=response),
            grpo=dataclasses.replace(run.grpo, micro_batch_tokens=tokens),
            lora=dataclasses.replace(run.lora, rank=rank),
        )
        options.append(([flag for flag, is_new in flags.items() if is_new], smaller))
    return options


def verdict(run: Run, arch: Architecture, train: sharding.Mesh, decode: sharding.Mesh, device_bytes: int) -> str:
    """One sentence: fits with N GB to spare, or misses by N GB and what makes it fit."""
    usable = int(device_bytes * (1 - RESERVED))

    def left(run: Run) -> int:
        return usable - peak(parts(run, arch, train, decode))[0]

    if left(run) >= 0:
        return f'fits with {left(run) / 1e9:.1f} GB to spare'
    for flags, smaller in ways_out(run):
        if left(smaller) >= 0:
            spare = left(smaller) / 1e9
            return f'misses by {-left(run) / 1e9:.1f} GB; {" ".join(flags)} makes it fit with {spare:.1f} GB to spare'
    return f'misses by {-left(run) / 1e9:.1f} GB; no flag makes it fit: take more devices or a smaller model'
