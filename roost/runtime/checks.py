"""Check a plan against the live nodes before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.inventory import Ints, Inventory, Node
from roost.config.findings import Findings, Where, counted
from roost.config.ranks import spell_nodes, spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan

SMALLEST = 1e-4  # Ray's resolution of resources; smaller differences are rounding
MAX_NAMED = 8  # nodes in one sentence


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of one component on a node; CPUs and memory are per process."""

    component: str
    processes: int
    accelerators: int
    cpus: float
    host_memory_gb: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources a plan needs on one node. Components may share accelerators, so shares can add up to more."""

    node: int
    accelerators: int
    cpus: float
    host_memory_gb: float
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Supply:
    """Ray's resources of one node, total and free."""

    node: int
    name: str
    resource: str  # what Ray calls the accelerators
    total_accelerators: int
    free_accelerators: int
    total_cpus: float
    free_cpus: float
    total_memory_gb: float
    free_memory_gb: float


@dataclass(frozen=True, slots=True)
class Held:
    """Resources a cluster holds on one node, and the groups that use them."""

    node: int
    accelerators: int
    cpus: float
    host_memory_gb: float
    groups: tuple[str, ...] = ()


def accelerators_used(components: Iterable[ComponentPlan]) -> dict[int, Ints]:
    """Sorted indices of the accelerators that components hold, by node.

    >>> import roost
    >>> plan = roost.plan({"num_gpus_per_node": 4, "actor_train": {"device_mapping": "[2, 3, 5]"}})
    >>> {node: held.tolist() for node, held in accelerators_used(plan.components).items()}
    {0: [2, 3], 1: [1]}
    """
    tables = [component.table for component in components]
    if not tables:
        return {}
    inventory = tables[0].inventory
    is_held = np.zeros(inventory.num_accelerators, np.bool_)
    for table in tables:
        is_held |= table.processes_on_accelerators > 0
    held = np.flatnonzero(is_held)
    nodes = np.searchsorted(np.cumsum(inventory.accelerator_counts), held, side="right")
    used, starts = np.unique(nodes, return_index=True)
    parts = np.split(held - inventory.first_accelerators[nodes], starts[1:])
    return dict(zip(used.tolist(), parts, strict=False))  # np.split returns one empty part for an empty array


def nodes_used(components: Iterable[ComponentPlan]) -> list[int]:
    """Sorted nodes on which a process runs or holds a device."""
    columns = [column for part in components for column in (part.table.nodes, part.table.device_nodes)]
    nodes: list[int] = np.unique(np.concatenate(columns)).tolist() if columns else []
    return nodes


def demands_of(
    plan_components: Sequence[ComponentPlan],
    cpus_per_process: Mapping[str, float],
    memory_per_process: Mapping[str, float],
) -> tuple[Demand, ...]:
    """Demand on each node a plan uses, in node order; a component missing from the mappings needs no CPU or memory.

    A shared accelerator counts once; CPUs and host memory add up.

    >>> import roost
    >>> cluster = {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor,rollout": "0-3"}}
    >>> (demand,) = demands_of(roost.plan({"cluster": cluster}).components, {"actor": 2, "rollout": 1}, {"actor": 8})
    >>> demand.accelerators, demand.cpus, demand.host_memory_gb
    (4, 12.0, 32.0)
    """
    shares: dict[int, list[Share]] = {node: [] for node in nodes_used(plan_components)}
    for component in plan_components:
        held = accelerators_used([component])
        nodes, counts = np.unique(component.table.nodes, return_counts=True)
        processes = dict(zip(nodes.tolist(), counts.tolist(), strict=True))
        cpus, memory = (float(sizes.get(component.name, 0)) for sizes in (cpus_per_process, memory_per_process))
        for node in sorted(processes.keys() | held.keys()):
            share = Share(component.name, processes.get(node, 0), len(held.get(node, ())), cpus, memory)
            shares[node].append(share)
    used = accelerators_used(plan_components)
    return tuple(
        Demand(
            node,
            len(used.get(node, ())),
            math.fsum(share.processes * share.cpus for share in parts),
            math.fsum(share.processes * share.host_memory_gb for share in parts),
            tuple(parts),
        )
        for node, parts in shares.items()
    )


