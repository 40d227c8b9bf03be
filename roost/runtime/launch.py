"""Launch a group: check the request, build each process environment, start the processes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.hardware.accelerator import Accelerator, AcceleratorType
from roost.cluster.hardware.registry import HardwareRegistry
from roost.cluster.inventory import ACCELERATOR, Inventory, Node
from roost.config.findings import Findings, bug, did_you_mean
from roost.config.node_groups import PROTECTED_VARIABLES
from roost.placement.component_plan import ComponentPlan, Process
from roost.placement.plan import Plan
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from roost.procs.child import log_name
from roost.runtime.host import host_class, is_asynchronous
from roost.runtime.membership import NodeReport
from roost.runtime.nodes import NodeDaemons
from roost.runtime.worker import LARGE, GroupSpec, LaunchOptions, Worker, check_methods, check_name, public_methods
from roost.transport.context import Address, DaemonContact, ProcessSetup, SimulatedDevices
from roost.transport.directory import GroupEntry


@dataclass(frozen=True, slots=True)
class PlanLaunch:
    """A plan with the worker class and launch options of each component to launch."""

    plan: Plan
    specs: Mapping[str, GroupSpec]
    options: Mapping[str, LaunchOptions]

    @property
    def left_out(self) -> list[str]:
        """Components of the plan that are not launched."""
        return [part.name for part in self.plan.components if part.name not in self.specs]


def plan_launch(
    plan: Plan | str | Path,
    groups: Mapping[str, GroupSpec | type[Worker]],
    options: Mapping[str, LaunchOptions] | None,
    used_names: Collection[str],
) -> PlanLaunch:
    """Validate a launch of a plan or a saved plan file; `used_names` are the names of running groups."""
    if not isinstance(plan, Plan):
        plan = Plan.from_json(Path(plan).read_text(encoding="utf-8"))
    specs = {name: each.create_group() if isinstance(each, type) else each for name, each in groups.items()}
    known = [part.name for part in plan.components]
    unknown = next((name for name in specs if name not in known), None)
    if unknown is not None:
        raise KeyError(f"the plan has no component {unknown}; {did_you_mean(unknown, known)}")
    not_launched = next((name for name in options or {} if name not in specs), None)
    if not_launched is not None:
        near = did_you_mean(not_launched, specs)
        raise KeyError(f"options are given for {not_launched}, which is not launched; {near}")
    for name, spec in specs.items():
        check_name(name, used_names)
        check_methods(spec.cls)
    return PlanLaunch(plan, specs, {name: (options or {}).get(name, LaunchOptions()) for name in specs})


def component_of(
    where: PlacementStrategy | ComponentPlan | None,
    name: str,
    options: LaunchOptions,
    inventory: Inventory,
    registry: HardwareRegistry,
) -> ComponentPlan:
    """The given component, or one placed by a strategy; by default one process per accelerator."""
    if isinstance(where, ComponentPlan):
        return where
    if where is None:
        count = inventory.num_accelerators
        where = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy([0])
    if not isinstance(where, PlacementStrategy):
        raise TypeError(
            f"placement_strategy is {where!r}; give a strategy such as PackedPlacementStrategy(0, 3), or a "
            "component of a plan"
        )
    findings = Findings()
    table = where.place(inventory, findings, isolate=options.isolate_accelerator is not False)
    findings.raise_errors()
    if table is None:
        raise bug("there is no placement, and no finding says why")
    return ComponentPlan(name, name, type(where).__name__, np.zeros(0, np.int64), table, registry=registry)


def check_env(name: str, env: Mapping[str, str], registry: HardwareRegistry) -> None:
    """Refuse launch options that would change the rank or the visible devices of a worker.

    >>> from roost.cluster.hardware.registry import BUILT_IN
    >>> check_env("actor", {"RANK": "1", "SEED": "5"}, BUILT_IN)
    Traceback (most recent call last):
    ...
    ValueError: actor: the plan sets RANK for every process; remove it from env
    """
    masks = {variable for vendor in registry.accelerators for variable in vendor.masks([])}
    wrong = [variable for variable in env if variable in masks or variable in PROTECTED_VARIABLES]
    if wrong:
        them = "it" if len(wrong) == 1 else "them"
        raise ValueError(f"{name}: the plan sets {', '.join(wrong)} for every process; remove {them} from env")


def single_process(component: ComponentPlan, rank: int, inventory: Inventory) -> ComponentPlan:
    """A component with one process of the given one, on the same devices."""
    table = component.table
    held = slice(table.offsets[rank], table.offsets[rank + 1])
    devices = table.device_ranks[held]
    alone = replace(
        table,
        inventory=inventory,
        nodes=table.nodes[rank : rank + 1],
        groups=table.groups[rank : rank + 1],
        offsets=np.array([0, len(devices)], np.int64),
        device_nodes=table.device_nodes[held],
        device_ranks=devices,
    )
    return replace(component, table=alone)


def process_env(
    address: Address,
    world_size: int,
    process: Process,
    vendor: Accelerator | None,
    visible: Sequence[tuple[int, str]],
    master: tuple[str, int],
    interface: str = "",
) -> dict[str, str]:
    """Environment variables of one worker.

    `visible` are pairs of planned index and vendor id of the accelerators it may see. A worker that sees only its own
    accelerators has local rank 0 of 1; one that also sees those of others has the index of its first one as local rank.
    Gloo uses the interface of Ray's address unless the user sets another: its default resolves the host name, which is
    loopback on many machines.
    """
    placement = process.placement
    seen = [planned for planned, _ in visible]
    is_alone = placement.isolate_accelerator or not seen
    own = next((seen.index(device) for device in placement.local_hardware_ranks if device in seen), 0)
    place = {
        "RANK": address.rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": 0 if is_alone else own,
        "LOCAL_WORLD_SIZE": 1 if is_alone else placement.local_world_size,
        "NODE_RANK": placement.placement_node_rank,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "GROUP_NAME": address.group,
        "WORKER_NAME": str(address),
        "CLUSTER_NODE_RANK": placement.cluster_node_rank,
        "NODE_LOCAL_RANK": placement.local_rank,
        "NODE_LOCAL_WORLD_SIZE": placement.local_world_size,
        "NODE_GROUP_LABEL": placement.node_group_label,
        "LOCAL_HARDWARE_RANKS": ",".join(map(str, placement.local_hardware_ranks)),
        "ACCELERATOR_TYPE": placement.accelerator_type,
    }
    # The plan's masks use its own numbering, perhaps of another vendor; only the live node knows the real ids.
    masks = vendor.visibility([name for _, name in visible]) if vendor is not None else {}
    network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {**network, **process.start_env, **{name: str(value) for name, value in place.items()}, **masks}


def visible_devices(
    process: Process, node: int, held: Mapping[tuple[int, int], int], physical_ids: Sequence[str]
) -> list[tuple[int, str]]:
    """Planned index and vendor id of the accelerators a process may see, among those its job holds on the node.

    >>> from roost.placement.component_plan import Placement
    >>> place = Placement(0, 0, 0, 1, "NV_GPU", 0, 1, ["1", "2"], True, [1, 2], "cluster")
    >>> visible_devices(Process(place, {}, None), 0, {(0, 1): 5, (0, 2): 6}, list("abcdefgh"))
    [(1, 'f'), (2, 'g')]
    """
    planned = sorted(int(device) for device in process.placement.visible_accelerators)
    return [(device, physical_ids[held[node, device]]) for device in planned if (node, device) in held]


LOOPBACK = "127.0.0.1"
MANY = 100_000  # concurrent calls of an asynchronous worker


class LiveNodes(NamedTuple):
    """The live nodes in rank order."""

    reports: Sequence[NodeReport]
    daemons: Sequence[DaemonContact]
    log_dirs: Sequence[str]
    inventory: Inventory


class PlannedProcess(NamedTuple):
    """Address and node of a process, known before Ray has allocated its accelerators."""

    address: Address
    node: int
    process: Process


def planned_processes(
    name: str, component: ComponentPlan, options: LaunchOptions, live_nodes: Sequence[int]
) -> list[PlannedProcess]:
    """Processes of a component in rank order, on the live nodes.

    The plan's node numbers may differ from the cluster's, for example after a restart; `live_nodes` maps each node of
    the plan to its live node.
    """
    if options.isolate_accelerator is not None:
        component = replace(component, table=replace(component.table, isolate=options.isolate_accelerator))
    return [
        PlannedProcess(Address(name, process.placement.rank), live_nodes[process.placement.cluster_node_rank], process)
        for process in component.processes()
    ]


def process_setups(
    processes: Sequence[PlannedProcess],
    component: ComponentPlan,
    options: LaunchOptions,
    live_nodes: Sequence[int],
    live: LiveNodes,
    held: Mapping[tuple[int, int], int],
    master: tuple[str, int],
) -> list[ProcessSetup]:
    """Setup of each process in rank order. `held` maps planned to allocated accelerators."""
    setups = []
    for address, node, planned in processes:
        report = live.reports[node]
        placement = planned.placement._replace(
            cluster_node_rank=node,
            accelerator_type=report.accelerator_type,
            devices=tuple((live_nodes[on], device) for on, device in planned.placement.devices),
        )
        process = replace(planned, placement=placement)
        visible = visible_devices(process, node, held, report.physical_ids)
        vendor = component.registry.accelerator(report.accelerator_type)
        env = process_env(address, component.world_size, process, vendor, visible, master, report.interface)
        kind = component.table.kinds[component.table.labels.index(placement.node_group_label)]
        own = tuple(placement.local_hardware_ranks) if kind == ACCELERATOR else ()
        setup = ProcessSetup(
            address,
            component.world_size,
            placement,
            {**env, **options.env},
            own,
            tuple(report.physical_ids[held[node, device]] for device in own),
            report.accelerator_type,
            kind,
            declared_devices(process, kind, live.inventory.nodes[node]),
            live.daemons[node],
            f"{live.log_dirs[node]}/{log_name(*address)}",
            options.restarts,
            simulated_devices(report, len(visible)),
        )
        setups.append(setup)
    return setups


def simulated_devices(report: NodeReport, count: int) -> SimulatedDevices | None:
    """Simulated devices that a process sees; None for real accelerators."""
    is_simulated = report.accelerator_type == AcceleratorType.SIMULATED
    return SimulatedDevices(count, report.memory_gb) if is_simulated else None


def declared_devices(process: Process, kind: str, node: Node) -> tuple[Mapping[str, Any], ...]:
    """Configs of a process's declared devices, completed by the live node where it knows them."""
    known = node.hardware.get(kind, ())
    ranks = process.placement.local_hardware_ranks
    if not process.hardware or len(known) <= max(ranks):
        return process.hardware
    return tuple({**known[rank], **written} for rank, written in zip(ranks, process.hardware, strict=True))


