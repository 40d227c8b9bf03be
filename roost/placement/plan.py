"""A plan: every process of a job with its node, devices, environment and interpreter.

A plan is a value: it is printed, compared, saved, and later verified against the machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry
from roost.cluster.inventory import Inventory
from roost.cluster.resources import ACCELERATOR, NODE, Ints
from roost.placement.mode import PlacementMode
from roost.placement.table import Placement, PlacementTable
from roost.spec.errors import Finding, Findings
from roost.spec.job import ModelUse, Notation, ParallelSizes, Role

if TYPE_CHECKING:
    from roost.placement.residency import Residency
    from roost.placement.routes import Routes


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


@dataclass(frozen=True)
class Plan:
    """Where every process of a job runs, on which machines, and what was doubtful about it.

    >>> import roost
    >>> cluster = {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": "all"}}
    >>> plan = roost.plan({"cluster": cluster})
    >>> plan.mode.value, plan["actor"].world_size
    ('collocated', 2)
    """

    notation: Notation
    file: str | None
    mode: PlacementMode
    inventory: Inventory
    components: tuple[ComponentPlan, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[Finding, ...] = ()

    @cached_property
    def residency(self) -> Residency:
        """What is resident when on every device."""
        from roost.placement.residency import ResidencySettings, find_residency

        settings = ResidencySettings.of(self.notation, self.settings)
        return find_residency(self.components, self.inventory, settings, {}, Findings())

    @cached_property
    def routes(self) -> Routes:
        """How weights travel from the learner to the engines."""
        from roost.placement.routes import find_routes

        return find_routes(self.components, self.inventory)

    def __getitem__(self, name: str) -> ComponentPlan:
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(f"there is no component {name}; the plan has {', '.join(part.name for part in self.components)}")

    def to_dict(self) -> dict[str, Any]:
        """The plan in the documented schema (docs/plan-schema.md)."""
        from roost.placement.plan_file import plan_to_dict

        return plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan that `to_dict` wrote; the two are inverse to each other."""
        from roost.placement.plan_file import plan_from_dict

        return plan_from_dict(data)

    def to_json(self, indent: int | None = 2) -> str:
        import json

        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        from roost.placement.plan_file import plan_from_json

        return plan_from_json(text)
