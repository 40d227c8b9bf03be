"""The trace of a run, small enough for a page: lanes of spans, where many short ones are drawn as one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

MOST_SPANS = 20_000  # on a page: it stays quick, and a screen has no room for more
MOST_LANES = 160
MOST_LEVELS = 5  # of spans inside spans
LANE_PARTS = 20_000  # that a lane is cut into at most, while the file is read
Event: TypeAlias = dict[str, Any]


class Bar(NamedTuple):
    """A span, or short ones close together, in microseconds since the start of the trace."""

    level: int  # 0: in no other span
    start: float
    length: float
    name: str  # of the longest
    longest: float
    is_wait: bool
    spans: int = 1


@dataclass(slots=True)
class Lane:
    """What one device, or one lane of a process, did."""

    name: str
    node: str
    is_device: bool = False
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TraceLanes:
    """The lanes of a trace. `resolution` is the length, in microseconds, below which spans were drawn together."""

    lanes: tuple[Lane, ...]
    hidden_lanes: int
    spans: int
    resolution: float
    about: dict[str, Any]  # what the trace says of itself: its start, its length, how busy each device was


def read_trace(path: Path, most_spans: int = MOST_SPANS) -> TraceLanes | None:
    """The trace that `write_trace` wrote; none where there is no file. A file that is no trace is a ValueError."""
    if not path.exists():
        return None
    reader = _Reader()
    try:
        for event in _events(path, reader.about):
            reader.take(event)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no trace: {error!r}") from None
    lanes = [lane for lane in reader.lanes.values() if lane.bars]
    shown = lanes[:MOST_LANES]
    resolution = coarsest_needed(shown, most_spans)
    for lane in shown:
        lane.bars = merged(lane.bars, resolution)
    return TraceLanes(tuple(shown), len(lanes) - len(shown), reader.spans, resolution, reader.about)


def merged(bars: Sequence[Bar], resolution: float) -> list[Bar]:
    """The bars with all that are shorter than the resolution, and start in the same stretch of that length, as one.

    >>> bars = [Bar(0, 0, 2, "a", 2, False), Bar(0, 3, 4, "b", 4, False), Bar(0, 12, 30, "c", 30, False)]
    >>> [(bar.start, bar.length, bar.name, bar.spans) for bar in merged(bars, 10)]
    [(0, 7, 'b', 2), (12, 30, 'c', 1)]
    """
    if not resolution:
        return list(bars)
    made: list[Bar] = []
    places: dict[tuple[int, int], int] = {}
    for bar in bars:
        if bar.length >= resolution:
            made.append(bar)
            continue
        stretch = (bar.level, int(bar.start / resolution))
        if stretch in places:
            made[places[stretch]] = _joined(made[places[stretch]], bar)
        else:
            places[stretch] = len(made)
            made.append(bar)
    return made


def coarsest_needed(lanes: Sequence[Lane], most: int) -> float:
    """The smallest resolution at which there are few enough bars; 0 where nothing has to be merged."""
    wall = max((bar.start + bar.length for lane in lanes for bar in lane.bars), default=0.0)
    if sum(len(lane.bars) for lane in lanes) <= most:
        return 0.0
    # From a pixel of a screen that shows a sixteenth of the trace, up to what is no picture any more.
    resolutions = [wall / parts for parts in (16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64)]
    for resolution in resolutions:
        if sum(len(merged(lane.bars, resolution)) for lane in lanes) <= most:
            return resolution
    return resolutions[-1]


def _joined(one: Bar, other: Bar) -> Bar:
    name, longest = (other.name, other.longest) if other.longest > one.longest else (one.name, one.longest)
    end = max(one.start + one.length, other.start + other.length)
    is_wait = one.is_wait and other.is_wait
    return Bar(one.level, one.start, end - one.start, name, longest, is_wait, one.spans + other.spans)


class _Reader:
    """Collects lanes from events, which come lane after lane and in each by their start."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.about: dict[str, Any] = {}
        self.spans = 0
        self._nodes: dict[int, str] = {}
        self._open: list[float] = []  # when the spans end that the next one may be inside of
        self._current: tuple[int, int] | None = None

    def take(self, event: Event) -> None:
        if event["ph"] == "M":
            if event["name"] == "process_name":
                self._nodes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                key = event["pid"], event["tid"]
                self.lanes[key] = Lane(event["args"]["name"], self._nodes.get(event["pid"], ""))
        elif event["ph"] == "X":
            self._take_span(event)

    def _take_span(self, event: Event) -> None:
        key = event["pid"], event["tid"]
        if key != self._current:
            self._current, self._open = key, []
        lane = self.lanes.setdefault(key, Lane(f"lane {key[1]}", self._nodes.get(key[0], f"process {key[0]}")))
        lane.is_device = event["cat"] == "device"
        self.spans += not lane.is_device
        start, length = float(event["ts"]), float(event["dur"])
        while self._open and self._open[-1] <= start:
            self._open.pop()
        level = len(self._open)
        self._open.append(start + length)
        if level >= MOST_LEVELS:
            return
        lane.bars.append(Bar(level, start, length, event["name"], length, event["cat"] == "wait"))
        if len(lane.bars) > 2 * LANE_PARTS:  # a trace may be larger than memory
            lane.bars = merged(lane.bars, (start + length) / LANE_PARTS)


def _events(path: Path, about: dict[str, Any]) -> Iterator[Event]:
    """The events of a trace, one by one where each has a line, as in ours; what is said after them goes to `about`."""
    with path.open(encoding="utf-8") as file:
        if file.readline().strip() != '{"traceEvents":[':
            file.seek(0)
            whole = json.load(file)
            about.update(whole.get("otherData", {}))
            yield from whole["traceEvents"]
            return
        for line in file:
            if line.startswith("]"):
                about.update(json.loads("{" + line.lstrip("],")).get("otherData", {}))
                return
            yield json.loads(line.rstrip().rstrip(","))


def packed(lanes: Iterable[Lane]) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of all spans, and the lanes with their bars as rows of whole numbers, six for each bar."""
    numbers = count()
    names: dict[str, int] = {}
    rows = []
    for lane in lanes:
        flat: list[int] = []
        for bar in lane.bars:
            if bar.name not in names:
                names[bar.name] = next(numbers)
            start, end = round(bar.start), round(bar.start + bar.length)
            flat += (bar.level, start, end - start, names[bar.name], bar.spans, int(bar.is_wait))
        rows.append({"name": lane.name, "node": lane.node, "is_device": lane.is_device, "bars": flat})
    return list(names), rows
