"""Write the Chrome trace file of a job, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
    """An interval in which the same components were busy on a device."""

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
    """The use of one device, from the intervals in the window in which each component was busy on it."""
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
    """Busy times of each component on each device, in the order of nodes and devices; clipped to the window."""
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
    """Times in which a worker is busy: in calls and in other work, except while it waits.

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
    """The busy time of a device in intervals that do not overlap, each with the components busy in it.

    >>> for segment in segments({"actor": [(0, 30)], "rollout": [(20, 40)]}):
    ...     print(*segment)
    0 20 ('actor',)
    20 30 ('actor', 'rollout')
    30 40 ('rollout',)
    """
    edges = sorted((time, name) for name in parts for interval in union(parts[name]) for time in interval)
    result: list[Segment] = []
    active: set[str] = set()
    since = 0
    for time, names in groupby(edges, key=lambda edge: edge[0]):
        if active:
            result.append(Segment(since, time, tuple(sorted(active))))
        # The intervals of a name neither overlap nor touch, so each of its edges turns it on or off.
        active.symmetric_difference_update(name for _, name in names)
        since = time
    return result


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as few as possible and ascending; empty ones are dropped.

    >>> union([(5, 9), (0, 2), (2, 4), (6, 7), (3, 3)])
    [(0, 4), (5, 9)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def subtract(intervals: Iterable[Interval], without: Iterable[Interval]) -> list[Interval]:
    """The times in `intervals` and not in `without`.

    >>> subtract([(0, 10), (20, 30)], [(5, 22), (25, 26)])
    [(0, 5), (22, 25), (26, 30)]
    """
    holes = union(without)
    result: list[Interval] = []
    first = 0
    for start, end in union(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end:
            if start < holes[at][0]:
                result.append((start, holes[at][0]))
            start = holes[at][1]
            at += 1
        if start < end:
            result.append((start, end))
    return result


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of the intervals inside a window."""
    low, high = window
    cut = ((max(start, low), min(end, high)) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]


def total(intervals: Iterable[Interval]) -> int:
    """The summed length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


Event: TypeAlias = dict[str, Any]
_JSON = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Summary of a written trace file."""

    path: Path
    window: Interval
    spans: int  # of workers, inside the window
    dropped: int  # lost by the workers before they were collected
    devices: tuple[DeviceUse, ...]


def write_trace(
    path: str | Path,
    workers: Sequence[WorkerSpans],
    nodes: Mapping[int, str],
    window: Interval | None = None,
) -> TraceSummary:
    """Write the trace of a job: for each node its devices, then its workers in the order given.

    `nodes` has the host name of each node rank. The window is the time to show, in nanoseconds since the epoch (None:
    that of all spans); spans are cut at its ends. The clocks of the nodes must agree already. The file is replaced at
    once when it is complete. Events are written one by one, so the file may be larger than memory.

    >>> import tempfile
    >>> worker = WorkerSpans("actor", 3, 0, ((0, 1),), (Span("train", "call", 5000, 9000),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = write_trace(Path(folder) / "trace.json", [worker], {0: "alpha"})
    ...     events = json.loads(summary.path.read_text())["traceEvents"]
    >>> [event["args"]["name"] for event in events if event["ph"] == "M" and event["name"].endswith("_name")]
    ['node 0 (alpha)', 'accelerator 1', 'actor 3']
    >>> [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    [('actor', 0.0, 4.0), ('train', 0.0, 4.0)]
    """
    path = Path(path)
    window = window_of(workers, window)
    busy = busy_times(workers, window)
    devices = tuple(use_of(device, parts, window) for device, parts in busy.items())
    dropped = sum(worker.dropped for worker in workers)
    about = {
        "start_ns": window[0],
        "wall_ns": window[1] - window[0],
        "dropped_spans": dropped,
        "utilization": [{**use._asdict(), "busy_share": round(use.busy_share, 6)} for use in devices],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    spans = 0
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write('{"traceEvents":[')
            for number, event in enumerate(trace_events(workers, nodes, busy, window)):
                spans += event["ph"] == "X" and event["cat"] != "device"
                file.write(("\n" if number == 0 else ",\n") + _encoded(event))
            file.write(f'\n],"displayTimeUnit":"ms","otherData":{_JSON.encode(about)}}}\n')
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return TraceSummary(path, window, spans, dropped, devices)


def trace_events(
    workers: Sequence[WorkerSpans], nodes: Mapping[int, str], busy: BusyTimes, window: Interval
) -> Iterator[Event]:
    """Events of a trace, lane by lane, in time order; an outer span precedes those inside it."""
    devices_of: dict[int, list[int]] = {}
    for node, device in busy:
        devices_of.setdefault(node, []).append(device)
    workers_of: dict[int, list[WorkerSpans]] = {}
    for worker in workers:
        workers_of.setdefault(worker.node, []).append(worker)
    ranks = sorted({*nodes, *devices_of, *workers_of})
    # Viewers take number 0 for the system's idle task, a lane with the number of its process for the main thread, and
    # some take equal lane numbers in two processes for one lane. So no number is 0, and all differ.
    numbers = count(max(ranks, default=0) + 2)
    for rank in ranks:
        pid = rank + 1
        host = nodes.get(rank)
        yield from _named("process", pid, pid, f"node {rank} ({host})" if host else f"node {rank}")
        for device in devices_of.get(rank, ()):
            tid = next(numbers)
            yield from _named("thread", pid, tid, f"accelerator {device}")
            for start, end, components in segments(busy[rank, device]):
                yield _complete(" + ".join(components), "device", pid, tid, (start, end), window)
        for worker in workers_of.get(rank, ()):
            for lane, spans in _lanes(worker.spans, window):
                tid = next(numbers)
                yield from _named("thread", pid, tid, lane_name(worker, lane))
                for span in spans:
                    yield _span_event(span, pid, tid, window)


def lane_name(worker: WorkerSpans, lane: int) -> str:
    """Name of a worker's lane; the main lane has the worker's name.

    >>> lane_name(WorkerSpans("actor", 3, 0), 0), lane_name(WorkerSpans("actor", 3, 0), 2)
    ('actor 3', 'actor 3, lane 2')
    """
    name = f"{worker.component} {worker.rank}"
    return f"{name}, lane {lane}" if lane else name


def microseconds(nanoseconds: int) -> float:
    """Nanoseconds as the microseconds of a trace, from which a viewer that truncates gets the same nanoseconds.

    1.001 * 1000 is a little less than 1001. A viewer that truncates it to 1000 sees a span end before the spans inside
    it, and drops one; the next larger float avoids that.

    >>> microseconds(1500), microseconds(1001), int(microseconds(1001) * 1000)
    (1.5, 1.0010000000000001, 1001)
    """
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)


def _lanes(spans: Sequence[Span], window: Interval) -> Iterator[tuple[int, list[Span]]]:
    """Spans that overlap the window by lane, in event order."""
    lanes: dict[int, list[Span]] = {}
    # A span is recorded after those inside it; in reverse, the stable sort keeps it before one with the same times.
    for span in reversed(spans):
        if span.start_ns <= window[1] and span.end_ns >= window[0]:
            lanes.setdefault(span.thread, []).append(span)
    for lane in sorted(lanes):
        yield lane, sorted(lanes.pop(lane), key=lambda span: (span.start_ns, -span.end_ns))


def _span_event(span: Span, pid: int, tid: int, window: Interval) -> Event:
    event = _complete(span.name, span.category, pid, tid, (span.start_ns, span.end_ns), window)
    if span.args:
        event["args"] = dict(span.args)
    if span.category == "wait":
        event["cname"] = "grey"
    return event


def _complete(name: str, category: str, pid: int, tid: int, interval: Interval, window: Interval) -> Event:
    start, end = max(interval[0], window[0]), min(interval[1], window[1])
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": microseconds(start - window[0]),
        "dur": microseconds(end - start),
    }


def _named(what: str, pid: int, tid: int, name: str) -> Iterator[Event]:
    """Events that name a process or a lane, and sort it by its number."""
    place = {"ph": "M", "pid": pid, "tid": tid}
    yield {**place, "name": f"{what}_name", "args": {"name": name}}
    yield {**place, "name": f"{what}_sort_index", "args": {"sort_index": tid}}


def _encoded(event: Event) -> str:
    try:
        return _JSON.encode(event)
    except (TypeError, ValueError):
        # Users may attach values to a span that are not JSON: NaN, keys that are not text, or cycles.
        return _JSON.encode({**event, "args": {str(key): repr(value) for key, value in event["args"].items()}})