def check_totals(
    demands: Iterable[Demand], supplies: Iterable[Supply], findings: Findings, file: str | None = None
) -> None:
    """Report demands that exceed a node's total, which waiting cannot resolve.

    Every node with a demand must have a supply.

    >>> findings = Findings()
    >>> demand = Demand(1, 0, 32, 0, (Share("env", 16, 0, 2, 0),))
    >>> check_totals([demand], [Supply(1, "10.0.0.2 (beta)", "GPU", 8, 8, 24, 24, 100, 100)], findings)
    >>> print(findings.errors[0].what, findings.errors[0].why, sep="; ")
    node 1, 10.0.0.2 (beta), has 24 CPUs, the plan needs 32 there; env 16 x 2 = 32 CPUs
    """
    for demand, supply in _paired(demands, supplies):
        for need in _needs(demand, supply):
            if need.exceeds(need.total):
                findings.error(
                    "RST-R019",
                    Where(file),
                    f"node {demand.node}, {supply.name}, has {need.amount(_rounded_down(need.total))}, "
                    f"the plan needs {_number(need.needed)} there",
                    need.why,
                    need.fix,
                )


def without(supply: Supply, held: Iterable[Held]) -> Supply:
    """Supply of a node with held resources subtracted from its totals."""
    on_node = [each for each in held if each.node == supply.node]
    return replace(
        supply,
        total_accelerators=supply.total_accelerators - sum(each.accelerators for each in on_node),
        total_cpus=supply.total_cpus - math.fsum(each.cpus for each in on_node),
        total_memory_gb=supply.total_memory_gb - math.fsum(each.host_memory_gb for each in on_node),
    )


def check_own_process(
    demands: Iterable[Demand], supplies: Iterable[Supply], held: Sequence[Held], findings: Findings
) -> None:
    """Report resources that another Cluster of this process holds, which waiting would never free.

    >>> findings = Findings()
    >>> supply = Supply(1, "10.0.0.2 (beta)", "GPU", 8, 2, 24, 24, 100, 100)
    >>> check_own_process([Demand(1, 4, 0, 0)], [supply], [Held(1, 6, 0, 0, ("actor",))], findings)
    >>> findings.errors[0].what
    'node 1, 10.0.0.2 (beta): 4 accelerators needed, 6 of 8 held by another Cluster of this process'
    >>> findings.errors[0].why
    'it holds them for actor'
    """
    for demand, supply in _paired(demands, supplies):
        left = without(supply, held)
        groups = sorted({group for each in held if each.node == demand.node for group in each.groups})
        for need, rest in zip(_needs(demand, supply), _needs(demand, left), strict=True):
            if rest.exceeds(rest.total) and not need.exceeds(need.total):
                findings.error(
                    "RST-R020",
                    Where(),
                    f"node {demand.node}, {supply.name}: {need.amount(need.needed)} needed, "
                    f"{_number(need.total - rest.total)} of {_number(_rounded_down(need.total))} held by another "
                    "Cluster of this process",
                    f"it holds them for {', '.join(groups)}",
                    "close those groups, shut that Cluster down, or launch on it: its groups may share accelerators",
                )


def describe_shortage(demands: Iterable[Demand], supplies: Iterable[Supply]) -> str:
    """Describe the resources a plan waits for, by node; empty if all it needs is free.

    >>> describe_shortage([Demand(1, 8, 0, 0)], [Supply(1, "10.0.0.2 (beta)", "GPU", 8, 2, 24, 24, 100, 100)])
    'node 1, 10.0.0.2 (beta): 8 accelerators needed, 2 of 8 free'
    """
    busy = []
    for demand, supply in _paired(demands, supplies):
        needs = [need for need in _needs(demand, supply) if need.exceeds(need.free)]
        if needs:
            busy.append(f"node {demand.node}, {supply.name}: {', '.join(need.shortage for need in needs)}")
    more = [f"and {counted(len(busy) - MAX_NAMED, 'more node')}"] if len(busy) > MAX_NAMED else []
    return "; ".join([*busy[:MAX_NAMED], *more])


class _Need(NamedTuple):
    """One resource of a node: needed, total and free amounts, and texts for a finding."""

    unit: str
    needed: float
    total: float
    free: float
    why: str
    fix: str

    def exceeds(self, available: float) -> bool:
        return self.needed > available + SMALLEST

    def amount(self, number: float) -> str:
        unit = self.unit[:-1] if number == 1 and self.unit.endswith("s") else self.unit
        return f"{_number(number)} {unit}"

    @property
    def shortage(self) -> str:
        free = f"{_number(_rounded_down(self.free))} of {_number(_rounded_down(self.total))} free"
        return f"{self.amount(self.needed)} needed, {free}"


