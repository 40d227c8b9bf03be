"""Reserve the resources of a plan, and track which groups hold them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any
from weakref import WeakSet

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from roost.config.findings import Findings
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.runtime import nodes as live
from roost.runtime.checks import (
    Demand,
    Held,
    Supply,
    accelerators_used,
    check_own_process,
    check_totals,
    demands_of,
    describe_shortage,
    without,
)
from roost.runtime.keeper import Keeper
from roost.runtime.membership import NodeReport
from roost.runtime.nodes import LiveNode
from roost.runtime.ray_connection import free_resources
from roost.runtime.worker import LaunchOptions
from roost.transport.context import WaitedTooLong

LOOK_EVERY = 0.02  # seconds
REPORT_AFTER = 1.0  # seconds of waiting
KEEPER_LIMIT = 120.0  # seconds for a keeper to start on a node with free resources
PRESENCE = 0.0001  # of a node's own resource: a bundle cannot be empty

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """Resources to reserve on one node."""

    node: int
    accelerators: tuple[int, ...] = ()
    cpus: float = 0.0
    host_memory_gb: float = 0.0
    held: frozenset[int] = frozenset()  # accelerators that the job holds there already


@dataclass(slots=True)
class Reservation:
    """A placement group with one bundle per node in plan order, and the keepers of its devices."""

    group: PlacementGroup
    needs: Sequence[NodeNeed]
    keepers: dict[int, Any] = field(default_factory=dict)  # by node
    answers: dict[int, Any] = field(default_factory=dict)  # refs of each keeper's accelerator indices

    @property
    def planned(self) -> set[tuple[int, int]]:
        """Planned accelerators as pairs of node and index."""
        return {(need.node, device) for need in self.needs for device in need.accelerators}

    def devices(self) -> dict[tuple[int, int], int]:
        """The allocated accelerator for each planned one: the same, unless another job holds it.

        Waits for the keepers to start.
        """
        given = dict(zip(self.answers, ray.get(list(self.answers.values()), timeout=KEEPER_LIMIT), strict=True))
        return {
            (need.node, planned): device
            for need in self.needs
            if need.node in given
            for planned, device in matched(need.accelerators, given[need.node]).items()
        }

    def release(self) -> None:
        remove_placement_group(self.group)
        self.keepers.clear()


def reserve(
    needs: Sequence[NodeNeed],
    demands: Sequence[Demand],
    nodes: Sequence[NodeReport],
    totals: Callable[[], Sequence[Supply]],
    limit: float,
    say: Say,
) -> Reservation:
    """Reserve all needs at once. Waits for resources that other jobs hold, and reports which are missing."""
    holders = {need.node: list(_hold_back(need, nodes[need.node])) for need in needs}
    try:
        group = _placement_group(needs, nodes)
        try:
            _wait(group, demands, totals, limit, say)
            return _keep(group, needs, nodes)
        except BaseException:
            remove_placement_group(group)
            raise
    finally:
        _stop_holders(needs, nodes, holders)


def _placement_group(needs: Sequence[NodeNeed], nodes: Sequence[NodeReport]) -> PlacementGroup:
    bundles = [_bundle(need, nodes[need.node]) for need in needs]
    selectors = [{"ray.io/node-id": nodes[need.node].node_id} for need in needs]
    group: PlacementGroup = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
    return group


def _bundle(need: NodeNeed, node: NodeReport) -> dict[str, float]:
    wanted = {
        f"node:{node.address}": PRESENCE,
        node.ray_resource: float(len(need.accelerators)),
        "CPU": need.cpus,
        "memory": need.host_memory_gb * 2**30,
    }
    return {name: amount for name, amount in wanted.items() if amount > 0}


def _wait(
    group: PlacementGroup,
    demands: Sequence[Demand],
    supplies: Callable[[], Sequence[Supply]],
    limit: float,
    say: Say,
) -> None:
    start = time.monotonic()
    is_reported = False
    while True:
        table = placement_group_table(group)
        if table["state"] == "CREATED":
            return
        waited = time.monotonic() - start
        state = table["stats"]["scheduling_state"]
        # A node may leave between the check and the reservation; its bundle is then infeasible.
        if state == "INFEASIBLE" and waited > REPORT_AFTER:
            findings = Findings()
            check_totals(demands, supplies(), findings)
            findings.raise_errors()
        if waited > limit:
            raise WaitedTooLong(f"the cluster had no room within {limit:g} s: {describe_shortage(demands, supplies())}")
        if waited > REPORT_AFTER and not is_reported:
            say(f"waiting up to {limit:g} s for the cluster: {describe_shortage(demands, supplies())}")
            is_reported = True
        time.sleep(LOOK_EVERY if waited < REPORT_AFTER else 10 * LOOK_EVERY)


def _keep(group: PlacementGroup, needs: Sequence[NodeNeed], nodes: Sequence[NodeReport]) -> Reservation:
    """Start the keepers without waiting: the placement group already owns the accelerators."""
    reservation = Reservation(group, needs)
    for index, need in enumerate(needs):
        if need.accelerators:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            keeper = _keeper(nodes[need.node], len(need.accelerators), strategy)
            reservation.keepers[need.node] = keeper
            reservation.answers[need.node] = keeper.indices.remote(nodes[need.node].ray_resource)
    return reservation


def substitutions(devices: Mapping[tuple[int, int], int]) -> Iterator[str]:
    """Messages for nodes where other accelerators were allocated than planned.

    >>> list(substitutions({(0, 1): 1, (2, 0): 4, (2, 1): 1}))
    ['node 2: accelerators 1,4 are used in place of 0-1, some of which another job holds']
    """
    for node in sorted({node for node, _ in devices}):
        planned = sorted(device for on, device in devices if on == node)
        given = sorted(device for (on, _), device in devices.items() if on == node)
        if given != planned:
            yield (
                f"node {node}: accelerators {spell_ranks(given)} are used in place of {spell_ranks(planned)}, "
                "some of which another job holds"
            )


def matched(planned: Iterable[int], given: Iterable[int]) -> dict[int, int]:
    """Map each planned accelerator to itself if it was allocated, otherwise to the next spare one.

    >>> matched([0, 1, 2], [2, 5, 6])
    {0: 5, 1: 6, 2: 2}
    """
    wanted, allocated = sorted(planned), set(given)
    spare = iter(sorted(allocated - set(wanted)))
    return {device: device if device in allocated else next(spare) for device in wanted}


def _keeper(node: NodeReport, count: int, strategy: Any) -> Any:
    amount = {"num_gpus": count} if node.ray_resource == "GPU" else {"resources": {node.ray_resource: count}}
    actor: Any = ray.remote(Keeper)
    return actor.options(num_cpus=0, scheduling_strategy=strategy, **amount).remote()


def _hold_back(need: NodeNeed, node: NodeReport) -> Iterator[Any]:
    """Start actors that hold the accelerators below the wanted ones, so that Ray allocates the wanted ones.

    Ray allocates the lowest free indices. For a plan on accelerators 4 to 7 of an idle node, temporary holders occupy
    0 to 3. If another job holds some of the node's accelerators, there are no holders, and any free ones are used.
    """
    others = [device for device in range(len(node.physical_ids)) if device not in need.held]
    runs = list(_runs(need.accelerators, others))
    if all(is_wanted for is_wanted, _ in runs):
        return
    free = free_resources().get(node.node_id, {}).get(node.ray_resource, 0)
    if free < len(others):
        return
    strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    wanted: list[Any] = []
    for is_wanted, run in runs[:-1]:  # the last run is wanted and needs no holder
        holder = _keeper(node, len(run), strategy)
        if is_wanted:
            wanted.append(holder)
        else:
            yield holder
        if ray.get(holder.indices.remote(node.ray_resource), timeout=KEEPER_LIMIT) != run:
            break  # another job was faster
    for holder in wanted:
        ray.kill(holder)
    _wait_until_free(node, len(others) - sum(len(run) for is_wanted, run in runs if not is_wanted))


def _stop_holders(needs: Sequence[NodeNeed], nodes: Sequence[NodeReport], holders: Mapping[int, Sequence[Any]]) -> None:
    """Stop the holders and wait until Ray has freed their accelerators, which the next reservation checks."""
    for holder in (holder for each in holders.values() for holder in each):
        ray.kill(holder)
    for need in needs:
        if holders[need.node]:
            _wait_until_free(
                nodes[need.node], len(nodes[need.node].physical_ids) - len(need.held) - len(need.accelerators)
            )


def _runs(accelerators: Sequence[int], others: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """Available accelerators up to the last wanted one, in runs of wanted and unwanted.

    >>> list(_runs([1, 2, 5], range(8)))
    [(False, [0]), (True, [1, 2]), (False, [3, 4]), (True, [5])]
    """
    wanted = set(accelerators).intersection(others)
    up_to_last = [device for device in others if device <= max(wanted, default=-1)]
    for is_wanted, run in groupby(up_to_last, key=wanted.__contains__):
        yield is_wanted, list(run)


def _wait_until_free(node: NodeReport, count: int, limit: float = 5.0) -> None:
    """Wait until Ray has noticed that a holder has exited."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        free: Mapping[str, float] = free_resources().get(node.node_id, {})
        if free.get(node.ray_resource, 0) >= count:
            return
        time.sleep(LOOK_EVERY)


