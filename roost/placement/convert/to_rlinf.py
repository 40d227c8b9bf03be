"""A plan as RLinf's `cluster` section: ranks of node groups, with the groups written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from roost.cluster.inventory import Group, Inventory
from roost.config.findings import Findings, Where
from roost.config.job import Notation, Role
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan

PACKED = "PackedPlacementStrategy"
_KEEP = "keep the notation it is written in"


def to_rlinf(plan: Plan, findings: Findings) -> dict[str, Any]:
    inventory = plan.inventory
    sizes = sorted(set(inventory.accelerator_counts.tolist()))
    if len(sizes) > 1:
        findings.error(
            "RST-N052",
            Where(path=("nodes",)),
            "a config describes nodes of one size only; the others are for an inventory",
            f"nodes have {', '.join(map(str, sizes))} accelerators",
            _KEEP,
        )
    cluster: dict[str, Any] = {
        "num_nodes": inventory.num_nodes,
        "num_gpus_per_node": sizes[-1] if sizes else 0,
        "component_placement": {part.name: _placement(part, findings) for part in plan.components},
    }
    if inventory.groups:
        cluster["node_groups"] = [_group(group, inventory) for group in inventory.groups]
    for part in plan.components:
        if part.env:
            findings.error(
                "RST-N051",
                Where(path=(part.name,)),
                "RLinf sets variables for node groups, not for a component",
                fix=_KEEP,
            )
    sections = _parallel_sizes(plan)
    actor = next((part for part in plan.components if part.name == "actor"), None)
    if actor is not None and plan.notation is Notation.RLINF:
        flags = {f"offload_{part}": True for part in actor.model.offloads}
        sections["actor"] = {**flags, **sections.get("actor", {})} if flags or "actor" in sections else {}
    return {"cluster": cluster, **{name: section for name, section in sections.items() if section}}


def _parallel_sizes(plan: Plan) -> dict[str, Any]:
    """The sizes that the model-parallel layout cuts by, for plans that it made."""
    sections: dict[str, Any] = {}
    for part in plan.components:
        if part.strategy != PACKED or part.role not in (Role.LEARNER, Role.ENGINE, Role.SCORER):
            continue
        sizes = part.parallel
        if part.role is Role.ENGINE:
            sections[part.name] = {"tensor_parallel_size": sizes.tensor, "pipeline_parallel_size": sizes.pipeline}
        else:
            model = {"tensor_model_parallel_size": sizes.tensor, "pipeline_model_parallel_size": sizes.pipeline}
            sections[part.name] = {
                "model": model | ({"context_parallel_size": sizes.context} if sizes.context > 1 else {})
            }
    if "inference" in sections:
        sections["algorithm"] = {"recompute_logprobs": True}  # what the component is for
    return sections


def _placement(part: ComponentPlan, findings: Findings) -> str | dict[str, str]:
    if part.strategy == PACKED:
        text = spell_ranks(part.hardware_ranks.tolist(), limit=10**9)
    elif len(part.table.device_nodes):
        text = _devices_text(part, findings)
    else:
        text = _nodes_text(part, findings)
    groups = part.node_groups
    if groups == (CLUSTER_GROUP,):
        return text
    return {"node_group": ",".join(groups), "placement": text}


def _devices_text(part: ComponentPlan, findings: Findings) -> str:
    """The resource ranks of each process as segments; what no segment can say is a finding."""
    table = part.table
    resources = table.inventory.resources(part.node_groups)
    entries = zip(resources.nodes.tolist(), resources.groups.tolist(), resources.starts.tolist(), strict=False)
    first = {(node, group): start for node, group, start in entries}
    held: list[tuple[int, int]] = []
    for placement, group in zip(table, table.groups.tolist(), strict=True):
        ranks = [first.get((node, group), 0) + index for node, index in placement.devices]
        is_run = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        if not is_run or len({node for node, _ in placement.devices}) > 1:
            what = f"RLinf gives a process a run of ranks on one node, and process {placement.rank} holds others"
            held_words = ", ".join(f"device {index} of node {node}" for node, index in placement.devices[:8])
            findings.error("RST-N053", Where(path=(part.name,)), what, f"it holds {held_words}", _KEEP)
            return ""
        held.append((ranks[0], len(ranks)))
    return _segments(part, held, findings)


def _segments(part: ComponentPlan, held: list[tuple[int, int]], findings: Findings) -> str:
    """Segments from the first rank and the number of ranks of each process.

    A segment is a run of processes with equally many ranks each that follow one another, or a run of ranks with equally
    many processes on each.
    """
    blocks = [(rank, size, sum(1 for _ in same)) for (rank, size), same in groupby(held)]
    runs: list[list[int]] = []  # first rank, ranks per process, processes per rank, blocks
    for rank, size, sharers in blocks:
        place = Where(path=(part.name,))
        if size > 1 and sharers > 1:
            findings.error(
                "RST-N053", place, f"RLinf shares single ranks, and {sharers} processes share {size}", fix=_KEEP
            )
            return ""
        last = runs[-1][0] + runs[-1][1] * runs[-1][3] - 1 if runs else -1
        if rank <= last:
            findings.error(
                "RST-N053",
                place,
                f"RLinf's ranks ascend, and a process goes back to rank {rank} after {last}",
                fix=_KEEP,
            )
            return ""
        if runs and runs[-1][1:3] == [size, sharers] and rank == last + 1:
            runs[-1][3] += 1
        else:
            runs.append([rank, size, sharers, 1])
    return ",".join(_spelled(runs))


def _spelled(runs: list[list[int]]) -> Iterator[str]:
    process = 0
    for rank, size, sharers, count in runs:
        ranks = spell_ranks(list(range(rank, rank + size * count)))
        is_implied = size == sharers == 1
        yield ranks if is_implied else f"{ranks}:{spell_ranks(list(range(process, process + sharers * count)))}"
        process += sharers * count


def _nodes_text(part: ComponentPlan, findings: Findings) -> str:
    """Blocks of processes on nodes, one segment for each node unless each has one process."""
    table = part.table
    resources = table.inventory.resources(part.node_groups).node_table()
    index_of = {int(node): index for index, node in enumerate(resources.nodes)}
    ranks = [index_of.get(node, 0) for node in table.nodes.tolist()]
    if ranks != sorted(ranks):
        findings.error(
            "RST-N053",
            Where(path=(part.name,)),
            "RLinf fills nodes in order, and these processes go round them in turn",
            fix=_KEEP,
        )
        return ""
    values, counts = np.unique(ranks, return_counts=True)
    if len(set(counts.tolist())) == 1 and values.tolist() == list(range(int(values[0]), int(values[-1]) + 1)):
        processes = "" if counts[0] == 1 else f":0-{len(ranks) - 1}"
        return spell_ranks(values.tolist()) + processes
    ends = np.cumsum(counts).tolist()
    blocks = zip(values.tolist(), counts.tolist(), ends, strict=True)
    return ",".join(f"{value}:{spell_ranks(list(range(end - count, end)))}" for value, count, end in blocks)


def _group(group: Group, inventory: Inventory) -> dict[str, Any]:
    nodes = group.node_ranks.tolist()
    described: dict[str, Any] = {"label": group.label, "node_ranks": spell_ranks(nodes, limit=10**9)}
    if group.software:
        described["env_configs"] = [
            {
                "node_ranks": spell_ranks(sorted(part.node_ranks), limit=10**9),
                **({"env_vars": [{key: value} for key, value in part.env_vars]} if part.env_vars else {}),
                **({"python_interpreter_path": part.python_interpreter_path} if part.python_interpreter_path else {}),
            }
            for part in group.software
        ]
    if group.ignore_hardware:
        described["ignore_hardware"] = True
    if group.hardware_type is not None:
        items = [
            {"node_rank": node, **item}
            for node in nodes
            for item in inventory.nodes[node].hardware.get(group.hardware_type, ())
        ]
        described["hardware"] = {"type": group.hardware_type, "configs": items}
    return described
