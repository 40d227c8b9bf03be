"""The grid of a plan: a row for each node, a cell for each accelerator, and who holds it. Equal nodes are one row.

Every picture of a plan (terminal, SVG, HTML) is drawn from this value; nothing here knows how it will look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from roost.cluster.inventory import Group, Inventory, Node
from roost.cluster.resources import ACCELERATOR, NODE, Ints
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.view.marks import Mark, marks
from roost.view.progressions import progressions

# Nodes that are not neighbours are one row only where they follow each other evenly and there are at least so many.
FEWEST_APART = 4
_RUNS_HERE, _HOLDS_NOTHING = -1, -2  # in place of a device index: the process runs on the node; it has no device


@dataclass(frozen=True, slots=True)
class Holder:
    """The processes of one component that hold a device, or that run on a node.

    Ranks are counted from the component's lowest rank on the node, so that equal nodes are one value; `Run.ranks` gives
    the ranks themselves.
    """

    component: str
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeclaredDevice:
    """A declared device such as a robot: its kind, its index among those of its kind on the node, and its holders."""

    kind: str
    index: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """What a node has and who is on it; equal nodes share one."""

    machine: Node  # less what is the node's own: its host name and the configs of its declared devices
    groups: tuple[str, ...]  # the declared node groups that it belongs to
    accelerators: tuple[tuple[Holder, ...], ...]  # for each accelerator its holders; empty where it is free
    declared: tuple[DeclaredDevice, ...]
    without_device: tuple[Holder, ...]  # processes that run here and hold no device anywhere
    residents: tuple[Holder, ...]  # all processes that run here; others may hold devices here and run elsewhere

    @property
    def num_free(self) -> int:
        return sum(not holders for holders in self.accelerators)


@dataclass(frozen=True, eq=False)
class Run:
    """Nodes of one layout at equal distances, mostly neighbours: a row of the grid."""

    nodes: range
    layout: NodeLayout
    first_ranks: Mapping[str, Ints]  # for each component here, its lowest rank on each of the nodes

    @property
    def label(self) -> str:
        """The nodes in words: `node 3`, `nodes 0-7`, `nodes 0-6, every 2nd`."""
        if len(self.nodes) == 1:
            return f"node {self.nodes[0]}"
        apart = "" if self.nodes.step == 1 else f", every {_ordinal(self.nodes.step)}"
        return f"nodes {self.nodes[0]}-{self.nodes[-1]}{apart}"

    def ranks(self, holder: Holder, position: int = 0) -> tuple[int, ...]:
        """The ranks of a holder on the node at a position of the run."""
        first = int(self.first_ranks[holder.component][position])
        return tuple(first + offset for offset in holder.offsets)

    def spell(self, holder: Holder) -> str:
        """The ranks of a holder on all nodes of the run, as a range where there are several: `3`, `0-7`, `3...4091`."""
        ranks = self.ranks(holder)
        if len(self.nodes) == 1:
            return spell_ranks(ranks)
        lowest = self.first_ranks[holder.component]
        low, high = int(lowest.min()) + ranks[0] - int(lowest[0]), int(lowest.max()) + ranks[-1] - int(lowest[0])
        if low == high:
            return str(low)
        is_dense = high - low + 1 == len(self.nodes) * len(ranks) and len(np.unique(lowest)) == len(lowest)
        return f"{low}-{high}" if is_dense else f"{low}...{high}"

    def split(self) -> Iterator[Run]:
        """The same as one row for each node."""
        for position, node in enumerate(self.nodes):
            here = {name: ranks[position : position + 1] for name, ranks in self.first_ranks.items()}
            yield Run(range(node, node + 1), self.layout, here)


@dataclass(frozen=True, eq=False)
class Grid:
    """The rows of a plan in node order, and the marks of its components."""

    marks: tuple[Mark, ...]
    runs: tuple[Run, ...]

    @property
    def num_nodes(self) -> int:
        return sum(len(run.nodes) for run in self.runs)

    @property
    def num_free(self) -> int:
        """Accelerators that nobody holds."""
        return sum(len(run.nodes) * run.layout.num_free for run in self.runs)

    def rows(self, most: int) -> tuple[Run, ...]:
        """One row for each node where there are at most `most` nodes, else the runs."""
        if self.num_nodes > most:
            return self.runs
        single = [row for run in self.runs for row in run.split()]
        return tuple(sorted(single, key=lambda row: row.nodes[0]))


def grid(plan: Plan) -> Grid:
    """The grid of a plan.

    >>> import roost
    >>> cluster = {"num_nodes": 4, "num_gpus_per_node": 2, "component_placement": {"actor": "all", "rollout": "0-3"}}
    >>> made = grid(roost.plan({"cluster": cluster}))
    >>> for run in made.runs:
    ...     cells = [[(holder.component, run.spell(holder)) for holder in cell] for cell in run.layout.accelerators]
    ...     print(run.label, cells)
    nodes 0-1 [[('actor', '0...2'), ('rollout', '0...2')], [('actor', '1...3'), ('rollout', '1...3')]]
    nodes 2-3 [[('actor', '4...6')], [('actor', '5...7')]]
    >>> [mark.short for mark in made.marks], [run.label for run in made.rows(most=8)]
    (['A', 'R'], ['node 0', 'node 1', 'node 2', 'node 3'])
    """
    presences = [_Presence.of(part, plan.inventory.num_nodes) for part in plan.components]
    classes = _classes(plan.inventory, presences)
    runs = []
    for nodes in classes:
        layout = _layout(int(nodes[0]), plan.inventory, presences)
        for start, step, count in progressions(nodes, FEWEST_APART):
            run = range(start, start + step * count, step)
            lowest = {here.component.name: here.lowest[run.start : run.stop : run.step] for here in presences}
            runs.append(Run(run, layout, {name: ranks for name, ranks in lowest.items() if ranks[0] >= 0}))
    return Grid(marks([part.name for part in plan.components]), tuple(sorted(runs, key=lambda run: run.nodes[0])))


@dataclass(frozen=True, eq=False)
class _Presence:
    """Where one component is: entries (rank above the node's lowest, device index or what stands for it, group)."""

    component: ComponentPlan
    entries: Ints
    starts: Ints  # the entries of node i are starts[i]:starts[i + 1]
    lowest: Ints  # the lowest rank on each node; -1 where the component is not
    shapes: Ints  # equal numbers for nodes whose entries are equal

    @classmethod
    def of(cls, component: ComponentPlan, num_nodes: int) -> _Presence:
        table = component.table
        counts = np.diff(table.offsets)
        own = np.arange(len(table))
        owners = np.repeat(own, counts)
        at = np.concatenate([table.nodes, table.device_nodes])
        ranks = np.concatenate([own, owners])
        index = np.concatenate([np.where(counts > 0, _RUNS_HERE, _HOLDS_NOTHING), table.device_ranks])
        groups = np.concatenate([table.groups, table.groups[owners]])
        order = np.argsort(at, kind="stable")
        starts = np.searchsorted(at[order], np.arange(num_nodes + 1))
        here = np.flatnonzero(np.diff(starts))
        lowest = np.full(num_nodes, -1)
        if len(here):
            lowest[here] = np.minimum.reduceat(ranks[order], starts[here])
        entries = np.stack([ranks[order] - lowest[at[order]], index[order], groups[order]], axis=1)
        seen: dict[bytes, int] = {}
        keys = (entries[starts[node] : starts[node + 1]].tobytes() for node in range(num_nodes))
        shapes = np.fromiter((seen.setdefault(key, len(seen)) for key in keys), np.int64, num_nodes)
        return cls(component, entries, starts, lowest, shapes)

    def on(self, node: int) -> list[tuple[int, int, str]]:
        """The entries of a node, with the kind of resource in place of the group."""
        kinds = self.component.table.kinds
        found = self.entries[self.starts[node] : self.starts[node + 1]].tolist()
        return [(offset, index, kinds[group]) for offset, index, group in found]


def _classes(inventory: Inventory, presences: list[_Presence]) -> list[Ints]:
    """The nodes of each layout, ascending."""
    key = _machine_numbers(inventory)
    columns = [_software_numbers(group, inventory.num_nodes) for group in inventory.groups]
    for column in (*columns, *(here.shapes for here in presences)):
        # Renumbering after each column keeps the keys small, however many columns there are.
        key = np.unique(key * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1]
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else []


def _machine_numbers(inventory: Inventory) -> Ints:
    """Equal numbers for nodes that have the same; equal nodes are mostly one object, which is looked at once."""
    seen: dict[str, int] = {}
    by_identity: dict[int, int] = {}
    numbers = np.empty(inventory.num_nodes, np.int64)
    for rank, node in enumerate(inventory.nodes):
        number = by_identity.get(id(node))
        if number is None:
            number = by_identity[id(node)] = seen.setdefault(repr(_plain(node)), len(seen))
        numbers[rank] = number
    return numbers


def _plain(node: Node) -> Node:
    return replace(node, host="", hardware={kind: ({},) * len(items) for kind, items in node.hardware.items()})


def _software_numbers(group: Group, num_nodes: int) -> Ints:
    """0 for nodes outside the group, 1 for those without software of their own, then by their entry."""
    numbers = np.zeros(num_nodes, np.int64)
    numbers[group.node_ranks] = 1
    for number, software in reversed(list(enumerate(group.software, 2))):
        numbers[sorted(software.node_ranks)] = number
    return numbers


def _layout(node: int, inventory: Inventory, presences: list[_Presence]) -> NodeLayout:
    machine = _plain(inventory.nodes[node])
    accelerators: list[list[Holder]] = [[] for _ in range(machine.accelerators)]
    declared: dict[tuple[str, int], list[Holder]] = {
        (kind, index): [] for kind, items in machine.hardware.items() for index in range(len(items))
    }
    without_device, residents = [], []
    for here in presences:
        name = here.component.name
        by_device: dict[tuple[str, int], list[int]] = {}
        for offset, index, kind in here.on(node):
            by_device.setdefault((kind if index >= 0 else NODE, index), []).append(offset)
        for (kind, index), offsets in by_device.items():
            holder = Holder(name, tuple(offsets))
            if kind == ACCELERATOR:
                accelerators[index].append(holder)
            elif index >= 0:
                declared.setdefault((kind, index), []).append(holder)
            elif index == _HOLDS_NOTHING:
                without_device.append(holder)
        at_home = by_device.get((NODE, _RUNS_HERE), []) + by_device.get((NODE, _HOLDS_NOTHING), [])
        if at_home:
            residents.append(Holder(name, tuple(sorted(at_home))))
    return NodeLayout(
        machine,
        tuple(group.label for group in inventory.groups if node in group.node_ranks),
        tuple(tuple(holders) for holders in accelerators),
        tuple(DeclaredDevice(kind, index, tuple(holders)) for (kind, index), holders in declared.items()),
        tuple(without_device),
        tuple(residents),
    )


def _ordinal(number: int) -> str:
    """The number as an ordinal: `2nd`, `3rd`, `11th`."""
    tail = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"
