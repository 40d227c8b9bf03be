"""What a job holds of its machines, and for which of its groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from roost.config.errors import Findings
from roost.placement.component_plan import ComponentPlan
from roost.runtime import nodes as live
from roost.runtime.capacity import (
    Demand,
    Held,
    Supply,
    accelerators_used,
    check_own_process,
    check_totals,
    demands_of,
    without,
)
from roost.runtime.group import LaunchOptions
from roost.runtime.nodes import LiveNode
from roost.runtime.reservation import NodeNeed, Reservation, reserve, stand_ins


@dataclass(slots=True)
class _Holding:
    reservation: Reservation
    needs: Mapping[str, NodeNeed]  # by Ray's id of the node: clusters of one process may rank the nodes differently
    users: set[str] = field(default_factory=set)
    devices: Mapping[tuple[int, int], int] | None = None  # once it is known


_of_this_process: WeakSet[Holdings] = WeakSet()


class Holdings:
    """Reservations, each kept as long as a group uses something of it. Groups of one job may share devices."""

    def __init__(self, limit: float, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        _of_this_process.add(self)
        self._held: list[_Holding] = []

    @property
    def devices(self) -> dict[tuple[int, int], int]:
        """For each accelerator that the job holds, as planned on its node, the one that stands for it."""
        return {planned: there for holding in self._held for planned, there in self._devices_of(holding).items()}

    def _devices_of(self, holding: _Holding) -> Mapping[tuple[int, int], int]:
        """Waits for the keepers the first time."""
        if holding.devices is None:
            holding.devices = holding.reservation.devices()
            for text in stand_ins(holding.devices):
                self._say(text)
        return holding.devices

    def take(
        self,
        components: Sequence[ComponentPlan],
        nodes: Sequence[LiveNode],
        live_nodes: Sequence[int],
        options: Mapping[str, LaunchOptions],
        users: Collection[str],
    ) -> None:
        """Reserve what components need and the job does not hold yet, for the groups that will use it.

        `live_nodes` has for each node of the plan its rank among the nodes of the cluster.
        """
        demands = demands_of(
            components,
            {name: each.cpus_per_process for name, each in options.items()},
            {name: each.host_memory_gb_per_process for name, each in options.items()},
        )
        used = accelerators_used(components)
        planned = {(live_nodes[node], int(device)) for node, devices in used.items() for device in devices}
        held = self.devices
        needs, wanted = self._missing(demands, live_nodes, planned, held)
        if needs:
            self._check(wanted, nodes)
            reports = [node.report for node in nodes]
            made = reserve(needs, wanted, reports, lambda: self._supplies(nodes), self._limit, self._say)
            self._held.append(_Holding(made, {reports[need.node].node_id: need for need in needs}, set(users)))
        for holding in self._held:
            if planned & holding.reservation.planned:
                holding.users.update(users)

    def _missing(
        self,
        demands: Sequence[Demand],
        live_nodes: Sequence[int],
        planned: Collection[tuple[int, int]],
        held: Mapping[tuple[int, int], int],
    ) -> tuple[list[NodeNeed], list[Demand]]:
        needs, wanted = [], []
        for demand in demands:
            node = live_nodes[demand.node]
            new = tuple(sorted(device for on, device in planned if on == node and (on, device) not in held))
            if new or demand.cpus or demand.host_memory_gb:
                ours = frozenset(there for (on, _), there in held.items() if on == node)
                needs.append(NodeNeed(node, new, demand.cpus, demand.host_memory_gb, ours))
                wanted.append(replace(demand, node=node, accelerators=len(new)))
        return needs, wanted

    def _check(self, demands: Sequence[Demand], nodes: Sequence[LiveNode]) -> None:
        """What no waiting will bring is an error at once: what the nodes never had, and what this process holds."""
        findings, supplies = Findings(), self._supplies(nodes)
        check_totals(demands, supplies, findings)
        others = [held for other in _of_this_process if other is not self for held in other.held_on(nodes)]
        check_own_process(demands, supplies, others, findings)
        findings.raise_errors()

    def held_on(self, nodes: Sequence[LiveNode]) -> list[Held]:
        """What is held on nodes, which may be another cluster's."""
        ranks = {node.report.node_id: rank for rank, node in enumerate(nodes)}
        return [
            Held(ranks[node], len(need.accelerators), need.cpus, need.host_memory_gb, tuple(holding.users))
            for holding in self._held
            for node, need in holding.needs.items()
            if node in ranks
        ]

    def _supplies(self, nodes: Sequence[LiveNode]) -> list[Supply]:
        """What the nodes have, less what the job holds itself: it would wait for itself for ever."""
        ours = self.held_on(nodes)
        return [without(supply, ours) for supply in live.supplies(nodes)]

    def give_back(self, group: str) -> None:
        """A group is closed: what it alone used is free again."""
        for holding in list(self._held):
            if group in holding.users:
                holding.users.discard(group)
                if not holding.users:
                    self._held.remove(holding)
                    holding.reservation.release()

    def give_all_back(self) -> None:
        for holding in self._held:
            with contextlib.suppress(Exception):  # Ray may be gone already
                holding.reservation.release()
        self._held.clear()
