"""Spans of one process, and the time spent under each tag."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

Category = Literal["call", "work", "wait"]
CATEGORIES = ("call", "work", "wait")
MOST_SPANS = 100_000

# A closed span with times of the recorder's clock. `drain` makes Spans of them, off the hot path.
_Closed: TypeAlias = tuple[str, Category, int, int, int, Mapping[str, Any] | None]


class Span(NamedTuple):
    """An interval of a process: a call it served, a piece of work, or a wait for a peer, channel or lock.

    Times are nanoseconds since the epoch. Spans of one lane (`thread`) follow each other or nest; lane 0 is the main
    one.
    """

    name: str
    category: Category
    start_ns: int
    end_ns: int
    thread: int = 0
    args: Mapping[str, Any] | None = None


class WorkerSpans(NamedTuple):
    """The spans of one process of a component, and where it runs. A device is (node rank, number on the node)."""

    component: str
    rank: int
    node: int
    devices: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()
    dropped: int = 0


class Clock:
    """Time since the epoch from a monotonic clock; the wall clock is read once, at the start.

    >>> ticks = iter([10, 20, 500])
    >>> Clock(monotonic=lambda: next(ticks), wall=lambda: 1_000_000).now()
    1000485
    """

    __slots__ = ("monotonic", "offset")

    def __init__(
        self, monotonic: Callable[[], int] = time.perf_counter_ns, wall: Callable[[], int] = time.time_ns
    ) -> None:
        before = monotonic()
        epoch = wall()
        self.monotonic = monotonic
        self.offset = epoch - (before + monotonic()) // 2

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        return self.offset + self.monotonic()


class SpanRecorder:
    """Records the spans of a process, from any of its threads and tasks, and adds up times by tag.

    An outermost span takes the lowest free lane. A span inside another shares its lane, also if it is opened in a task
    or by `asyncio.to_thread`; of several that run at the same time, the first shares the lane and the others take lanes
    of their own. At most `limit` spans wait to be drained; then the oldest are dropped, because a call closes after the
    spans inside it and says more.

    >>> recorder = SpanRecorder(Clock(iter(range(0, 100, 10)).__next__, lambda: 1005))
    >>> with recorder.span("generate", "call", step=7):
    ...     with recorder.span("prompts", "wait"):
    ...         pass
    >>> for span in recorder.drain():
    ...     print(*span)
    prompts wait 1030 1040 0 None
    generate call 1020 1050 0 {'step': 7}
    >>> with recorder.timer("forward"):
    ...     pass
    >>> recorder.pop_time("forward")
    1e-08
    """

    def __init__(self, clock: Clock | None = None, limit: int = MOST_SPANS) -> None:
        if limit < 1:
            raise ValueError(f"a recorder keeps at least 1 span, not {limit}")
        clock = clock or Clock()
        self._now = clock.monotonic  # the epoch is added when spans are drained, not while they are measured
        self._epoch = clock.offset
        # Reentrant, because a finalizer may open a span while its thread holds the lock.
        self._lock = threading.RLock()
        self._spans: deque[_Closed] = deque(maxlen=limit)
        self._limit = limit
        self._dropped = 0
        self._lanes: list[_Lane] = []
        self._free: list[int] = []  # a heap of the lanes in which nothing is open
        self._times: dict[str, int] = {}
        # One per recorder, so that recorders do not see each other's spans. Contexts keep it alive: there is one
        # recorder in a process, not one per call.
        self._innermost: ContextVar[OpenSpan | None] = ContextVar("innermost span", default=None)

    def span(self, name: str, /, category: Category = "work", **args: Any) -> OpenSpan:
        """A context manager that records a span; `args` are shown with it in the trace."""
        if category not in CATEGORIES:
            raise ValueError(f"a span is one of {', '.join(CATEGORIES)}, not {category!r}")
        return OpenSpan(self, name, category, args or None, None, True)

    def timer(
        self, tag: str, /, category: Literal["call", "work"] = "work", trace: bool = True, **args: Any
    ) -> OpenSpan:
        """A span whose duration is added to a tag; with `trace=False` it is not recorded otherwise.

        Timers of one tag that overlap, nested or side by side, each add their whole duration.
        """
        if category not in ("call", "work"):
            raise ValueError(f"a timer is one of call, work, not {category!r}: waits are not execution time")
        return OpenSpan(self, tag, category, args or None, tag, trace)

    @property
    def dropped(self) -> int:
        """Number of spans lost since the start because they were not drained in time."""
        return self._dropped

    def drain(self) -> list[Span]:
        """Return the spans closed since the last drain, in closing order."""
        with self._lock:
            closed = list(self._spans)
            self._spans.clear()
        epoch = self._epoch
        return [
            Span(name, category, epoch + start, epoch + end, lane, args)
            for name, category, start, end, lane, args in closed
        ]

    def pop_time(self, tag: str) -> float:
        """Return and reset the seconds of a tag; raise KeyError if it has none."""
        with self._lock:
            if tag in self._times:
                return self._times.pop(tag) / 1e9
            tags = sorted(self._times)
        # Imported here, because every worker imports this module and only this error needs it.
        from roost.config.findings import did_you_mean

        hint = did_you_mean(tag, tags) or f"there are {', '.join(tags) or 'none'}"
        raise KeyError(f"no time under {tag!r} since it was last popped; {hint}")

    def pop_times(self) -> dict[str, float]:
        """Return and reset the seconds of all tags."""
        with self._lock:
            popped, self._times = self._times, {}
        return {tag: nanoseconds / 1e9 for tag, nanoseconds in popped.items()}

    def _take_lane(self, parent: OpenSpan | None) -> _Lane:
        """The parent's lane if nothing else is open inside the parent there, else the lowest free one."""
        if parent is not None:
            lane = parent.lane
            if lane.open and lane.open[-1] is parent:
                return lane
        if self._free:
            return self._lanes[heapq.heappop(self._free)]
        return self._new_lane()

    def _new_lane(self) -> _Lane:
        lane = _Lane(len(self._lanes))
        self._lanes.append(lane)
        return lane

    def _leave_lane(self, span: OpenSpan, end: int) -> int:
        """Close a span; return the number of the lane to record it in."""
        lane = span.lane
        if lane.open[-1] is span:
            lane.open.pop()
            if not lane.open:
                lane.idle_since = end
                heapq.heappush(self._free, lane.number)
            return lane.number
        # It closes before a span that was opened inside it, such as a background task that a call started. The two
        # overlap without nesting, so this one is recorded in a lane that was idle for its whole duration.
        lane.open.remove(span)
        idle = [number for number in self._free if self._lanes[number].idle_since <= span.start]
        if idle:
            other = self._lanes[min(idle)]
        else:
            other = self._new_lane()
            heapq.heappush(self._free, other.number)
        other.idle_since = end
        return other.number


