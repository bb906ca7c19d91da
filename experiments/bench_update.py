"""What `experiments.bench update` measures: one optimizer step on fixed rows, ours against TRL's.

* `ours`: `learner.update`, as the trainer calls it: the reference's pass, PPO-clip, k3, token mean, clipping, AdamW.
* `trl`: `GRPOTrainer.training_step` on the same rows (`loss_type='dapo'`, which is the mean over action tokens of all
  micro-batches), the reference's pass that the trainer makes before it, its clipping and its AdamW. Observations are
  `tool_mask` zeros. Given the better of it: rows sorted by length, each micro-batch padded to its own longest prompt and
  completion and filled up to a token budget, no gradient checkpointing unless ours recomputes too.
* `trl-stock`: the same with the shapes that the trainer itself makes: rows in any order, a fixed number a micro-batch, all
  padded to the longest of the batch.

Each contender lives in a process of its own (`python -m experiments.bench_update NAME`), so that its peak memory is its
own; the first process asks them in turns, and only one works at a time. The reference is the policy with its final norm
scaled by 1.05, so that its term is not 0. Nothing is timed unless loss and gradient norm of the first step agree.

TRL multiplies k3 by the ratio by default since 1.x, which changes its gradient; that is off. Left out: sampling, and old
log-probs other than the policy's own, which is what a first mini-batch has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Say = Callable[[str], None]
Compare = Callable[[Sequence[float], Sequence[float]], Any]  # seconds of ours and of the other -> bench.Ratio
TOLERANCE = 1e-4  # relative, of loss and gradient norm
REFERENCE_SCALE = 1.05
# Freed memory stays, for all, as our commands keep it (run/process.py); OpenMP's threads do not burn cores while they wait.
ENVIRONMENT = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': '2147483647', 'MALLOC_TOP_PAD_': '67108864',
               'OMP_WAIT_POLICY': 'PASSIVE'}  # fmt: skip


class Disagreement(Exception):
    """Contenders that do not compute the same."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A trajectory without its text: prompt, then actions and observations in turns."""

    ids: np.ndarray  # i32[T]
    is_action: np.ndarray  # bool[T]
    prompt: int  # tokens
    advantage: float


def agent_rows(count: int, ids: np.ndarray, *, mean: float, variation: float, prompt: int, actions: float) -> list[Row]:
    """Rows of a search agent, with tokens drawn from `ids`: log-normal lengths (variation: standard deviation over mean),
    a share `actions` of each row sampled, in four turns with an observation between them. actions 1.0: all that follows
    the prompt, in one turn."""
    rng = np.random.default_rng(0)
    sigma = np.sqrt(np.log1p(variation**2))
    lengths = np.maximum(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 2 * prompt).astype(int)
    rows = []
    for i, length in enumerate(lengths):
        rest = length - prompt
        sampled = rest if actions == 1.0 else min(round(actions * length), rest)
        is_action = np.zeros(length, bool)
        turns = 1 if sampled == rest else min(4, sampled)
        gaps = [*np.diff(np.linspace(0, rest - sampled, max(turns - 1, 1) + 1).astype(int)), 0]
        place = prompt
        for share, gap in zip(np.diff(np.linspace(0, sampled, turns + 1).astype(int)), gaps, strict=False):
            is_action[place : place + share] = True
            place += share + gap
        rows.append(Row(rng.choice(ids, length).astype(np.int32), is_action, prompt, 1.0 if i % 2 else -0.75))
    return rows


# --- the first process ------------------------------------------------------------------------------------------------


