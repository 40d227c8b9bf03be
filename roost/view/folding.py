"""Runs of equal rows: what a person would say in one line about thousands of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from roost.cluster.inventory import Group
from roost.config.ranks import spell_ranks
from roost.placement.table import PlacementTable

SHOWN_PROCESSES = 8  # of a node, where they cannot be said in fewer words


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """Processes `first` to `last` of a component: their nodes in order, and what those on one node hold, in words."""

    first: int
    last: int
    nodes: tuple[int, ...]  # in order of first use, each once
    is_dealt: bool  # whether nodes come back after others
    devices: str
    group: str

    @property
    def ranks(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def per_node(self) -> str:
        """How many run on each node; dealt out in turn, the first nodes may have one more."""
        count = self.last - self.first + 1
        fewest, most = count // len(self.nodes), -(-count // len(self.nodes))
        return str(most) if fewest == most else f"{fewest}-{most}"

    @property
    def node_ranks(self) -> str:
        spelled = spell_ranks(self.nodes, limit=6)
        return f"{spelled} in turn" if self.is_dealt else spelled


def fold(table: PlacementTable) -> list[FoldedRow]:
    """The processes as runs: consecutive nodes whose processes hold the same devices and get the same software."""
    if not len(table.device_nodes) and bool(np.any(np.diff(table.nodes) < 0)) and len(table.labels) == 1:
        return [_dealt_row(table)]
    rows = []
    for _, same in groupby(_node_runs(table), key=lambda run: run[2]):
        runs = list(same)
        start, stop = runs[0][0], runs[-1][1]
        nodes = [int(table.nodes[first]) for first, _, _ in runs]
        distinct = tuple(dict.fromkeys(nodes))
        words = _devices(table, start, runs[0][1])
        rows.append(FoldedRow(start, stop - 1, distinct, len(distinct) < len(nodes), words, _label(table, start)))
    return rows


def _dealt_row(table: PlacementTable) -> FoldedRow:
    """Workers without devices that go round the nodes: one row, however many there are."""
    order = np.sort(np.unique(table.nodes, return_index=True)[1])
    return FoldedRow(0, len(table) - 1, tuple(table.nodes[order].tolist()), True, "-", _label(table, 0))


def _label(table: PlacementTable, process: int) -> str:
    return table.labels[int(table.groups[process])]


def _node_runs(table: PlacementTable) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Consecutive processes on one node, with a key that is equal where devices and software are the same."""
    groups = [table.inventory.group(label) for label in table.labels]
    starts = np.flatnonzero(np.concatenate([[True], table.nodes[1:] != table.nodes[:-1]])).tolist()
    for start, stop in zip(starts, [*starts[1:], len(table)], strict=True):
        low, high = int(table.offsets[start]), int(table.offsets[stop])
        node = int(table.nodes[start])
        yield (
            start,
            stop,
            (
                (table.offsets[start : stop + 1] - low).tobytes(),
                table.device_ranks[low:high].tobytes(),
                (table.device_nodes[low:high] - node).tobytes(),
                table.groups[start:stop].tobytes(),
                _software_key(groups[int(table.groups[start])], node),
            ),
        )


def _software_key(group: Group, node: int) -> object:
    software = group.software_of(node)
    return software.env_vars, software.python_interpreter_path


def _devices(table: PlacementTable, start: int, stop: int) -> str:
    """What each process of a node holds, in the shortest honest words."""
    low, high = int(table.offsets[start]), int(table.offsets[stop])
    if low == high:
        return "-"
    held, lengths = table.device_ranks[low:high], np.diff(table.offsets[start : stop + 1])
    if np.any(table.device_nodes[low:high] != table.nodes[start]):
        return "; ".join(_across_nodes(table, process) for process in range(start, min(stop, start + 4)))
    if stop - start == 1:
        return spell_ranks(held.tolist())
    size = int(lengths[0])
    is_even = bool(np.all(lengths == size))
    if is_even and np.array_equal(held, np.arange(held[0], held[0] + len(held))):
        return f"{spell_ranks(held.tolist())}, {size} each"
    if is_even and np.array_equal(held, np.tile(held[:size], len(lengths))):
        return f"{spell_ranks(held[:size].tolist())}, shared by {len(lengths)}"
    sharers = int(np.argmax(held != held[0])) or len(held)
    if size == 1 and is_even and np.array_equal(held, np.repeat(held[::sharers], sharers)):
        return f"{spell_ranks(held[::sharers].tolist())}, each shared by {sharers}"
    ends = np.cumsum(lengths).tolist()
    parts = [held[end - length : end].tolist() for end, length in zip(ends, lengths.tolist(), strict=True)]
    more = len(parts) - SHOWN_PROCESSES
    shown = " ".join(f"[{spell_ranks(part)}]" for part in parts[:SHOWN_PROCESSES])
    return shown + (f" and {more} more" if more > 0 else "")


def _across_nodes(table: PlacementTable, process: int) -> str:
    """The devices of a process that spans nodes, node by node."""
    parts = []
    home = int(table.nodes[process])
    for node, same in groupby(table[process].devices, key=lambda device: device[0]):
        place = (
            "" if node == home else " of the next node" if node == home + 1 else f" of the node {node - home:+d} away"
        )
        parts.append(spell_ranks([index for _, index in same]) + place)
    return " and ".join(parts)
