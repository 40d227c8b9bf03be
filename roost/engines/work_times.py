"""When an engine had requests: from the first to the last of those that overlap."""

from __future__ import annotations

from collections import deque

from roost.trace.spans import MOST_SPANS, Clock, Span


class WorkTimes:
    """Counts requests in flight, and notes the stretches of time in which there were any.

    >>> ticks = iter([0, 0, 10, 30, 40])
    >>> times = WorkTimes(Clock(monotonic=lambda: next(ticks), wall=lambda: 1000))
    >>> times.begin(); times.begin(); times.end(); times.end()
    >>> [(span.name, span.start_ns, span.end_ns) for span in times.drain()], times.total_ns()
    ([('generate', 1010, 1030)], 20)
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._since = 0
        self._total = 0
        self.in_flight = 0

    def begin(self) -> None:
        if self.in_flight == 0:
            self._since = self._clock.now()
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            now = self._clock.now()
            self._total += now - self._since
            self._spans.append(Span("generate", "call", self._since, now))

    def total_ns(self) -> int:
        """How long there were requests, up to now."""
        return self._total + (self._clock.now() - self._since if self.in_flight else 0)

    def drain(self) -> list[Span]:
        """The stretches that ended since the last time."""
        spans = list(self._spans)
        self._spans.clear()
        return spans
