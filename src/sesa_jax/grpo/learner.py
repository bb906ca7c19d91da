"""The learner: scored trajectories of one role and one step -> a new train state. `update` is the whole story.

`update(state, reference, samples, ...) -> (state, metrics)` is a pure function of its arguments: it plans mini-batches
(one optimizer step each) and micro-batches (one forward and backward pass each, of a few fixed shapes), adds up
gradients and (sum, count) pairs over a mini-batch in float32, divides once by the counts of the whole mini-batch, clips
by the global norm and takes an AdamW step. So neither the micro-batch size nor the number of devices changes the
gradient beyond rounding, and permuting the rows changes nothing at all.

Two jitted functions do the work: `_accumulate` (one micro-batch, reference pass included) and `_apply` (one optimizer
step). With adapters (policy/lora.py) only they have gradients and moments, and the reference is their base.
Left out on purpose: packing, and moments that live on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from sesa_jax import config
from sesa_jax.grpo import loss
from sesa_jax.grpo.logprob import token_logprobs
from sesa_jax.grpo.microbatch import MicroBatch, Sample, by_problem, check, micro_batches
from sesa_jax.policy import lora, sharding
from sesa_jax.policy.arch import Architecture
from sesa_jax.policy.transformer import Params
from sesa_jax.run import distributed

log = logging.getLogger(__name__)
Sums = dict[str, loss.Ratio]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes of one role."""

    params: lora.Policy  # float32 masters
    moments: optax.OptState  # AdamW's, float32
    step: jax.Array  # i32[]; optimizer steps taken: the warm-up counts them, and rollouts are stamped with them


def init_state(params: lora.Policy, optimizer: config.Optimizer) -> TrainState:
    """A state before its first step, on the devices of `params`.

    The parameters are copied: `update` may give a state's buffers away, and the caller's tree (often the frozen
    reference) must survive that. The moments of a sharded parameter are sharded like it.
    """
    # Committed to where they lie: otherwise the second step would meet other types, and compile its programs again.
    params = jax.tree.map(lambda x: jax.device_put(jnp.array(x, jnp.float32, copy=True), x.sharding), params)
    transform = _adamw(optimizer)
    moments = optax.tree_map_params(
        transform, lambda moment, param: jax.device_put(moment, param.sharding), transform.init(params), params
    )
    anywhere = jax.tree.leaves(params)[0].sharding
    scalar = sharding.replicated(anywhere.mesh) if isinstance(anywhere, NamedSharding) else anywhere
    moments = jax.tree.map(lambda x: x if x.ndim else sharding.placed(np.asarray(x), scalar), moments)
    return TrainState(params, moments, sharding.placed(np.int32(0), scalar))


