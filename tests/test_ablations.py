"""Each method runs, and each ablation flag changes the behaviour that it names: seen in what a run leaves behind."""

import dataclasses

import numpy as np
import pytest
import runs

from sesa_jax.policy import backbones
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.run import checkpoint
from sesa_jax.selfplay import checks
from sesa_jax.skills import priming

CANARY = 'kolzax mirvuth'
KEEP = ('--keep-checkpoints', '9')
OFTEN = ('--bank.every', '2', '--bank.at-least', '1', '--bank.at-most', '30')


@pytest.fixture(scope='module')
def default(tmp_path_factory):
    """Five steps of sesa with consolidations every second step."""
    return runs.play(tmp_path_factory.mktemp('default') / 'run', *OFTEN, *KEEP, steps=5)


def frontier_reward(solve_rate, penalty=0.1):
    return 4 * solve_rate * (1 - solve_rate) if 0 < solve_rate < 1 else -penalty


def rewards_of(played, step, pay):
    """The challenger's mean reward, computed from the questions on disk."""
    paid = []
    for row in played.questions(step):
        if not row['reused']:
            paid.append(pay(np.mean([outcome['kind'] == 'correct' for outcome in row['outcomes']])))
    invalid = sum(played.metrics[step - 1]['challenger']['rejected'].values())
    return np.mean(paid + [-0.1] * invalid)


@pytest.mark.parametrize('method', ['sesa', 'ssp', 'skillrl', 'search-r1'])
def test_each_method_plays(method, default, tmp_path):
    played, steps = (default, 5) if method == 'sesa' else (runs.play(tmp_path / 'run', '--method', method), 2)
    assert [row['step'] for row in played.metrics] == [*range(1, steps + 1)]
    has_challenger, has_memory = method in ('sesa', 'ssp'), method in ('sesa', 'skillrl')
    assert bool(played.trajectories(1, 'challenger')) == has_challenger
    assert (played.metrics[0]['challenger'] is not None) == has_challenger
    assert any(t.card_ids for t in played.trajectories(1, 'solver')) == has_memory
    assert (played.metrics[0]['bank']['active'] == 15) == has_memory
    if not has_challenger:
        assert len(played.questions(1)) == 8
        assert {row['question'] for row in played.questions(1)}.isdisjoint(q['question'] for q in played.questions(2))


def test_everything_that_was_asked_is_accounted_for(default):
    for row in default.metrics:
        asked, solver = row['challenger'], row['solver']
        assert set(asked['rejected']) <= set(checks.REASONS)
        assert asked['issued'] == asked['valid'] + sum(asked['rejected'].values()) == 8
        assert asked['valid'] + asked['reused'] + asked['empty'] == 8
        kinds = ('correct', 'wrong', 'malformed', 'unjudged', 'outage')
        assert solver['issued'] == sum(solver[kind] for kind in kinds) == 3 * sum(solver['p_histogram'])
        assert row['calls'].get('solver search', 0) + row['calls']['challenger search'] == row['tokens']['searches']


def test_cards_are_shown_and_counted(default):
    retrieved = sum(len(row['card_ids']) for step in range(1, 6) for row in default.questions(step))
    with default.bank() as bank:
        assert sum(card.retrieved for card in bank.cards()) == retrieved > 0


def test_a_consolidation_takes_failures_and_commits_one_boundary_later(default):
    banks = [row['bank'] for row in default.metrics]
    started = next(step for step, bank in enumerate(banks, 1) if bank['taken'])
    assert started in (2, 4)
    assert all(bank['consolidation'] is None for bank in banks[:started])
    finished = banks[started]['consolidation']
    assert (finished['started'], finished['failures']) == (started, banks[started - 1]['taken'])


def test_no_failure_distillation_queues_and_distils_nothing(default, tmp_path):
    played = runs.play(tmp_path / 'run', '--no-failure-distillation', *OFTEN, steps=3)
    assert [row['bank']['queue'] for row in played.metrics] == [0, 0, 0]
    assert [row['bank']['consolidation'] for row in played.metrics] == [None] * 3
    assert max(row['bank']['queue'] for row in default.metrics) > 0
    assert any(t.card_ids for t in played.trajectories(3, 'solver'))


def test_no_memory_priming_starts_with_an_empty_bank(tmp_path):
    played = runs.play(tmp_path / 'run', '--no-memory-priming', steps=1)
    assert played.metrics[0]['bank']['active'] == 0
    assert not any(t.card_ids for t in played.trajectories(1, 'solver'))


def test_mined_cards_join_the_handwritten_ones(tmp_path):
    played = runs.play(tmp_path / 'run', '--bank.bootstrap-steps', '2', steps=1)
    with played.bank() as bank:
        seeds = [card for card in bank.cards() if card.is_seed]
        mined = [card for card in seeds if card.rollout_ids]
    assert len(seeds) == 15 + len(mined)
    assert mined


