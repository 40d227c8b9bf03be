"""Placement strategies: from written ranks to the node and devices of each process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.cluster.inventory import Inventory
from roost.cluster.resources import Ints
from roost.config.findings import Findings, Where, shown
from roost.placement.strategy import (
    GroupLabels,
    PlacementStrategy,
    as_labels,
    check_count,
    check_ranks,
    has_devices,
    in_range,
    is_list,
    on_single_nodes,
    refuse,
    without_devices,
)
from roost.placement.table import PlacementTable


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
        self._set(flat, _offsets(lengths), node_group_label)

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
        if table is None or not has_devices(table, findings, where):
            return None
        if not in_range(self.ranks, table, findings, where):
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
        count, block = (
            self.end_hardware_rank - self.start_hardware_rank + 1,
            self.num_hardware_per_process * self.stride,
        )
        if count % block:
            whole = count // block * block
            refuse(
                "RST-P041",
                f"{count} resources cannot be cut into blocks of {block}, so some would be left over",
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
        """One row per process. A block of per_process * stride ranks holds `stride` interleaved processes."""
        per, stride = self.num_hardware_per_process, self.stride
        ranks = np.arange(self.start_hardware_rank, self.end_hardware_rank + 1, dtype=np.int64)
        return ranks.reshape(-1, per, stride).swapaxes(1, 2).reshape(-1, per)

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        if table is None or not has_devices(table, findings, where):
            return None
        if not in_range(np.array([self.start_hardware_rank, self.end_hardware_rank]), table, findings, where):
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
        if not in_range(self.node_ranks, nodes, findings, where):
            return None
        entries = nodes.entries(self.node_ranks)
        return without_devices(inventory, nodes, nodes.nodes[entries], nodes.groups[entries], isolate)


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _sorted_processes(ranks: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Sort ranks within each process, and processes by their first rank."""
    if len(ranks) < 2 or bool(np.all(ranks[1:] > ranks[:-1])):
        return ranks, offsets
    lengths = np.diff(offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    ranks = ranks[np.lexsort((ranks, owner))]
    order = np.argsort(ranks[offsets[:-1]], kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return ranks[np.argsort(place[owner], kind="stable")], _offsets(lengths[order])