def abstract_state(params: lora.Policy, optimizer: config.Optimizer) -> TrainState:
    """`init_state` of abstract parameters (`jax.ShapeDtypeStruct` with shardings on a mesh), without any array."""
    transform = _adamw(optimizer)
    scalar = sharding.replicated(jax.tree.leaves(params)[0].sharding.mesh)

    def struct(x: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    moments = optax.tree_map_params(
        transform,
        lambda moment, param: struct(moment, param.sharding),
        jax.eval_shape(transform.init, params),
        params,
        transform_non_params=lambda x: struct(x, scalar),
    )
    return TrainState(params, moments, struct(jnp.int32(0), scalar))


def learning_rate(step: jax.Array | int, optimizer: config.Optimizer) -> jax.Array:
    """Rate of the optimizer step after `step` steps: linear over the first warmup_steps, whose last has the full rate."""
    warmup = jnp.minimum(1.0, (jnp.float32(step) + 1) / max(optimizer.warmup_steps, 1))
    return optimizer.learning_rate * warmup


def update(
    state: TrainState,
    reference: Params,
    samples: Sequence[Sample],
    *,
    arch: Architecture,
    grpo: config.Grpo,
    optimizer: config.Optimizer,
    temperature: float,
    allowed: int,
    response_length: int,
    mini_batch: int | None = None,
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
    donate: bool = True,
) -> tuple[TrainState, dict[str, float]]:
    """One step of GRPO on one role's rows.

    Args:
      state: before the step. Its buffers are reused for the result when a step is taken and `donate` is set: keep no
        other reference to them (a decode copy made by `transformer.unstack` under jit is a copy and stays). Pass
        donate=False to go on using the old state, such as for a frozen opponent.
      reference: frozen initial weights for the KL term, and the base of a state of adapters; never donated, so it may
        serve both roles, but it must not be the state's own tree.
      samples: the rows. Those that are left out, have no action token, or (with grpo.drop_dead_groups) belong to a
        dead group take no part in anything.
      arch, allowed, temperature: as the sampler had them (see `logprob.token_logprobs`).
      grpo, optimizer: the objective; the step size.
      response_length: tokens of the response budget, the divisor of `constant` aggregation.
      mini_batch: problems per optimizer step; None takes one step over all rows.
      mesh: rows are split over its 'data' axis; `state` and `reference` lie where the caller put them.
      dtype: of the forward pass.

    Returns:
      The new state and metrics as Python floats. Always: rows, tokens (action tokens that take part), optimizer_steps,
      skipped_steps (loss or gradient not finite), idle_mini_batches (no advantage differs from 0), micro_batches,
      padding_waste (share of padding in the micro-batches). Over the mini-batches that took their step, and absent
      when none did: what `loss.divided` names (kl: absent without a KL term); sampler_difference_max; the largest
      grad_norm, before clipping; the last learning_rate.

    A mini-batch without a row whose advantage differs from 0 takes no optimizer step: parameters and moments stay
    bitwise as they are, whatever KL and weight decay. The same holds for one whose loss or gradient is not finite.

    Raises:
      ValueError: a row that cannot be trained (see `microbatch.check`), a temperature that is not positive, or a
        reference that shares its arrays with the state.
      RuntimeError: on all processes of a mesh, where one of them brings other rows.
    """
    if not temperature > 0:
        raise ValueError(f'update: temperature is {temperature}; rows sampled greedily cannot be trained on')
    if donate and {id(x) for x in jax.tree.leaves(state.params)} & {id(x) for x in jax.tree.leaves(reference)}:
        raise ValueError('update: the reference shares arrays with the state, whose buffers are given away; copy it')
    kept = [s for s in samples if s.is_included and not (grpo.drop_dead_groups and s.is_dead)]
    kept = [s for s in kept if s.trajectory.is_action.any()]
    check(kept, allowed)
    ways = 1 if mesh is None else mesh.shape['data']
    minis = by_problem(kept, mini_batch)
    live = [mini for mini in minis if any(s.advantage != 0 for s in mini)]
    plans = [micro_batches(mini, grpo.micro_batch_tokens, ways) for mini in live]
    if mesh is not None and mesh.is_multi_process:  # a process with fewer passes would leave the others waiting for it
        distributed.agree(0, [[micro.digest for micro in plan] for plan in plans], 'batch')

    shared = _Shared(arch, allowed, jnp.dtype(dtype).name, grpo.remat, mesh)
    options = _Options.of(grpo, response_length, dtype)
    temperature = jnp.float32(temperature)
    base = reference if isinstance(state.params, lora.Adapters) else None

    # The first mini-batch meets the weights that its old log-probs are defined by; later ones need them stored.
    def stored(plan: list[MicroBatch]) -> list[jax.Array]:
        return [_old_logprobs(state.params, base, _arrays(micro, mesh), temperature, shared=shared) for micro in plan]

    old = [stored(plan) if i else None for i, plan in enumerate(plans)]
    apply = _apply_donating if donate else _apply
    layout = _Layout.of(state)
    reports = []
    for i, plan in enumerate(plans):
        gradients = jax.tree.map(jnp.zeros_like, state.params)
        sums, maxima = None, None
        for j, micro in enumerate(plan):
            gradients, *terms = _accumulate(
                gradients,
                state.params,
                reference if grpo.kl else base,
                _arrays(micro, mesh),
                old[i] and old[i][j],
                temperature,
                shared=shared,
                options=options,
                layout=layout,
            )
            sums = terms[0] if sums is None else jax.tree.map(jnp.add, sums, terms[0])
            maxima = terms[1] if maxima is None else jax.tree.map(jnp.maximum, maxima, terms[1])
        state, report = apply(state, gradients, sums['loss'], optimizer=optimizer, layout=layout)
        reports.append((sums, maxima, report))
    return state, _metrics(kept, minis, plans, jax.device_get(reports))


def lowered(
    params: lora.Policy,
    reference: Params | None,
    shape: tuple[int, int],
    *,
    arch: Architecture,
    grpo: config.Grpo,
    optimizer: config.Optimizer,
    response_length: int,
    mesh: Mesh,
    dtype: Any,
) -> dict[str, tuple[Callable[[], jax.stages.Lowered], tuple[Any, ...]]]:
    """The programs of an update of (rows, tokens) for abstract arguments: name -> (lowers it, its array arguments)."""
    state = abstract_state(params, optimizer)
    layout = _Layout.of(state)
    shared = _Shared(arch, arch.vocab, jnp.dtype(dtype).name, grpo.remat, mesh)
    options = _Options.of(grpo, response_length, dtype)
    rows, whole = sharding.rows(mesh), sharding.replicated(mesh)
    kinds = {
        'ids': (shape, jnp.int32), 'is_action': (shape, jnp.bool), 'sampler': (shape, jnp.float32),
        'lengths': (shape[:1], jnp.int32), 'advantage': (shape[:1], jnp.float32), 'is_counted': (shape[:1], jnp.bool),
    }  # fmt: skip
    arrays = {name: jax.ShapeDtypeStruct(*kind, sharding=rows) for name, kind in kinds.items()}
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    reference = reference if grpo.kl or isinstance(params, lora.Adapters) else None
    batch = (params, params, reference, arrays, None, scalar)
    step = (state, params, loss.Ratio(scalar, scalar))
    return {
        'update, one micro-batch': (
            lambda: _accumulate.lower(*batch, shared=shared, options=options, layout=layout),
            batch,
        ),
        'update, optimizer step': (lambda: _apply_donating.lower(*step, optimizer=optimizer, layout=layout), step),
    }


# --- one micro-batch, one optimizer step ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Static arguments of every forward pass."""

    arch: Architecture
    allowed: int
    dtype: str
    remat: str
    mesh: Mesh | None

    def logprobs(
        self,
        params: lora.Policy,
        base: Params | None,
        arrays: dict[str, jax.Array],
        temperature: jax.Array,
        entropy: str,
    ) -> Any:
        if isinstance(params, lora.Adapters):
            params = lora.applied(base, params)
        return token_logprobs(
            params,
            self.arch,
            arrays['ids'],
            arrays['lengths'],
            arrays['is_action'],
            temperature=temperature,
            allowed=self.allowed,
            entropy=entropy,
            rows=None if self.mesh is None else sharding.rows(self.mesh),
            remat=self.remat,
            dtype=jnp.dtype(self.dtype),
        )


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static arguments of the objective."""

    grpo: config.Grpo
    response_length: int
    importance_level: loss.Importance

    @classmethod
    def of(cls, grpo: config.Grpo, response_length: int, dtype: Any) -> _Options:
        auto = 'token' if jnp.dtype(dtype) == jnp.bfloat16 else 'off'
        level = auto if grpo.importance_weights == 'auto' else grpo.importance_weights
        # What only the planning reads must not compile the objective anew.
        grpo = dataclasses.replace(grpo, mini_batch=0, micro_batch_tokens=0, drop_dead_groups=False)
        return cls(grpo, response_length, level)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where a state lies; static, so that gradients and results are pinned to the same places."""

    treedef: Any
    shardings: tuple[Any, ...]

    @classmethod
    def of(cls, state: TrainState) -> _Layout:
        leaves, treedef = jax.tree.flatten(state)
        return cls(treedef, tuple(x.sharding if isinstance(x.sharding, NamedSharding) else None for x in leaves))

    def pin(self, state: TrainState) -> TrainState:
        leaves = self.treedef.flatten_up_to(state)
        pairs = zip(leaves, self.shardings, strict=True)
        return self.treedef.unflatten([x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in pairs])

    def pin_params(self, params: lora.Policy) -> lora.Policy:
        full = self.treedef.unflatten(self.shardings)
        return jax.tree.map(
            lambda s, x: x if s is None else jax.lax.with_sharding_constraint(x, s),
            full.params,
            params,
            is_leaf=lambda s: s is None,
        )


@functools.partial(jax.jit, static_argnames=('shared', 'options', 'layout'), donate_argnames='gradients')
def _accumulate(
    gradients: lora.Policy,
    params: lora.Policy,
    reference: Params | None,
    arrays: dict[str, jax.Array],
    old: jax.Array | None,
    temperature: jax.Array,
    *,
    shared: _Shared,
    options: _Options,
    layout: _Layout,
) -> tuple[lora.Policy, Sums, dict[str, jax.Array]]:
    """Adds a micro-batch's gradient of the loss *sum*; returns it with the (sum, count) pairs and maxima."""
    log.info(
        'compiling the learner for %d rows of %d tokens', *arrays['ids'].shape
    )  # runs when traced, so once a shape
    grpo = options.grpo
    with jax.named_scope('reference'):
        anchor = shared.logprobs(reference, None, arrays, temperature, 'none')[0] if grpo.kl else None

    def loss_sum(params: lora.Policy) -> tuple[jax.Array, tuple[Sums, dict[str, jax.Array]]]:
        kind = 'gradient' if grpo.entropy else 'value'
        logprobs, entropy = shared.logprobs(params, reference, arrays, temperature, kind)
        current = jax.lax.stop_gradient(logprobs)
        tokens = loss.Tokens(
            logprobs=logprobs,
            entropy=entropy,
            old=current if old is None else old,
            sampler=arrays['sampler'],
            reference=current if anchor is None else anchor,
            is_action=arrays['is_action'],
            advantage=arrays['advantage'],
            is_counted=arrays['is_counted'],
        )
        total, sums, maxima = loss.objective(
            tokens, grpo, constant_length=options.response_length, importance_level=options.importance_level
        )
        if anchor is None:
            del sums['kl']  # without a reference it is not 0 but unknown
        return total.sum, (sums, maxima)

    with jax.named_scope('policy'):
        new, (sums, maxima) = jax.grad(loss_sum, has_aux=True)(params)
    added = jax.tree.map(lambda total, x: total + x.astype(jnp.float32), gradients, new)
    return layout.pin_params(added), sums, maxima


@functools.partial(jax.jit, static_argnames='shared')
def _old_logprobs(
    params: lora.Policy,
    base: Params | None,
    arrays: dict[str, jax.Array],
    temperature: jax.Array,
    *,
    shared: _Shared,
) -> jax.Array:
    return shared.logprobs(params, base, arrays, temperature, 'none')[0]


def _optimizer_step(
    state: TrainState, gradients: lora.Policy, total: loss.Ratio, *, optimizer: config.Optimizer, layout: _Layout
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Divides by the mini-batch's count, clips, and steps; a step that is not finite changes nothing."""
    gradients = jax.tree.map(lambda x: x / total.count, gradients)
    norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(norm) & jnp.isfinite(total.sum)
    gradients = jax.tree.map(lambda x: x * jnp.minimum(1.0, optimizer.clip_norm / norm), gradients)
    direction, moments = _adamw(optimizer).update(gradients, state.moments, state.params)
    rate = learning_rate(state.step, optimizer)
    params = jax.tree.map(lambda x, d: x - rate * d, state.params, direction)
    stepped = TrainState(params, moments, state.step + 1)
    result = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), stepped, state)
    return layout.pin(result), {'grad_norm': norm, 'is_finite': is_finite, 'learning_rate': rate}


