"""What a run is refused for, before anything of it is made. Each message names the flag and the way out."""

from __future__ import annotations

from dataclasses import replace

from sesa_jax import config
from sesa_jax.config import ConfigError, Run
from sesa_jax.grpo.microbatch import LENGTHS


def refuse_changes(run: Run, saved: Run, done: int = 0) -> None:
    """ConfigError unless a resumed run differs from what was saved in its length and what it ends with alone, and does
    not end before the last of the steps that are `done`."""
    free = {'steps': run.steps, 'run_dir': run.run_dir, 'resume': run.resume, 'report': run.report}
    for name, (ours, theirs) in config.difference(run, replace(saved, **free)).items():
        raise ConfigError(f'--resume: {name} is {ours!r} here, but {theirs!r} in {run.run_dir}; leave the flag out')
    if run.steps < done:
        raise ConfigError(
            f'--resume: steps is {run.steps}, but {run.run_dir} has done {done}; give --steps {done} to measure it as it '
            'is, or more to go on'
        )


AT_LEAST_ONE = (
    'steps problems checkpoint_every validate_every keep_checkpoints solver.rollouts solver.max_turns '
    'challenger.max_turns challenger.pool_clear_every lengths.documents bank.every bank.capacity bank.at_least '
    'bank.commit_lag grpo.mini_batch grpo.clip_dual grpo.importance_cap evaluation.per_cell evaluation.validate_per_cell '
    'rollout.rows rollout.single rollout.short rollout.blocks rollout.chunk rollout.batch'
)
AT_LEAST_ZERO = (
    'seed devices tensor_parallel lora.rank rollout.long solver.temperature challenger.temperature '
    'challenger.noise_blocks challenger.penalty bank.retrieved bank.grace_steps bank.mined bank.bootstrap_steps '
    'optimizer.learning_rate grpo.kl grpo.clip_low grpo.clip_high'
)


def check(run: Run) -> None:
    """Raises ConfigError for values and pairs that cannot run; the message names the flags."""
    values = config.flat(config.to_json(run))
    for limit, names in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        for name in names.split():
            if values[name] is not None and not limit <= values[name] < float('inf'):
                flag = '--' + name.replace('_', '-')
                raise ConfigError(f'{flag} is {values[name]}; it must be a number of at least {limit}')
    if run.rollout.rows < run.solver.rollouts:
        raise ConfigError(
            f'--rollout.rows {run.rollout.rows} holds no group of --solver.rollouts {run.solver.rollouts}; raise it'
        )
    for role, kind, members in (
        ('solver', run.solver.advantage, run.solver.rollouts),
        ('challenger', run.challenger.advantage, 1),
    ):
        if members == 1 and kind not in ('batch', 'raw'):
            raise ConfigError(
                f'--{role}.advantage {kind} compares the rows of a group, but a group of the {role} has one; '
                'take batch or raw'
            )
    _check_rows(run)
    if run.bank.commit_lag >= run.bank.every:
        raise ConfigError(
            f'--bank.commit-lag {run.bank.commit_lag} is not shorter than --bank.every {run.bank.every}: '
            'a consolidation must end before the next one starts'
        )
    if run.bank.at_most < run.bank.at_least:
        raise ConfigError(f'--bank.at-most {run.bank.at_most} is less than --bank.at-least {run.bank.at_least}')
    if run.bank.retrieved > run.bank.capacity:
        raise ConfigError(f'--bank.retrieved {run.bank.retrieved} is more than --bank.capacity {run.bank.capacity}')
    needs = [
        (run.challenger_sees_skills, '--challenger-sees-skills', run.self_play and run.skill_memory,
         'self-play and a skill memory (--method sesa)'),
        (run.freeze_challenger, '--freeze-challenger', run.self_play, 'self-play (--method sesa or ssp)'),
        (run.freeze_bank, '--freeze-bank', run.skill_memory, 'a skill memory (--method sesa or skillrl)'),
        (run.failure_distillation, '--failure-distillation', run.skill_memory, 'a skill memory'),
        (run.memory_priming, '--memory-priming', run.skill_memory, 'a skill memory'),
    ]  # fmt: skip
    for is_on, flag, is_met, what in needs:
        if is_on and not is_met:
            raise ConfigError(f'{flag} needs {what}, which --method {run.method} does not have')
    _check_world(run)
    if not run.lora.rank and run.lora != config.Lora():
        raise ConfigError('--lora.alpha and --lora.projections do nothing without --lora.rank')
    if run.resume and not run.run_dir:
        raise ConfigError('--resume needs --run-dir, the folder of the run to go on with')


def _check_rows(run: Run) -> None:
    """Raises ConfigError for rows that the learner could not train on."""
    longest = run.lengths.prompt + run.lengths.response
    if longest > LENGTHS[-1]:
        raise ConfigError(
            f'--lengths.prompt {run.lengths.prompt} and --lengths.response {run.lengths.response} make rows of up to '
            f'{longest} tokens, but the longest row that can be trained on has {LENGTHS[-1]}; lower one of them'
        )
    learning = {'solver': run.solver, 'challenger': run.challenger}
    if not run.self_play or run.freeze_challenger:
        del learning['challenger']
    for role, options in learning.items():
        if options.temperature == 0:
            raise ConfigError(
                f'--{role}.temperature is 0, but rows sampled greedily cannot be trained on; give a number above 0'
                + (', or --freeze-challenger' if role == 'challenger' else '')
            )


def _check_world(run: Run) -> None:
    """Raises ConfigError where the world lacks a file that the method needs, or is given what another world takes."""
    world = run.world
    given = [name for name, path in config.paths(world).items() if path]
    if given and world.name != 'files':
        raise ConfigError(f'--{given[0]} is for --world files, but the world is {world.name}')
    if world.name != 'lab' and world.pointer_share != config.World().pointer_share:
        raise ConfigError(f'--world.pointer-share is for --world lab, but the world is {world.name}')
    for is_needed, name, why in [
        (True, 'corpus', 'a corpus to search'),
        (run.self_play, 'answers', f'target answers for the self-play of --method {run.method}'),
        (not run.self_play, 'questions', f'the questions that --method {run.method} trains on'),
    ]:
        if world.name == 'files' and is_needed and name not in given:
            raise ConfigError(f'--world files needs --{name} FILE: {why}')
