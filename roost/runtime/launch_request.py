"""What a person asks to launch, checked and completed before anything is reserved or started."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roost.cluster.hardware.registry import HardwareRegistry
from roost.cluster.inventory import Inventory
from roost.config.errors import Findings, did_you_mean
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
from roost.placement.strategy import PlacementStrategy
from roost.runtime.group import GroupSpec, LaunchOptions, check_methods, check_name
from roost.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class PlanLaunch:
    """Components of a plan, each with the workers it is of and how they are launched."""

    plan: Plan
    specs: Mapping[str, GroupSpec]
    options: Mapping[str, LaunchOptions]

    @property
    def left_out(self) -> list[str]:
        """Components of the plan that are not launched."""
        return [part.name for part in self.plan.components if part.name not in self.specs]


def plan_launch(
    plan: Plan | str | Path,
    groups: Mapping[str, GroupSpec | type[Worker]],
    options: Mapping[str, LaunchOptions] | None,
    taken: Collection[str],
) -> PlanLaunch:
    """A plan, or the file it was saved in, with what is to run of it; `taken` are the names of groups that run."""
    if not isinstance(plan, Plan):
        plan = Plan.from_json(Path(plan).read_text(encoding="utf-8"))
    specs = {name: each.create_group() if isinstance(each, type) else each for name, each in groups.items()}
    known = [part.name for part in plan.components]
    unknown = next((name for name in specs if name not in known), None)
    if unknown is not None:
        raise KeyError(f"the plan has no component {unknown}; {did_you_mean(unknown, known)}")
    stranger = next((name for name in options or {} if name not in specs), None)
    if stranger is not None:
        raise KeyError(f"there are options for {stranger}, which is not launched; {did_you_mean(stranger, specs)}")
    for name, spec in specs.items():
        check_name(name, taken)
        check_methods(spec.cls)
    return PlanLaunch(plan, specs, {name: (options or {}).get(name, LaunchOptions()) for name in specs})


def component_of(
    where: PlacementStrategy | ComponentPlan | None,
    name: str,
    options: LaunchOptions,
    inventory: Inventory,
    registry: HardwareRegistry,
) -> ComponentPlan:
    """A component of a plan, or one that a strategy places; without either, a process on every accelerator."""
    if isinstance(where, ComponentPlan):
        return where
    if where is None:
        count = inventory.num_accelerators
        where = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy([0])
    if not isinstance(where, PlacementStrategy):
        raise TypeError(
            f"placement_strategy is {where!r}; give a strategy such as PackedPlacementStrategy(0, 3), or a "
            "component of a plan"
        )
    findings = Findings()
    table = where.place(inventory, findings, isolate=options.isolate_accelerator is not False)
    findings.raise_errors()
    if table is None:
        raise RuntimeError("a placement without findings must have been made; please report it")
    return ComponentPlan(name, name, type(where).__name__, np.zeros(0, np.int64), table, registry=registry)
