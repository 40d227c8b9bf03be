"""Utilization of each device from the spans of the workers that hold it, exact in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

from roost.trace.spans import Span, WorkerSpans

Interval: TypeAlias = tuple[int, int]  # from a nanosecond up to, not including, another
Device: TypeAlias = tuple[int, int]  # node rank, number on the node
BusyTimes: TypeAlias = Mapping[Device, Mapping[str, list[Interval]]]  # of each device, by component


class DeviceUse(NamedTuple):
    """Busy and idle time of a device in a time window; they sum to the window exactly.

    Components that share a device may run at the same time. `busy_ns` counts that time once, `by_component` for each
    of them, so its sum may exceed `busy_ns`.
    """

    node: int
    device: int
    busy_ns: int
    idle_ns: int
    wall_ns: int
    by_component: Mapping[str, int]

    @property
    def busy_share(self) -> float:
        """The busy part of the window, from 0 to 1; 0 for an empty window."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0


class Segment(NamedTuple):
    """A stretch of time in which the same components were busy on a device."""

    start_ns: int
    end_ns: int
    components: tuple[str, ...]


def device_uses(workers: Sequence[WorkerSpans], window: Interval | None = None) -> tuple[DeviceUse, ...]:
    """The use of every device that a worker holds, in the order of nodes and devices.

    >>> spans = (Span("generate", "call", 0, 60), Span("prompts", "wait", 10, 30))
    >>> worker = WorkerSpans("rollout", 0, 0, ((0, 3),), spans)
    >>> print(*device_uses([worker], (0, 100)))
    DeviceUse(node=0, device=3, busy_ns=40, idle_ns=60, wall_ns=100, by_component={'rollout': 40})
    """
    window = window_of(workers, window)
    return tuple(use_of(device, parts, window) for device, parts in busy_times(workers, window).items())


def use_of(device: Device, parts: Mapping[str, list[Interval]], window: Interval) -> DeviceUse:
    """The use of one device on which each component was busy in the intervals given, all inside the window."""
    wall = window[1] - window[0]
    busy = total(union(chain.from_iterable(parts.values())))
    return DeviceUse(*device, busy, wall - busy, wall, {name: total(intervals) for name, intervals in parts.items()})


def window_of(workers: Iterable[WorkerSpans], window: Interval | None = None) -> Interval:
    """The window given, else the time from the first start to the last end of all spans."""
    if window is not None:
        if window[1] < window[0]:
            raise ValueError(f"the window ends {window[0] - window[1]:,} ns before it starts")
        return window
    ends = [
        (min(span.start_ns for span in worker.spans), max(span.end_ns for span in worker.spans))
        for worker in workers
        if worker.spans
    ]
    return (min(start for start, _ in ends), max(end for _, end in ends)) if ends else (0, 0)


def busy_times(workers: Sequence[WorkerSpans], window: Interval) -> BusyTimes:
    """When each component was busy on each device, in the order of nodes and devices; clipped to the window."""
    found: dict[Device, dict[str, list[list[Interval]]]] = {}
    for worker in workers:
        busy = clip(busy_intervals(worker.spans), window)
        for device in worker.devices:
            found.setdefault(device, {}).setdefault(worker.component, []).append(busy)
    return {
        device: {name: union(chain.from_iterable(lists)) for name, lists in found[device].items()}
        for device in sorted(found)
    }


def busy_intervals(spans: Iterable[Span]) -> list[Interval]:
    """When a worker works: in its calls, and in work outside of them, except while it waits.

    A wait counts only for its own lane: a worker that serves two calls, of which one waits, is busy with the other.

    >>> busy_intervals([Span("step", "call", 0, 50), Span("recv", "wait", 20, 30), Span("warm up", "work", 70, 80)])
    [(0, 20), (30, 50), (70, 80)]
    """
    active: dict[int, list[Interval]] = {}
    waiting: dict[int, list[Interval]] = {}
    for span in spans:
        lanes = waiting if span.category == "wait" else active
        lanes.setdefault(span.thread, []).append((span.start_ns, span.end_ns))
    return union(chain.from_iterable(subtract(parts, waiting.get(lane, ())) for lane, parts in active.items()))


def segments(parts: Mapping[str, list[Interval]]) -> list[Segment]:
    """The busy time of a device cut into stretches that never overlap, each with the components busy in it.

    >>> for segment in segments({"actor": [(0, 30)], "rollout": [(20, 40)]}):
    ...     print(*segment)
    0 20 ('actor',)
    20 30 ('actor', 'rollout')
    30 40 ('rollout',)
    """
    edges = sorted((time, name) for name in parts for interval in union(parts[name]) for time in interval)
    made: list[Segment] = []
    active: set[str] = set()
    since = 0
    for time, names in groupby(edges, key=lambda edge: edge[0]):
        if active:
            made.append(Segment(since, time, tuple(sorted(active))))
        # The intervals of a name neither overlap nor touch, so each of its edges turns it on or off.
        active.symmetric_difference_update(name for _, name in names)
        since = time
    return made


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in the fewest intervals, ascending; empty ones are left out.

    >>> union([(5, 9), (0, 2), (2, 4), (6, 7), (3, 3)])
    [(0, 4), (5, 9)]
    """
    made: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made


def subtract(intervals: Iterable[Interval], without: Iterable[Interval]) -> list[Interval]:
    """The times in the one and not in the other.

    >>> subtract([(0, 10), (20, 30)], [(5, 22), (25, 26)])
    [(0, 5), (22, 25), (26, 30)]
    """
    holes = union(without)
    made: list[Interval] = []
    first = 0
    for start, end in union(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end:
            if start < holes[at][0]:
                made.append((start, holes[at][0]))
            start = holes[at][1]
            at += 1
        if start < end:
            made.append((start, end))
    return made


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of the intervals inside a window."""
    low, high = window
    cut = ((max(start, low), min(end, high)) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]


def total(intervals: Iterable[Interval]) -> int:
    """The summed length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
