"""Choose free accelerators for processes that need a place: as many as possible, in the order of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_UNITS = 64  # that a search places; for more, the first assignment is taken
MAX_VISITS = 20_000  # states of the search; beyond, the best assignment so far is taken


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal units that need a place: each takes `size` accelerators of one of the nodes."""

    count: int
    size: int
    nodes: frozenset[int]


def assign(demands: Sequence[Demand], free: Mapping[int, int]) -> list[list[int]]:
    """Nodes for the units of each demand; units that find no room are left out, and no assignment places more.

    `free` has the number of free accelerators of each node. Nodes of low rank are taken first.

    >>> assign([Demand(2, 1, frozenset({0, 1})), Demand(1, 1, frozenset({0}))], {0: 1, 1: 2})
    [[1, 1], [0]]
    >>> assign([Demand(3, 2, frozenset({0, 1}))], {0: 3, 1: 2})
    [[0, 1]]
    """
    first = _in_order(demands, free)
    is_full = all(len(nodes) == demand.count for demand, nodes in zip(demands, first, strict=True))
    if is_full or len(demands) == 1 or sum(demand.count for demand in demands) > MAX_UNITS:
        return first
    return _Search(demands, free).best


def _in_order(demands: Sequence[Demand], free: Mapping[int, int]) -> list[list[int]]:
    """Each unit on the first node with room. For one demand, no assignment places more."""
    left, chosen = dict(free), []
    for demand in demands:
        nodes: list[int] = []
        for node in sorted(demand.nodes & left.keys()):
            count = min(left[node] // demand.size, demand.count - len(nodes))
            nodes += [node] * count
            left[node] -= count * demand.size
        chosen.append(nodes)
    return chosen


class _Search:
    """Depth-first search over the demands and, for each, over the nodes; ends when a bound is reached."""

    def __init__(self, demands: Sequence[Demand], free: Mapping[int, int]) -> None:
        self._demands = demands
        self._free = dict(free)
        self._nodes = sorted(free)
        self._kinds = {node: tuple(node in demand.nodes for demand in demands) for node in self._nodes}
        self._chosen: list[list[int]] = [[] for _ in demands]
        self.best: list[list[int]] = [[] for _ in demands]
        self._best_count = 0
        self._visits = 0
        self._limit = self._bound(0, 0)
        self._visit(0, 0)

    def _bound(self, index: int, first: int) -> int:
        """Most units that the demands from `index` can place in addition, each looked at alone."""
        total = 0
        for number, demand in enumerate(self._demands[index:], index):
            start = first if number == index else 0
            room = sum(self._free[node] // demand.size for node in self._nodes[start:] if node in demand.nodes)
            total += min(demand.count - len(self._chosen[number]), room)
        return total

    def _visit(self, index: int, first: int) -> None:
        """Place the rest of demand `index` on the nodes from position `first`, then the next demands."""
        self._visits += 1
        count = sum(map(len, self._chosen))
        if count > self._best_count:
            self._best_count, self.best = count, [list(nodes) for nodes in self._chosen]
        if index == len(self._demands) or count + self._bound(index, first) <= self._best_count:
            return
        demand, tried = self._demands[index], set()
        if len(self._chosen[index]) < demand.count:
            for position in range(first, len(self._nodes)):
                node = self._nodes[position]
                alike = self._free[node], self._kinds[node]  # such nodes are interchangeable
                if node not in demand.nodes or self._free[node] < demand.size or alike in tried:
                    continue
                tried.add(alike)
                self._free[node] -= demand.size
                self._chosen[index].append(node)
                self._visit(index, position)
                self._chosen[index].pop()
                self._free[node] += demand.size
                if self._best_count == self._limit or self._visits > MAX_VISITS:
                    return
        self._visit(index + 1, 0)
