"""Write the Chrome trace file of a job, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from roost.trace.spans import Span, WorkerSpans
from roost.trace.utilization import (
    BusyTimes,
    DeviceUse,
    Interval,
    busy_times,
    segments,
    use_of,
    window_of,
)

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

    `nodes` has the host name of each node rank. The window is the time to show, in nanoseconds since the epoch: all
    spans where it is left out; spans that reach out of it are cut. The clocks of the nodes must agree already. The
    file appears at once and whole, and events are written one by one, so it may be larger than memory.

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
    # Readers take number 0 for the system's idle task and a lane with its process's number for the main thread; some
    # take equal lane numbers in two processes for one lane. So none is 0, and all differ.
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
    """Nanoseconds in the unit of a trace, such that a reader that multiplies and cuts gets them back exactly.

    1.001 * 1000 is a little less than 1001. A reader that cuts it to 1000 sees a span end before what is inside it, and
    drops one of the two; the next larger float has no such loss.

    >>> microseconds(1500), microseconds(1001), int(microseconds(1001) * 1000)
    (1.5, 1.0010000000000001, 1001)
    """
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)


def _lanes(spans: Sequence[Span], window: Interval) -> Iterator[tuple[int, list[Span]]]:
    """Spans that overlap the window by lane, in event order."""
    lanes: dict[int, list[Span]] = {}
    # A span is recorded after those inside it; turned round, the stable sort keeps it before one with the same times.
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
    """The name of a process or a lane, and its place: they are shown in the order of their numbers."""
    place = {"ph": "M", "pid": pid, "tid": tid}
    yield {**place, "name": f"{what}_name", "args": {"name": name}}
    yield {**place, "name": f"{what}_sort_index", "args": {"sort_index": tid}}


def _encoded(event: Event) -> str:
    try:
        return _JSON.encode(event)
    except (TypeError, ValueError):
        # What people attach to a span may be no JSON: not a number, keys that are no text, a value that holds itself.
        return _JSON.encode({**event, "args": {str(key): repr(value) for key, value in event["args"].items()}})
