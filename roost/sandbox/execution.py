"""Result of running a piece of code."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Reason that code did not run to its end. The process survives the first three, and is gone after the others."""

    RAISED = "raised"  # an uncaught exception
    EXITED = "exited"  # it called `exit`, with any status
    MEMORY = "memory"  # an uncaught `MemoryError`
    TIMED_OUT = "timed_out"
    CPU = "cpu"
    FLOODED = "flooded"  # it printed too much
    DISK = "disk"
    DIED = "died"  # a crash, or `os._exit`
    BROKEN = "broken"  # it corrupted the connection or sent an invalid message

    @property
    def is_fatal(self) -> bool:
        """Return True if the process is gone, so that the next execution starts a new one.

        >>> Fault.RAISED.is_fatal, Fault.DIED.is_fatal
        (False, True)
        """
        return self not in (Fault.RAISED, Fault.EXITED, Fault.MEMORY)


@dataclass(frozen=True, slots=True)
class Execution:
    """Output of code, including tracebacks, and how it ended."""

    output: str  # as shown to an agent
    error: Fault | None
    seconds: float


class Printed:
    """The output of one execution, in bounded memory.

    >>> printed = Printed(limit=10)
    >>> printed.add(b"0123456789abcdef")
    >>> printed.text()
    '01234\\n[6 characters omitted]\\nbcdef'
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = ""
        self._end = ""
        self._characters = 0
        self.size = 0  # bytes of the whole output

    def add(self, data: bytes) -> None:
        """Add a chunk of output, cut anywhere."""
        self.size += len(data)
        self._keep(self._decoder.decode(data))

    def text(self) -> str:
        """The output as shown."""
        self._keep(self._decoder.decode(b"", final=True))
        if self._characters <= self._limit:
            return self._start + self._end
        first = self._limit // 2
        last = self._limit - first
        left_out = self._characters - self._limit
        return f"{self._start[:first]}\n[{left_out} characters omitted]\n{(self._start + self._end)[-last:]}"

    def _keep(self, text: str) -> None:
        self._characters += len(text)
        room = self._limit - len(self._start)
        self._start += text[:room]
        self._end = (self._end + text[room:])[-self._limit :]
