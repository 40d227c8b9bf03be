"""What moves between two plans: components, processes and devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from roost.placement.plan import ComponentPlan, Plan, Process
from roost.placement.table import Placement
from roost.spec.ranks import spell_ranks


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: what it is about, the processes it concerns, and both sides in words."""

    subject: str  # "mode", "machines", "component", "process", "environment"
    component: str | None
    processes: str
    before: str
    after: str

    def __str__(self) -> str:
        owner = " ".join(part for part in (self.component, self.processes) if part) or self.subject
        if not self.before:
            return f"{owner}: added, {self.after}"
        if not self.after:
            return f"{owner}: removed, was {self.before}"
        return f"{owner}: {self.before} -> {self.after}"


def diff_plans(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Every difference between two plans, in the order of the second; empty where they place everything alike."""
    changes = list(_job_changes(before, after))
    old = {part.name: part for part in before.components}
    new = {part.name: part for part in after.components}
    for name, part in new.items():
        if name in old:
            changes += _component_changes(old[name], part)
        else:
            changes.append(Change("component", name, "", "", _size(part)))
    changes += [Change("component", name, "", _size(part), "") for name, part in old.items() if name not in new]
    return tuple(changes)


def _job_changes(before: Plan, after: Plan) -> Iterator[Change]:
    if before.mode is not after.mode:
        yield Change("mode", None, "", before.mode.value, after.mode.value)
    one, two = ((plan.inventory.num_nodes, plan.inventory.num_accelerators) for plan in (before, after))
    if one != two:
        yield Change(
            "machines", None, "", f"{one[0]} nodes, {one[1]} accelerators", f"{two[0]} nodes, {two[1]} accelerators"
        )
    for key in sorted({*before.settings, *after.settings}):
        old, new = before.settings.get(key), after.settings.get(key)
        if old != new:
            yield Change("settings", key, "", str(old), str(new))


def _size(part: ComponentPlan) -> str:
    nodes = spell_ranks(np.unique(part.table.nodes).tolist(), limit=6)
    return f"{part.world_size} processes on nodes {nodes}"


def _component_changes(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    changes = []
    if before.world_size != after.world_size:
        changes.append(
            Change("component", after.name, "", f"{before.world_size} processes", f"{after.world_size} processes")
        )
    changes += _moves(before, after)
    changes += _environment_changes(before, after)
    return changes


def _moves(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes that both plans have and that sit elsewhere now; neighbours that move alike are one change."""
    moved = [
        (rank, old, new)
        for rank, (old, new) in enumerate(zip(before.table, after.table, strict=False))
        if (old.cluster_node_rank, old.devices) != (new.cluster_node_rank, new.devices)
    ]
    changes = []
    # Consecutive ranks between the same two nodes have the same difference between rank and position.
    runs = groupby(
        enumerate(moved),
        key=lambda item: (item[1][0] - item[0], item[1][1].cluster_node_rank, item[1][2].cluster_node_rank),
    )
    for _, run in runs:
        rows = [row for _, row in run]
        ranks = spell_ranks([rank for rank, _, _ in rows])
        changes.append(
            Change(
                "process", after.name, ranks, _places([old for _, old, _ in rows]), _places([new for _, _, new in rows])
            )
        )
    return changes


def _places(placements: list[Placement]) -> str:
    node = placements[0].cluster_node_rank
    held = [device for placement in placements for device in placement.devices]
    if not held:
        return f"node {node}"
    if all(on == node for on, _ in held):
        return f"node {node} devices {spell_ranks([index for _, index in held])}"
    return f"node {node} devices " + ",".join(f"{on}:{index}" for on, index in held)


def _environment_changes(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes whose interpreter or variables change, beyond the visible devices that follow from their place."""
    changed: list[tuple[int, str, str]] = []
    for rank, (old, new) in enumerate(zip(before.processes(), after.processes(), strict=False)):
        one, two = _environment(old, new)
        if one != two:
            changed.append((rank, one or "nothing", two or "nothing"))
    changes = []
    for (one, two), run in groupby(changed, key=lambda item: item[1:]):
        changes.append(Change("environment", after.name, spell_ranks([rank for rank, _, _ in run]), one, two))
    return changes


def _environment(old: Process, new: Process) -> tuple[str, str]:
    """Both sides in words, without what they have in common and without variables that only name devices."""
    sides = []
    for own, other in ((old, new), (new, old)):
        words = [f"interpreter {own.interpreter}"] if own.interpreter and own.interpreter != other.interpreter else []
        words += [
            f"{key}={value}"
            for key, value in own.env.items()
            if other.env.get(key) != value and "VISIBLE_DEVICES" not in key
        ]
        sides.append(" ".join(words))
    return sides[0], sides[1]
