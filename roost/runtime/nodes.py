"""The nodes of a live cluster: waited for, asked what they are, and put in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.errors import Findings
from roost.runtime.agent_actor import NodeAgentActor
from roost.runtime.capacity import Supply
from roost.runtime.membership import check_device_counts, check_versions, order_nodes
from roost.runtime.node_report import NodeReport
from roost.runtime.ray_connection import alive_nodes, free_resources, node_resources
from roost.runtime.ray_errors import raised_line

LOOK_EVERY = 0.2  # seconds
SPEAK_AFTER = 2.0
AGENT_LIMIT = 120.0  # seconds for an agent to start and look around
AGENT_CALLS = 1_000_000  # requests an agent may have under way: most of them wait for something


class LiveNode(NamedTuple):
    """A node of the job: what it says of itself, and its agent."""

    report: NodeReport
    agent: Any


def wait_for_nodes(count: int | None, limit: float, say: Callable[[str], None]) -> Mapping[str, Mapping[str, float]]:
    """The nodes that are there; if fewer than wanted, after a bounded time. Who is missing is for the caller to say."""
    start = time.monotonic()
    has_spoken = False
    while True:
        nodes = node_resources()
        waited = time.monotonic() - start
        if count is None or len(nodes) >= count or waited > limit:
            return nodes
        if waited > SPEAK_AFTER and not has_spoken:
            addresses = ", ".join(node["NodeManagerAddress"] for node in alive_nodes())
            say(f"waiting up to {limit:g} s for {count} nodes; {len(nodes)} joined: {addresses}")
            has_spoken = True
        time.sleep(LOOK_EVERY)


def start_agents(node_ids: Sequence[str], log_dir: str, mark: str, scratch: Path | None) -> dict[str, Any]:
    """An agent on each node, all at once; their temporary files go to `scratch`, which must exist on each."""
    actor = ray.remote(NodeAgentActor)
    return {
        node: actor.options(
            num_cpus=0,
            max_concurrency=AGENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(log_dir, mark, scratch)
        for node in node_ids
    }


def ask_nodes(
    agents: Mapping[str, Any], counted: Mapping[str, Mapping[str, float]], say: Callable[[str], None]
) -> list[NodeReport]:
    """What every node says of itself, and how far its clock is from this one; one that cannot is left out."""
    driver = ray.get_runtime_context().get_node_id()
    asked = {node: agent.ask.remote("report", driver, dict(counted[node])) for node, agent in agents.items()}
    end = time.monotonic() + AGENT_LIMIT
    reports = []
    for node, answer in asked.items():
        try:
            report = ray.get(answer, timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.RayError as error:
            addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in alive_nodes()}
            say(f"node {addresses.get(node, node)} is left out, its agent did not start: {raised_line(error)}")
            continue
        reports.append(replace(report, clock_offset_ns=_clock_offset(agents[node])))
    return reports


def _clock_offset(agent: Any, tries: int = 3) -> int:
    """How far another clock is ahead; of a few tries the one that was answered fastest is the most exact."""
    seen = []
    for _ in range(tries):
        before = time.time_ns()
        there: int = ray.get(agent.ask.remote("clock"), timeout=AGENT_LIMIT)
        after = time.time_ns()
        seen.append((after - before, there - (before + after) // 2))
    return min(seen)[1]


def ordered(
    reports: Sequence[NodeReport], agents: Mapping[str, Any], num_nodes: int | None, findings: Findings
) -> tuple[LiveNode, ...]:
    """The job's nodes in rank order; everything wrong with them goes to `findings`."""
    order = order_nodes(reports, findings, num_nodes)
    if order is None:
        return ()
    check_versions(order, findings)
    check_device_counts(order, findings)
    return tuple(LiveNode(report, agents[report.node_id]) for report in order)


def supplies(nodes: Sequence[LiveNode]) -> list[Supply]:
    """What Ray counts on each node, and what of it is free."""
    totals, free = node_resources(), free_resources()
    return [
        _supply(rank, node.report, totals.get(node.report.node_id, {}), free.get(node.report.node_id, {}))
        for rank, node in enumerate(nodes)
    ]


def _supply(rank: int, report: NodeReport, total: Mapping[str, float], free: Mapping[str, float]) -> Supply:
    return Supply(
        rank,
        report.name,
        report.ray_resource,
        int(total.get(report.ray_resource, 0)),
        int(free.get(report.ray_resource, 0)),
        total.get("CPU", 0.0),
        free.get("CPU", 0.0),
        total.get("memory", 0.0) / 2**30,
        free.get("memory", 0.0) / 2**30,
    )
