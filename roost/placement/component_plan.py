"""A component in a plan: its processes, their placements and its mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry
from roost.cluster.resources import ACCELERATOR, NODE, Ints
from roost.config.job import ModelUse, ParallelSizes, Role
from roost.placement.placement import Placement
from roost.placement.table import PlacementTable

Bools = npt.NDArray[np.bool_]

# Components in the loop of generating and learning. Rewards and references do not count: they may share any devices
# without changing how the others take turns.
LOOP_COMPONENTS = ("actor", "rollout", "inference", "env", "student_train", "student_infer")


class PlacementMode(StrEnum):
    """Sharing of devices between the components of a job."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"
    HYBRID = "hybrid"
    AUTO = "auto"


def mode_of(held: Mapping[str, Bools]) -> PlacementMode:
    """The mode, from the accelerators of the cluster that each component holds (one flag for each accelerator).

    Collocated where all hold the same ones, disaggregated where no two share any, hybrid otherwise.

    >>> first, second, both = (np.array(flags) for flags in ([True, False], [False, True], [True, True]))
    >>> mode_of({"actor": both, "rollout": both}).value, mode_of({"actor": first, "rollout": second}).value
    ('collocated', 'disaggregated')
    >>> mode_of({"actor": both, "rollout": first}).value
    'hybrid'
    """
    sets = [flags for name, flags in held.items() if name in LOOP_COMPONENTS and flags.any()]
    sets = sets or [flags for flags in held.values() if flags.any()]
    if all(np.array_equal(sets[0], other) for other in sets[1:]):
        return PlacementMode.COLLOCATED
    return PlacementMode.DISAGGREGATED if np.sum(sets, axis=0).max() == 1 else PlacementMode.HYBRID


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a component with its placement, environment, interpreter and devices."""

    placement: Placement
    start_env: Mapping[str, str]  # the user's variables and those of the accelerator's vendor
    interpreter: str | None
    hardware: tuple[Mapping[str, Any], ...] = ()  # configs of its declared devices
    masks: Mapping[str, str] = field(default_factory=dict)  # its visible devices in the plan's numbers

    @property
    def env(self) -> dict[str, str]:
        return {**self.start_env, **self.masks}


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
    registry: HardwareRegistry = BUILT_IN  # known accelerators; not part of the plan's value

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

    __hash__ = None  # type: ignore[assignment]  # compares by value and holds arrays

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
        vendor = self.registry.accelerator(placement.accelerator_type) if placement.visible_accelerators else None
        return Process(
            placement,
            start_env={**dict(software.env_vars), **dict(vendor.extra_environment if vendor else ()), **dict(self.env)},
            interpreter=software.python_interpreter_path,
            hardware=tuple(declared[rank] for rank in placement.local_hardware_ranks) if declared else (),
            masks=vendor.masks(placement.visible_accelerators) if vendor else {},
        )
