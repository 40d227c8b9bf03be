"""Addresses of workers and node daemons, and failures as records and errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Address(NamedTuple):
    """A worker by group and rank.

    >>> str(Address("rollout", 3))
    'rollout:3'
    """

    group: str
    rank: int

    def __str__(self) -> str:
        return f"{self.group}:{self.rank}"


DRIVER = Address("driver", 0)


@dataclass(frozen=True, slots=True)
class DaemonContact:
    """Contact data of a node daemon for the processes of its node."""

    node: int
    host: str
    pid: int
    socket: str
    handle: Any = field(default=None, compare=False)  # the Ray actor


LOG_LINES = 20  # of a failed worker's log, shown with its failure


class FailureKind(StrEnum):
    """Kind of a worker's failure."""

    RAISED = "raised"  # a method or the constructor raised; the process is alive
    DIED = "died"  # the process has exited
    NODE_LOST = "node lost"  # its node is lost


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's failure, reported by the worker or by its watchers."""

    address: Address
    kind: FailureKind
    summary: str  # one line: the exception, or how the process ended
    time_ns: int
    node: int = -1
    host: str = ""
    devices: tuple[int, ...] = ()
    method: str = ""
    traceback: str = ""
    log: str = ""  # the last lines of the worker's log
    log_path: str = ""
    call: str = ""  # id of the group call it happened in; ranks that fail in one call fail together
    cause: bytes | None = field(default=None, repr=False)  # the pickled exception, if it can be pickled
    is_consequence: bool = False  # of another worker's failure: it waited for a lost peer
    will_restart: bool = False

    def __str__(self) -> str:
        doing = f" in {self.method}" if self.method else ""
        lines = [f"{self.address} {self.kind}{doing} on {self.place}: {self.summary}"]
        if self.traceback:
            lines.append(_indented(self.traceback))
        if self.log:
            lines.append(f"  last lines of its log{f' ({self.log_path})' if self.log_path else ''}:")
            lines.append(_indented(self.log))
        return "\n".join(lines)

    @property
    def place(self) -> str:
        host = f" ({self.host})" if self.host else ""
        devices = f", device {','.join(map(str, self.devices))}" if self.devices else ""
        return f"node {self.node}{host}{devices}"


class WorkerFailed(RuntimeError):
    """A call failed because of a worker; `failures` starts with the root cause.

    `failures` has all that were known when it was raised. The worker's exception is the `__cause__` if it could be
    unpickled.
    """

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures = in_order_of_cause(failures)
        first, *rest = [str(failure) for failure in self.failures]
        followed = "".join(f"\nthen: {text.splitlines()[0]}" for text in rest)
        super().__init__(first + followed)

    @property
    def first(self) -> Failure:
        return self.failures[0]

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[tuple[Failure, ...]]]:
        return type(self), (self.failures,)


class PeerLost(ConnectionError):
    """A worker waited for a lost peer."""


class WaitedTooLong(TimeoutError):
    """A wait for a peer, channel, lock or the cluster timed out."""


def in_order_of_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Failures with the root cause first; consequences of other failures come last, whenever they were noticed.

    >>> late = Failure(Address("actor", 0), FailureKind.RAISED, "lost rollout:1", 5, is_consequence=True)
    >>> cause = Failure(Address("rollout", 1), FailureKind.DIED, "killed by signal 9", 9)
    >>> in_order_of_cause([late, cause])[0].summary
    'killed by signal 9'
    """
    return tuple(sorted(failures, key=lambda failure: (failure.is_consequence, failure.time_ns)))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
