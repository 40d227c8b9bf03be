"""Job context of the current process: its worker setup, daemon link and span recorder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roost.trace.spans import SpanRecorder
from roost.transport.failure import Address, DaemonContact

if TYPE_CHECKING:
    from roost.placement.placement import Placement
    from roost.transport.link import DaemonLink


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


def enter(current: Current) -> None:
    """Enter a job. A driver may be in several; the last one entered is the default."""
    _entered.append(current)


def leave(current: Current) -> None:
    if current in _entered:
        _entered.remove(current)


def get() -> Current:
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