@dataclass(slots=True)
class _Holding:
    reservation: Reservation
    needs: Mapping[str, NodeNeed]  # by Ray's node id: clusters of one process may rank nodes differently
    users: set[str] = field(default_factory=set)
    devices: Mapping[tuple[int, int], int] | None = None  # None until the keepers have started


_of_this_process: WeakSet[Holdings] = WeakSet()


class Holdings:
    """Reservations of a job, each kept while a group uses part of it. Groups of one job may share devices."""

    def __init__(self, limit: float, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        _of_this_process.add(self)
        self._held: list[_Holding] = []

    @property
    def devices(self) -> dict[tuple[int, int], int]:
        """Map each planned accelerator of the job, a pair of node and index, to the allocated one."""
        return {planned: device for holding in self._held for planned, device in self._devices_of(holding).items()}

    def _devices_of(self, holding: _Holding) -> Mapping[tuple[int, int], int]:
        """Devices of a holding; the first call waits for the keepers."""
        if holding.devices is None:
            holding.devices = holding.reservation.devices()
            for text in substitutions(holding.devices):
                self._say(text)
        return holding.devices

    def take(
        self,
        components: Sequence[ComponentPlan],
        nodes: Sequence[LiveNode],
        live_nodes: Sequence[int],
        options: Mapping[str, LaunchOptions],
        users: Collection[str],
        limit: float | None = None,
    ) -> None:
        """Reserve what components need beyond what the job already holds, on behalf of groups.

        `live_nodes` maps each node of the plan to its rank in the cluster; `limit` is in seconds.
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
            seconds = self._limit if limit is None else limit
            result = reserve(needs, wanted, reports, lambda: self._supplies(nodes), seconds, self._say)
            self._held.append(_Holding(result, {reports[need.node].node_id: need for need in needs}, set(users)))
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
        """Needs and demands by live node, less the accelerators that the job holds."""
        needs, wanted = [], []
        for demand in demands:
            node = live_nodes[demand.node]
            new = tuple(sorted(device for on, device in planned if on == node and (on, device) not in held))
            if new or demand.cpus or demand.host_memory_gb:
                ours = frozenset(device for (on, _), device in held.items() if on == node)
                needs.append(NodeNeed(node, new, demand.cpus, demand.host_memory_gb, ours))
                wanted.append(replace(demand, node=node, accelerators=len(new)))
        return needs, wanted

    def _check(self, demands: Sequence[Demand], nodes: Sequence[LiveNode]) -> None:
        """Raise ConfigError for demands that waiting cannot satisfy: beyond the totals, or held by this process."""
        findings, supplies = Findings(), self._supplies(nodes)
        check_totals(demands, supplies, findings)
        others = [held for other in _of_this_process if other is not self for held in other.held_on(nodes)]
        check_own_process(demands, supplies, others, findings)
        findings.raise_errors()

    def held_on(self, nodes: Sequence[LiveNode]) -> list[Held]:
        """Resources held on these nodes, which may belong to another cluster object."""
        ranks = {node.report.node_id: rank for rank, node in enumerate(nodes)}
        return [
            Held(ranks[node], len(need.accelerators), need.cpus, need.host_memory_gb, tuple(holding.users))
            for holding in self._held
            for node, need in holding.needs.items()
            if node in ranks
        ]

    def _supplies(self, nodes: Sequence[LiveNode]) -> list[Supply]:
        """Supplies less the job's own holdings, which are not freed while it waits."""
        ours = self.held_on(nodes)
        return [without(supply, ours) for supply in live.supplies(nodes)]

    def release(self, group: str) -> None:
        """Release reservations that only this group used."""
        for holding in list(self._held):
            if group in holding.users:
                holding.users.discard(group)
                if not holding.users:
                    self._held.remove(holding)
                    holding.reservation.release()

    def release_all(self) -> None:
        for holding in self._held:
            with contextlib.suppress(Exception):  # Ray may be down already
                holding.reservation.release()
        self._held.clear()
