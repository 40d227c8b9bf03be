"""What came of a piece of code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Why code did not run to its end. After the first three the process goes on, after the others it is gone."""

    RAISED = "raised"  # an exception that it did not catch
    EXITED = "exited"  # it called `exit`, with whatever status
    MEMORY = "memory"  # a `MemoryError` that it did not catch
    TIMED_OUT = "timed_out"
    CPU = "cpu"
    FLOODED = "flooded"  # it printed without end
    DISK = "disk"
    DIED = "died"  # a crash, or `os._exit`
    BROKEN = "broken"  # it spoiled the connection, or said what it cannot know

    @property
    def is_fatal(self) -> bool:
        """Whether the process is gone, and the next execution starts with a new one.

        >>> Fault.RAISED.is_fatal, Fault.DIED.is_fatal
        (False, True)
        """
        return self not in (Fault.RAISED, Fault.EXITED, Fault.MEMORY)


@dataclass(frozen=True, slots=True)
class Execution:
    """What code printed, tracebacks included, and how it ended."""

    output: str  # as an agent is shown it
    error: Fault | None
    seconds: float
