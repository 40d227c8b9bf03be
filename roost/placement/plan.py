"""A plan: every process of a job with its node, devices, environment and interpreter.

A plan is a value: it is printed, compared, saved, and later verified against the machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from roost.cluster.inventory import Inventory
from roost.config.errors import Finding, Findings
from roost.config.job import Notation
from roost.config.known_keys.tables import KeyUse
from roost.config.origins import ResolvedSetting
from roost.placement.component_plan import ComponentPlan
from roost.placement.mode import PlacementMode
from roost.placement.residency import Residency, ResidencySettings, find_residency
from roost.placement.routes import Routes, find_routes


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
    training: tuple[ResolvedSetting, ...] = ()  # empty for a config that only places
    keys: tuple[KeyUse, ...] = ()  # of the config, that count for nothing
    warnings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @cached_property
    def residency(self) -> Residency:
        """What is resident when on every device."""
        settings = ResidencySettings.of(self.notation, self.settings)
        return find_residency(self.components, self.inventory, settings, {}, Findings())

    @cached_property
    def routes(self) -> Routes:
        """How weights travel from the learner to the engines."""
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
