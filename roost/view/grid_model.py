"""The grid of a plan: rows of nodes, holders of devices, and a mark (colour, short name) per component."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from roost.cluster.inventory import ACCELERATOR, NODE, Group, Ints, Inventory, Node
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan, PlacementTable
from roost.placement.plan import Plan

# The colours of Okabe and Ito (2008) are distinct with the common kinds of colour blindness. The ones after them repeat
# hues; the short names distinguish those.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#d55e00", "#f0e442", "#8a8f98",
    "#7fb8d8", "#8a5f00", "#7fceb9", "#1f6a9a", "#7a3f62", "#f0a67a", "#7d7600", "#4b5058",
)  # fmt: skip
# Colours of the usual components, the same in every plan.
USUAL = {"actor": 0, "rollout": 1, "inference": 2, "env": 3, "reward": 4, "critic": 5, "agent": 6, "reference": 7}
INK, PAPER = "#14171c", "#ffffff"


@dataclass(frozen=True, slots=True)
class Mark:
    """Colour of a component, colour of text on it, and a unique short name."""

    component: str
    short: str
    colour: str
    ink: str


def marks(names: Sequence[str]) -> tuple[Mark, ...]:
    """One mark for each component, in the order given.

    >>> [(mark.component, mark.short) for mark in marks(["actor", "rollout", "reward", "agent", "reward.llm_judge"])]
    [('actor', 'A'), ('rollout', 'R'), ('reward', 'Re'), ('agent', 'Ag'), ('reward.llm_judge', 'Rl')]
    """
    used: list[str] = []
    for name in names:
        used.append(next(short for short in _short_names(name) if short not in used))
    colours = _colours(names)
    return tuple(
        Mark(name, short, colour, ink_on(colour)) for name, short, colour in zip(names, used, colours, strict=True)
    )


def _short_names(name: str) -> Iterator[str]:
    """Yield candidates for a short name, without end."""
    words = re.findall(r"[^\W_]+", name) or ["?"]
    letters = "".join(words)
    first = letters[0].upper()
    yield first
    yield from (first + word[0].lower() for word in words[1:])
    yield from (first + letter.lower() for letter in letters[1:])
    number = 2
    while True:
        yield f"{first}{number}"
        number += 1


def _colours(names: Sequence[str]) -> list[str]:
    usual = {USUAL[name] for name in names if name in USUAL}
    free = [colour for number, colour in enumerate(COLOURS) if number not in usual]
    others = iter(range(len(names)))
    return [COLOURS[USUAL[name]] if name in USUAL else free[next(others) % len(free)] for name in names]


def ink_on(colour: str) -> str:
    """Return dark or light text, whichever is more readable on a colour (WCAG 2 contrast).

    >>> ink_on("#0072b2") == PAPER, ink_on("#f0e442") == INK
    (True, True)
    """
    lightness = _luminance(colour)
    dark, light = (lightness + 0.05) / (_luminance(INK) + 0.05), 1.05 / (lightness + 0.05)
    # Prefer dark text a little: small text is easier to read dark than the formula says.
    return INK if dark * 1.05 >= light else PAPER


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Progression(NamedTuple):
    """An arithmetic progression of `length` numbers."""

    start: int
    step: int
    length: int


def progressions(numbers: Ints, fewest_apart: int = 2) -> Iterator[Progression]:
    """Progressions that give the numbers in order; those with another step than 1 have at least `fewest_apart` numbers.

    >>> [tuple(part) for part in progressions(np.array([0, 1, 2, 5, 5, 9]))]
    [(0, 1, 3), (5, 0, 2), (9, 1, 1)]
    >>> [tuple(part) for part in progressions(np.array([0, 5, 10, 11, 12]), fewest_apart=4)]
    [(0, 1, 1), (5, 1, 1), (10, 1, 3)]
    """
    steps = np.diff(numbers)
    # Where the step changes, a progression ends.
    ends = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(numbers) - 1]
    position = 0
    while position < len(numbers):
        end = ends[bisect_left(ends, position + 1)] if position < len(steps) else position
        step = int(steps[position]) if end > position else 1
        if step != 1 and end - position + 1 < fewest_apart:
            end, step = position, 1
        yield Progression(int(numbers[position]), step, end - position + 1)
        position = end + 1


SHOWN_PROCESSES = 8  # of a node, if their devices follow no pattern


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """Processes `first` to `last` of a component: their nodes in order, and the devices per node as text."""

    first: int
    last: int
    nodes: tuple[int, ...]  # in order of first use, each once
    is_round_robin: bool
    devices: str
    group: str

    @property
    def ranks(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def per_node(self) -> str:
        """Processes per node; in round robin the first nodes may have one more."""
        count = self.last - self.first + 1
        fewest, most = count // len(self.nodes), -(-count // len(self.nodes))
        return str(most) if fewest == most else f"{fewest}-{most}"

    @property
    def node_ranks(self) -> str:
        spelled = spell_ranks(self.nodes, limit=6)
        return f"{spelled} in turn" if self.is_round_robin else spelled


def fold(table: PlacementTable) -> list[FoldedRow]:
    """Fold processes into runs: consecutive nodes with the same devices and software."""
    if not len(table.device_nodes) and bool(np.any(np.diff(table.nodes) < 0)) and len(table.labels) == 1:
        return [_round_robin_row(table)]
    rows = []
    for _, same in groupby(_node_runs(table), key=lambda run: run[2]):
        runs = list(same)
        start, stop = runs[0][0], runs[-1][1]
        nodes = [int(table.nodes[first]) for first, _, _ in runs]
        distinct = tuple(dict.fromkeys(nodes))
        words = _devices(table, start, runs[0][1])
        rows.append(FoldedRow(start, stop - 1, distinct, len(distinct) < len(nodes), words, _label(table, start)))
    return rows


def _round_robin_row(table: PlacementTable) -> FoldedRow:
    """One row for workers without devices that are spread round robin over nodes."""
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
    """Devices of the processes on a node, as short text."""
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
    home = int(table.nodes[process])
    groups = groupby(table[process].devices, key=lambda device: device[0])
    held = [(node - home, spell_ranks([index for _, index in same])) for node, same in groups]
    if len(held) > 2 and held == [(away, held[0][1]) for away in range(len(held))]:
        return f"{held[0][1]} of each of {len(held)} nodes"
    places = {0: "", 1: " of the next node"}
    return " and ".join(own + places.get(away, f" of the node {away:+d} away") for away, own in held)


FEWEST_APART = 4  # nodes that are not neighbours share a row only if they are at least so many, at equal distances
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
    """Devices of a node and their holders; equal nodes share one."""

    machine: Node  # without host name and configs of declared devices, which differ per node
    groups: tuple[str, ...]  # declared node groups of the node
    accelerators: tuple[tuple[Holder, ...], ...]  # holders of each accelerator; empty if it is free
    declared: tuple[DeclaredDevice, ...]
    without_device: tuple[Holder, ...]  # processes that run here and hold no device anywhere
    residents: tuple[Holder, ...]  # all processes that run here; others may hold devices here and run elsewhere

    @property
    def num_free(self) -> int:
        return sum(not holders for holders in self.accelerators)


@dataclass(frozen=True, eq=False)
class Run:
    """Nodes with one layout at equal distances, mostly neighbours: a row of the grid."""

    nodes: range
    layout: NodeLayout
    first_ranks: Mapping[str, Ints]  # for each component here, its lowest rank on each of the nodes

    @property
    def label(self) -> str:
        """The nodes as text: `node 3`, `nodes 0-7`, `nodes 0-6, every 2nd`."""
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
        """Return one row per node."""
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
        """Accelerators without a holder."""
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
    >>> result = grid(roost.plan({"cluster": cluster}))
    >>> for run in result.runs:
    ...     cells = [[(holder.component, run.spell(holder)) for holder in cell] for cell in run.layout.accelerators]
    ...     print(run.label, cells)
    nodes 0-1 [[('actor', '0...2'), ('rollout', '0...2')], [('actor', '1...3'), ('rollout', '1...3')]]
    nodes 2-3 [[('actor', '4...6')], [('actor', '5...7')]]
    >>> [mark.short for mark in result.marks], [run.label for run in result.rows(most=8)]
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
    """Location of one component: entries (rank above the node's lowest, device index or stand-in, group)."""

    component: ComponentPlan
    entries: Ints
    starts: Ints  # the entries of node i are starts[i]:starts[i + 1]
    lowest: Ints  # lowest rank on each node; -1 if the component is not there
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
    """Number nodes so that equal nodes have equal numbers; shared node objects are compared once."""
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
    """0 for nodes outside the group, 1 for those without an env_configs entry, then by their entry."""
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
    """Format an ordinal: `2nd`, `3rd`, `11th`."""
    tail = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"
