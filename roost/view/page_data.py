"""What the HTML page is drawn from: a plan as compact JSON, small however many equal nodes there are.

Columns of numbers are folded into progressions, equal nodes into layouts, and equal environments are written once; the
page makes the details of a process when somebody looks at it. What a user named is in lists of pairs: a browser would
put the keys of an object in another order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roost.cluster.inventory import Inventory
from roost.cluster.resources import Ints
from roost.config.errors import Finding
from roost.placement.component_plan import ComponentPlan
from roost.placement.phases import Phase
from roost.placement.plan import Plan
from roost.placement.routes import TRANSPORTS, EngineRoutes, Reach
from roost.view.device_phases import DevicePhases, device_phases, machine_words
from roost.view.grid_model import Grid, Holder, NodeLayout, Run, grid
from roost.view.marks import Mark
from roost.view.progressions import progressions
from roost.view.text import machines_line

Packed = int | list[int]


def page_data(plan: Plan) -> dict[str, Any]:
    """Everything the page shows, as values that JSON can hold."""
    made = grid(plan)
    numbers = {part.name: number for number, part in enumerate(plan.components)}
    starts = _Starts(plan)
    layouts: dict[int, int] = {}  # by identity: runs of equal nodes share their layout
    described = []
    for run in made.runs:
        if id(run.layout) not in layouts:
            layouts[id(run.layout)] = len(layouts)
            described.append(_layout(run, numbers, starts))
    return {
        "file": plan.file or "plan",
        "notation": plan.notation.value,
        "mode": plan.mode.value,
        "machines": machines_line(plan.inventory),
        "processes": sum(part.world_size for part in plan.components),
        "free": made.num_free,
        "components": [_component(part, mark) for part, mark in zip(plan.components, made.marks, strict=True)],
        "layouts": described,
        "runs": [_run(run, layouts[id(run.layout)], numbers) for run in made.runs],
        "starts": starts.described,
        **_nodes(plan.inventory, made),
        "phases": [phase.value for phase in Phase],
        "is_async": plan.residency.is_async,
        "classes": [_class(table, numbers) for table in device_phases(plan)],
        "routes": [_routes(engine, numbers) for engine in plan.routes.engines],
        "findings": [_finding(finding) for finding in plan.warnings],
    }


def pack(column: Sequence[int] | Ints) -> Packed:
    """Numbers as progressions of start, step and length, one after the other; one number is itself.

    >>> pack([7]), pack([0, 1, 2, 3]), pack([5, 5, 5, 0, 8])
    (7, [0, 1, 4], [5, 0, 3, 0, 8, 2])
    """
    if len(column) == 1:
        return int(column[0])
    return [number for part in progressions(np.asarray(column, np.int64)) for number in part]


def _component(part: ComponentPlan, mark: Mark) -> dict[str, Any]:
    sizes = part.parallel
    named = (("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("context", sizes.context))
    owners = np.repeat(part.table.nodes, np.diff(part.table.offsets))
    return {
        "name": part.name,
        "written": part.written_name,
        "short": mark.short,
        "colour": mark.colour,
        "ink": mark.ink,
        "size": part.world_size,
        "role": part.role.value,
        "strategy": part.strategy.removesuffix("PlacementStrategy").lower(),
        "parallel": ", ".join(f"{name} {size}" for name, size in named if size > 1),
        "managed_by": part.managed_by,
        "unused": part.model.unused_because,
        "spans": not np.array_equal(owners, part.table.device_nodes),  # whether a process holds devices of other nodes
    }


def _layout(run: Run, numbers: Mapping[str, int], starts: _Starts) -> dict[str, Any]:
    layout = run.layout
    return {
        "machine": machine_words(layout.machine, layout.machine.accelerators) if layout.machine.accelerators else "",
        "groups": list(layout.groups),
        "cells": [_holders(holders, numbers) for holders in layout.accelerators],
        "declared": [[part.kind, part.index, _holders(part.holders, numbers)] for part in layout.declared],
        "cpu": _holders(layout.without_device, numbers),
        "residents": [[*held, starts.of(run, part)] for held, part in _residents(layout, numbers)],
    }


def _holders(holders: Sequence[Holder], numbers: Mapping[str, int]) -> list[list[int | Packed]]:
    return [[numbers[holder.component], pack(holder.offsets)] for holder in holders]


def _residents(layout: NodeLayout, numbers: Mapping[str, int]) -> list[tuple[list[int | Packed], Holder]]:
    return list(zip(_holders(layout.residents, numbers), layout.residents, strict=True))


def _run(run: Run, layout: int, numbers: Mapping[str, int]) -> list[Any]:
    """First node, how far apart, how many, layout, and for each component its lowest rank on each node."""
    ranks = {numbers[name]: pack(column) for name, column in run.first_ranks.items()}
    return [run.nodes[0], run.nodes.step, len(run.nodes), layout, ranks]


@dataclass
class _Starts:
    """How processes are started (group, environment, interpreter), each way written once."""

    plan: Plan
    described: list[dict[str, Any]] = field(default_factory=list)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def of(self, run: Run, holder: Holder) -> Packed:
        """For each process of a component on the run's first node, the number of its start."""
        component = self.plan[holder.component]
        return pack([self._number(component, rank) for rank in run.ranks(holder)])

    def _number(self, component: ComponentPlan, rank: int) -> int:
        process = component.process(rank)
        group = process.placement.node_group_label
        key = (group, tuple(process.env.items()), process.interpreter)
        if key not in self._numbers:
            self._numbers[key] = len(self.described)
            described = {"group": group, "env": list(process.env.items()), "interpreter": process.interpreter}
            self.described.append(described)
        return self._numbers[key]


