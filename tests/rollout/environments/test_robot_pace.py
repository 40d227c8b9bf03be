"""When steps of control begin."""

import pytest
from hypothesis import given, strategies as st

from roost.rollout.environments.driven_robot import LATE_SHARE, Pace


@pytest.mark.parametrize(
    ("asked", "begun", "missed"),
    [
        pytest.param([7.0, 7.25, 8.5], [7.0, 8.0, 9.0], 0, id="in time"),
        pytest.param([7.0, 8.05, 8.5], [7.0, 8.05, 9.0], 0, id="hardly late, and the next is where it was"),
        pytest.param([7.0, 8.5, 9.5], [7.0, 9.0, 10.0], 1, id="late by half a period"),
        pytest.param([7.0, 11.75, 12.5], [7.0, 12.0, 13.0], 4, id="late by several"),
        pytest.param([7.0], [7.0], 0, id="the first begins it"),
    ],
)
def test_steps_begin_at_whole_periods(asked, begun, missed):
    pace = Pace(1.0)
    assert [pace.next_at(now) for now in asked] == begun
    assert pace.missed == missed


@given(st.floats(0.001, 10), st.lists(st.floats(0, 5), min_size=1, max_size=30))
def test_steps_neither_drift_nor_crowd_and_every_period_is_a_step_or_missed(period, waits):
    pace, now, begun = Pace(period), 100.0, []
    for wait in waits:
        now = pace.next_at(now + wait * period)
        begun.append(now)
    places = [(at - begun[0]) / period for at in begun]
    assert all(place - round(place) < LATE_SHARE + 1e-6 for place in places), "never before its period, nor long after"
    assert all(place - round(place) > -1e-6 for place in places)
    periods = [round(place) for place in places]
    assert periods == sorted(set(periods)), "one step in a period"
    assert periods[-1] == len(periods) - 1 + pace.missed
