"""What is one per process: the worker that lives in it, and its ways to the others.

A process has one place in a job, as it has one process id; everything that must know that place asks here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roost.runtime.address import Address
from roost.runtime.process import ProcessSetup
from roost.runtime.trace.spans import SpanRecorder

if TYPE_CHECKING:
    from roost.runtime.link import AgentLink
    from roost.runtime.process_link import ProcessLink


@dataclass(frozen=True, slots=True)
class Current:
    """A process's place in a job. The driver has no setup: it was not placed."""

    setup: ProcessSetup | None
    connection: ProcessLink
    recorder: SpanRecorder
    check: Callable[[], None] | None = None  # in the driver: raises if the job has failed and nobody knows

    @property
    def link(self) -> AgentLink:
        return self.connection.get()

    @property
    def address(self) -> Address:
        return self.link.who


_entered: list[Current] = []


def enter(current: Current) -> None:
    """Take a place in a job. A driver may take part in several; the last one entered is used where none is named."""
    _entered.append(current)


def leave(current: Current) -> None:
    if current in _entered:
        _entered.remove(current)


def get() -> Current:
    if not _entered:
        raise RuntimeError("this process is no part of a job; call this in a worker, or after making a Cluster")
    return _entered[-1]


def worker_setup() -> ProcessSetup | None:
    """What the worker of this process was started with; None in a driver, and where there is no job."""
    return _entered[-1].setup if _entered else None
