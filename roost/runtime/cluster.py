"""A live cluster: what a person starts or joins, looks at, and launches groups of workers on."""

from __future__ import annotations

import atexit
import contextlib
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from roost.cluster.inventory import Inventory
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
from roost.placement.strategy import PlacementStrategy
from roost.runtime import current, launcher, nodes, probe
from roost.runtime.address import DRIVER
from roost.runtime.capacity import accelerators_used, demands_of
from roost.runtime.channel import Channel
from roost.runtime.directory import GroupEntry
from roost.runtime.failure import Failure
from roost.runtime.failures_seen import FailuresSeen
from roost.runtime.group import GroupSpec, LaunchOptions, WorkerGroup, check_methods, check_name
from roost.runtime.live_inventory import ClusterConfig, live_inventory, read_cluster_config
from roost.runtime.logs import LogCollector
from roost.runtime.process import AgentContact
from roost.runtime.process_link import ProcessLink
from roost.runtime.ray_connection import connect
from roost.runtime.reservation import NodeNeed, Reservation, reserve
from roost.runtime.trace.chrome import TraceSummary, write_trace
from roost.runtime.trace.spans import SpanRecorder, WorkerSpans
from roost.runtime.verify import check_plan
from roost.spec.errors import Findings, did_you_mean

NODE_LIMIT = 60.0  # seconds to wait for nodes to join
RESERVATION_LIMIT = 600.0  # seconds to wait for what others hold
CALL_LIMIT = 60.0  # seconds for an agent to answer


def _say(text: str) -> None:
    print(f"roost: {text}", file=sys.stderr, flush=True)


