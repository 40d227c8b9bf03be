"""How often an engine may be started again before it is given up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """At most so many restarts within so many seconds.

    >>> limit = RestartLimit(most=2, within_s=60.0)
    >>> earlier = deque([0.0, 50.0])
    >>> limit.allows(earlier, now=55.0), limit.allows(earlier, now=61.0)
    (False, True)
    """

    most: int = 3
    within_s: float = 600.0

    def allows(self, earlier: deque[float], now: float) -> bool:
        """Whether one more may be made; those too long ago to count are forgotten."""
        while earlier and now - earlier[0] >= self.within_s:
            earlier.popleft()
        return len(earlier) < self.most