class _Lane:
    """A row of the trace: its open spans, outermost first, and since when it has none."""

    __slots__ = ("idle_since", "number", "open")

    def __init__(self, number: int) -> None:
        self.number = number
        self.open: list[OpenSpan] = []
        self.idle_since = 0


class OpenSpan:
    """A span while its `with` block runs; made by `SpanRecorder.span` and `SpanRecorder.timer`, for one use."""

    __slots__ = ("_args", "_category", "_name", "_parent", "_recorder", "_tag", "_trace", "is_open", "lane", "start")

    lane: _Lane
    start: int
    _parent: OpenSpan | None

    def __init__(
        self,
        recorder: SpanRecorder,
        name: str,
        category: Category,
        args: dict[str, Any] | None,
        tag: str | None,
        trace: bool,
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._category = category
        self._args = args
        self._tag = tag
        self._trace = trace
        self.is_open = False

    def __enter__(self) -> OpenSpan:
        if self.is_open:
            raise RuntimeError(f"span {self._name!r} is open already; make one for each block")
        recorder = self._recorder
        innermost = recorder._innermost.get()
        self._parent = parent = innermost.nearest_open() if innermost is not None else None
        with recorder._lock:
            self.lane = recorder._take_lane(parent)
            self.lane.open.append(self)
            # Read under the lock, so that the order in a lane is the order of the times.
            self.start = recorder._now()
        self.is_open = True
        recorder._innermost.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if self._parent is not None:  # shorten the chain: tasks that start each other would keep all spans alive
            self._parent = self._parent.nearest_open()
        with recorder._lock:
            end = recorder._now()
            self.is_open = False
            lane = recorder._leave_lane(self, end)
            if self._trace:
                args = self._args
                if kind is not None:
                    args = {**(args or {}), "error": kind.__name__}
                if len(recorder._spans) == recorder._limit:
                    recorder._dropped += 1
                recorder._spans.append((self._name, self._category, self.start, end, lane, args))
            if self._tag is not None:
                recorder._times[self._tag] = recorder._times.get(self._tag, 0) + end - self.start

    def nearest_open(self) -> OpenSpan | None:
        """This span, or the nearest around it that is still open.

        A closed span stays in its context: tasks have copies of the context, and a generator may be closed in another
        context than the one it was opened in.
        """
        span: OpenSpan | None = self
        while span is not None and not span.is_open:
            span = span._parent
        return span