def test_frontier_shaping_pays_the_bell_and_without_it_one_minus_p(default, tmp_path):
    assert default.metrics[0]['challenger']['reward_mean'] == pytest.approx(rewards_of(default, 1, frontier_reward))
    plain = runs.play(tmp_path / 'run', '--no-frontier-shaping', steps=1)
    assert plain.metrics[0]['challenger']['reward_mean'] == pytest.approx(rewards_of(plain, 1, lambda p: 1 - p))
    assert plain.questions(1)[0]['question'] == default.questions(1)[0]['question']  # nothing else differs in step 1


def test_no_verification_asks_for_none_and_rejects_for_none(default, tmp_path):
    played = runs.play(tmp_path / 'run', '--no-verification')
    assert all('verification' not in row['calls'] for row in played.metrics)
    assert all('not verified' not in row['challenger']['rejected'] for row in played.metrics)
    assert any(row['calls'].get('verification') for row in default.metrics)
    # The same rollouts: what was rejected for this reason alone is valid now.
    first, verified = played.metrics[0]['challenger'], default.metrics[0]['challenger']
    assert first['valid'] == verified['valid'] + verified['rejected'].get('not verified', 0)


def parameters(played, step, role):
    leaves = checkpoint.verify(played.folder.checkpoints, step)['leaves']
    return {name: digest for name, digest in leaves.items() if name.startswith(f'{role}/')}


def test_freeze_challenger_leaves_its_state_bitwise_alone(default, tmp_path):
    frozen = runs.play(tmp_path / 'run', *KEEP, '--freeze-challenger')
    for played, is_frozen in ((frozen, True), (default, False)):
        before, after = (parameters(played, step, 'challenger') for step in (0, 2))
        assert (before == after) == is_frozen
        assert played.trajectories(2, 'challenger')
        assert parameters(played, 0, 'solver') != parameters(played, 2, 'solver')


def test_freeze_bank_lets_nothing_in_or_out_but_counts(tmp_path):
    """With mined cards that can be evicted, of which one does harm: without the flag it leaves, and others come."""
    mined = ('--bank.no-mined-are-seeds', '--bank.bootstrap-steps', '2', '--bank.capacity', '17', *OFTEN)

    def is_harmful(card):
        return not card.is_seed and card.retrieved >= 3 and card.score < 0

    free = runs.play(tmp_path / 'free', *mined, steps=3)
    with free.bank() as bank:
        assert any(card.evicted_step > 0 for card in bank.cards())
        assert any(card.born_step > 0 for card in bank.cards())
        assert not any(map(is_harmful, bank.active()))
        ids = [card.id for card in bank.cards() if card.born_step == 0]
    assert len(ids) > 15
    frozen = runs.play(tmp_path / 'frozen', *mined, '--freeze-bank', steps=3)
    assert [row['bank']['consolidation'] for row in frozen.metrics] == [None] * 3
    assert [row['bank']['evicted_now'] for row in frozen.metrics] == [{}] * 3
    with frozen.bank() as bank:
        assert [card.id for card in bank.active()] == [card.id for card in bank.cards()] == ids
        assert any(map(is_harmful, bank.active()))
        assert sum(card.helpful for card in bank.cards()) > 0


def canaries(monkeypatch):
    """Puts a canary into every card of the seed bank."""
    cards = [dataclasses.replace(card, trigger=f'{card.trigger} {CANARY}') for card in priming.handwritten()]
    monkeypatch.setattr(priming, 'handwritten', lambda: cards)


def prompts(played, step, role):
    tokenizer = Tokenizer(backbones.resolve('tiny'))
    return [tokenizer.decode(t.ids[: t.prompt_length]) for t in played.trajectories(step, role)]


def test_no_card_reaches_a_challenger(tmp_path, monkeypatch):
    canaries(monkeypatch)
    played = runs.play(tmp_path / 'run')
    for step in (1, 2):
        assert all(CANARY in prompt for prompt in prompts(played, step, 'solver'))
        assert not any(CANARY in prompt for prompt in prompts(played, step, 'challenger'))


def test_challenger_sees_skills_is_the_leak(tmp_path, monkeypatch):
    canaries(monkeypatch)
    played = runs.play(tmp_path / 'run', '--challenger-sees-skills', steps=1)
    assert all(CANARY in prompt for prompt in prompts(played, 1, 'challenger'))


def test_reused_problems_teach_the_challenger_nothing(default):
    earlier, worth = set(), []
    for step in range(1, 6):
        rows = default.questions(step)
        for row in (row for row in rows if row['reused']):
            assert row['challenger_row'] == -1
            assert row['question'] in earlier
            worth.append(frontier_reward(np.mean([outcome['kind'] == 'correct' for outcome in row['outcomes']])))
        reward = default.metrics[step - 1]['challenger']['reward_mean']
        assert reward == pytest.approx(rewards_of(default, step, frontier_reward))  # of the new ones alone
        earlier |= {row['question'] for row in rows if not row['reused']}
    assert max(worth) > 0  # paid to the challenger, it would have been seen
