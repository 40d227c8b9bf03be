"""Self-contained HTML pages: everything inlined, nothing loaded, no user text executed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import numpy as np

from roost.cluster.inventory import Ints, Inventory
from roost.config.findings import Finding
from roost.placement.component_plan import ComponentPlan
from roost.placement.explain import shown_mesh, shown_sizes
from roost.placement.memory.phases import Phase
from roost.placement.memory.traffic import micro_batch_tokens, micro_batch_traffic
from roost.placement.plan import Plan
from roost.placement.routes import TRANSPORTS, EngineRoutes, Reach
from roost.view.grid_model import Grid, Holder, Mark, NodeLayout, Run, grid, progressions
from roost.view.phases import DevicePhases, device_phases, machine_text
from roost.view.text import machines_line, sent_by_dimension

_MARKER = re.compile(r"\{\{(\w+)\}\}")
# Characters that could end a script element, or that older browsers take for the end of a line inside one.
_ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def one_file_page(
    read: Callable[[str], str],
    template: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    title: str,
    data: Mapping[str, Any],
) -> str:
    """A page of a template with markers, styles and scripts in the order given, and data for the scripts.

    >>> files = {"page.html": "<title>{{title}}</title><script>{{data}}</script>", "a.css": "", "b.js": ""}
    >>> one_file_page(files.__getitem__, "page.html", ["a"], ["b"], "<me>", {"text": "</script>{{title}}"})
    '<title>&lt;me&gt;</title><script>{"text":"\\\\u003c/script\\\\u003e{{title}}"}</script>'
    """
    style = "\n".join(read(f"{name}.css") for name in styles)
    # Wrapped in a function, so that the page's names do not become globals.
    script = "\n".join(['"use strict";', "(() => {", *(read(f"{name}.js") for name in scripts), "})();"])
    parts = {
        "policy": html.escape(_policy(style, script)),
        "title": html.escape(_printable(title)),
        "style": style,
        "script": script,
        "data": embedded_json(data),
    }
    # Fill all markers in one pass, so that a marker inside user text stays text.
    return _MARKER.sub(lambda found: parts[found[1]], read(template))


def embedded_json(data: Mapping[str, Any]) -> str:
    """Encode JSON so that it is safe inside a script element.

    >>> embedded_json({"name": "</script><b>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], text)


def _policy(style: str, script: str) -> str:
    """Content security policy: only this style and this script, by their hashes."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; base-uri 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _printable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: paths may contain arbitrary bytes."""
    return text.encode("utf-8", "replace").decode()


Packed = int | list[int]


def page_data(plan: Plan) -> dict[str, Any]:
    """All data of the page, as JSON types."""
    result = grid(plan)
    numbers = {part.name: number for number, part in enumerate(plan.components)}
    starts = _Starts(plan)
    layouts: dict[int, int] = {}  # by identity: runs of equal nodes share their layout
    described = []
    for run in result.runs:
        if id(run.layout) not in layouts:
            layouts[id(run.layout)] = len(layouts)
            described.append(_layout(run, numbers, starts))
    return {
        "file": plan.file or "plan",
        "notation": plan.notation.value,
        "mode": plan.mode.value,
        "machines": machines_line(plan.inventory),
        "processes": sum(part.world_size for part in plan.components),
        "free": result.num_free,
        "components": [_component(part, mark) for part, mark in zip(plan.components, result.marks, strict=True)],
        "layouts": described,
        "runs": [_run(run, layouts[id(run.layout)], numbers) for run in result.runs],
        "starts": starts.described,
        **_nodes(plan.inventory, result),
        "phases": [phase.value for phase in Phase],
        "is_async": plan.residency.is_async,
        "classes": [_class(table, numbers) for table in device_phases(plan)],
        "routes": [_routes(engine, numbers) for engine in plan.routes.engines],
        "traffic": [sent for part in plan.components if (sent := _traffic(part, numbers[part.name]))],
        "findings": [_finding(finding) for finding in plan.warnings],
    }


def pack(column: Sequence[int] | Ints) -> Packed:
    """Numbers as a flat list of progressions (start, step, length); a single number stays itself.

    >>> pack([7]), pack([0, 1, 2, 3]), pack([5, 5, 5, 0, 8])
    (7, [0, 1, 4], [5, 0, 3, 0, 8, 2])
    """
    if len(column) == 1:
        return int(column[0])
    return [number for part in progressions(np.asarray(column, np.int64)) for number in part]


def _component(part: ComponentPlan, mark: Mark) -> dict[str, Any]:
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
        "parallel": shown_mesh(part) or shown_sizes(part),
        "managed_by": part.managed_by,
        "unused": part.model.unused_because,
        "spans": not np.array_equal(owners, part.table.device_nodes),  # whether a process holds devices of other nodes
    }


def _layout(run: Run, numbers: Mapping[str, int], starts: _Starts) -> dict[str, Any]:
    layout = run.layout
    return {
        "machine": machine_text(layout.machine, layout.machine.accelerators) if layout.machine.accelerators else "",
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
    """First node, step, number of nodes, layout, and for each component its lowest rank on each node."""
    ranks = {numbers[name]: pack(column) for name, column in run.first_ranks.items()}
    return [run.nodes[0], run.nodes.step, len(run.nodes), layout, ranks]


@dataclass
class _Starts:
    """Distinct start settings of processes (group, environment, interpreter)."""

    plan: Plan
    described: list[dict[str, Any]] = field(default_factory=list)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def of(self, run: Run, holder: Holder) -> Packed:
        """Index of the start settings of each process of a component on the run's first node."""
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


def _nodes(inventory: Inventory, result: Grid) -> dict[str, Any]:
    """Properties of single nodes: host names, configs of declared devices, and group labels."""
    hosts = [node.host for node in inventory.nodes]
    configs = {
        rank: {kind: [_in_words(item) for item in items] for kind, items in node.hardware.items() if any(items)}
        for rank, node in enumerate(inventory.nodes)
        if any(any(items) for items in node.hardware.values())
    }
    return {
        "num_nodes": result.num_nodes,
        "hosts": hosts if any(hosts) else [],
        "configs": configs,
        "groups": [[group.label, pack(group.node_ranks)] for group in inventory.groups],
    }


def _in_words(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Convert a config to text: JSON cannot hold all values that users may write."""
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
                    for cell, word in zip(row.cells, row.text, strict=True)
                ],
            ]
            for row in table.rows
        ],
        "memory": [
            [use.text, _rounded(use.total_gib), _rounded(use.in_flight_gib), use.is_whole] for use in table.memory
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
        "disk_note": engine.disk_note.removeprefix("; "),
    }


def _traffic(part: ComponentPlan, number: int) -> dict[str, Any] | None:
    traffic = micro_batch_traffic(part)
    if traffic is None or not traffic.total:
        return None
    sent = [[name, round(size)] for name, size in sent_by_dimension(traffic)]
    return {"component": number, "tokens": micro_batch_tokens(part), "sent": sent}


def _finding(finding: Finding) -> dict[str, str]:
    """The finding with its position as editors take it, `file:line:column`."""
    where = finding.where
    return {
        "severity": finding.severity.value,
        "code": finding.code,
        "where": str(replace(where, path=())),
        "path": where.key_path,
        "what": finding.what,
        "why": finding.why,
        "fix": finding.fix,
    }


# One style and one script, in this order: what comes later overrides, and the last script starts the page.
STYLES = ("page", "grid", "details", "sections", "narrow", "print")
SCRIPTS = (
    "elements", "model", "node_filter", "tip", "rows", "cells", "grid", "overview", "details", "phases", "routes",
    "findings", "legend", "page",
)  # fmt: skip


def plan_to_html(plan: Plan) -> str:
    """The page of a plan: its grid, details of every process, phases, weight routes, traffic and findings.

    >>> import roost
    >>> page = plan_to_html(roost.plan({"num_gpus_per_node": 2, "actor_train": {"device_mapping": "0-1"}}))
    >>> page.startswith("<!doctype html>"), "<link" in page, "http" in page.replace("http-equiv", "")
    (True, False, False)
    """
    title = f"{plan.file or 'plan'}: Roost plan"
    return one_file_page(_page_file, "plan.html", STYLES, SCRIPTS, title, page_data(plan))


def _page_file(name: str) -> str:
    return (files("roost.view") / "page" / name).read_text(encoding="utf-8")
