"""What came of a piece of code."""

from __future__ import annotations

import codecs
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


class Printed:
    """The output of one execution, in bounded memory.

    >>> printed = Printed(limit=10)
    >>> printed.add(b"0123456789abcdef")
    >>> printed.text()
    '01234\\n[6 characters left out]\\nbcdef'
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = ""
        self._end = ""
        self._characters = 0
        self.size = 0  # in bytes, of everything

    def add(self, data: bytes) -> None:
        """More of it, cut anywhere."""
        self.size += len(data)
        self._keep(self._decoder.decode(data))

    def text(self) -> str:
        """What is shown of it."""
        self._keep(self._decoder.decode(b"", final=True))
        if self._characters <= self._limit:
            return self._start + self._end
        first = self._limit // 2
        last = self._limit - first
        left_out = self._characters - self._limit
        return f"{self._start[:first]}\n[{left_out} characters left out]\n{(self._start + self._end)[-last:]}"

    def _keep(self, text: str) -> None:
        self._characters += len(text)
        room = self._limit - len(self._start)
        self._start += text[:room]
        self._end = (self._end + text[room:])[-self._limit :]
