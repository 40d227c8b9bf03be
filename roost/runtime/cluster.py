"""`Cluster`: start or join a Ray cluster, inspect it, and launch worker groups on it."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from roost.cluster.inventory import Inventory
from roost.config.findings import Findings, bug
from roost.config.job import Notation
from roost.placement.component_plan import ComponentPlan, PlacementMode
from roost.placement.plan import Plan
from roost.placement.strategies import PlacementStrategy
from roost.procs.child import LogCollector
from roost.runtime import launch as launcher, nodes, probe
from roost.runtime.checks import NOT_USED, check_plan
from roost.runtime.control_watch import ControlWatch
from roost.runtime.failures import FailureWatch, StartWatch
from roost.runtime.launch import Launching, Request, component_of, plan_launch
from roost.runtime.membership import NodeReport
from roost.runtime.nodes import (
    CLOSING_LIMIT,
    ClusterConfig,
    LiveNode,
    NodeDaemons,
    dismiss,
    live_inventory,
    read_cluster_config,
)
from roost.runtime.ray_connection import connect
from roost.runtime.reserve import Holdings
from roost.runtime.worker import GroupSpec, LaunchOptions, Worker, WorkerGroup, check_methods, check_name
from roost.trace.chrome import TraceSummary, write_trace
from roost.trace.spans import Span, SpanRecorder, WorkerSpans
from roost.transport.channel import Channel
from roost.transport.context import (
    DRIVER,
    Address,
    Current,
    Failure,
    FailureKind,
    ProcessLink,
    WorkerFailed,
    enter_context,
    leave_context,
)
from roost.transport.directory import GroupEntry

FLUSH_LIMIT = 3.0  # seconds for workers to flush their spans
LAST_FLUSH_LIMIT = 0.5  # the same, for workers about to be stopped


def flush(groups: Iterable[WorkerGroup], limit: float = FLUSH_LIMIT) -> None:
    """Ask workers to flush their spans, without waiting for one that is in a long call."""
    flushed = [host._roost_flush.remote() for group in groups for host in group.hosts]
    if flushed:
        ray.wait(flushed, num_returns=len(flushed), timeout=limit)


def worker_spans(daemons: NodeDaemons, nodes: Sequence[LiveNode]) -> list[WorkerSpans]:
    """Spans of all workers, from every node daemon."""
    workers = []
    for node, found in daemons.ask_all("spans"):
        # The driver's own daemon may follow those of the job's nodes.
        offset = nodes[node].report.clock_offset_ns if node < len(nodes) else 0
        for who, devices, spans, dropped in found:
            held = tuple((node, device) for device in devices)
            workers.append(WorkerSpans(who.group, who.rank, node, held, _shifted(spans, offset), dropped))
    return workers


def _shifted(spans: Iterable[Span], offset: int) -> tuple[Span, ...]:
    return tuple(span._replace(start_ns=span.start_ns - offset, end_ns=span.end_ns - offset) for span in spans)


def with_spans(workers: Sequence[WorkerSpans], more: Mapping[Address, Sequence[Span]], node: int) -> list[WorkerSpans]:
    """Add spans to workers; spans of any other address become a new entry on this node."""
    known = {Address(worker.component, worker.rank) for worker in workers}
    found = [
        worker._replace(spans=(*worker.spans, *more.get(Address(worker.component, worker.rank), ())))
        for worker in workers
    ]
    others = [
        WorkerSpans(who.group, who.rank, node, (), tuple(spans)) for who, spans in more.items() if who not in known
    ]
    return [*others, *found]


NODE_LIMIT = 60.0  # seconds to wait for nodes to join
RESERVATION_LIMIT = 600.0  # seconds to wait for resources that other jobs hold


def _say(text: str) -> None:
    print(f"roost: {text}", file=sys.stderr, flush=True)


class Cluster:
    """The nodes of one job and the worker groups that run on them.

    Without an address it joins the Ray cluster that runs on this machine, or starts a local one. `cluster_cfg` is a
    config in RLinf's notation, or its `cluster` section: node groups, their software and the devices they declare.
    `former` are the Ray ids of nodes that the job ran on before, by rank: if there are too few nodes after
    `node_timeout`, the job continues on those of them that are left, with their ranks.
    Use it as a context manager, or call `shutdown()`.

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
        former: Sequence[str] = (),
    ) -> None:
        findings = Findings()
        job = read_cluster_config(cluster_cfg, findings)
        findings.raise_errors()
        wanted = num_nodes if num_nodes is not None else (job.num_nodes if job is not None else None)
        wanted = len(former) or None if wanted is None else wanted
        self._former, self._ranks = tuple(former), tuple[int, ...]()
        self.lost: tuple[int, ...] = ()  # ranks of former nodes that are gone and were not replaced
        self._say = say
        self._groups: dict[str, WorkerGroup] = {}
        self._daemons: dict[str, Any] = {}
        self._given_up: WorkerFailed | None = None
        self._holdings = Holdings(reservation_timeout, say)
        self._ports: dict[str, tuple[int, int]] = {}  # by group: node and port of its rendezvous
        self.log_dir = Path(log_dir or tempfile.mkdtemp(prefix="roost-logs-")).absolute()
        self._has_own_logs = log_dir is None
        self._cleanup = contextlib.ExitStack()  # runs in reverse order of start, even if a step raises
        try:
            self.connection = connect(address, say)
        except BaseException:
            self.shutdown()
            raise
        self._cleanup.callback(self.connection.close)
        self._control = ControlWatch(self.connection.address, say)
        self._cleanup.callback(self._control.stop)
        try:
            self._cleanup.callback(self._end_processes)
            self._join(wanted, job, node_timeout, findings)
            self._collect_logs(show_logs)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, Exception):
                self._control.raise_if_lost()  # the root cause of any other error
            raise
        atexit.register(self.shutdown)

    def _join(self, wanted: int | None, job: Any, node_timeout: float, findings: Findings) -> None:
        mark = uuid.uuid4().hex
        self.log_dir.mkdir(parents=True, exist_ok=True)
        (self.log_dir / probe.MARK).write_text(mark, encoding="utf-8")
        reports = self._reports(wanted, node_timeout, mark)
        left = [rank for rank, node in enumerate(self._former) if node in {report.node_id for report in reports}]
        if left and wanted is not None and len(reports) < wanted:
            self.lost = tuple(rank for rank in range(len(self._former)) if rank not in left)
            self._ranks, job = tuple(left), None  # the plan to continue already contains the node groups
        former = [self._former[rank] for rank in self._ranks]
        self.nodes = nodes.ordered(reports, self._daemons, wanted, findings, former)
        findings.raise_errors()
        self._ranks = self._ranks or tuple(range(len(self.nodes)))
        self._inventory, self._registry = live_inventory(self.nodes, job, findings)
        findings.raise_errors()
        for warning in findings.warnings:
            self._say(str(warning))
        self._links = NodeDaemons(self.nodes, self._daemons)
        self._failures = FailureWatch(self._links.lead, self._control.raise_if_lost)
        self._cleanup.callback(self._failures.stop)
        self._cleanup.callback(self._print_unsettled)
        self._starts = StartWatch(self._never_started)
        self._cleanup.callback(self._starts.stop)
        self._context = Current(
            None, ProcessLink(DRIVER, self._links.driver), SpanRecorder(), self._failures.raise_if_failed
        )
        self._cleanup.callback(self._context.connection.close)
        enter_context(self._context)
        self._cleanup.callback(leave_context, self._context)
        self._links.directory("add_group", GroupEntry(DRIVER.group, (self._links.driver.node,)))

    def _reports(self, wanted: int | None, node_timeout: float, mark: str) -> list[NodeReport]:
        """Start a daemon on every node and return the nodes' reports.

        Ray lists a dead node as alive for some seconds, so after a loss this looks again if a daemon did not start.
        """
        reports: list[NodeReport] = []
        for _ in range(2 if self._former else 1):
            counted = nodes.wait_for_nodes(wanted, node_timeout, self._say)
            new = [node for node in counted if node not in self._daemons]
            daemons = nodes.start_daemons(new, str(self.log_dir), mark, self.connection.folder)
            self._daemons |= daemons
            reports += nodes.ask_nodes(daemons, counted, self._say)
            if len(reports) >= (wanted or 0) or len(reports) == len(counted):
                break
        return reports

    # Inspecting ---------------------------------------------------------------------------------------------------

    @property
    def inventory(self) -> Inventory:
        """The machines, for planning."""
        return self._inventory

    @property
    def num_nodes(self) -> int:
        return self._inventory.num_nodes

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Ray ids of the nodes by rank, to continue on them (`former`); empty for one that is lost."""
        ids = {rank: node.report.node_id for rank, node in zip(self._ranks, self.nodes, strict=True)}
        return tuple(ids.get(rank, "") for rank in range(len(ids) + len(self.lost)))

    @property
    def _live_ranks(self) -> tuple[int, ...]:
        """Position in `nodes` of each node of the job's plan; `NOT_USED` for lost nodes."""
        return tuple(self._ranks.index(rank) if node else NOT_USED for rank, node in enumerate(self.node_ids))

    @property
    def num_accelerators(self) -> int:
        return self._inventory.num_accelerators

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """Open worker groups by name."""
        return dict(self._groups)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All failures so far, root causes first."""
        return self._failures.all

    async def follow_notes(self, report: Callable[[str], None]) -> None:
        """Report notes from workers, such as code that blocks their event loop, until cancelled."""
        count = 0
        while True:
            try:
                count, new = await self._links.lead.ask.remote("directory", "notes_after", count)
            except ray.exceptions.RayError:
                return  # reported with the job's failures
            for text in new:
                report(text)

    def raise_if_lost(self) -> None:
        """Raise `ControlLost` or `WorkerFailed` if Ray's control service or the driver's node daemon is lost.

        Also raise the error given to `give_up`. Waits for workers raise all of these too, but short waits do not check.
        """
        self._failures.raise_if_lost()
        if self._given_up is not None:
            raise self._given_up

    def give_up(self, error: WorkerFailed) -> None:
        """Make `raise_if_lost` raise this error, for a loss that the program expected to handle but cannot."""
        self._given_up = error

    def get_node_ip(self, rank: int) -> str:
        if not 0 <= rank < self.num_nodes:
            raise ValueError(f"there is no node {rank}; the cluster has 0 to {self.num_nodes - 1}")
        return self.nodes[rank].report.address

    # Reserving and launching --------------------------------------------------------------------------------------

    def verify(self, plan: Plan) -> tuple[int, ...]:
        """Check a plan against the live nodes; raise `ConfigError` if they differ.

        Returns the rank of the live node for each node of the plan, or -1 if the plan does not use it.
        """
        findings = Findings()
        known = {rank: live for live, rank in enumerate(self._ranks)} if self.lost else None
        live = check_plan(plan, self._inventory, findings, known)
        findings.raise_errors()
        for warning in findings.warnings:
            self._say(str(warning))
        if live is None:
            raise bug("the plan does not fit, and no finding says why")
        return live

    def launch(
        self,
        plan: Plan | str | Path,
        groups: Mapping[str, GroupSpec | type[Worker]],
        options: Mapping[str, LaunchOptions] | None = None,
    ) -> dict[str, WorkerGroup]:
        """Verify a plan or a saved plan file, reserve all its resources at once, and launch its components.

        `groups` gives the worker class of each component: `{"actor": Actor.create_group(config), ...}`.
        """
        request = plan_launch(plan, groups, options, self._groups)
        if request.left_out:
            self._say(f"launching {', '.join(request.specs)}; the plan also has {', '.join(request.left_out)}")
        live = self.verify(request.plan)
        return self._start(
            [
                Request(
                    name, spec, self._with_registry(request.plan[name]), request.options[name], launcher.packed(spec)
                )
                for name, spec in request.specs.items()
            ],
            live,
        )

    def _launch(
        self,
        spec: GroupSpec,
        where: PlacementStrategy | ComponentPlan | None,
        name: str,
        options: LaunchOptions,
    ) -> WorkerGroup:
        check_name(name, self._groups)
        check_methods(spec.cls)
        component = component_of(where, name, options, self._inventory, self._registry)
        live = self._live_nodes(component)
        request = Request(name, spec, self._with_registry(component), options, launcher.packed(spec))
        return self._start([request], live)[name]

    def launch_one(
        self, spec: GroupSpec, component: ComponentPlan, rank: int, name: str, options: LaunchOptions, wait_s: float
    ) -> WorkerGroup:
        """Launch one more process of a component that was planned on this cluster, as a separate group.

        Its failures do not end waits for other groups. Waits at most `wait_s` seconds for devices that other jobs hold.
        """
        check_name(name, self._groups)
        self._failures.set_expendable(name, list(FailureKind))
        alone = launcher.single_process(component, rank, component.table.inventory if self.lost else self._inventory)
        request = Request(name, spec, self._with_registry(alone), options, launcher.packed(spec))
        return self._start([request], self._live_ranks, wait_s)[name]

    def end_worker(self, group: WorkerGroup, rank: int) -> None:
        """Stop one worker of a group. Its devices stay reserved as long as other workers use the reservation."""
        self._links.tell_all("expect_end", [(group.name, rank)])
        ray.kill(group.hosts[rank])

    def set_expendable(self, group: str, kinds: Collection[FailureKind]) -> None:
        """Let failures of these kinds in a group end only waits for the group itself."""
        self._failures.set_expendable(group, kinds)

    @property
    def lost_nodes(self) -> frozenset[int]:
        """Ranks in the plan of nodes that were lost since the start."""
        lost = (failure.node for failure in self._failures.all if failure.kind is FailureKind.NODE_LOST)
        return frozenset(self._ranks[node] for node in lost if 0 <= node < len(self._ranks))

    def _live_nodes(self, component: ComponentPlan) -> tuple[int, ...]:
        """The live node of each node of a component's plan; the identity if it was planned on this cluster."""
        inventory = component.table.inventory
        if inventory is self._inventory:
            return tuple(range(inventory.num_nodes))
        return self.verify(Plan(Notation.RLINF, None, PlacementMode.HYBRID, inventory, (component,)))

    def _with_registry(self, component: ComponentPlan) -> ComponentPlan:
        """The component with this cluster's hardware registry."""
        return replace(component, registry=self._registry)

    def _start(
        self, requests: Sequence[Request], live: tuple[int, ...], limit: float | None = None
    ) -> dict[str, WorkerGroup]:
        """Reserve resources for the groups and start all of them; processes start while Ray allocates accelerators."""
        needed = {request.component.name: request.options for request in requests}
        components, names = [request.component for request in requests], [request.name for request in requests]
        self._holdings.take(components, self.nodes, live, needed, names, limit)
        reports = [node.report for node in self.nodes]
        live_nodes = launcher.LiveNodes(reports, self._links.contacts, self._links.log_dirs, self._inventory)
        launches: dict[str, Launching] = {}
        with contextlib.ExitStack() as undo:
            for name in names:
                undo.callback(self._holdings.release, name)
            for request in requests:
                launches[request.name] = Launching(request, live, live_nodes, self._links)
                undo.callback(launches[request.name].abandon)
            devices = self._holdings.devices
            for launch in launches.values():
                launch.assign(devices)
            undo.pop_all()
        return {request.name: self._register(request, launches[request.name]) for request in requests}

    def _register(self, request: Request, launch: Launching) -> WorkerGroup:
        group = WorkerGroup(
            request.name, request.spec.cls, launch.hosts, self._failures, self._end_group, request.packed
        )
        self._ports[request.name] = (launch.master_node, launch.port)
        self._groups[request.name] = group
        ready = [host._roost_ready.remote() for host in launch.hosts]
        self._starts.add([process.address for process in launch.processes], ready)
        return group

    def _never_started(self, who: Address, why: str) -> None:
        """Report a worker whose process did not start to the whole job, as node daemons report dead workers."""
        if any(failure.address == who for failure in self._failures.all):
            return  # its daemon has reported it
        try:
            group = self._links.directory("group", who.group, 0.0)
        except LookupError:
            return  # its group has been closed
        failure = Failure(who, FailureKind.DIED, why, time.time_ns(), group.nodes[who.rank])
        self._links.tell_all("lose", tuple(who), why, False)
        self._links.directory("add_failure", failure)

    def _end_group(self, group: WorkerGroup) -> None:
        addresses = [(group.name, rank) for rank in range(group.world_size)]
        self._starts.forget(group.name)
        flush([group], LAST_FLUSH_LIMIT)
        self._links.tell_all("expect_end", addresses)
        for host in group.hosts:
            ray.kill(host)
        self._links.directory("remove_group", group.name)
        self._links.tell_all("forget", addresses)
        node, port = self._ports.pop(group.name)
        for _ in self._links.ask_all("release_port", port, nodes=[node]):
            pass
        self._holdings.release(group.name)
        self._failures.settle_group(group.name)
        self._groups.pop(group.name, None)

    def create_channel(self, name: str, maxsize: int = 0, node_rank: int = 0) -> Channel:
        """Create a channel shared by the job's workers and this process."""
        return Channel.create(name, maxsize, node_rank, self._context)

    # Traces and logs ----------------------------------------------------------------------------------------------

    def write_trace(self, path: str | Path, more: Mapping[Address, Sequence[Span]] | None = None) -> TraceSummary:
        """Write the spans of all workers as a Chrome trace (open it in Perfetto); return device utilization.

        `more` are spans recorded by this process, of itself or on behalf of workers.
        """
        flush(list(self._groups.values()))  # a thread may launch another
        names = {rank: node.report.name for rank, node in enumerate(self.nodes)}
        workers = with_spans(worker_spans(self._links, self.nodes), more or {}, self._links.driver.node)
        return write_trace(Path(path), workers, names)

    @property
    def blind_nodes(self) -> list[int]:
        """Nodes that do not see this process's `log_dir`, because they share no disk with it."""
        here = str(self.log_dir)
        return [node for node, folder in enumerate(self._links.log_dirs) if folder != here]

    def _collect_logs(self, show: bool) -> None:
        blind_nodes = self.blind_nodes

        def fetch(sizes: Mapping[str, int]) -> dict[str, bytes]:
            return {
                name: text
                for _, found in self._links.ask_all("read_logs", dict(sizes), nodes=blind_nodes)
                for name, text in found.items()
            }

        collector = LogCollector(self.log_dir, fetch if blind_nodes else None, sys.stdout if show else None)
        collector.start()
        self._cleanup.callback(collector.stop)

    # Ending -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop all workers, release all resources, and disconnect from Ray; a local Ray is stopped."""
        atexit.unregister(self.shutdown)
        self._cleanup.close()
        if self._has_own_logs and not any(path.stat().st_size for path in self.log_dir.rglob("*.log")):
            shutil.rmtree(self.log_dir, ignore_errors=True)  # no log has any content

    def _print_unsettled(self) -> None:
        """Print failures that no wait has raised, so that they are not lost."""
        for failure in self._failures.unsettled:
            self._say(f"a failure that no call raised: {failure}")

    def _end_processes(self) -> None:
        for group in list(self._groups.values()):  # a thread may launch another
            group.mark_closed()
        if not ray.is_initialized() or self._control.is_lost:
            return  # Ray is unreachable; processes end with the local Ray, or when they lose the control service
        # A node may be lost; the rest of the job must still be stopped.
        with contextlib.suppress(ray.exceptions.RayError):
            closing = [daemon.ask.remote("stop_watching") for daemon in self._daemons.values()]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSING_LIMIT) if closing else None
            for host in [host for group in list(self._groups.values()) for host in group.hosts]:
                ray.kill(host)
            dismiss(list(self._daemons.values()))
        self._holdings.release_all()