def _nodes(inventory: Inventory, made: Grid) -> dict[str, Any]:
    """What nodes have of their own: host names, configs of declared devices, and the labels they are found by."""
    hosts = [node.host for node in inventory.nodes]
    configs = {
        rank: {kind: [_in_words(item) for item in items] for kind, items in node.hardware.items() if any(items)}
        for rank, node in enumerate(inventory.nodes)
        if any(any(items) for items in node.hardware.values())
    }
    return {
        "num_nodes": made.num_nodes,
        "hosts": hosts if any(hosts) else [],
        "configs": configs,
        "groups": [[group.label, pack(group.node_ranks)] for group in inventory.groups],
    }


def _in_words(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A config as text: its values are the user's, and JSON cannot hold all of them."""
    return [
        (str(key), value if isinstance(value, str) else json.dumps(value, default=str)) for key, value in config.items()
    ]


def _class(table: DevicePhases, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {
        "title": table.title,
        "machine": table.machine,
        "decision": table.decision.value if table.decision is not None else None,
        "reason": table.reason,
        "rows": [
            [
                numbers[row.component],
                [
                    [cell.state.value, word, _rounded(cell.device_gib), _rounded(cell.host_gib)]
                    for cell, word in zip(row.cells, row.words, strict=True)
                ],
            ]
            for row in table.rows
        ],
        "memory": [
            [use.words, _rounded(use.total_gib), _rounded(use.in_flight_gib), use.is_whole] for use in table.memory
        ],
    }


def _rounded(size: float | None) -> float | None:
    return None if size is None or not math.isfinite(size) else round(size, 2)


def _routes(engine: EngineRoutes, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {
        "component": numbers[engine.component],
        "shards": len(engine.shards),
        "reaches": [[reach.value, engine.count(reach), TRANSPORTS[reach]] for reach in Reach if engine.count(reach)],
        "without_source": int((engine.sources < 0).sum()),
    }


def _finding(finding: Finding) -> dict[str, str]:
    """The finding with its place as an editor takes it, `file:line:column`."""
    where = finding.where
    return {
        "severity": finding.severity.value,
        "where": str(replace(where, path=())),
        "path": where.key_path,
        "what": finding.what,
        "why": finding.why,
        "fix": finding.fix,
    }
