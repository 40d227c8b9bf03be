"""What a job holds of its machines, and for which of its groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from roost.placement.component_plan import ComponentPlan
from roost.runtime import nodes as live
from roost.runtime.capacity import Demand, Supply, accelerators_used, demands_of
from roost.runtime.group import LaunchOptions
from roost.runtime.nodes import LiveNode
from roost.runtime.reservation import NodeNeed, Reservation, reserve


@dataclass(slots=True)
class _Holding:
    reservation: Reservation
    needs: tuple[NodeNeed, ...]
    users: set[str] = field(default_factory=set)


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
        return {planned: there for holding in self._held for planned, there in holding.reservation.devices.items()}

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
            reports = [node.report for node in nodes]
            made = reserve(needs, wanted, reports, lambda: self._supplies(nodes), self._limit, self._say_more)
            self._held.append(_Holding(made, tuple(needs)))
            self._held[-1].users.update(users)
        for holding in self._held:
            if planned & holding.reservation.devices.keys():
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

    def _say_more(self, text: str) -> None:
        """Add what a person who waits would not think of: that their own program holds what it waits for."""
        others = sum(bool(other.devices) for other in _of_this_process if other is not self)
        hint = "; another Cluster of this process holds accelerators: shut it down, or close its groups"
        self._say(text + (hint if others and text.startswith("waiting") else ""))

    def _supplies(self, nodes: Sequence[LiveNode]) -> list[Supply]:
        """What the nodes have, less what the job holds itself: it would wait for itself for ever."""
        return [self._less_ours(supply) for supply in live.supplies(nodes)]

    def _less_ours(self, supply: Supply) -> Supply:
        ours = [need for holding in self._held for need in holding.needs if need.node == supply.node]
        return replace(
            supply,
            total_accelerators=supply.total_accelerators - sum(len(need.accelerators) for need in ours),
            total_cpus=supply.total_cpus - sum(need.cpus for need in ours),
            total_memory_gb=supply.total_memory_gb - sum(need.host_memory_gb for need in ours),
        )

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
