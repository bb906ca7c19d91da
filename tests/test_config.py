"""The command line, the methods and the refusals."""

import pytest

from sesa_jax import command, config, door
from sesa_jax.command import from_command_line
from sesa_jax.config import ConfigError, Run
from sesa_jax.policy import backbones


def test_without_flags_is_the_lab():
    run = from_command_line([])
    assert run == config.with_method(config.lab_preset(Run()), 'sesa')
    assert (run.steps, run.problems, run.prompt_style) == (40, 16, 'short')


def test_another_model_gets_the_papers_defaults():
    run = from_command_line(['--model', 'some/folder'])
    assert config.difference(run) == {'model': ('some/folder', 'tiny'), 'world.name': ('wiki', 'lab')}


@pytest.mark.parametrize(
    ('method', 'expected'),
    [
        ('sesa', (True, True, True, True, True)),
        ('ssp', (True, False, False, False, False)),
        ('skillrl', (False, True, True, True, True)),
        ('search-r1', (False, False, False, False, True)),
    ],
)
def test_a_method_is_a_set_of_values(method, expected):
    run = from_command_line(['--method', method])
    found = (run.self_play, run.skill_memory, run.memory_priming, run.failure_distillation, run.frontier_shaping)
    assert found == expected


def test_flags_win_over_preset_and_method():
    run = from_command_line(['--method', 'ssp', '--frontier-shaping', '--bank.every', '7', '--steps', '3'])
    assert (run.frontier_shaping, run.bank.every, run.steps, run.solver.max_turns) == (True, 7, 3, 6)


def test_json_round_trip_of_every_method():
    for method in config.METHODS:
        run = from_command_line(['--method', method, '--bank.threshold', '0.5'])
        assert config.from_json(config.to_json(run)) == run


@pytest.mark.parametrize('change', [{'sneed': 1}, {'steps': None}])
def test_json_of_another_version_is_refused_by_field(change):
    data = config.to_json(Run())
    name = next(iter(change))
    if change[name] is None:
        del data[name]
    else:
        data |= change
    with pytest.raises(ConfigError, match=name):
        config.from_json(data)


def test_nested_json_names_the_path():
    data = config.to_json(Run())
    data['bank']['evry'] = 3
    with pytest.raises(ConfigError, match=r'config\.bank: evry is not a field'):
        config.from_json(data)


def test_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        from_command_line(['--seeed', '3'])
    assert stop.value.code == 2
    assert '--seed' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flags', 'named'),
    [
        (['--steps', '0'], '--steps is 0'),
        (['--solver.rollouts', '0'], '--solver.rollouts is 0'),
        (['--bank.retrieved', '900'], '--bank.capacity 800'),
        (['--bank.every', '1'], '--bank.commit-lag 1'),
        (['--bank.at-most', '4'], '--bank.at-least 20'),
        (['--method', 'ssp', '--freeze-bank'], '--freeze-bank needs a skill memory'),
        (['--method', 'skillrl', '--freeze-challenger'], '--freeze-challenger needs self-play'),
        (['--method', 'skillrl', '--challenger-sees-skills'], '--challenger-sees-skills needs self-play'),
        (['--method', 'search-r1', '--failure-distillation'], '--failure-distillation needs a skill memory'),
        (['--resume'], '--resume needs --run-dir'),
        (['--optimizer.learning-rate', 'nan'], '--optimizer.learning-rate is nan'),
        (['--solver.temperature', '-1'], '--solver.temperature is -1'),
        (['--solver.rollouts', '1'], '--solver.advantage group compares the rows of a group, but a group of the solver'),
        (['--challenger.advantage', 'rloo'], '--challenger.advantage rloo compares the rows of a group'),
        (['--challenger.advantage', 'reinforce++-baseline'], 'take batch or raw'),
        (['--grpo.clip-low', '-0.1'], '--grpo.clip-low is -0.1'),
        (['--grpo.clip-dual', '0.5'], '--grpo.clip-dual is 0.5'),
        (['--lengths.prompt', '4097', '--lengths.response', '8192'], 'make rows of up to 12289 tokens, but the longest row'),
        (['--solver.temperature', '0'], '--solver.temperature is 0, but rows sampled greedily cannot be trained on'),
        (['--challenger.temperature', '0'], 'give a number above 0, or --freeze-challenger'),
    ],
)
def test_what_cannot_run_is_refused_with_the_flag(flags, named):
    with pytest.raises(ConfigError) as error:
        from_command_line(flags)
    assert named in str(error.value)


