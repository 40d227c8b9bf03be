"""Resolve placement strings: from segments of ranks to the resources of each process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.cluster.inventory import Ints, Inventory, ResourceTable, UnknownGroup
from roost.config.findings import MAX_PROCESSES, Findings, Where, counted, remainder
from roost.config.job import RankMap
from roost.config.ranks import Segment
from roost.placement.component_plan import offsets_of
from roost.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PlacementStrategy,
    kinds_by_label,
    report_unknown_group,
)


@dataclass(frozen=True, eq=False)
class BoundRanks:
    """A rank map on known machines: its strategy, its resource ranks, and whether process ranks were written."""

    strategy: PlacementStrategy
    hardware_ranks: Ints
    table: ResourceTable
    has_explicit_processes: bool


def bind_rank_map(requested: RankMap, inventory: Inventory, findings: Findings) -> BoundRanks | None:
    """Resolve the ranks of one component; mistakes in its placement string go to `findings`."""
    where = requested.where
    try:
        table = inventory.resources(requested.node_groups)
    except UnknownGroup as error:
        report_unknown_group(error, findings, requested.groups_where)
        return None
    if not len(table.nodes):
        return None  # a group without nodes, which is reported where it is declared
    if table.total == 0:
        kinds = " or ".join(dict.fromkeys(table.kinds))
        findings.error(
            "RST-P005",
            requested.groups_where,
            f"no {kinds} exists in {', '.join(requested.node_groups)}",
            fix=f"describe the {kinds} devices of the group, or name another node group",
        )
        return None
    pairs = _segment_ranges(requested.segments, table, findings, where)
    if pairs is None:
        return None
    strategy = (
        _node_strategy(pairs, table, findings, where)
        if table.counts_nodes
        else _device_strategy(pairs, table, findings, where)
    )
    if strategy is None:
        return None
    ranks = np.concatenate([np.arange(resources.start, resources.stop) for resources, _ in pairs])
    return BoundRanks(strategy, ranks, table, any(segment.processes is not None for segment in requested.segments))


Pair = tuple[range, range]  # resources, and the processes on them


def _segment_ranges(
    segments: tuple[Segment, ...], table: ResourceTable, findings: Findings, where: Where
) -> list[Pair] | None:
    """Resources and processes of each segment, checked: in range, ascending, and processes numbered 0, 1, 2, ..."""
    errors = findings.num_errors
    pairs: list[Pair] = []
    last_resource, next_process = -1, 0
    for segment in segments:
        if segment.resources is None and table.is_mixed:
            findings.error(
                "RST-P006",
                where,
                "'all' is ambiguous here",
                kinds_by_label(table),
                "write the node ranks, or name groups of one kind",
            )
            return None
        resources = range(table.total) if segment.resources is None else segment.resources
        if resources[-1] >= table.total:
            kind = "node" if table.counts_nodes else " or ".join(dict.fromkeys(table.kinds))
            findings.error(
                "RST-P007",
                where,
                f"{segment.text!r} names rank {resources[-1]}, which is out of range",
                f"{', '.join(table.labels)} has {counted(table.total, kind)}, counted from 0",
                f"use ranks up to {table.total - 1}",
            )
        if resources[0] <= last_resource:
            findings.error(
                "RST-P008",
                where,
                f"{segment.text!r} names rank {resources[0]} again or out of order",
                f"the segment before it ends at {last_resource}",
                "name each rank once, in ascending order",
            )
        processes = segment.processes or range(next_process, next_process + len(resources))
        if processes[0] != next_process:
            findings.error(
                "RST-P009",
                where,
                f"the processes of {segment.text!r} start at {processes[0]}",
                f"process ranks run from 0 without gaps, so {next_process} comes next",
                f"write {segment.text.split(':')[0].strip()}:{next_process}-{next_process + len(processes) - 1}",
            )
        last_resource, next_process = resources[-1], processes[-1] + 1
        if next_process > MAX_PROCESSES:
            what = f"makes {next_process:,} processes, more than the {MAX_PROCESSES:,} that Roost plans for"
            findings.error("RST-P010", where, what, fix="use fewer processes")
        pairs.append((resources, processes))
    return pairs if findings.num_errors == errors else None


def _device_strategy(
    pairs: list[Pair], table: ResourceTable, findings: Findings, where: Where
) -> PlacementStrategy | None:
    """Each process gets an equal slice of its segment's resources, or each resource an equal block of processes."""
    ranks, lengths = [], []
    for resources, processes in pairs:
        many, few = max(len(resources), len(processes)), min(len(resources), len(processes))
        more = "processes" if len(processes) > len(resources) else "resources"
        if many % few:
            findings.error(
                "RST-P011",
                where,
                f"{len(processes)} processes cannot be spread evenly over {len(resources)} resources",
                remainder(many, few),
                f"use {many // few * few} or {(many // few + 1) * few} {more}",
            )
            continue
        own = np.arange(resources.start, resources.stop)
        if len(resources) >= len(processes):
            ranks.append(own)
            lengths.append(np.full(len(processes), many // few))
        else:
            ranks.append(np.repeat(own, many // few))
            lengths.append(np.ones(len(processes), np.int64))
    if len(lengths) < len(pairs):
        return None
    offsets = offsets_of(np.concatenate(lengths))
    return FlexiblePlacementStrategy.from_columns(np.concatenate(ranks), offsets, table.labels)


def _node_strategy(
    pairs: list[Pair], table: ResourceTable, findings: Findings, where: Where
) -> PlacementStrategy | None:
    """Processes on nodes, in blocks; where they do not divide evenly the first nodes take one more."""
    nodes = []
    for resources, processes in pairs:
        share, rest = divmod(len(processes), len(resources))
        if share == 0:
            findings.error(
                "RST-P012",
                where,
                f"{len(processes)} processes cannot run across {len(resources)} nodes",
                "a process runs on one node",
                f"name {len(processes)} nodes, or at least {len(resources)} processes",
            )
            return None
        if rest:
            findings.warn(
                "RST-P013",
                where,
                f"{len(processes)} processes do not divide evenly over {len(resources)} nodes",
                f"{rest} of them {'gets' if rest == 1 else 'get'} {share + 1}, the others {share}",
                f"for an even split give {share * len(resources)} or {(share + 1) * len(resources)} processes",
            )
        counts = np.full(len(resources), share)
        counts[:rest] += 1
        nodes.append(np.repeat(np.arange(resources.start, resources.stop), counts))
    return NodePlacementStrategy(np.concatenate(nodes), table.labels)
