"""What a worker's process is told when it starts, and what it knows of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roost.runtime.address import Address

if TYPE_CHECKING:
    from roost.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class AgentContact:
    """How the processes of a node reach its agent."""

    node: int
    host: str
    pid: int
    socket: str
    handle: Any = field(default=None, compare=False)  # the Ray actor


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """Accelerators that are not there, and that a worker is to count all the same."""

    count: int
    memory_gb: float | None  # of each


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Everything a worker is started with, beside its class and arguments."""

    address: Address
    world_size: int
    placement: Placement
    env: Mapping[str, str]
    devices: tuple[int, ...]  # accelerators it holds, as numbered on its node
    physical_ids: tuple[str, ...]  # what the vendor calls them
    accelerator_type: str
    hardware_type: str  # "accelerator", "node", or the kind of its declared devices
    hardware: tuple[Mapping[str, Any], ...]  # the configs of those
    agent: AgentContact
    log_path: str
    max_restarts: int = 0
    simulated: SimulatedDevices | None = None  # what it sees, where that is simulated
