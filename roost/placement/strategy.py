"""Base of placement strategies: interface, checks and errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from roost.cluster.inventory import Inventory, UnknownGroup
from roost.cluster.resources import Ints, ResourceTable
from roost.config.findings import Findings, Where, counted, did_you_mean, shown
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.ranks import spell_ranks
from roost.placement.placement import Placement
from roost.placement.table import PlacementTable

GroupLabels = str | Sequence[str] | None


class PlacementStrategy(ABC):
    """Places the processes of one component. Planning never changes the strategy."""

    labels: tuple[str, ...]

    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placement of each process on a live cluster or an `Inventory`.

        >>> from roost import PackedPlacementStrategy
        >>> inventory = Inventory.from_dict({"nodes": [{"accelerators": 4}]})
        >>> [p.local_hardware_ranks for p in PackedPlacementStrategy(0, 3, 2).get_placement(inventory)]
        [[0, 1], [2, 3]]
        """
        findings = Findings()
        table = self.place(inventory_of(cluster), findings, isolate=isolate_accelerator)
        findings.raise_errors()
        return [] if table is None else list(table)

    @abstractmethod
    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        """Return all placements as columns, or None with errors in `findings`."""

    def _resources(self, inventory: Inventory, findings: Findings, where: Where) -> ResourceTable | None:
        try:
            return inventory.resources(self.labels)
        except UnknownGroup as error:
            report_unknown_group(error, findings, where)
            return None


def inventory_of(cluster: Any) -> Inventory:
    """Return the inventory of a live cluster, or the inventory itself."""
    found = cluster if isinstance(cluster, Inventory) else getattr(cluster, "inventory", None)
    if not isinstance(found, Inventory):
        raise TypeError(
            f"expected a Cluster or an Inventory, got {type(cluster).__name__}; "
            "describe machines with Inventory.from_dict({'nodes': [{'accelerators': 8}]})"
        )
    return found


def report_unknown_group(error: UnknownGroup, findings: Findings, where: Where) -> None:
    findings.error(
        "RST-P014",
        where,
        f"names node group {error.label}, which is not declared",
        did_you_mean(error.label, error.known),
        f"use one of {', '.join(error.known)}, or declare it in node_groups",
    )


def as_labels(label: GroupLabels) -> tuple[str, ...]:
    """Normalize group labels: None (the whole cluster), one label, a comma-separated string, or a sequence."""
    if label is None:
        return (CLUSTER_GROUP,)
    parts = label.split(",") if isinstance(label, str) else [str(part) for part in label]
    return tuple(part.strip() for part in parts)


def without_devices(
    inventory: Inventory, table: ResourceTable, nodes: Ints, groups: Ints, isolate: bool
) -> PlacementTable:
    nothing = np.zeros(0, np.int64)
    kinds = ("node",) * len(table.labels)
    return PlacementTable(
        inventory, table.labels, kinds, nodes, groups, np.zeros(len(nodes) + 1, np.int64), nothing, nothing, isolate
    )


def refuse(code: str, what: str, fix: str, why: str = "") -> None:
    findings = Findings()
    findings.error(code, Where(), what, why, fix)
    findings.raise_errors()


def is_list(value: object) -> bool:
    return isinstance(value, list | tuple | range | np.ndarray)


def check_count(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        refuse("RST-P039", f"{name} is {shown(value)}; it must be a whole number of at least 1", f"give {name}=1")


def check_ranks(ranks: Sequence[int] | Ints, owner: str) -> None:
    if not len(ranks):
        refuse("RST-P036", f"{owner} has no ranks", "name at least one rank")
    if isinstance(ranks, np.ndarray) and ranks.dtype.kind in "iu" and ranks.ndim == 1 and ranks.min() >= 0:
        return
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank <= 10**9:
            refuse(
                "RST-P037",
                f"{owner} has the rank {shown(rank)}; ranks are whole numbers that are not negative",
                "number ranks from 0",
            )


def has_devices(
    table: ResourceTable,
    findings: Findings,
    where: Where,
    fix: str = "name another node group, place processes on nodes (node_group: node, NodePlacementStrategy), "
    "or simulate accelerators (export ROOST_FAKE_ACCELERATORS=8)",
) -> bool:
    if not table.counts_nodes and table.total > 0:
        return True
    what = (
        "have neither accelerators nor declared hardware"
        if table.counts_nodes
        else f"have no {' or '.join(table.kinds)}"
    )
    findings.error(
        "RST-P015",
        where,
        f"the nodes of {', '.join(table.labels)} {what}, so no device can be assigned there",
        fix=fix,
    )
    return False


def in_range(ranks: Ints, table: ResourceTable, findings: Findings, where: Where, noun: str = "rank") -> bool:
    beyond = ranks[ranks >= table.total]
    if not len(beyond):
        return True
    kind = "node" if table.counts_nodes else " or ".join(dict.fromkeys(table.kinds))
    findings.error(
        "RST-P007",
        where,
        f"{noun} {beyond[0]} is out of range",
        f"{', '.join(table.labels)} has {counted(table.total, kind)}, counted from 0",
        f"use {noun}s up to {table.total - 1}" if table.total else "name another node group",
    )
    return False


def on_single_nodes(
    ranks: Ints,
    offsets: Ints,
    table: ResourceTable,
    inventory: Inventory,
    findings: Findings,
    where: Where,
    isolate: bool,
) -> PlacementTable | None:
    """The placements of processes whose resources must each lie on one node, of one kind, and be different devices."""
    entries = table.entries(ranks)
    nodes, local = table.nodes[entries], ranks - table.starts[entries]
    first = offsets[:-1]
    lengths = np.diff(offsets)
    if len(ranks) > len(first):
        astray = np.flatnonzero(nodes != np.repeat(nodes[first], lengths))
        if len(astray):
            process = int(np.searchsorted(offsets, astray[0], side="right") - 1)
            own = slice(offsets[process], offsets[process + 1])
            findings.error(
                "RST-P016",
                where,
                f"process {process} would span nodes; all its resources must be on the same node",
                f"ranks {spell_ranks(ranks[own].tolist())} are on nodes {spell_ranks(np.unique(nodes[own]).tolist())}",
                "give it resources of one node",
            )
            return None
        if len(table.labels) > 1 and not _of_one_kind(entries, offsets, nodes, local, table, findings, where):
            return None
    return PlacementTable(
        inventory, table.labels, table.kinds, nodes[first], table.groups[entries[first]], offsets, nodes, local, isolate
    )


def _of_one_kind(
    entries: Ints, offsets: Ints, nodes: Ints, local: Ints, table: ResourceTable, findings: Findings, where: Where
) -> bool:
    """Only several groups can give a process devices of two kinds, or the same device under two ranks."""
    kinds = [table.kinds[group] for group in table.groups[entries].tolist()]
    devices = list(zip(kinds, nodes.tolist(), local.tolist(), strict=True))
    for process, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        own = devices[start:stop]
        if len({kind for kind, _, _ in own}) > 1:
            findings.error(
                "RST-P017",
                where,
                f"process {process} would hold {' and '.join(sorted({kind for kind, _, _ in own}))}",
                fix="give it resources of one kind",
            )
            return False
        if len(set(own)) < len(own):
            findings.error(
                "RST-P018",
                where,
                f"process {process} would hold the same device twice",
                f"node groups {', '.join(table.labels)} overlap",
                "name groups that do not overlap",
            )
            return False
    return True