def packed(spec: GroupSpec) -> Any:
    """Pickled class and arguments of a group; in the object store if they are large."""
    result: bytes = cloudpickle.dumps((spec.cls, spec.args, dict(spec.kwargs)))  # type: ignore[no-untyped-call]
    return ray.put(result) if len(result) > LARGE else result


def start_hosts(
    spec: GroupSpec,
    packed: Any,
    processes: Sequence[PlannedProcess],
    live: LiveNodes,
    options: LaunchOptions,
) -> list[Any]:
    """Start all processes without waiting; each gets its setup from its node daemon."""
    is_async = is_asynchronous(spec.cls)
    actor = ray.remote(host_class(spec.cls, public_methods(spec.cls)))
    # Pickled here, because Ray would track the daemon's handle in it as an object that can be lost.
    contacts = {node: cloudpickle.dumps(live.daemons[node]) for node in {each.node for each in processes}}  # type: ignore[no-untyped-call]
    return [
        actor.options(
            num_cpus=0,
            max_restarts=options.restarts,
            max_concurrency=options.max_concurrency or (MANY if is_async else 1),
            scheduling_strategy=NodeAffinitySchedulingStrategy(live.reports[each.node].node_id, soft=False),
            runtime_env=runtime_env(each.process, options),
        ).remote(tuple(each.address), contacts[each.node], packed)
        for each in processes
    ]


