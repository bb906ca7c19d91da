"""The update benchmark: its rows are what it says, both sides get the same ones, and nothing is timed on a disagreement."""

import numpy as np
import pytest

from experiments import bench, bench_update


def agent_rows(**changes):
    flags = {'mean': 500, 'variation': 0.6, 'prompt': 64, 'actions': 0.3}
    return bench_update.agent_rows(16, np.arange(10, 100), **(flags | changes))


def test_rows_of_an_agent():
    """Log-normal lengths, 30 % actions in four turns, an action at the end and none in the prompt."""
    rows = bench_update.agent_rows(1000, np.arange(10, 100), mean=500, variation=0.6, prompt=64, actions=0.3)
    lengths = np.array([len(row.ids) for row in rows])
    assert abs(lengths.mean() / 500 - 1) < 0.05
    assert abs(lengths.std() / lengths.mean() / 0.6 - 1) < 0.1
    for row in rows[:50]:
        assert row.is_action.sum() == round(0.3 * len(row.ids))
        assert not row.is_action[:64].any() and row.is_action[-1]
        assert (np.diff(row.is_action.astype(int)) == 1).sum() == 4


def test_completions_of_one_length_that_are_all_actions():
    for row in agent_rows(mean=576, variation=0.0, actions=1.0):
        assert len(row.ids) in (575, 576) and row.is_action[64:].all() and not row.is_action[:64].any()


@pytest.mark.parametrize('stock', [0, 3])
def test_trl_gets_our_rows(stock):
    """Taken back out of TRL's arrays, every row is there once, with its advantage, actions and observations."""
    rows = agent_rows()
    batches = bench_update.trl_batches(rows, 2048, stock)
    found = []
    for batch in batches:
        for i, advantage in enumerate(batch['advantages']):
            prompt = batch['prompt_ids'][i][batch['prompt_mask'][i] == 1]
            seen = batch['completion_mask'][i] == 1
            ids = np.concatenate([prompt, batch['completion_ids'][i][seen]])
            is_action = np.concatenate([np.zeros(len(prompt), bool), batch['tool_mask'][i][seen] == 1])
            assert not batch['tool_mask'][i][~seen].any()
            found.append((ids.tobytes(), is_action.tobytes(), float(advantage)))
    wanted = [(row.ids.astype(np.int64).tobytes(), row.is_action.tobytes(), row.advantage) for row in rows]
    assert sorted(found) == sorted(wanted)
    widths = {batch['completion_ids'].shape[1] for batch in batches}
    assert (len(widths) == 1) == bool(stock)


def test_rows_survive_the_file(tmp_path):
    rows = agent_rows()
    bench_update.save(tmp_path / 'rows.npz', rows)
    for row, back in zip(rows, bench_update.load(tmp_path / 'rows.npz'), strict=True):
        assert (row.ids == back.ids).all() and (row.is_action == back.is_action).all()
        assert (row.prompt, row.advantage) == (back.prompt, back.advantage)


class Scripted:
    """A contender whose steps are known."""

    def __init__(self, norm, seconds, log):
        self.step = {
            'loss': -0.5, 'grad_norm': norm, 'micro_batches': 2, 'padding_waste': 0.1, 'seconds': seconds,
            'cpu_seconds': 2 * seconds, 'peak_bytes': 3e9, 'bytes_before_model': 1e9,
        }  # fmt: skip
        self.log = log

    def ask(self, _):
        self.log.append(self)
        return self.step


def test_turns_and_ratios():
    log, said = [], []
    workers = {'ours': Scripted(2.0, 1.0, log), 'trl': Scripted(2.0001, 1.5, log)}
    found = bench_update.compared(workers, 2, 1000, bench.ratio, said.append)
    ours, trl = workers.values()
    assert log == [ours, trl, ours, trl, trl, ours]
    assert found['ratios']['trl']['seconds']['median'] == found['ratios']['trl']['cpu_seconds']['median'] == 1.5


@pytest.mark.parametrize('norm', [2.001, float('nan')])
def test_nothing_is_timed_when_they_disagree(norm):
    log = []
    workers = {'ours': Scripted(2.0, 1.0, log), 'trl': Scripted(norm, 1.5, log)}
    with pytest.raises(bench_update.Disagreement, match='trl: grad_norm'):
        bench_update.compared(workers, 2, 1000, bench.ratio, print)
    assert len(log) == 2
