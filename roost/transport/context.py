"""Job context of a process: addresses of workers and daemons, failures as records and errors, and its daemon link."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from roost.trace.spans import SpanRecorder

if TYPE_CHECKING:
    from roost.placement.placement import Placement
    from roost.transport.link import DaemonLink


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


@dataclass(frozen=True, slots=True)
class Current:
    """Job context of a process. The driver has no setup, because it was not placed."""

    setup: ProcessSetup | None
    connection: ProcessLink
    recorder: SpanRecorder
    check: Callable[[], None] | None = None  # in the driver: raises unsettled failures of the job

    @property
    def link(self) -> DaemonLink:
        return self.connection.get()

    @property
    def address(self) -> Address:
        return self.link.who


_entered: list[Current] = []


def enter_context(current: Current) -> None:
    """Enter a job. A driver may be in several; the last one entered is the default."""
    _entered.append(current)


def leave_context(current: Current) -> None:
    if current in _entered:
        _entered.remove(current)


def current_context() -> Current:
    if not _entered:
        raise RuntimeError("this process is not part of a job; call this in a worker, or after making a Cluster")
    return _entered[-1]


def worker_setup() -> ProcessSetup | None:
    """Setup of this process's worker; None in a driver or without a job."""
    return _entered[-1].setup if _entered else None


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """Simulated accelerators that a worker sees."""

    count: int
    memory_gb: float | None  # of each


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Everything a worker is started with, except its class and arguments."""

    address: Address
    world_size: int
    placement: Placement
    env: Mapping[str, str]
    devices: tuple[int, ...]  # its accelerators, by index on its node
    physical_ids: tuple[str, ...]  # their vendor ids
    accelerator_type: str
    hardware_type: str  # "accelerator", "node", or the kind of its declared devices
    hardware: tuple[Mapping[str, Any], ...]  # the configs of those
    daemon: DaemonContact
    log_path: str
    max_restarts: int = 0
    simulated: SimulatedDevices | None = None  # None for real accelerators


class ProcessLink:
    """Opens the daemon link on first use, and a new one in a forked process."""

    def __init__(self, who: Address, daemon: DaemonContact) -> None:
        self._who, self._daemon = who, daemon
        self._link: DaemonLink | None = None
        self._pid = -1
        self._making = threading.Lock()

    def get(self) -> DaemonLink:
        from roost.transport.link import DaemonLink

        if self._link is None or self._pid != os.getpid():
            with self._making:
                if self._link is None or self._pid != os.getpid():
                    self._link, self._pid = DaemonLink(self._who, self._daemon), os.getpid()
        return self._link

    @property
    def is_open(self) -> bool:
        return self._link is not None and self._pid == os.getpid()

    def close(self) -> None:
        if self._link is not None and self._pid == os.getpid():
            self._link.close()
        self._link = None