def _paired(demands: Iterable[Demand], supplies: Iterable[Supply]) -> Iterator[tuple[Demand, Supply]]:
    by_node = {supply.node: supply for supply in supplies}
    return ((demand, by_node[demand.node]) for demand in demands)


def _needs(demand: Demand, supply: Supply) -> Iterator[_Need]:
    holding = [share for share in demand.shares if share.accelerators]
    shared = "; one that several hold counts once" if len(holding) > 1 else ""
    yield _Need(
        "accelerators",
        demand.accelerators,
        supply.total_accelerators,
        supply.free_accelerators,
        ", ".join(f"{share.component} {share.accelerators}" for share in holding) + shared,
        f"place fewer on it, or start Ray there with all of its {supply.resource} resources",
    )
    cpus = math.ceil(demand.cpus)
    yield _Need(
        "CPUs",
        demand.cpus,
        supply.total_cpus,
        supply.free_cpus,
        _products(((share.component, share.processes, share.cpus) for share in demand.shares), "CPUs"),
        f"place fewer processes on it, ask for fewer CPUs for each, or `ray start --num-cpus {cpus}` if it has them",
    )
    memory = math.ceil(demand.host_memory_gb) * 2**30
    yield _Need(
        "GB of host memory",
        demand.host_memory_gb,
        supply.total_memory_gb,
        supply.free_memory_gb,
        _products(((share.component, share.processes, share.host_memory_gb) for share in demand.shares), "GB"),
        f"place fewer processes on it, ask for less for each, or `ray start --memory {memory}` if it has as much",
    )


def _products(parts: Iterable[tuple[str, int, float]], unit: str) -> str:
    return ", ".join(
        f"{component} {processes} x {_number(each)} = {_number(processes * each)} {unit}"
        for component, processes, each in parts
        if processes and each
    )


def _number(number: float) -> str:
    return f"{number:,.4f}".rstrip("0").rstrip(".")


def _rounded_down(number: float) -> float:
    """Round down to a tenth; rounding up could show a shortage as enough."""
    return math.floor(number * 10 + 1e-6) / 10


NOT_USED = -1
MEMORY_TOLERANCE = 0.02  # drivers differ in the accelerator memory they reserve
PLAN_AGAIN = "plan again on this cluster"


def check_plan(
    plan: Plan, live: Inventory, findings: Findings, known: Mapping[int, int] | None = None
) -> tuple[int, ...] | None:
    """Live node for each node of the plan, or `NOT_USED` if no component uses it; None if there are errors.

    Nodes are matched by host if the plan and the cluster have hosts, so that a saved plan keeps its nodes when they
    join in another order; otherwise by rank. `known` has the live rank of each node if they were matched before.

    >>> import roost
    >>> planned, live = ({"nodes": [{"accelerators": 1, "host": host} for host in hosts]} for hosts in ("ab", "cba"))
    >>> job = {"num_gpus_per_node": 1, "actor_train": {"device_mapping": "0-1"}}
    >>> check_plan(roost.plan(job, roost.Inventory.from_dict(planned)), roost.Inventory.from_dict(live), Findings())
    (2, 1)
    """
    errors = findings.num_errors
    used = nodes_used(plan.components)
    is_known = known is not None and known.keys() >= set(used)
    live_ranks = {node: known[node] for node in used} if known and is_known else _match(plan, used, live, findings)
    if live_ranks is None:
        return None
    devices = accelerators_used(plan.components)
    for node, live_rank in live_ranks.items():
        if node in devices:
            where = Where(plan.file, path=("node", node))
            _compare(plan.inventory.nodes[node], live.nodes[live_rank], live_rank, devices[node], where, findings)
    if findings.num_errors > errors:
        return None
    return tuple(live_ranks.get(node, NOT_USED) for node in range(plan.inventory.num_nodes))


def _match(plan: Plan, used: Sequence[int], live: Inventory, findings: Findings) -> dict[int, int] | None:
    """Live rank of each node that the plan uses."""
    hosts = {node: plan.inventory.nodes[node].host for node in used}
    ranks_of_host: dict[str, list[int]] = {}
    for rank, machine in enumerate(live.nodes):
        ranks_of_host.setdefault(machine.host, []).append(rank)
    absent = [node for node in used if hosts[node] and hosts[node] not in ranks_of_host]
    if absent and any(host and host in ranks_of_host for host in hosts.values()):
        # Some hosts match the plan, so an unknown host is an error rather than a reason to match by rank.
        findings.error(
            "RST-R011",
            Where(plan.file, path=("node", absent[0])),
            f"the plan uses hosts that are not in the cluster: {_listed([hosts[node] for node in absent])}",
            f"{len(absent)} of {counted(len(used), 'node')} that the plan uses cannot be matched",
            f"run `ray start --address=HEAD:PORT` on them, or {PLAN_AGAIN}",
        )
        return None
    is_each_one_machine = all(host and len(ranks_of_host.get(host, ())) == 1 for host in hosts.values())
    if is_each_one_machine and len(set(hosts.values())) == len(hosts):
        return {node: ranks_of_host[host][0] for node, host in hosts.items()}
    return _match_by_rank(plan, hosts, live, findings)


