"""Nodes of a live cluster: wait for them, start their daemons, collect reports, and order them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.describe import describe, known_hardware
from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry, registry_for
from roost.cluster.inventory import NO_ACCELERATOR, Inventory
from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.job import Job, Notation
from roost.config.notations.notation import read_job
from roost.runtime.checks import Supply
from roost.runtime.membership import (
    NodeReport,
    check_device_counts,
    check_versions,
    order_nodes,
    report_device,
    report_interpreter,
    to_node,
)
from roost.runtime.node_daemon_actor import NodeDaemonActor
from roost.runtime.ray_connection import alive_nodes, free_resources, node_resources
from roost.runtime.ray_errors import cause_of, raised_line
from roost.transport.context import DaemonContact, ProcessSetup

LOOK_EVERY = 0.2  # seconds
REPORT_AFTER = 2.0
DAEMON_LIMIT = 120.0  # seconds for a daemon to start and probe its node
DAEMON_CALLS = 1_000_000  # concurrent requests of a daemon; most of them wait


class LiveNode(NamedTuple):
    """A node of the job: its report and its daemon."""

    report: NodeReport
    daemon: Any


def wait_for_nodes(count: int | None, limit: float, say: Callable[[str], None]) -> Mapping[str, Mapping[str, float]]:
    """Return the alive nodes once there are `count`, or after `limit` seconds; the caller checks for missing ones."""
    start = time.monotonic()
    is_reported = False
    while True:
        nodes = node_resources()
        waited = time.monotonic() - start
        if count is None or len(nodes) >= count or waited > limit:
            return nodes
        if waited > REPORT_AFTER and not is_reported:
            addresses = ", ".join(node["NodeManagerAddress"] for node in alive_nodes())
            say(f"waiting up to {limit:g} s for {count} nodes; {len(nodes)} joined: {addresses}")
            is_reported = True
        time.sleep(LOOK_EVERY)


def start_daemons(node_ids: Sequence[str], log_dir: str, mark: str, scratch: Path | None) -> dict[str, Any]:
    """Start a daemon on each node concurrently; their temporary files go to `scratch`, which must exist on each."""
    actor = ray.remote(NodeDaemonActor)
    return {
        node: actor.options(
            num_cpus=0,
            max_concurrency=DAEMON_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(log_dir, mark, scratch)
        for node in node_ids
    }


def ask_nodes(
    daemons: Mapping[str, Any], counted: Mapping[str, Mapping[str, float]], say: Callable[[str], None]
) -> list[NodeReport]:
    """Report and clock offset of every node; a node whose daemon fails is skipped."""
    driver = ray.get_runtime_context().get_node_id()
    entries = {node: daemon.ask.remote("report", driver, dict(counted[node])) for node, daemon in daemons.items()}
    end = time.monotonic() + DAEMON_LIMIT
    reports = []
    for node, answer in entries.items():
        try:
            report = ray.get(answer, timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.RayError as error:
            addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in alive_nodes()}
            say(f"node {addresses.get(node, node)} is not used, its daemon did not start: {raised_line(error)}")
            continue
        reports.append(replace(report, clock_offset_ns=_clock_offset(daemons[node])))
    return reports


def _clock_offset(daemon: Any, tries: int = 3) -> int:
    """Nanoseconds by which the daemon's clock is ahead, from the fastest of a few round trips."""
    seen = []
    for _ in range(tries):
        before = time.time_ns()
        remote: int = ray.get(daemon.ask.remote("clock"), timeout=DAEMON_LIMIT)
        after = time.time_ns()
        seen.append((after - before, remote - (before + after) // 2))
    return min(seen)[1]


def ordered(
    reports: Sequence[NodeReport],
    daemons: Mapping[str, Any],
    num_nodes: int | None,
    findings: Findings,
    former: Sequence[str] = (),
) -> tuple[LiveNode, ...]:
    """The job's nodes in rank order, or only the `former` ones in the given order; problems go to `findings`."""
    by_id = {report.node_id: report for report in reports}
    order = tuple(by_id[node] for node in former) if former else order_nodes(reports, findings, num_nodes)
    if order is None:
        return ()
    check_versions(order, findings)
    check_device_counts(order, findings)
    return tuple(LiveNode(report, daemons[report.node_id]) for report in order)


def supplies(nodes: Sequence[LiveNode]) -> list[Supply]:
    """Total and free resources of each node, from Ray."""
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


ASK_LIMIT = 120.0  # seconds

ClusterConfig = Mapping[str, Any] | str | Path | None


def read_cluster_config(config: ClusterConfig, findings: Findings) -> Job | None:
    """Read a job from a whole config, or from its `cluster` section alone."""
    if config is None:
        return None
    if not isinstance(config, Mapping | str | Path) and not hasattr(config, "keys"):
        raise TypeError(f"cluster_cfg is {config!r}; give a config's path, or its cluster section as a mapping")
    if not isinstance(config, str | Path) and "cluster" not in config:
        config = {"cluster": _plain(config)}
    source = load(config, (), findings)
    # Only the machines matter here, so a config without component placement is valid.
    return read_job(source, findings, needs_components=False) if source is not None else None


def _plain(section: Mapping[str, Any]) -> Any:
    """A section as plain values; OmegaConf interpolations are resolved here, as they refer outside of it."""
    if not type(section).__module__.startswith("omegaconf"):
        return section
    from omegaconf import OmegaConf

    return OmegaConf.to_container(section, resolve=True)


def live_inventory(
    nodes: Sequence[LiveNode], job: Job | None, findings: Findings
) -> tuple[Inventory, HardwareRegistry]:
    """Inventory of the nodes with the job's node groups, checked on the nodes themselves."""
    bare = Inventory(tuple(to_node(node.report) for node in nodes))
    if job is None or job.notation is not Notation.RLINF:
        types = {node.accelerator_type for node in bare.nodes} - {NO_ACCELERATOR}
        return bare, registry_for((), types, {}) if types else BUILT_IN
    registry = known_hardware(job, bare, findings)
    bound = describe(job, findings, bare, registry=registry)
    if bound is None:
        return bare, registry
    _check_interpreters(bound, nodes, findings)
    return _with_devices(bound, nodes, job, findings), registry


def _check_interpreters(inventory: Inventory, nodes: Sequence[LiveNode], findings: Findings) -> None:
    paths = {
        (rank, part.python_interpreter_path)
        for group in inventory.groups
        for part in group.software
        if part.python_interpreter_path is not None
        for rank in part.node_ranks
    }
    ordered = sorted(paths)
    answers = ray.get(
        [nodes[rank].daemon.ask.remote("check_interpreter", path) for rank, path in ordered], timeout=ASK_LIMIT
    )
    for (rank, _), wrong in zip(ordered, answers, strict=True):
        if wrong:
            report_interpreter(rank, nodes[rank].report.name, wrong, findings)


def _with_devices(inventory: Inventory, nodes: Sequence[LiveNode], job: Job, findings: Findings) -> Inventory:
    """Inventory with declared devices completed from their nodes' environment variables."""
    wanted = [
        (rank, kind, configs) for rank, node in enumerate(inventory.nodes) for kind, configs in node.hardware.items()
    ]
    undeclared = [
        (int(rank), group.hardware_type, ())
        for group in inventory.groups
        if group.hardware_type is not None
        for rank in group.node_ranks
        if group.hardware_type not in inventory.nodes[int(rank)].hardware
    ]
    entries = [*wanted, *undeclared]
    answers = ray.get(
        [
            nodes[rank].daemon.ask.remote("robots", kind, [dict(config) for config in configs], rank)
            for rank, kind, configs in entries
        ],
        timeout=ASK_LIMIT,
    )
    machines = list(inventory.nodes)
    for (rank, kind, _), (filled, problems) in zip(entries, answers, strict=True):
        for problem in problems:
            report_device(rank, kind, problem, findings)
        if filled:
            machines[rank] = replace(machines[rank], hardware={**machines[rank].hardware, kind: filled})
    return Inventory(tuple(machines), inventory.groups)


LIMIT = 60.0  # seconds for a daemon to answer
CLOSING_LIMIT = 5.0


class NodeDaemons:
    """The daemons of a job in node order, followed by the driver's own if its node is not one of them."""

    def __init__(self, nodes: Sequence[LiveNode], started: Mapping[str, Any]) -> None:
        here = ray.get_runtime_context().get_node_id()
        members = {node.report.node_id: node.daemon for node in nodes}
        members.setdefault(here, started[here])  # joins even if no worker runs there
        dismiss([daemon for node, daemon in started.items() if node not in members])
        self.handles = list(members.values())
        lead = list(members).index(here)
        self.lead = self.handles[lead]
        joined = [daemon.ask.remote("join", rank, self.handles, lead) for rank, daemon in enumerate(self.handles)]
        self.contacts: list[DaemonContact] = [
            replace(contact, handle=daemon)
            for contact, daemon in zip(ray.get(joined, timeout=LIMIT), self.handles, strict=True)
        ]
        self.driver = self.contacts[lead]
        self.log_dirs: list[str] = ray.get([daemon.ask.remote("log_dir") for daemon in self.handles], timeout=LIMIT)

    def ask(self, node: int, method: str, *args: Any) -> Any:
        """Call a method of one daemon."""
        return ray.get(self.handles[node].ask.remote(method, *args), timeout=LIMIT)

    def ask_all(self, method: str, *args: Any, nodes: Sequence[int] | None = None) -> Iterator[tuple[int, Any]]:
        """Call a method of all daemons, or of some nodes'; yield nodes and answers, skipping lost daemons."""
        chosen = range(len(self.handles)) if nodes is None else nodes
        calls = [(node, self.handles[node].ask.remote(method, *args)) for node in chosen]
        for node, answer in calls:
            with contextlib.suppress(ray.exceptions.RayError):
                yield node, ray.get(answer, timeout=LIMIT)

    def tell_all(self, method: str, *args: Any) -> None:
        """Call a method of all daemons and discard the answers."""
        for _ in self.ask_all(method, *args):
            pass

    def assign(self, setups: Sequence[ProcessSetup]) -> None:
        """Send the daemons the setups that their workers wait for."""
        of_node: dict[int, list[tuple[Any, ...]]] = {}
        for setup in setups:
            packed = cloudpickle.dumps(setup)  # type: ignore[no-untyped-call]
            entry = (tuple(setup.address), setup.devices, setup.log_path, setup.max_restarts, packed)
            of_node.setdefault(setup.daemon.node, []).append(entry)
        assigned = [self.handles[node].ask.remote("assign", entries) for node, entries in of_node.items()]
        ray.get(assigned, timeout=LIMIT)

    def directory(self, method: str, *args: Any) -> Any:
        """Call a method of the job's directory."""
        try:
            return ray.get(self.lead.ask.remote("directory", method, *args), timeout=LIMIT)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None


def dismiss(daemons: Sequence[Any]) -> None:
    """Stop daemons after they have cleaned up."""
    closing = [daemon.ask.remote("close") for daemon in daemons]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=CLOSING_LIMIT)
    for daemon in daemons:
        ray.kill(daemon)
