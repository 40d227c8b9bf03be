"""How long a caller waits, through all that its request has to wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment until which a caller waits, and the seconds it asked for, which messages name.

    >>> Deadline.of(0).does_not_wait, Deadline.of(None).left()
    (True, None)
    """

    limit: float | None
    moment: float | None  # of this process's clock

    @classmethod
    def of(cls, timeout: float | Sequence[float | None] | None) -> Deadline:
        """From what a process asks for, or from what another node's agent hands on: see `handed_on`."""
        limit, left = timeout if isinstance(timeout, Sequence) else (timeout, timeout)
        return cls(limit, None if left is None else time.monotonic() + left)

    def left(self) -> float | None:
        return None if self.moment is None else max(0.0, self.moment - time.monotonic())

    def at_most(self, seconds: float) -> float:
        left = self.left()
        return seconds if left is None else min(seconds, left)

    @property
    def does_not_wait(self) -> bool:
        return self.limit is not None and self.limit <= 0

    @property
    def handed_on(self) -> tuple[float | None, float | None]:
        """For another machine, whose clock is another."""
        return self.limit, self.left()

    def __str__(self) -> str:
        return f"{self.limit or 0:g} s"