def runtime_env(process: Process, options: LaunchOptions) -> dict[str, Any] | None:
    """Ray runtime environment with the user's variables and interpreter, which must be set before Python starts.

    The plan's own variables are set by the worker itself: Ray takes twice as long to start a process with variables.
    """
    written = {**process.start_env, **options.env}
    env: dict[str, Any] = {"env_vars": written} if written else {}
    if process.interpreter is not None:
        env["py_executable"] = process.interpreter
    return env or None


def group_entry(name: str, setups: Sequence[ProcessSetup]) -> GroupEntry:
    """Directory entry of a group."""
    return GroupEntry(
        name,
        tuple(setup.daemon.node for setup in setups),
        tuple(setup.physical_ids for setup in setups),
    )


def master_address(nodes: Sequence[int], reports: Sequence[NodeReport]) -> str:
    """Address where rank 0 listens for the others; loopback if all are on one node."""
    return LOOPBACK if len(set(nodes)) == 1 else reports[nodes[0]].address


@dataclass(frozen=True, slots=True)
class Request:
    """Request to launch a group."""

    name: str
    spec: GroupSpec
    component: ComponentPlan
    options: LaunchOptions
    packed: Any  # pickled class and arguments of its workers

    def __post_init__(self) -> None:
        check_env(self.name, self.options.env, self.component.registry)


class Launching:
    """Starts a group's processes, which wait at their node daemons until `assign` gives each its setup."""

    def __init__(self, request: Request, live_nodes: Sequence[int], live: LiveNodes, daemons: NodeDaemons) -> None:
        self._request, self._live_nodes, self._live, self._daemons = request, live_nodes, live, daemons
        self.processes = planned_processes(request.name, request.component, request.options, live_nodes)
        self.master_node = self.processes[0].node
        self.port: int = daemons.ask(self.master_node, "lease_port")
        self.hosts: list[Any] = []
        try:
            self.hosts = start_hosts(request.spec, request.packed, self.processes, live, request.options)
        except BaseException:
            self.abandon()
            raise

    def assign(self, held: Mapping[tuple[int, int], int]) -> None:
        """Give every process its setup and register the group. `held` maps planned to allocated accelerators."""
        nodes = [each.node for each in self.processes]
        master = master_address(nodes, self._live.reports), self.port
        setups = process_setups(
            self.processes, self._request.component, self._request.options, self._live_nodes, self._live, held, master
        )
        self._daemons.directory("add_group", group_entry(self._request.name, setups))
        self._daemons.assign(setups)

    def abandon(self) -> None:
        """Undo a launch at any stage; nodes may be lost at the same time."""
        addresses = [tuple(each.address) for each in self.processes]
        with contextlib.suppress(ray.exceptions.RayError):
            self._daemons.tell_all("expect_end", addresses)
            for host in self.hosts:
                ray.kill(host)
            self._daemons.directory("remove_group", self._request.name)
            self._daemons.tell_all("forget", addresses)
            self._daemons.ask(self.master_node, "release_port", self.port)