def measure(flags: Any, ratio: Compare, say: Say) -> dict[str, Any]:
    """Every figure of the benchmark; `say` is told each as it is found."""
    from sesa_jax.policy import backbones, hf

    folder = backbones.resolve(flags.model)
    arch = hf.load_architecture(folder)
    # Without the padding token: transformers gives its embedding no gradient, wherever it stands.
    ids = np.setdiff1d(np.arange(10, arch.vocab), [hf.load_config(folder).get('pad_token_id') or 0])
    rows = agent_rows(
        flags.rows, ids, mean=flags.mean_tokens, variation=flags.variation, prompt=flags.prompt_tokens,
        actions=flags.actions,
    )  # fmt: skip
    tokens = sum(len(row.ids) for row in rows)
    share = sum(int(row.is_action.sum()) for row in rows) / tokens
    found: dict[str, Any] = {'tokens': tokens, 'longest': max(len(row.ids) for row in rows), 'share_actions': share}
    say(f'{len(rows)} rows, {tokens} tokens, longest {found["longest"]}, {share:.0%} are actions')
    setup = {'folder': str(folder), **dataclasses.asdict(flags)}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / 'rows.npz'
        save(file, rows)
        names = ['ours', 'trl', *(['trl-stock'] if flags.stock else [])] if has_trl() else ['ours']
        if len(names) == 1:
            say('TRL is not installed (pip install trl datasets): ours alone, no ratio')
        workers = {name: Worker(name, setup | {'rows_file': str(file), 'scratch': scratch}) for name in names}
        try:
            found |= compared(workers, flags.pairs, tokens, ratio, say)
        finally:
            for worker in workers.values():
                worker.close()
    if flags.counters:
        found['counters'] = counters(setup, arch, rows, say)
    return found


def compared(workers: dict[str, Worker], pairs: int, tokens: int, ratio: Compare, say: Say) -> dict[str, Any]:
    """The first step of each, which must agree, then steps in turns."""
    first: dict[str, dict[str, float]] = {}
    for name, worker in workers.items():
        step = first[name] = worker.ask('step')
        say(
            f'{name}: loss {step["loss"]:.6f}, gradient norm {step["grad_norm"]:.5f}, {step["micro_batches"]:.0f} '
            f'micro-batches, {step["padding_waste"]:.1%} padding; {step["seconds"]:.0f} s with loading and compiling'
        )
        agree(name, step, first['ours'])
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for pair in range(pairs):
        for name in workers if pair % 2 == 0 else reversed(list(workers)):
            steps[name].append(step := workers[name].ask('step'))
            say(f'{name}: step of {step["seconds"]:.1f} s, {step["cpu_seconds"]:.1f} processor seconds')
    found: dict[str, Any] = {'first_step': first, 'steps': steps, 'ratios': {}}
    for name, taken in steps.items():
        seconds = min(step['seconds'] for step in taken)
        memory = taken[-1]['peak_bytes'], taken[-1]['peak_bytes'] - first[name]['bytes_before_model']
        say(
            f'{name}: {tokens / seconds:.0f} tokens a second at best, {min(s["cpu_seconds"] for s in taken):.1f} '
            f'processor seconds a step; peak {memory[0] / 1e9:.2f} GB, {memory[1] / 1e9:.2f} GB over its imports'
        )
        if name != 'ours':
            found['ratios'][name] = {
                kind: dataclasses.asdict(ratio([s[kind] for s in steps['ours']], [s[kind] for s in taken]))
                for kind in ('seconds', 'cpu_seconds')
            }
            wall, cpu = (found['ratios'][name][kind] for kind in ('seconds', 'cpu_seconds'))
            say(
                f'{name}: {wall["median"]:.2f}x our time [{wall["low"]:.2f}, {wall["high"]:.2f}], '
                f'{cpu["median"]:.2f}x our processor time [{cpu["low"]:.2f}, {cpu["high"]:.2f}], {pairs} pairs'
            )
    return found


def agree(name: str, step: dict[str, float], ours: dict[str, float]) -> None:
    """Disagreement unless loss and gradient norm are ours, to TOLERANCE."""
    for kind in ('loss', 'grad_norm'):
        if not abs(step[kind] - ours[kind]) <= TOLERANCE * abs(ours[kind]):
            raise Disagreement(f'{name}: {kind} is {step[kind]!r}, ours is {ours[kind]!r}')


