"""The rollout benchmark: whole on `tiny`, its counts right, and nothing is timed where contenders disagree."""

import json

import numpy as np
import pytest

from experiments import bench, bench_rollout

SMALL = ['--model', 'tiny', '--prompts', '2', '--group', '2', '--prompt-tokens', '24', '--new-tokens', '6', '--pairs', '1']


def test_every_part_of_the_benchmark_runs(tmp_path, capsys):
    """Greedy tokens of the engine and the plain sampler are equal, and every figure is written down."""
    file = tmp_path / 'bench.json'
    latencies = ['--latencies', '0', '20', '--turns', '2', '--rounds', '2', '--observation-tokens', '48', '--no-growth']
    assert bench.main(['rollout', *SMALL, *latencies, '--json', str(file)]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert 'greedy tokens of each prompt are equal: ours, plain' in said
    assert list(found['calls']) == ['2 x 2', '2 x 1', '1 x 1']
    assert [entry['milliseconds'] for entry in found['turns']] == [0, 20, 0]
    first, slow, last = found['turns']
    assert first['throughput_kept'] + last['throughput_kept'] == pytest.approx(2)
    for entry in found['turns']:
        assert entry['prefill_recompute'] == 1.0
        assert 0 < entry['searches'] <= 8  # two rounds of four rows, which may search once before their last turn
        assert entry['observation_tokens'] <= 48 * entry['searches']
    assert slow['action_tokens'] == first['action_tokens'] == last['action_tokens']
    assert found['flags']['turns'] == 2 and found['versions']['jax']


def test_contenders_that_disagree_are_not_timed(monkeypatch, capsys):
    """One wrong token of the plain sampler is enough."""
    right = bench_rollout.Plain.__call__

    def wrong(self, tokens, temperature):
        sampled = np.array(right(self, tokens, temperature))
        sampled[-1, -1] += 1
        return sampled

    monkeypatch.setattr(bench_rollout.Plain, '__call__', wrong)
    monkeypatch.setattr(bench, 'interleaved', lambda *_: pytest.fail('timed'))
    assert bench.main(['rollout', *SMALL, '--no-growth', '--turns', '0']) == 1
    assert 'nothing was timed: plain has other greedy tokens' in capsys.readouterr().err


def test_turns_of_the_contenders_and_their_ratios():
    """A, B, B, A behind one call of each for warm-up; the ratio is theirs to ours."""
    log, now = [], [0.0]

    def contender(name, seconds):
        def run():
            log.append(name)
            now[0] += seconds

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.time, 'perf_counter', lambda: now[0])
        ratios = bench.interleaved(contender('ours', 2.0), {'theirs': contender('theirs', 5.0)}, 2)
    assert log == ['ours', 'theirs', 'ours', 'theirs', 'theirs', 'ours']
    assert ratios['theirs'].median == 2.5 and ratios['theirs'].least_seconds == 2.0