class Cluster:
    """The machines of one job, and what runs on them.

    Without an address it joins the Ray cluster that runs on this machine, or starts one here, which needs nothing but
    Python. `cluster_cfg` is a config in RLinf's notation, or its `cluster` section: its node groups, their software and
    the devices they declare. Use it as a context manager, or call `shutdown()`.

        with Cluster(num_nodes=1) as cluster:
            group = MyWorker.create_group().launch(cluster, name="hello")
    """

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: ClusterConfig = None,
        address: str | None = None,
        *,
        log_dir: str | Path | None = None,
        show_logs: bool = False,
        node_timeout: float = NODE_LIMIT,
        reservation_timeout: float = RESERVATION_LIMIT,
        say: Callable[[str], None] = _say,
    ) -> None:
        findings = Findings()
        job = read_cluster_config(cluster_cfg, findings)
        findings.raise_errors()
        wanted = num_nodes if num_nodes is not None else (job.num_nodes if job is not None else None)
        self._say, self._reservation_limit = say, reservation_timeout
        self._is_ended = False
        self._place: current.Current | None = None
        self._groups: dict[str, WorkerGroup] = {}
        self._reservations: list[Reservation] = []
        self._devices: dict[tuple[int, int], int] = {}  # of each accelerator held, the one that stands for it
        self._agents: dict[str, Any] = {}
        self._ports: dict[str, tuple[Any, int]] = {}  # of each group the one its ranks meet at
        self.log_dir = Path(log_dir or tempfile.mkdtemp(prefix="roost-logs-")).absolute()
        self.connection = connect(address)
        try:
            self._join(wanted, job, node_timeout, findings)
            self._collector = self._collect_logs(show_logs)
        except BaseException:
            self.shutdown()
            raise
        atexit.register(self.shutdown)

    def _join(self, wanted: int | None, job: Any, node_timeout: float, findings: Findings) -> None:
        mark = uuid.uuid4().hex
        self.log_dir.mkdir(parents=True, exist_ok=True)
        (self.log_dir / probe.MARK).write_text(mark, encoding="utf-8")
        counted = nodes.wait_for_nodes(wanted, node_timeout, self._say)
        self._agents = nodes.start_agents(list(counted), str(self.log_dir), mark)
        reports = nodes.ask_nodes(self._agents, counted)
        self.nodes = nodes.ordered(reports, self._agents, wanted, findings)
        findings.raise_errors()
        self._inventory, self._registry = live_inventory(self.nodes, job, findings)
        findings.raise_errors()
        for warning in findings.warnings:
            self._say(str(warning))
        self._contacts = self._connect_agents()
        self._log_dirs = ray.get([agent.ask.remote("log_dir") for agent in self._handles], timeout=CALL_LIMIT)
        self._failures = FailuresSeen(self._lead)
        driver = next(contact for contact in self._contacts if contact.handle is self._lead)
        self._place = current.Current(None, ProcessLink(DRIVER, driver), SpanRecorder())
        current.enter(self._place)
        self._ask_directory("add_group", GroupEntry(DRIVER.group, (driver.node,)))

    def _connect_agents(self) -> list[AgentContact]:
        """Let the agents know each other. The driver's node takes part even if no worker is to run there."""
        here = ray.get_runtime_context().get_node_id()
        self._handles = [node.agent for node in self.nodes]
        members = [node.report.node_id for node in self.nodes]
        for node_id, agent in self._agents.items():
            if node_id == here and node_id not in members:
                self._handles.append(agent)
                members.append(node_id)
            elif node_id not in members:
                ray.kill(agent)
        lead = members.index(here)
        self._lead = self._handles[lead]
        joined = [agent.ask.remote("join", rank, self._handles, lead) for rank, agent in enumerate(self._handles)]
        contacts = ray.get(joined, timeout=CALL_LIMIT)
        return [replace(contact, handle=agent) for contact, agent in zip(contacts, self._handles, strict=True)]

    # What there is ------------------------------------------------------------------------------------------------

    @property
    def inventory(self) -> Inventory:
        """The machines, for planning."""
        return self._inventory

    @property
    def num_nodes(self) -> int:
        return self._inventory.num_nodes

    @property
    def num_accelerators(self) -> int:
        return self._inventory.num_accelerators

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """The groups that were launched and not closed, by name."""
        return dict(self._groups)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Everything that has failed so far, first causes first."""
        return self._failures.all

    def get_node_ip(self, rank: int) -> str:
        if not 0 <= rank < self.num_nodes:
            raise ValueError(f"there is no node {rank}; the cluster has 0 to {self.num_nodes - 1}")
        return self.nodes[rank].report.address

    # Reserving and launching --------------------------------------------------------------------------------------

    def verify(self, plan: Plan) -> tuple[int, ...]:
        """Hold a plan against the machines that are there; what differs is raised as a `ConfigError`.

        The answer has for each node of the plan the rank of the live node, or -1 where the plan does not use it.
        """
        findings = Findings()
        live = check_plan(plan, self._inventory, findings)
        findings.raise_errors()
        for warning in findings.warnings:
            self._say(str(warning))
        if live is None:
            raise RuntimeError("a plan without findings must fit; please report it")
        return live

    def launch(
        self,
        plan: Plan | str | Path,
        groups: Mapping[str, GroupSpec],
        options: Mapping[str, LaunchOptions] | None = None,
    ) -> dict[str, WorkerGroup]:
        """Verify a plan or a saved plan file, reserve all it needs at once, and launch its components.

        `groups` says of which class each component's workers are: `{"actor": Actor.create_group(config), ...}`.
        """
        if not isinstance(plan, Plan):
            plan = Plan.from_json(Path(plan).read_text(encoding="utf-8"))
        unknown = [name for name in groups if name not in {part.name for part in plan.components}]
        if unknown:
            hint = did_you_mean(unknown[0], [part.name for part in plan.components])
            raise KeyError(f"the plan has no component {unknown[0]}; {hint}")
        for name, spec in groups.items():
            check_name(name, self._groups)
            check_methods(spec.cls)
        live = self.verify(plan)
        settings = {name: (options or {}).get(name, LaunchOptions()) for name in groups}
        components = [plan[name] for name in groups]
        self._reserve(components, live, settings)
        return {name: self._start(spec, plan[name], name, settings[name], live) for name, spec in groups.items()}

    def _launch(
        self,
        spec: GroupSpec,
        where: PlacementStrategy | ComponentPlan | None,
        name: str,
        options: LaunchOptions,
    ) -> WorkerGroup:
        check_name(name, self._groups)
        check_methods(spec.cls)
        component = where if isinstance(where, ComponentPlan) else self._placed(where, name, options)
        live = tuple(range(max(component.table.inventory.num_nodes, 1)))
        self._reserve([component], live, {component.name: options})
        return self._start(spec, component, name, options, live)

    def _placed(self, strategy: PlacementStrategy | None, name: str, options: LaunchOptions) -> ComponentPlan:
        if strategy is None:
            count = self.num_accelerators
            strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy([0])
        findings = Findings()
        table = strategy.place(self._inventory, findings, isolate=options.isolate_accelerator)
        findings.raise_errors()
        if table is None:
            raise RuntimeError("a placement without findings must have been made; please report it")
        return ComponentPlan(name, name, type(strategy).__name__, np.zeros(0, np.int64), table, registry=self._registry)

    def _reserve(
        self, components: list[ComponentPlan], live: tuple[int, ...], options: Mapping[str, LaunchOptions]
    ) -> None:
        """Reserve what the components need and this job does not hold yet."""
        demands = demands_of(
            components,
            {name: each.cpus_per_process for name, each in options.items()},
            {name: each.host_memory_gb_per_process for name, each in options.items()},
        )
        used = accelerators_used(components)
        needs, wanted = [], []
        for demand in demands:
            node = live[demand.node]
            held = [int(device) for device in used.get(demand.node, ())]
            new = tuple(device for device in held if (node, device) not in self._devices)
            if new or demand.cpus or demand.host_memory_gb:
                ours = frozenset(there for (on, _), there in self._devices.items() if on == node)
                needs.append(NodeNeed(node, new, demand.cpus, demand.host_memory_gb, ours))
                wanted.append(replace(demand, node=node, accelerators=len(new)))
        if not needs:
            return
        reports = [node.report for node in self.nodes]
        reservation = reserve(
            needs, wanted, reports, lambda: nodes.supplies(self.nodes), self._reservation_limit, self._say
        )
        self._reservations.append(reservation)
        self._devices |= reservation.devices

    def _start(
        self, spec: GroupSpec, component: ComponentPlan, name: str, options: LaunchOptions, live: tuple[int, ...]
    ) -> WorkerGroup:
        placed = [live[int(node)] for node in component.table.nodes]
        reports = [node.report for node in self.nodes]
        port = ray.get(self._handles[placed[0]].ask.remote("lease_port"), timeout=CALL_LIMIT)
        master = (launcher.master_address(placed, reports), port)
        setups = launcher.process_setups(
            name, component, options, live, reports, self._contacts, self._log_dirs, self._devices, master
        )
        self._ask_directory("add_group", launcher.group_entry(name, setups))
        hosts, kept = launcher.start_hosts(spec, setups, reports, options)
        group = WorkerGroup(name, spec.cls, hosts, self._failures, self._end_group, kept)
        self._ports[name] = (self._handles[placed[0]], port)
        self._groups[name] = group
        return group

    def _end_group(self, group: WorkerGroup) -> None:
        addresses = [(group.name, rank) for rank in range(group.world_size)]
        ray.get([agent.ask.remote("expect_end", addresses) for agent in self._handles], timeout=CALL_LIMIT)
        for host in group.hosts:
            ray.kill(host)
        self._ask_directory("remove_group", group.name)
        ray.get([agent.ask.remote("forget", group.name, addresses) for agent in self._handles], timeout=CALL_LIMIT)
        agent, port = self._ports.pop(group.name)
        agent.ask.remote("release_port", port)
        self._groups.pop(group.name, None)

    def create_channel(self, name: str, maxsize: int = 0, node_rank: int = 0) -> Channel:
        """A channel that the job's workers and this process share."""
        return Channel.create(name, maxsize, node_rank, self._place)

    # Looking back -------------------------------------------------------------------------------------------------

    def write_trace(self, path: str | Path) -> TraceSummary:
        """Write what every worker did, and when, as a Chrome trace (open it in Perfetto), and how busy devices were."""
        flushed = [host._roost_flush.remote() for group in self._groups.values() for host in group.hosts]
        ray.wait(flushed, num_returns=len(flushed), timeout=10) if flushed else None
        workers = []
        for node, agent in enumerate(self._handles):
            offset = self.nodes[node].report.clock_offset_ns if node < len(self.nodes) else 0
            for who, devices, spans, dropped in ray.get(agent.ask.remote("take_spans"), timeout=CALL_LIMIT):
                shifted = tuple(
                    span._replace(start_ns=span.start_ns - offset, end_ns=span.end_ns - offset) for span in spans
                )
                held = tuple((node, device) for device in devices)
                workers.append(WorkerSpans(who.group, who.rank, node, held, shifted, dropped))
        names = {rank: node.report.name for rank, node in enumerate(self.nodes)}
        return write_trace(Path(path), workers, names)

    def _collect_logs(self, show: bool) -> LogCollector:
        away = [
            agent for agent, folder in zip(self._handles, self._log_dirs, strict=True) if folder != str(self.log_dir)
        ]

        def fetch(sizes: Mapping[str, int]) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for answer in [agent.ask.remote("read_logs", dict(sizes)) for agent in away]:
                with contextlib.suppress(ray.exceptions.RayError):  # of a node that is lost there is nothing to fetch
                    found |= ray.get(answer, timeout=CALL_LIMIT)
            return found

        collector = LogCollector(self.log_dir, fetch if away else None, sys.stdout if show else None)
        collector.start()
        return collector

    def _ask_directory(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(self._lead.ask.remote("directory", method, *args), timeout=CALL_LIMIT)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    # Ending -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End all workers, give everything back, and leave Ray; a local Ray is stopped."""
        atexit.unregister(self.shutdown)
        if self._is_ended or not ray.is_initialized():
            return
        self._is_ended = True
        if self._place is not None:
            self._collector.stop()
            self._failures.stop()
            for failure in self._failures.unsettled:
                self._say(f"this was not waited for: {failure}")
            current.leave(self._place)
            self._place.connection.close()
        with contextlib.suppress(Exception):  # a node may be gone; what is left of the job must still be ended
            self._end_processes()
        for reservation in self._reservations:
            with contextlib.suppress(Exception):
                reservation.release()
        self.connection.close()

    def _end_processes(self) -> None:
        for group in self._groups.values():
            group.mark_closed()
            for host in group.hosts:
                ray.kill(host)
        closing = [agent.ask.remote("close") for agent in self._agents.values()]
        ray.wait(closing, num_returns=len(closing), timeout=5) if closing else None
        for agent in self._agents.values():
            ray.kill(agent)