# The result has the shapes of one state, so it can take the place of the old state or of the gradients.
_apply = jax.jit(_optimizer_step, static_argnames=('optimizer', 'layout'), donate_argnames='gradients')
_apply_donating = jax.jit(_optimizer_step, static_argnames=('optimizer', 'layout'), donate_argnames='state')


def _adamw(optimizer: config.Optimizer) -> optax.GradientTransformation:
    """AdamW's direction, without the rate; the decay is decoupled and covers every parameter."""
    return optax.chain(
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(optimizer.weight_decay),
    )


def _arrays(micro: MicroBatch, mesh: Mesh | None) -> dict[str, jax.Array]:
    place = None if mesh is None else sharding.rows(mesh)
    return {name: sharding.placed(array, place) for name, array in vars(micro).items()}


def _metrics(
    kept: Sequence[Sample], minis: Sequence[Any], plans: Sequence[Sequence[MicroBatch]], reports: Sequence[Any]
) -> dict[str, float]:
    micros = [micro for plan in plans for micro in plan]
    real, padded = sum(int(m.lengths.sum()) for m in micros), sum(m.ids.size for m in micros)
    taken = [report for report in reports if report[2]['is_finite']]
    if len(taken) < len(reports):
        log.warning(
            '%d of %d optimizer steps were not finite and were skipped', len(reports) - len(taken), len(reports)
        )
    metrics: dict[str, Any] = {
        'rows': len(kept),
        'tokens': sum(int(s.trajectory.is_action.sum()) for s in kept),
        'optimizer_steps': len(taken),
        'skipped_steps': len(reports) - len(taken),
        'idle_mini_batches': len(minis) - len(reports),
        'micro_batches': len(micros),
        'padding_waste': 1 - real / padded if padded else 0.0,
    }
    if taken:
        sums, maxima, steps = zip(*taken, strict=True)
        totals = jax.tree.map(lambda *x: sum(x), *sums)
        metrics |= loss.divided(totals)
        metrics |= jax.tree.map(lambda *x: max(x), *maxima)
        metrics |= {'grad_norm': max(s['grad_norm'] for s in steps), 'learning_rate': steps[-1]['learning_rate']}
    return {name: float(value) for name, value in metrics.items()}
