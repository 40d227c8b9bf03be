"""Placement strategies: from written ranks to the node and devices of each process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.cluster.inventory import NODE, Ints, Inventory, ResourceTable, UnknownGroup
from roost.config.findings import Findings, Where, counted, did_you_mean, shown
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import PlacementTable, offsets_of
from roost.placement.placement import Placement

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
    """The placements of processes that hold no devices."""
    nothing = np.zeros(0, np.int64)
    kinds = (NODE,) * len(table.labels)
    return PlacementTable(
        inventory, table.labels, kinds, nodes, groups, np.zeros(len(nodes) + 1, np.int64), nothing, nothing, isolate
    )


def refuse(code: str, what: str, fix: str, why: str = "") -> None:
    """Raise ConfigError with one finding."""
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


def kinds_by_label(table: ResourceTable) -> str:
    """The kind of resource that each node group counts, as text."""
    return ", ".join(f"{label} counts {kind}s" for label, kind in zip(table.labels, table.kinds, strict=True))


def check_has_devices(
    table: ResourceTable,
    findings: Findings,
    where: Where,
    fix: str = "name another node group, place processes on nodes (node_group: node, NodePlacementStrategy), "
    "or simulate accelerators (export ROOST_FAKE_ACCELERATORS=8)",
) -> bool:
    """Return True if the node groups have devices to assign; report it if not."""
    if not table.counts_nodes and table.total > 0:
        return True
    if table.counts_nodes and len(set(table.kinds)) > 1:
        with_devices = [label for label, kind in zip(table.labels, table.kinds, strict=True) if kind != NODE]
        what = f"the node groups {', '.join(table.labels)} are counted in nodes together"
        fix = f"name groups with devices only: {', '.join(with_devices)}"
        findings.error("RST-P015", where, what, kinds_by_label(table), fix)
        return False
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


def check_in_range(ranks: Ints, table: ResourceTable, findings: Findings, where: Where, noun: str = "rank") -> bool:
    """Return True if all ranks exist; report the first that does not."""
    beyond = ranks[ranks >= table.total]
    if not len(beyond):
        return True
    kind = "node" if table.counts_nodes else " or ".join(dict.fromkeys(table.kinds))
    fix = f"use {noun}s up to {table.total - 1}" if table.total else "name another node group"
    if noun == "device":  # of a list, or of a count in a job of another framework
        fix = f"use devices up to {table.total - 1}, or give an inventory with more"
    findings.error(
        "RST-P007",
        where,
        f"{noun} {beyond[0]} is out of range",
        f"{', '.join(table.labels)} has {counted(table.total, kind)}, counted from 0",
        fix,
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
    """The placements of processes, each with different devices of one kind on one node; None if one has others."""
    entries = table.entries(ranks)
    nodes, local = table.nodes[entries], ranks - table.starts[entries]
    first = offsets[:-1]
    lengths = np.diff(offsets)
    if len(ranks) > len(first):
        elsewhere = np.flatnonzero(nodes != np.repeat(nodes[first], lengths))
        if len(elsewhere):
            process = int(np.searchsorted(offsets, elsewhere[0], side="right") - 1)
            own = slice(offsets[process], offsets[process + 1])
            findings.error(
                "RST-P016",
                where,
                f"process {process} would span nodes; all its resources must be on the same node",
                f"ranks {spell_ranks(ranks[own].tolist())} are on nodes {spell_ranks(np.unique(nodes[own]).tolist())}",
                "give it resources of one node",
            )
            return None
        if len(table.labels) > 1 and not _check_devices(entries, offsets, nodes, local, table, findings, where):
            return None
        if len(table.labels) > 1:  # ranks of several groups may name devices of a node out of order
            local = local[np.lexsort((local, np.repeat(np.arange(len(first)), lengths)))]
    return PlacementTable(
        inventory, table.labels, table.kinds, nodes[first], table.groups[entries[first]], offsets, nodes, local, isolate
    )


def _check_devices(
    entries: Ints, offsets: Ints, nodes: Ints, local: Ints, table: ResourceTable, findings: Findings, where: Where
) -> bool:
    """Return True if each process has different devices of one kind; only with several groups may one have others."""
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


@dataclass(frozen=True, eq=False)
class FlexiblePlacementStrategy(PlacementStrategy):
    """Each process gets the resources listed for it, all on one node.

    Ranks are sorted within a process, and processes by their first rank.

    >>> FlexiblePlacementStrategy([[2], [1, 0]]).hardware_ranks_list
    [[0, 1], [2]]
    """

    ranks: Ints
    offsets: Ints
    labels: tuple[str, ...]

    def __init__(self, hardware_ranks_list: Sequence[Sequence[int]], node_group_label: GroupLabels = None) -> None:
        if not is_list(hardware_ranks_list) or not all(is_list(listed) for listed in hardware_ranks_list):
            refuse(
                "RST-P035",
                f"hardware_ranks_list is {shown(hardware_ranks_list)}; it must be a list of lists of ranks",
                "list the ranks of each process, such as [[0], [1]]",
            )
        if not len(hardware_ranks_list):
            refuse(
                "RST-P036",
                "hardware_ranks_list must not be empty",
                "list the ranks of each process, such as [[0], [1]]",
            )
        for process, listed in enumerate(hardware_ranks_list):
            check_ranks(listed, f"process {process}")
            if len(set(listed)) < len(listed):
                refuse(
                    "RST-P038",
                    f"the ranks of a process must be unique: process {process} has {shown(list(listed))}",
                    "name each rank once",
                )
        lengths = np.array([len(listed) for listed in hardware_ranks_list], np.int64)
        flat = np.array([rank for listed in hardware_ranks_list for rank in listed], np.int64)
        self._set(flat, offsets_of(lengths), node_group_label)

    @classmethod
    def from_columns(
        cls, ranks: Ints, offsets: Ints, node_group_label: GroupLabels = None
    ) -> FlexiblePlacementStrategy:
        """Create a strategy from columns: process i gets `ranks[offsets[i]:offsets[i + 1]]`."""
        strategy = cls.__new__(cls)
        strategy._set(ranks, offsets, node_group_label)
        return strategy

    def _set(self, ranks: Ints, offsets: Ints, node_group_label: GroupLabels) -> None:
        ranks, offsets = _sorted_processes(ranks, offsets)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "labels", as_labels(node_group_label))

    @property
    def hardware_ranks_list(self) -> list[list[int]]:
        return [part.tolist() for part in np.split(self.ranks, self.offsets[1:-1])]

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        if table is None or not check_has_devices(table, findings, where):
            return None
        if not check_in_range(self.ranks, table, findings, where):
            return None
        return on_single_nodes(self.ranks, self.offsets, table, inventory, findings, where, isolate)


@dataclass(frozen=True)
class PackedPlacementStrategy(PlacementStrategy):
    """Fills nodes one after the other: each process gets `num_hardware_per_process` resources, `stride` apart.

    >>> PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2).hardware_ranks_list
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """

    start_hardware_rank: int
    end_hardware_rank: int
    num_hardware_per_process: int = 1
    stride: int = 1
    node_group: GroupLabels = None

    def __post_init__(self) -> None:
        check_ranks([self.start_hardware_rank, self.end_hardware_rank], "the strategy")
        check_count(self.num_hardware_per_process, "num_hardware_per_process")
        check_count(self.stride, "stride")
        if self.end_hardware_rank < self.start_hardware_rank:
            refuse(
                "RST-P040",
                f"end_hardware_rank {self.end_hardware_rank} is before start_hardware_rank {self.start_hardware_rank}",
                "swap the two",
            )
        count = self.end_hardware_rank - self.start_hardware_rank + 1
        block = self.num_hardware_per_process * self.stride
        if count % block:
            whole = count // block * block
            refuse(
                "RST-P041",
                f"{count} resources cannot be split into blocks of {block}, so some would be left over",
                f"end at rank {self.start_hardware_rank + (whole or block) - 1}",
                f"{self.num_hardware_per_process} per process * stride {self.stride}; {count % block} would be left",
            )

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        return as_labels(self.node_group)

    @property
    def hardware_ranks_list(self) -> list[list[int]]:
        ranks: list[list[int]] = self._ranks().tolist()
        return ranks

    def _ranks(self) -> Ints:
        """One row of ranks per process. A block of per_process * stride ranks holds `stride` interleaved processes."""
        per_process = self.num_hardware_per_process
        ranks = np.arange(self.start_hardware_rank, self.end_hardware_rank + 1, dtype=np.int64)
        return ranks.reshape(-1, per_process, self.stride).swapaxes(1, 2).reshape(-1, per_process)

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        if table is None or not check_has_devices(table, findings, where):
            return None
        if not check_in_range(np.array([self.start_hardware_rank, self.end_hardware_rank]), table, findings, where):
            return None
        ranks = self._ranks()
        offsets = np.arange(len(ranks) + 1) * self.num_hardware_per_process
        return on_single_nodes(ranks.reshape(-1), offsets, table, inventory, findings, where, isolate)


@dataclass(frozen=True, eq=False)
class NodePlacementStrategy(PlacementStrategy):
    """Puts each process on a node without assigning devices; ranks are sorted.

    >>> inventory = Inventory.from_dict({"nodes": [{"accelerators": 2}, {}]})
    >>> [p.cluster_node_rank for p in NodePlacementStrategy([1, 0, 1]).get_placement(inventory)]
    [0, 1, 1]
    """

    node_ranks: Ints
    labels: tuple[str, ...]

    def __init__(self, node_ranks: Sequence[int] | Ints, node_group_label: GroupLabels = None) -> None:
        if not is_list(node_ranks):
            refuse(
                "RST-P035",
                f"node_ranks is {shown(node_ranks)}; it must be a list",
                "list the node of each process, such as [0] * 4",
            )
        if not len(node_ranks):
            refuse("RST-P036", "node_ranks must not be empty", "list the node of each process, such as [0] * 4")
        check_ranks(node_ranks, "the strategy")
        object.__setattr__(self, "node_ranks", np.sort(np.asarray(node_ranks, np.int64)))
        object.__setattr__(self, "labels", as_labels(node_group_label))

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        if table is None:
            return None
        nodes = table.node_table()
        if len(np.unique(nodes.nodes)) < len(nodes.nodes):
            findings.error(
                "RST-P019",
                where,
                f"node groups {', '.join(self.labels)} have nodes in common, so node ranks would be ambiguous",
                fix="name groups without common nodes",
            )
            return None
        if not check_in_range(self.node_ranks, nodes, findings, where):
            return None
        entries = nodes.entries(self.node_ranks)
        return without_devices(inventory, nodes, nodes.nodes[entries], nodes.groups[entries], isolate)


def _sorted_processes(ranks: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Sort ranks within each process, and processes by their first rank."""
    if len(ranks) < 2 or bool(np.all(ranks[1:] > ranks[:-1])):
        return ranks, offsets
    lengths = np.diff(offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    ranks = ranks[np.lexsort((ranks, owner))]
    order = np.argsort(ranks[offsets[:-1]], kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return ranks[np.argsort(position[owner], kind="stable")], offsets_of(lengths[order])
