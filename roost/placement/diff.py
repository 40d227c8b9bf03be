"""What moves between two plans: components, processes and devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from roost.cluster.resources import ACCELERATOR, NODE, Ints
from roost.placement.component_plan import ComponentPlan, Process
from roost.placement.plan import Plan
from roost.placement.table import Placement, PlacementTable
from roost.spec.ranks import spell_ranks


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: what it is about, the processes it concerns, and both sides in words."""

    subject: str  # "mode", "machines", "settings", "component", "sizes", "process", "environment"
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


def _cut(part: ComponentPlan) -> str:
    sizes = part.parallel
    return f"tensor {sizes.tensor}, pipeline {sizes.pipeline}, context {sizes.context}, expert {sizes.expert}"


def _component_changes(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    changes = []
    if before.world_size != after.world_size:
        changes.append(
            Change("component", after.name, "", f"{before.world_size} processes", f"{after.world_size} processes")
        )
    if before.parallel != after.parallel:
        changes.append(Change("sizes", after.name, "", _cut(before), _cut(after)))
    changes += _moves(before, after)
    changes += _environment_changes(before, after)
    return changes


def _moves(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes that both plans have and that sit elsewhere now; neighbours that move alike are one change."""
    moved = [(rank, before.table[rank], after.table[rank]) for rank in _moved_ranks(before.table, after.table)]
    changes = []
    # Consecutive ranks between the same two nodes have the same difference between rank and position.
    runs = groupby(
        enumerate(moved),
        key=lambda item: (item[1][0] - item[0], item[1][1].cluster_node_rank, item[1][2].cluster_node_rank),
    )
    for _, run in runs:
        rows = [row for _, row in run]
        ranks = spell_ranks([rank for rank, _, _ in rows])
        old, new = _places([row[1] for row in rows]), _places([row[2] for row in rows])
        changes.append(Change("process", after.name, ranks, old, new))
    return changes


def _moved_ranks(before: PlacementTable, after: PlacementTable) -> list[int]:
    """The ranks that both tables have and place differently, compared column by column."""
    count = min(len(before), len(after))
    is_moved = before.nodes[:count] != after.nodes[:count]
    lengths = np.diff(before.offsets[: count + 1])
    is_moved |= lengths != np.diff(after.offsets[: count + 1])
    if not np.array_equal(before.offsets[: count + 1], after.offsets[: count + 1]):
        is_moved[int(np.argmax(before.offsets[1 : count + 1] != after.offsets[1 : count + 1])) :] = True
        return [rank for rank in np.flatnonzero(is_moved).tolist() if before[rank].devices != after[rank].devices]
    end = int(before.offsets[count])
    differs = (before.device_nodes[:end] != after.device_nodes[:end]) | (
        before.device_ranks[:end] != after.device_ranks[:end]
    )
    is_moved[np.repeat(np.arange(count), lengths)[differs]] = True
    return np.flatnonzero(is_moved).tolist()


def _places(placements: list[Placement]) -> str:
    node = placements[0].cluster_node_rank
    held = [device for placement in placements for device in placement.devices]
    if not held:
        return f"node {node}"
    if all(on == node for on, _ in held):
        return f"node {node} devices {spell_ranks([index for _, index in held])}"
    return f"node {node} devices " + ",".join(f"{on}:{index}" for on, index in held)


def _environment_changes(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes whose interpreter, variables or declared devices change, beyond what follows from their place."""
    if not any(_has_software(part) for part in (before, after)):
        return []
    count = min(before.world_size, after.world_size)
    # Processes of one group on one node get the same, so each such pair is looked at once.
    keys = zip(
        *(column[:count].tolist() for part in (before, after) for column in _software_columns(part)), strict=True
    )
    known: dict[object, tuple[str, str]] = {}
    changed = []
    for rank, key in enumerate(keys):
        if key not in known:
            known[key] = _environment(before.process(rank), after.process(rank))
        if known[key][0] != known[key][1]:
            changed.append((rank, known[key][0] or "nothing", known[key][1] or "nothing"))
    return [
        Change("environment", after.name, spell_ranks([rank for rank, _, _ in run]), one, two)
        for (one, two), run in groupby(changed, key=lambda item: item[1:])
    ]


def _has_software(part: ComponentPlan) -> bool:
    """Whether anything but the place of a process says what it is started with."""
    groups = [part.table.inventory.group(label) for label in part.table.labels]
    return bool(part.env or set(part.table.kinds) - {ACCELERATOR, NODE} or any(group.software for group in groups))


def _software_columns(part: ComponentPlan) -> list[Ints]:
    """Columns whose equal values mean equal software and equal declared devices."""
    holds_declared = set(part.table.kinds) - {ACCELERATOR, NODE}
    rank = np.arange(part.world_size) if holds_declared else np.zeros(part.world_size, np.int64)
    return [part.table.nodes, part.table.groups, rank]


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
        if own.hardware != other.hardware:
            words += [" ".join(f"{key}={value}" for key, value in item.items()) for item in own.hardware]
        sides.append(" ".join(words))
    return sides[0], sides[1]
