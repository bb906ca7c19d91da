"""Numbers of the charts, worked out by hand from the margins."""

import pytest

from sesa_jax.run import charts
from sesa_jax.run.charts import BOTTOM, HEIGHT, LEFT, MAX_COLUMNS, RIGHT, TOP, WIDTH, curve, heat_map

BASE = HEIGHT - BOTTOM  # where 0 lies


def test_a_curve_spans_its_box_and_starts_at_zero():
    found = curve([1, 2, 3], {'a': [0.0, 0.5, 1.0]}, top=1.0)
    middle = (LEFT + WIDTH - RIGHT) / 2
    assert found.series[0].points == f'{LEFT}.0,{BASE}.0 {middle},{(TOP + BASE) / 2} {WIDTH - RIGHT}.0,{TOP}.0'
    assert [tick.label for tick in found.y_ticks] == ['0', '0.25', '0.5', '0.75', '1']
    assert found.series[0].last == '1.00'


def test_a_value_above_the_axis_stays_in_the_box():
    assert curve([1, 2], {'a': [0.5, 1.5]}, top=1.0).series[0].marks[1].y == TOP


def test_steps_without_a_value_are_passed_over_and_empty_lines_left_out():
    found = curve([1, 2, 3, 4], {'a': [None, 0.2, None, 0.4], 'b': [None] * 4}, top=1.0)
    assert [series.name for series in found.series] == ['a']
    assert [mark.label for mark in found.series[0].marks] == ['a, step 2: 0.20', 'a, step 4: 0.40']


def test_nothing_to_draw_is_none():
    assert curve([], {'a': []}) is None
    assert curve([1], {'a': [None]}) is None
    assert heat_map([], []) is None
    assert heat_map([1], [[0, 0]]) is None


def test_one_step_lies_in_the_middle():
    assert curve([7], {'a': [1.0]}, top=1.0).series[0].marks[0].x == (LEFT + WIDTH - RIGHT) / 2


@pytest.mark.parametrize(
    ('value', 'top'), [(0, '1'), (0.3, '0.4'), (1, '1'), (7, '8'), (37, '40'), (40, '40'), (157, '200'), (801, '1000')]
)
def test_the_axis_ends_at_a_round_number_above_the_data(value, top):
    assert curve([1], {'a': [value]}).y_ticks[-1].label == top


def test_step_ticks_are_whole_and_few():
    assert [tick.label for tick in curve([1, 40], {'a': [0, 1]}).x_ticks] == ['1', '9', '17', '25', '33']
    assert [tick.label for tick in curve([1, 2], {'a': [0, 1]}).x_ticks] == ['1', '2']


def test_a_heat_map_column_is_a_step_and_darkness_a_share():
    found = heat_map([1, 2], [[3, 1], [0, 4]])
    assert [(box.share, box.label) for box in found.boxes] == [
        (0.75, 'step 1: 3 of 4 problems with 0 of 1 solved'),
        (0.25, 'step 1: 1 of 4 problems with 1 of 1 solved'),
        (0.0, 'step 2: 0 of 4 problems with 0 of 1 solved'),
        (1.0, 'step 2: 4 of 4 problems with 1 of 1 solved'),
    ]
    none, all_ = found.boxes[0], found.boxes[1]
    assert (none.x, none.y + none.height) == (LEFT, BASE)  # unsolved problems lie at the bottom
    assert all_.y == TOP
    assert [tick.label for tick in found.y_ticks] == ['0/1', '1/1']


def test_many_steps_share_columns_and_lose_no_problem():
    steps = list(range(1, 3 * MAX_COLUMNS))
    found = heat_map(steps, [[1, 2, 1]] * len(steps))
    assert len(found.boxes) == 3 * MAX_COLUMNS
    assert found.boxes[0].label == 'step 1 to 3: 3 of 12 problems with 0 of 2 solved'
    assert max(box.x + box.width for box in found.boxes) == pytest.approx(WIDTH - RIGHT, abs=0.1)


def test_a_step_without_problems_is_left_out():
    assert [box.label.split(':')[0] for box in heat_map([1, 2, 3], [[1, 0], [], [0, 1]]).boxes[::2]] == [
        'step 1',
        'step 3',
    ]


def test_charts_fit_into_their_canvas():
    assert charts.LEFT + charts.RIGHT < charts.WIDTH
    assert charts.TOP + charts.BOTTOM < charts.HEIGHT
