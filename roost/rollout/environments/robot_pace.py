"""Periods of control: when the next one begins, so that steps neither drift nor crowd."""

from __future__ import annotations

import math

LATE_SHARE = 0.1  # of a period: so late a step still counts as in time, as no clock of a process is exact


class Pace:
    """Steps at a rate. The first begins it, and the others come at whole periods from then.

    A step that is late waits for the next period, as two commands in one would crowd; each period that went by without
    one is counted as missed.

    >>> pace = Pace(0.1)
    >>> [round(pace.next_at(now), 3) for now in (5.0, 5.04, 5.205, 5.33)], pace.missed
    ([5.0, 5.1, 5.205, 5.4], 1)
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._began_at: float | None = None
        self._period = 0  # of the last step
        self.missed = 0

    def next_at(self, now: float) -> float:
        """When the step that is asked for now is to begin."""
        if self._began_at is None:
            self._began_at = now
            return now
        passed = (now - self._began_at) / self._period_s - (self._period + 1)
        missed = max(math.ceil(passed - LATE_SHARE), 0)
        self.missed += missed
        self._period += 1 + missed
        return max(self._began_at + self._period * self._period_s, now)
