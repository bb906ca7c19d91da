"""The metrics file repeats byte for byte but for `time`; the terminal shows no control character."""

import io
import json
import math
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from sesa_jax.run.clock import Clock, Laps
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.metrics import MetricsLog, Reporter, flatten, plain_line, read_metrics, valid_rate
from sesa_jax.run.visible import clean, duration, one_line


class FakeTime:
    def __init__(self):
        self.now = 100.0

    def clock(self):
        return Clock(monotonic=lambda: self.now, wall=lambda: 1_700_000_000.0 + self.now)


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path, {}) as made:
        yield made


LINE = {
    'step': 3,
    'challenger': {'issued': 16, 'valid': 12, 'rejected': {'leak': 4}},
    'solver': {'p_histogram': [5, 3, 2, 1, 0, 1], 'reward_mean': 0.4125},
    'bank': {'active': 37},
    'validation': {'solve_rate': 0.25},
    'time': {'total': 7.25},
}


def test_a_line_is_sorted_compact_and_repeats_but_for_the_clock(folder):
    time = FakeTime()
    log = MetricsLog(folder, time.clock())
    first = log.append({'step': np.int64(1), 'b': {'y': np.float32(0.1), 'x': jnp.float32(0.5)}, 'a': (1, True, None)})
    time.now += 5
    second = log.append({'a': [1, True, None], 'b': {'x': 0.5, 'y': float(np.float32(0.1))}, 'step': 1})
    log.close()
    assert folder.metrics.read_bytes().split(b'\n') == [
        b'{"a":[1,true,null],"b":{"x":0.5,"y":0.10000000149011612},"step":1,"time":{"wall":1700000100.0}}',
        b'{"a":[1,true,null],"b":{"x":0.5,"y":0.10000000149011612},"step":1,"time":{"wall":1700000105.0}}',
        b'',
    ]
    assert (first, second) == (96, 192)


def test_offsets_go_on_after_reopening(folder):
    log = MetricsLog(folder)
    offset = log.append({'step': 1})
    log.close()
    log = MetricsLog(folder)
    assert log.offset == offset == folder.metrics.stat().st_size
    assert log.append({'step': 2}) == folder.metrics.stat().st_size
    log.close()


def test_what_json_cannot_hold_is_null_and_named(folder):
    log = MetricsLog(folder)
    log.append({'step': 1, 'update': {'solver': {'loss': math.nan}}, 'list': [1.0, np.float32(np.inf)]})
    log.close()
    (row,) = read_metrics(folder.metrics)
    assert row['update']['solver']['loss'] is None
    assert row['list'] == [1.0, None]
    assert row['non_finite'] == ['list.1', 'update.solver.loss']


def test_a_metric_that_is_no_data_is_named(folder):
    log = MetricsLog(folder)
    with pytest.raises(TypeError, match=r'metric solver\.what is a object'):
        log.append({'step': 1, 'solver': {'what': object()}})
    log.close()
    assert folder.metrics.read_bytes() == b''


def test_a_torn_last_line_is_left_out_and_damage_before_it_is_not(folder):
    folder.metrics.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    assert [row['step'] for row in read_metrics(folder.metrics)] == [1, 2]
    folder.metrics.write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(ValueError, match='line 2 is not JSON'):
        read_metrics(folder.metrics)


def scalars(folder):
    found = set()
    for file in folder.tensorboard.iterdir():
        data = file.read_bytes()  # records of: length, its checksum, an event, its checksum
        while data:
            length = int.from_bytes(data[:8], 'little')
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found |= {(event.step, value.tag, round(value.simple_value, 6)) for value in event.summary.value}
    return found


def test_tensorboard_has_each_number_of_each_step(folder):
    log = MetricsLog(folder)
    log.append(LINE)
    log.close()
    assert scalars(folder) == {
        (3, 'challenger/issued', 16.0),
        (3, 'challenger/valid', 12.0),
        (3, 'challenger/rejected/leak', 4.0),
        (3, 'solver/reward_mean', 0.4125),
        (3, 'bank/active', 37.0),
        (3, 'validation/solve_rate', 0.25),
        (3, 'time/total', 7.25),
    }


def test_tensorboard_forgets_what_recovery_dropped(folder):
    log = MetricsLog(folder)
    offset = log.append({'step': 1, 'x': 1.0})
    log.append({'step': 2, 'x': 2.0})
    log.close()
    (old,) = folder.tensorboard.iterdir()
    old.rename(folder.tensorboard / 'events.out.tfevents.1.before')  # or a file of the same second would hide it
    with open(folder.metrics, 'r+b') as file:
        file.truncate(offset)
    MetricsLog(folder).close()
    assert scalars(folder) == {(1, 'x', 1.0)}


