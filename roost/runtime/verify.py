"""A plan held against the live nodes before anything starts: it may have been made elsewhere, or long ago."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.inventory import Inventory, Node
from roost.cluster.resources import Ints
from roost.config.errors import Findings, Where, counted
from roost.config.ranks import spell_ranks
from roost.placement.plan import Plan
from roost.runtime.capacity import accelerators_used, nodes_used

NOT_USED = -1
MEMORY_TOLERANCE = 0.02  # drivers differ in what they keep of an accelerator's memory for themselves
MAX_NAMED = 8  # nodes in one message
PLAN_AGAIN = "plan again on this cluster"


def check_plan(plan: Plan, live: Inventory, findings: Findings) -> tuple[int, ...] | None:
    """For each node of the plan the live node that takes its part, `NOT_USED` where no component uses it.

    Nodes are matched by their hosts where the plan and the cluster have those, so that a saved plan keeps its nodes
    when they join in another order; else by rank. None where there are findings that stop it.

    >>> import roost
    >>> planned, live = ({"nodes": [{"accelerators": 1, "host": host} for host in hosts]} for hosts in ("ab", "cba"))
    >>> job = {"num_gpus_per_node": 1, "actor_train": {"device_mapping": "0-1"}}
    >>> check_plan(roost.plan(job, roost.Inventory.from_dict(planned)), roost.Inventory.from_dict(live), Findings())
    (2, 1)
    """
    errors = findings.num_errors
    used = nodes_used(plan.components)
    live_ranks = _match(plan, used, live, findings)
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
    """The live rank of each node that the plan uses."""
    hosts = {node: plan.inventory.nodes[node].host for node in used}
    ranks_of_host: dict[str, list[int]] = {}
    for rank, machine in enumerate(live.nodes):
        ranks_of_host.setdefault(machine.host, []).append(rank)
    absent = [node for node in used if hosts[node] and hosts[node] not in ranks_of_host]
    if absent and any(host and host in ranks_of_host for host in hosts.values()):
        # Some of the machines are the planned ones, so a stranger in the place of another is no accident to pass over.
        findings.error(
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
            Where(plan.file, path=("node", beyond[0])),
            f"the plan uses {counted(len(hosts), 'node')} ({spell_ranks(list(hosts))}), "
            f"the cluster has {counted(live.num_nodes, 'node')}",
            f"{'node' if len(beyond) == 1 else 'nodes'} {spell_ranks(beyond)} cannot be matched",
            f"run `ray start --address=HEAD:PORT` on more nodes, or {PLAN_AGAIN}",
        )
        return None
    others = [node for node, host in hosts.items() if host and host != live.nodes[node].host]
    if others:
        differ = "differs" if len(others) == 1 else "differ"
        pairs = [f"{hosts[node]} is now {_called(live.nodes[node], node)}" for node in others]
        findings.warn(
            Where(plan.file, path=("node", others[0])),
            f"nodes are matched by rank, and {counted(len(others), 'host')} {differ}: {_listed(pairs)}",
            "hosts match only where each is in the plan once and in the cluster once",
            f"check that these machines are meant, or {PLAN_AGAIN}",
        )
    return {node: node for node in hosts}


def _compare(planned: Node, there: Node, live_rank: int, used: Ints, where: Where, findings: Findings) -> None:
    """The accelerators that the plan uses on a node must be there and be what they were planned as."""
    name = _called(there, live_rank)
    if used[-1] >= there.accelerators:
        findings.error(
            where,
            f"{name} has {counted(there.accelerators, 'accelerator')}, "
            f"the plan uses {spell_ranks(used.tolist())} there",
            f"accelerators count from 0, so it would need at least {used[-1] + 1}",
            f"{PLAN_AGAIN}, or give the node that was planned for",
        )
        if there.accelerators == 0:
            return
    if there.accelerator_type == AcceleratorType.SIMULATED != planned.accelerator_type:
        findings.warn(
            where,
            f"{name} simulates its accelerators, the plan is for {planned.accelerator_type}",
            "processes run on its CPU and are told apart as they would be on real ones",
            "give the machines that were planned for, unless this is a trial",
        )
        return
    if there.accelerator_type != planned.accelerator_type:
        findings.error(
            where,
            f"{name} has accelerators of type {there.accelerator_type}, the plan is for {planned.accelerator_type}",
            "processes are limited to their accelerators by variables that differ between types",
            PLAN_AGAIN,
        )
        return
    if not _is_model(planned.accelerator_model, there.accelerator_model):
        findings.warn(
            where,
            f"{name} has {there.accelerator_model}, the plan is for {planned.accelerator_model}",
            fix=f"check that this machine is meant, or {PLAN_AGAIN}",
        )
    if planned.memory_gb and there.memory_gb and there.memory_gb < planned.memory_gb * (1 - MEMORY_TOLERANCE):
        findings.warn(
            where,
            f"{name} has accelerators of {there.memory_gb:.1f} GB, the plan is for {planned.memory_gb:.1f} GB",
            "what was planned to be in memory together may not fit",
            f"{PLAN_AGAIN} to see whether it does",
        )


def _is_model(planned: str, there: str) -> bool:
    """Whether a model may be the one that was planned; people write H20 for what a driver calls NVIDIA H20-3e.

    >>> _is_model("A800", "NVIDIA A800-SXM4-80GB"), _is_model("H20", "NVIDIA H200")
    (True, False)
    """
    written, named = (set(re.findall(r"[a-z0-9]+", text.casefold())) for text in (planned, there))
    return not (written and named) or written <= named


def _called(node: Node, rank: int) -> str:
    return node.host or f"live node {rank}"


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MAX_NAMED:,} more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more])