def has_trl() -> bool:
    import importlib.util

    return all(importlib.util.find_spec(name) is not None for name in ('trl', 'torch', 'datasets'))


class Worker:
    """A contender in a process of its own, which works when it is asked and sleeps otherwise."""

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, '-m', 'experiments.bench_update', name]
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        self.process = subprocess.Popen(command, env={**ENVIRONMENT, **os.environ}, text=True, **pipes)
        self._tell(setup)

    def ask(self, what: str) -> Any:
        self._tell(what)
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise OSError(f'the process of {self.name} ended with code {self.process.wait()}; see its messages above')
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + '\n')
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer that does not come says so


def save(file: Path, rows: Sequence[Row]) -> None:
    arrays = {f'{name}{i}': getattr(row, name) for i, row in enumerate(rows) for name in ('ids', 'is_action')}
    np.savez(file, prompt=[row.prompt for row in rows], advantage=[row.advantage for row in rows], **arrays)


def load(file: str | Path) -> list[Row]:
    with np.load(file) as saved:
        pairs = zip(saved['prompt'].tolist(), saved['advantage'].tolist(), strict=True)
        return [Row(saved[f'ids{i}'], saved[f'is_action{i}'], *pair) for i, pair in enumerate(pairs)]


# --- what does not depend on the machine ------------------------------------------------------------------------------


def counters(setup: dict[str, Any], arch: Any, rows: Sequence[Row], say: Say) -> dict[str, Any]:
    """FLOPs by XLA's count over those by our own, for the longest micro-batch of a one-layer model (a compiler counts the
    body of a loop once); and the memory and traffic of the real program."""
    import jax
    import jax.numpy as jnp

    from sesa_jax.grpo import learner
    from sesa_jax.grpo.logprob import HEAD_CHUNK
    from sesa_jax.grpo.microbatch import micro_batches
    from sesa_jax.policy import sharding
    from sesa_jax.policy.arch import abstract, shapes
    from sesa_jax.run import plan

    grpo, optimizer = objective(setup)
    mesh = sharding.make_mesh(1)
    largest = micro_batches(samples(rows), grpo.micro_batch_tokens)[0].ids.shape
    one = dataclasses.replace(arch, layers=1)

    def lowered(model: Any, shape: tuple[int, int], remat: str) -> jax.stages.Lowered:
        layout = sharding.shardings(abstract(model), sharding.TRAIN, mesh)
        params = plan.placed(shapes(model, jnp.float32), layout)
        programs = learner.lowered(
            params, params, shape, arch=model, grpo=dataclasses.replace(grpo, remat=remat), optimizer=optimizer,
            mesh=mesh, response_length=1024, dtype=jnp.float32,
        )  # fmt: skip
        return programs['update, one micro-batch'][0]()

    found: dict[str, Any] = {'micro_batch': largest}
    forward = plan.forward_flops(one, HEAD_CHUNK, HEAD_CHUNK)
    # Forward and backward, and the pass of the reference; the head of a chunk is always computed again.
    own = (3 + (grpo.kl > 0)) * forward + plan.recomputed_head(one)
    for remat in ('none', 'nothing'):
        counted = lowered(one, (1, HEAD_CHUNK), remat).cost_analysis()['flops']
        found[f'flops_ratio_{remat}'] = counted / own
    compiled = lowered(arch, largest, grpo.remat).compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    found |= {
        'temporary_bytes': memory.temp_size_in_bytes,
        'argument_bytes': memory.argument_size_in_bytes,
        'donated_bytes': memory.alias_size_in_bytes,
        'bytes_accessed_once': cost.get('bytes accessed'),
    }
    say(
        f'XLA counts {found["flops_ratio_none"]:.3f} of our own FLOPs, {found["flops_ratio_nothing"]:.3f} with remat; '
        f'a micro-batch of {largest[0]} x {largest[1]} has {found["temporary_bytes"] / 1e9:.2f} GB of temporaries and '
        f'{found["donated_bytes"] / 1e9:.2f} of {found["argument_bytes"] / 1e9:.2f} GB of arguments donated'
    )
    return found