def test_a_step_elsewhere_is_one_plain_line():
    assert plain_line(LINE, 40, 200.0) == (
        'step 3/40 | valid 0.75 | p 5 3 2 1 0 1 | reward 0.412 | cards 37 | held-out 0.250 | 7.2 s | ETA 3 min 20 s'
    )


def test_what_a_method_does_not_have_is_a_dash():
    assert plain_line({'step': 1, 'challenger': None, 'validation': None}, 4, 1.0) == (
        'step 1/4 | valid - | p - | reward - | cards - | - s | ETA 1 s'
    )


def test_the_time_left_comes_from_the_recent_steps():
    time, out = FakeTime(), io.StringIO()
    with Reporter(40, 'run', Console(file=out, width=200), time.clock()) as reporter:
        time.now += 10
        reporter.step({'step': 1})
        time.now += 20
        reporter.step({'step': 2})
    lines = out.getvalue().splitlines()
    assert lines[0].endswith('ETA 6 min 30 s')  # 39 x 10 s
    assert lines[1].endswith('ETA 9 min 30 s')  # 38 x 15 s


def test_the_panel_shows_the_same_numbers_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with Reporter(40, 'a [bold]run[/bold]', console, FakeTime().clock()) as reporter:
        reporter.step(LINE)
        shown = Console(file=io.StringIO(), width=100)
        shown.print(reporter._live.renderable)
    text = shown.file.getvalue()
    for part in ('a [bold]run[/bold]', 'step 3/40', '0.75', '0.412', '37', '0.250', '0/5 solved', '5/5 solved'):
        assert part in text
    assert text.count('█') == 12 + 8 + 5 + 2 + 0 + 2  # 30 blocks x share, rounded


def test_nothing_that_is_said_reaches_the_terminal_as_a_command():
    out = io.StringIO()
    with Reporter(1, 't', Console(file=out, width=200)) as reporter:
        reporter.say('red \x1b[31m \x9b31m [link=http://x]y[/link] :smile: \x07')
    assert out.getvalue() == 'red \ufffd[31m \ufffd31m [link=http://x]y[/link] :smile: \ufffd\n'


def test_clean_keeps_scripts_tabs_and_newlines():
    assert clean('a\tb\r\nc é العربية \u200d') == 'a\tb\nc é العربية \u200d'
    assert clean('\u202eevil\u2066\ud800\x00') == '\ufffdevil\ufffd\ufffd\ufffd'


def test_one_line_cuts_with_an_ellipsis():
    assert one_line('a\n b \t c') == 'a b c'
    assert one_line('abcdef', 4) == 'abc…'


@pytest.mark.parametrize(
    ('seconds', 'expected'),
    [(-3, '0 s'), (59.4, '59 s'), (59.6, '1 min 0 s'), (3599, '59 min 59 s'), (7500, '2 h 5 min')],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected


def test_laps_add_up_by_name_and_start_anew():
    time = FakeTime()
    laps = Laps(time.clock())
    for _ in range(2):
        with laps('rollout'):
            time.now += 1.5
    time.now += 1
    assert laps.read() == {'rollout': 3.0, 'total': 4.0}
    assert laps.read() == {'total': 0.0}


def test_valid_rate_needs_a_challenger():
    assert valid_rate(LINE) == 0.75
    assert valid_rate({'challenger': {'issued': 0, 'valid': 0}}) is None
    assert valid_rate({}) is None


def test_flatten_joins_names():
    assert dict(flatten({'a': {'b': 1, 'c': {'d': [2]}}, 'e': 3})) == {'a/b': 1, 'a/c/d': [2], 'e': 3}


@pytest.mark.parametrize(('wanted', 'survives'), [('', True), ('p', False), ('p:3', False), ('p:4', True), ('q', True)])
def test_a_crash_point_kills_at_its_visit(wanted, survives):
    code = 'from sesa_jax.run.crash import crash_point\nfor _ in range(3): crash_point("p")\nprint("alive")'
    env = {**os.environ, 'SESA_CRASH_AT': wanted}
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, check=False)
    assert (done.returncode == 0, done.stdout) == (survives, b'alive\n' if survives else b'')


def test_lines_are_json(folder):
    log = MetricsLog(folder)
    log.append(LINE)
    log.close()
    assert {**json.loads(folder.metrics.read_text()), 'time': LINE['time']} == LINE
