"""Utilization of devices: the arithmetic of intervals, busy time, and sums that are exact."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from roost.trace.chrome import (
    busy_intervals,
    busy_times,
    clip,
    device_uses,
    segments,
    subtract,
    total,
    union,
    window_of,
)
from roost.trace.spans import Span, WorkerSpans

TIMES = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(TIMES, TIMES), max_size=12)
SPANS = st.builds(
    lambda category, ends, lane: Span("x", category, min(ends), max(ends), lane),
    st.sampled_from(["call", "work", "wait"]),
    st.tuples(TIMES, TIMES),
    st.integers(0, 2),
)
WORKERS = st.lists(
    st.builds(
        WorkerSpans,
        st.sampled_from(["actor", "rollout", "reward"]),
        st.integers(0, 3),
        st.just(0),
        st.sets(st.tuples(st.integers(0, 1), st.integers(0, 1))).map(tuple),
        st.lists(SPANS, max_size=8).map(tuple),
    ),
    max_size=5,
)
WINDOWS = st.tuples(TIMES, TIMES).map(lambda ends: (min(ends), max(ends)))


def moments(intervals):
    """The same times one by one: what interval arithmetic is checked against."""
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS)
def test_a_union_is_the_same_times_in_the_fewest_intervals(intervals):
    made = union(intervals)
    assert moments(made) == moments(intervals)
    assert union(made) == made
    assert all(start < end for start, end in made)
    assert all(one[1] < two[0] for one, two in pairwise(made))


@given(INTERVALS, INTERVALS)
def test_subtracting_parts_the_times_in_two(intervals, without):
    rest = subtract(intervals, without)
    taken = subtract(intervals, rest)
    assert moments(rest) == moments(intervals) - moments(without)
    assert union([*rest, *taken]) == union(intervals)
    assert total(rest) + total(taken) == total(union(intervals))
    assert rest == union(rest)


@given(INTERVALS, WINDOWS)
def test_clipping_keeps_what_is_inside(intervals, window):
    assert moments(clip(intervals, window)) == moments(intervals) & moments([window])


def call(start, end, lane=0):
    return Span("step", "call", start, end, lane)


def work(start, end, lane=0):
    return Span("forward", "work", start, end, lane)


def wait(start, end, lane=0):
    return Span("recv", "wait", start, end, lane)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([call(0, 10)], [(0, 10)], id="a call"),
        pytest.param([call(0, 10), work(2, 4)], [(0, 10)], id="work inside a call adds nothing"),
        pytest.param([work(2, 4)], [(2, 4)], id="work outside of calls"),
        pytest.param([wait(2, 4)], [], id="a wait alone"),
        pytest.param([call(0, 10), wait(2, 4), wait(6, 7)], [(0, 2), (4, 6), (7, 10)], id="waits inside a call"),
        pytest.param([call(0, 10), wait(0, 10)], [], id="a call that only waits"),
        pytest.param([call(0, 10), work(1, 6), wait(2, 4)], [(0, 2), (4, 10)], id="a wait inside work"),
        pytest.param([call(0, 10), wait(2, 8), work(3, 5)], [(0, 2), (8, 10)], id="work inside a wait"),
        pytest.param([call(0, 10), call(5, 12, 1), wait(6, 12, 1)], [(0, 10)], id="one of two calls waits"),
        pytest.param(
            [call(0, 10), wait(4, 9), call(3, 8, 1), wait(5, 7, 1)], [(0, 5), (7, 8), (9, 10)], id="both wait"
        ),
    ],
)
def test_what_counts_as_busy(spans, busy):
    assert busy_intervals(spans) == busy
    assert busy_intervals(reversed(spans)) == busy


def holder(component, *spans, devices=((0, 0),), rank=0):
    return WorkerSpans(component, rank, 0, devices, spans)


@pytest.mark.parametrize(
    ("workers", "window", "uses"),
    [
        pytest.param([], None, [], id="no workers"),
        pytest.param([holder("reward", call(0, 9), devices=())], None, [], id="no device"),
        pytest.param([holder("actor")], (0, 10), [(0, 0, 0, 10, 10, {"actor": 0})], id="idle"),
        pytest.param([holder("actor")], None, [(0, 0, 0, 0, 0, {"actor": 0})], id="no time at all"),
        pytest.param(
            [holder("actor", call(0, 30)), holder("rollout", call(20, 60))],
            (0, 100),
            [(0, 0, 60, 40, 100, {"actor": 30, "rollout": 40})],
            id="collocated and overlapping",
        ),
        pytest.param(
            [holder("actor", call(0, 30)), holder("actor", call(10, 40), rank=1)],
            (0, 100),
            [(0, 0, 40, 60, 100, {"actor": 40})],
            id="two workers of a component",
        ),
        pytest.param(
            [holder("rollout", call(5, 10), devices=((1, 0), (0, 7)))],
            (0, 20),
            [(0, 7, 5, 15, 20, {"rollout": 5}), (1, 0, 5, 15, 20, {"rollout": 5})],
            id="a worker on two devices",
        ),
        pytest.param([holder("actor", call(0, 30))], (10, 15), [(0, 0, 5, 0, 5, {"actor": 5})], id="clipped"),
        pytest.param(
            [holder("actor", call(5, 10), call(20, 25))], None, [(0, 0, 10, 10, 20, {"actor": 10})], id="own window"
        ),
    ],
)
def test_use_of_devices(workers, window, uses):
    assert [tuple(use) for use in device_uses(workers, window)] == uses


@given(WORKERS, WINDOWS)
def test_busy_and_idle_make_up_the_window(workers, window):
    uses = device_uses(workers, window)
    assert [(use.node, use.device) for use in uses] == sorted(
        {device for worker in workers for device in worker.devices}
    )
    for use in uses:
        assert use.busy_ns + use.idle_ns == use.wall_ns == window[1] - window[0]
        assert 0 <= use.busy_ns <= use.wall_ns
        assert 0 <= use.busy_share <= 1
        assert max(use.by_component.values()) <= use.busy_ns <= sum(use.by_component.values())


@given(WORKERS, WINDOWS)
def test_segments_cut_the_busy_time_by_who_is_busy(workers, window):
    for device, parts in busy_times(workers, window).items():
        made = segments(parts)
        assert all(one.end_ns <= two.start_ns for one, two in pairwise(made))
        for name, intervals in parts.items():
            named = [(one.start_ns, one.end_ns) for one in made if name in one.components]
            assert union(named) == intervals
        (use,) = [use for use in device_uses(workers, window) if (use.node, use.device) == device]
        assert sum(one.end_ns - one.start_ns for one in made) == use.busy_ns


def test_a_window_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="ends 5 ns before it starts"):
        window_of([], (10, 5))
