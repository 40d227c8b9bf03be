"""Runs of equal rows: what a person would say in one line about thousands of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from roost.cluster.inventory import Group
from roost.placement.table import PlacementTable
from roost.spec.ranks import spell_ranks


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """Processes `first` to `last` of a component: their nodes in order, and what those on one node hold."""

    first: int
    last: int
    nodes: tuple[int, ...]
    processes_per_node: int  # in a row on one node
    held: tuple[tuple[tuple[int, int], ...], ...]  # for each process on a node, its devices as (nodes away, index)
    group: str

    @property
    def ranks(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def per_node(self) -> str:
        """How many run on each node; dealt out in turn, the first nodes may have one more."""
        fewest = (self.last - self.first + 1) // len(set(self.nodes))
        most = -(-(self.last - self.first + 1) // len(set(self.nodes)))
        return str(most) if fewest == most else f"{fewest}-{most}"

    @property
    def node_ranks(self) -> str:
        """The nodes; a node that comes back after others are dealt to in turn."""
        distinct = sorted(set(self.nodes))
        spelled = spell_ranks(distinct, limit=6)
        return spelled if len(distinct) == len(self.nodes) else f"{spelled} in turn"

    @property
    def devices(self) -> str:
        """What each process on a node holds, in the shortest honest words."""
        if not any(self.held):
            return "-"
        if any(away for process in self.held for away, _ in process):
            return "; ".join(_across_nodes(process) for process in self.held[:4])
        lists = [[index for _, index in process] for process in self.held]
        flat = [index for listed in lists for index in listed]
        sizes = {len(listed) for listed in lists}
        if len(lists) == 1:
            return spell_ranks(flat)
        if len(sizes) == 1 and flat == list(range(flat[0], flat[0] + len(flat))):
            return f"{spell_ranks(flat)}, {sizes.pop()} each"
        if all(listed == lists[0] for listed in lists):
            return f"{spell_ranks(lists[0])}, shared by {len(lists)}"
        shown = [f"[{spell_ranks(listed)}]" for listed in lists[:8]]
        return " ".join(shown) + (" ..." if len(lists) > 8 else "")


def _across_nodes(devices: tuple[tuple[int, int], ...]) -> str:
    """The devices of a process that spans nodes, node by node."""
    parts = []
    for away, same in groupby(devices, key=lambda device: device[0]):
        place = "" if away == 0 else " of the next node" if away == 1 else f" of the node {away:+d} away"
        parts.append(spell_ranks([index for _, index in same]) + place)
    return " and ".join(parts)


def fold(table: PlacementTable) -> list[FoldedRow]:
    """The processes as runs: consecutive nodes whose processes hold the same devices are one row."""
    folded: list[FoldedRow] = []
    open_nodes: list[int] = []
    current: tuple[object, int, int, int] | None = (
        None  # pattern, first process, first process of a node, processes per node
    )
    end = 0
    for start, stop, pattern in _node_runs(table):
        if current is not None and current[0] != pattern:
            folded.append(_row(table, current[1], end, open_nodes, current[3]))
            current, open_nodes = None, []
        if current is None:
            current = (pattern, start, start, stop - start)
        open_nodes.append(int(table.nodes[start]))
        end = stop
    if current is not None:
        folded.append(_row(table, current[1], end, open_nodes, current[3]))
    return folded


def _node_runs(table: PlacementTable) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Consecutive processes on one node, with a key that is equal where devices and software are the same."""
    nodes = table.nodes.tolist()
    groups = [table.inventory.group(label) for label in table.labels]
    start = 0
    for stop in range(1, len(nodes) + 1):
        if stop < len(nodes) and nodes[stop] == nodes[start]:
            continue
        low, high = int(table.offsets[start]), int(table.offsets[stop])
        yield (
            start,
            stop,
            (
                (table.offsets[start : stop + 1] - low).tobytes(),
                table.device_ranks[low:high].tobytes(),
                (table.device_nodes[low:high] - nodes[start]).tobytes(),
                table.groups[start:stop].tobytes(),
                _software_key(groups[int(table.groups[start])], nodes[start]),
            ),
        )
        start = stop


def _software_key(group: Group, node: int) -> object:
    software = group.software_of(node)
    return software.env_vars, software.python_interpreter_path


def _row(table: PlacementTable, start: int, stop: int, nodes: list[int], per_node: int) -> FoldedRow:
    held = tuple(
        tuple((node - placement.cluster_node_rank, index) for node, index in placement.devices)
        for placement in table[start : start + per_node]
    )
    return FoldedRow(start, stop - 1, tuple(nodes), per_node, held, table.labels[int(table.groups[start])])
