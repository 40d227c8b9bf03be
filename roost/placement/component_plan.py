"""One component of a plan: where its processes run, and what each is started with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry
from roost.cluster.resources import ACCELERATOR, NODE, Ints
from roost.config.job import ModelUse, ParallelSizes, Role
from roost.placement.placement import Placement
from roost.placement.table import PlacementTable


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a component with all it is started with."""

    placement: Placement
    env: Mapping[str, str]
    interpreter: str | None
    hardware: tuple[Mapping[str, Any], ...] = ()  # the configs of the declared devices it holds


@dataclass(frozen=True, eq=False)
class ComponentPlan:
    """One component of a plan."""

    name: str
    written_name: str
    strategy: str
    hardware_ranks: Ints
    table: PlacementTable
    parallel: ParallelSizes = field(default_factory=ParallelSizes)
    env: tuple[tuple[str, str], ...] = ()
    role: Role = Role.HELPER
    model: ModelUse = field(default_factory=ModelUse)
    managed_by: str | None = None  # the component whose process 0 starts and stops this one's processes
    registry: HardwareRegistry = BUILT_IN  # what knows the accelerators; not part of what a plan says

    @property
    def world_size(self) -> int:
        return len(self.table)

    @property
    def node_groups(self) -> tuple[str, ...]:
        return self.table.labels

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComponentPlan):
            return NotImplemented
        return (
            self._values() == other._values()
            and np.array_equal(self.hardware_ranks, other.hardware_ranks)
            and self.table == other.table
        )

    __hash__ = None  # type: ignore[assignment]  # it compares by value and holds arrays

    def _values(self) -> tuple[object, ...]:
        return (
            self.name,
            self.written_name,
            self.strategy,
            self.parallel,
            self.env,
            self.role,
            self.model,
            self.managed_by,
        )

    def processes(self) -> Iterator[Process]:
        """The processes in rank order."""
        return (self._process(placement) for placement in self.table)

    def process(self, rank: int) -> Process:
        """One process."""
        return self._process(self.table[rank])

    def _process(self, placement: Placement) -> Process:
        inventory = self.table.inventory
        software = inventory.group(placement.node_group_label).software_of(placement.cluster_node_rank)
        kind = self.table.kinds[self.table.labels.index(placement.node_group_label)]
        hardware = inventory.nodes[placement.cluster_node_rank].hardware
        declared = hardware.get(kind, ()) if kind not in (ACCELERATOR, NODE) else ()
        return Process(
            placement,
            env={**dict(software.env_vars), **_visibility(placement, self.registry), **dict(self.env)},
            interpreter=software.python_interpreter_path,
            hardware=tuple(declared[rank] for rank in placement.local_hardware_ranks) if declared else (),
        )


def _visibility(placement: Placement, registry: HardwareRegistry) -> dict[str, str]:
    accelerator = registry.accelerator(placement.accelerator_type)
    if accelerator is None or not placement.visible_accelerators:
        return {}
    return accelerator.visibility(placement.visible_accelerators)