# --- a contender's process --------------------------------------------------------------------------------------------


def main() -> None:
    """Takes the setup and then a word for each step from the standard input; answers on the standard output."""
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # whatever else a library prints must not be taken for an answer
    setup = json.loads(sys.stdin.readline())
    before, contender = 0, None
    for _ in sys.stdin:
        began, used = time.perf_counter(), cpu_seconds()
        if contender is None:
            make = ours if sys.argv[1] == 'ours' else trl
            contender, before = make(setup, load(setup['rows_file']), sys.argv[1])
        result = contender()
        result |= {
            'seconds': time.perf_counter() - began, 'cpu_seconds': cpu_seconds() - used, 'peak_bytes': peak_bytes(),
            'bytes_before_model': before,
        }  # fmt: skip
        answers.write(json.dumps(result) + '\n')
        answers.flush()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """The most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def objective(setup: dict[str, Any]) -> tuple[Any, Any]:
    """(config.Grpo, config.Optimizer) of the flags; what TRL knows too."""
    from sesa_jax import config

    grpo = config.Grpo(
        clip_low=0.2, clip_high=0.285, kl=setup['kl'], aggregation='token', remat=setup['remat'],
        micro_batch_tokens=setup['micro_batch_tokens'], importance_weights='off',
    )  # fmt: skip
    return grpo, config.Optimizer(learning_rate=1e-6, warmup_steps=1)


def samples(rows: Sequence[Row]) -> list[Any]:
    from sesa_jax.grpo.microbatch import Sample
    from sesa_jax.records import Trajectory

    made = []
    for i, row in enumerate(rows):
        sampler = np.zeros(len(row.ids), np.float32)
        trajectory = Trajectory(
            role='solver', problem_id=f'p{i}', sample=0, ids=row.ids, is_action=row.is_action, logprobs=sampler,
            prompt_length=row.prompt, turns=(), searches=(), card_ids=(), stop_reason='answer', weights_version=0,
            bank_version=0,
        )  # fmt: skip
        made.append(Sample(trajectory, row.advantage))
    return made


def ours(setup: dict[str, Any], rows: Sequence[Row], _: str) -> tuple[Callable[[], dict[str, float]], int]:
    import jax

    from sesa_jax.grpo import learner
    from sesa_jax.policy import hf, sharding
    from sesa_jax.policy.arch import abstract
    from sesa_jax.run.process import prepare

    prepare()
    mesh = sharding.make_mesh(1)
    before = peak_bytes()
    arch = hf.load_architecture(Path(setup['folder']))
    layout = sharding.shardings(abstract(arch), sharding.TRAIN, mesh)
    params = hf.load_params(Path(setup['folder']), arch, layout)
    grpo, optimizer = objective(setup)
    reference = {**params, 'final_norm': params['final_norm'] * REFERENCE_SCALE}
    state, batch = learner.init_state(params, optimizer), samples(rows)

    def step() -> dict[str, float]:
        nonlocal state
        state, metrics = learner.update(
            state, reference, batch, arch=arch, grpo=grpo, optimizer=optimizer, temperature=1.0, allowed=arch.vocab,
            response_length=1024, mesh=mesh,
        )  # fmt: skip
        jax.block_until_ready(state)
        return {name: metrics[name] for name in ('loss', 'grad_norm', 'micro_batches', 'padding_waste')}

    return step, before


def trl_batches(rows: Sequence[Row], tokens: int, stock: int) -> list[dict[str, np.ndarray]]:
    """TRL's arrays: prompts padded on the left, completions on the right, in micro-batches.

    stock: rows of each micro-batch as the trainer makes them, all of one shape; 0: sorted, each with its own shape, of
    about `tokens` padded tokens.
    """
    if stock:
        parts = [list(rows[i : i + stock]) for i in range(0, len(rows), stock)]
    else:
        rest, parts = sorted(rows, key=lambda row: -len(row.ids)), []
        while rest:
            count = max(tokens // len(rest[0].ids), 1)
            parts.append(rest[:count])
            rest = rest[count:]
    batches = []
    for part in parts:
        among = rows if stock else part
        left, right = max(row.prompt for row in among), max(len(row.ids) - row.prompt for row in among)
        batch = {name: np.zeros((len(part), left), np.int64) for name in ('prompt_ids', 'prompt_mask')}
        for name in ('completion_ids', 'completion_mask', 'tool_mask'):
            batch[name] = np.zeros((len(part), right), np.int64)
        for i, row in enumerate(part):
            size = len(row.ids) - row.prompt
            start = left - row.prompt
            batch['prompt_ids'][i, start:], batch['prompt_mask'][i, start:] = row.ids[: row.prompt], 1
            batch['completion_ids'][i, :size], batch['completion_mask'][i, :size] = row.ids[row.prompt :], 1
            batch['tool_mask'][i, :size] = row.is_action[row.prompt :]
        batch['advantages'] = np.array([row.advantage for row in part], np.float32)
        batches.append(batch)
    return batches


def trl(setup: dict[str, Any], rows: Sequence[Row], name: str) -> tuple[Callable[[], dict[str, float]], int]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Fixed(GRPOTrainer):
        """The trainer with the rows that it is given, instead of what it would generate."""

        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    torch.set_num_threads(os.cpu_count() or 1)
    before = peak_bytes()
    arrays = trl_batches(rows, setup['trl_tokens'], setup['stock_rows'] if name == 'trl-stock' else 0)
    actions = torch.tensor(float(sum(row.is_action.sum() for row in rows)))
    batches = [{key: torch.from_numpy(x) for key, x in batch.items()} for batch in arrays]
    grpo, optimizer = objective(setup)
    arguments = GRPOConfig(
        output_dir=str(Path(setup['scratch']) / name), per_device_train_batch_size=2, num_generations=2,
        gradient_accumulation_steps=len(batches), steps_per_generation=len(batches), beta=grpo.kl, loss_type='dapo',
        epsilon=grpo.clip_low, epsilon_high=grpo.clip_high, use_bias_correction_kl=False, temperature=1.0,
        learning_rate=optimizer.learning_rate, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.clip_norm,
        bf16=False, use_cpu=True, gradient_checkpointing=setup['remat'] != 'none', report_to=[], logging_strategy='no',
        save_strategy='no',
    )  # fmt: skip
    trainer = Fixed(
        AutoModelForCausalLM.from_pretrained(setup['folder'], dtype=torch.float32, local_files_only=True),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{'prompt': 'unused'}] * (2 * len(batches))),
        processing_class=AutoTokenizer.from_pretrained(setup['folder'], local_files_only=True),
    )
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.create_optimizer()
    if trainer.ref_model is not None:
        with torch.no_grad():
            trainer.ref_model.model.norm.weight.mul_(REFERENCE_SCALE)
    real = sum(len(row.ids) for row in rows)
    padded = sum(batch[key].size for batch in arrays for key in ('prompt_ids', 'completion_ids'))

    def step() -> dict[str, float]:
        loss = 0.0
        for batch in batches:
            inputs = {**batch, 'num_items_in_batch': actions}
            if trainer.ref_model is not None:
                ids = torch.cat([batch['prompt_ids'], batch['completion_ids']], dim=1)
                seen = torch.cat([batch['prompt_mask'], batch['completion_mask']], dim=1)
                with torch.no_grad():
                    inputs['ref_per_token_logps'] = trainer._get_per_token_logps_and_entropies(
                        trainer.ref_model, ids, seen, batch['completion_ids'].shape[1]
                    )[0]
            loss += float(trainer.training_step(trainer.model, inputs, None))
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), optimizer.clip_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return {
            'loss': loss, 'grad_norm': float(norm), 'micro_batches': len(batches), 'padding_waste': 1 - real / padded,
        }  # fmt: skip

    return step, before


if __name__ == '__main__':
    main()
