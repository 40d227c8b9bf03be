"""Workers that are starting: how long they are waited for."""

import pytest
from hypothesis import given, strategies as st

from roost.runtime.failures import Starting
from roost.transport.context import Address

LIMIT = 300.0


def starting(count=4, group="agent", now=0.0):
    made = Starting(LIMIT)
    made.add({f"{group} {rank}": Address(group, rank) for rank in range(count)}, now)
    return made


@pytest.mark.parametrize(
    ("came", "now", "late"),
    [
        pytest.param({}, 300.0, [], id="none yet, and there is time"),
        pytest.param({}, 301.0, [0, 1, 2, 3], id="none at all"),
        pytest.param({0: 250.0, 1: 500.0}, 799.0, [], id="some keep coming"),
        pytest.param({0: 250.0, 1: 500.0}, 801.0, [2, 3], id="none any more"),
        pytest.param({0: 290.0, 1: 580.0, 2: 870.0, 3: 1160.0}, 9999.0, [], id="all, slowly"),
    ],
)
def test_time_runs_from_when_the_last_one_came(came, now, late):
    watched = starting()
    for rank, at in came.items():
        assert watched.overdue(at) == []
        assert watched.started(f"agent {rank}", at) == Address("agent", rank)
    assert [who.rank for who in watched.overdue(now)] == late
    assert watched.overdue(now) == [], "each is reported once"


def test_one_that_was_added_later_has_its_own_time():
    watched = starting(1)
    watched.add({"late": Address("reward", 0)}, 200.0)
    assert watched.overdue(301.0) == [Address("agent", 0)]
    assert watched.overdue(500.0) == []
    assert watched.overdue(501.0) == [Address("reward", 0)]


def test_one_that_failed_is_no_sign_that_others_come():
    watched = starting(2)
    assert watched.end("agent 0") == Address("agent", 0)
    assert [who.rank for who in watched.overdue(301.0)] == [1]


def test_a_group_that_was_closed_is_not_waited_for():
    watched = starting(2)
    watched.add({"other": Address("reward", 0)}, 0.0)
    watched.forget("agent")
    assert watched.calls == ["other"]
    assert watched.started("agent 0", 1.0) is None


@given(st.lists(st.floats(0, LIMIT), min_size=1, max_size=200))
def test_any_number_is_waited_for_as_long_as_each_comes_within_the_limit_of_the_last(waits):
    watched, now = starting(len(waits)), 0.0
    for rank, wait in enumerate(waits):
        now += wait
        assert watched.overdue(now - 1e-6) == []
        watched.started(f"agent {rank}", now)
    assert watched.calls == []