@pytest.mark.parametrize(
    'flags',
    [
        ['--lengths.prompt', '4096', '--lengths.response', '8192'],
        ['--challenger.temperature', '0', '--freeze-challenger'],
        ['--challenger.temperature', '0', '--method', 'skillrl'],
    ],
)
def test_rows_that_are_just_trained_on_or_never_are_not_refused(flags):
    from_command_line(flags)


def test_every_preset_passes_the_door():
    for model in backbones.BACKBONES:
        for size in ('paper', 'small'):
            for method in config.METHODS:
                run = from_command_line(['--model', model, '--size', size, '--method', method])
                assert (run.model, run.size, run.method) == (model, size, method)


def test_the_digest_of_the_base_is_no_flag(capsys):
    with pytest.raises(SystemExit):
        from_command_line(['--base', '0' * 64])
    assert '--base' in capsys.readouterr().err


def test_the_objective_is_made_of_flags():
    run = from_command_line(
        ['--solver.advantage', 'rloo', '--challenger.advantage', 'raw', '--grpo.loss', 'gspo', '--grpo.clip-high', '0.001',
         '--grpo.kl-estimator', 'k2', '--grpo.importance-weights', 'sequence']
    )  # fmt: skip
    assert (run.solver.advantage, run.challenger.advantage, run.grpo.loss) == ('rloo', 'raw', 'gspo')
    assert (run.grpo.clip_low, run.grpo.clip_high, run.grpo.kl_estimator) == (None, 0.001, 'k2')
    assert from_command_line(['--solver.rollouts', '1', '--solver.advantage', 'batch']).solver.rollouts == 1


def test_folder_to_resume_is_seen_before_the_rest():
    assert command.folder_to_resume(['--steps', '9', '--run-dir', 'runs/a', '--resume']) == 'runs/a'
    assert command.folder_to_resume(['--run-dir', 'runs/a']) is None


def test_resume_lays_flags_over_the_saved_config():
    saved = from_command_line(['--seed', '7', '--method', 'ssp', '--run-dir', 'a'])
    run = from_command_line(['--run-dir', 'a', '--resume', '--steps', '50'], saved=saved)
    assert (run.seed, run.method, run.steps) == (7, 'ssp', 50)
    door.refuse_changes(run, saved)


def test_resume_refuses_another_seed():
    saved = from_command_line(['--seed', '7', '--run-dir', 'a'])
    run = from_command_line(['--run-dir', 'a', '--resume', '--seed', '8'], saved=saved)
    with pytest.raises(ConfigError, match='seed is 8 here, but 7'):
        door.refuse_changes(run, saved)


def test_resume_refuses_an_end_before_what_is_done():
    saved = from_command_line(['--steps', '40', '--run-dir', 'a'])
    run = from_command_line(['--run-dir', 'a', '--resume'], saved=saved)
    door.refuse_changes(run, saved, done=40)
    with pytest.raises(ConfigError, match='steps is 40, but a has done 50; give --steps 50 to measure it as it is, or more'):
        door.refuse_changes(run, saved, done=50)


def test_difference_is_by_dotted_field():
    run = from_command_line(['--bank.every', '3'])
    assert config.difference(run, config.lab_preset(Run())) == {'bank.every': (3, 10)}