def _match_by_rank(plan: Plan, hosts: dict[int, str], live: Inventory, findings: Findings) -> dict[int, int] | None:
    beyond = [node for node in hosts if node >= live.num_nodes]
    if beyond:
        findings.error(
            "RST-R012",
            Where(plan.file, path=("node", beyond[0])),
            f"the plan uses {counted(len(hosts), 'node')} ({spell_ranks(list(hosts))}), "
            f"the cluster has {counted(live.num_nodes, 'node')}",
            f"{spell_nodes(beyond)} cannot be matched",
            f"run `ray start --address=HEAD:PORT` on more nodes, or {PLAN_AGAIN}",
        )
        return None
    others = [node for node, host in hosts.items() if host and host != live.nodes[node].host]
    if others:
        differ = "differs" if len(others) == 1 else "differ"
        pairs = [f"{hosts[node]} is now {_name(live.nodes[node], node)}" for node in others]
        findings.warn(
            "RST-R013",
            Where(plan.file, path=("node", others[0])),
            f"nodes are matched by rank, and {counted(len(others), 'host')} {differ}: {_listed(pairs)}",
            "hosts match only where each is in the plan once and in the cluster once",
            f"check that these machines are meant, or {PLAN_AGAIN}",
        )
    return {node: node for node in hosts}


def _compare(planned: Node, live: Node, live_rank: int, used: Ints, where: Where, findings: Findings) -> None:
    """Report accelerators of a node that are missing or differ from the plan."""
    name = _name(live, live_rank)
    if used[-1] >= live.accelerators:
        findings.error(
            "RST-R014",
            where,
            f"{name} has {counted(live.accelerators, 'accelerator')}, the plan uses {spell_ranks(used.tolist())} there",
            f"accelerators count from 0, so it would need at least {used[-1] + 1}",
            f"{PLAN_AGAIN}, or give the node that was planned for",
        )
        if live.accelerators == 0:
            return
    if live.accelerator_type == AcceleratorType.SIMULATED != planned.accelerator_type:
        findings.warn(
            "RST-R015",
            where,
            f"{name} simulates its accelerators, the plan is for {planned.accelerator_type}",
            "processes run on its CPU and are told apart as they would be on real ones",
            "give the machines that were planned for, unless this is a trial",
        )
        return
    if live.accelerator_type != planned.accelerator_type:
        findings.error(
            "RST-R016",
            where,
            f"{name} has accelerators of type {live.accelerator_type}, the plan is for {planned.accelerator_type}",
            "processes are limited to their accelerators by variables that differ between types",
            PLAN_AGAIN,
        )
        return
    if not _is_model(planned.accelerator_model, live.accelerator_model):
        findings.warn(
            "RST-R017",
            where,
            f"{name} has {live.accelerator_model}, the plan is for {planned.accelerator_model}",
            fix=f"check that this machine is meant, or {PLAN_AGAIN}",
        )
    if planned.memory_gb and live.memory_gb and live.memory_gb < planned.memory_gb * (1 - MEMORY_TOLERANCE):
        findings.warn(
            "RST-R018",
            where,
            f"{name} has accelerators of {live.memory_gb:.1f} GB, the plan is for {planned.memory_gb:.1f} GB",
            "what was planned to be in memory together may not fit",
            f"{PLAN_AGAIN} to see whether it does",
        )


def _is_model(planned: str, live: str) -> bool:
    """Return True if a model may be the planned one; users write H20 where the driver reports NVIDIA H20-3e.

    >>> _is_model("A800", "NVIDIA A800-SXM4-80GB"), _is_model("H20", "NVIDIA H200")
    (True, False)
    """
    planned_words, live_words = (set(re.findall(r"[a-z0-9]+", text.casefold())) for text in (planned, live))
    return not (planned_words and live_words) or planned_words <= live_words


def _name(node: Node, rank: int) -> str:
    return node.host or f"live node {rank}"


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MAX_NAMED:,} more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more])
