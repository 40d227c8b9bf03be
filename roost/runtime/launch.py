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
from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry
from roost.cluster.inventory import Inventory, Node
from roost.cluster.resources import ACCELERATOR
from roost.config.findings import Findings, did_you_mean
from roost.placement.component_plan import ComponentPlan, Process
from roost.placement.plan import Plan
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
from roost.placement.strategy import PlacementStrategy
from roost.procs.logs import log_name
from roost.runtime.host import host_class, is_asynchronous
from roost.runtime.membership import NodeReport
from roost.runtime.node_daemons import NodeDaemons
from roost.runtime.worker import LARGE, GroupSpec, LaunchOptions, Worker, check_methods, check_name, public_methods
from roost.transport.current import ProcessSetup, SimulatedDevices
from roost.transport.directory import GroupEntry
from roost.transport.failure import Address, DaemonContact


@dataclass(frozen=True, slots=True)
class PlanLaunch:
    """Components of a plan, each with the workers it is of and how they are launched."""

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
    taken: Collection[str],
) -> PlanLaunch:
    """A plan, or the file it was saved in, with what is to run of it; `taken` are the names of groups that run."""
    if not isinstance(plan, Plan):
        plan = Plan.from_json(Path(plan).read_text(encoding="utf-8"))
    specs = {name: each.create_group() if isinstance(each, type) else each for name, each in groups.items()}
    known = [part.name for part in plan.components]
    unknown = next((name for name in specs if name not in known), None)
    if unknown is not None:
        raise KeyError(f"the plan has no component {unknown}; {did_you_mean(unknown, known)}")
    stranger = next((name for name in options or {} if name not in specs), None)
    if stranger is not None:
        raise KeyError(f"there are options for {stranger}, which is not launched; {did_you_mean(stranger, specs)}")
    for name, spec in specs.items():
        check_name(name, taken)
        check_methods(spec.cls)
    return PlanLaunch(plan, specs, {name: (options or {}).get(name, LaunchOptions()) for name in specs})


def component_of(
    where: PlacementStrategy | ComponentPlan | None,
    name: str,
    options: LaunchOptions,
    inventory: Inventory,
    registry: HardwareRegistry,
) -> ComponentPlan:
    """A component of a plan, or one that a strategy places; without either, a process on every accelerator."""
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
        raise RuntimeError("a placement without findings must have been made; please report it")
    return ComponentPlan(name, name, type(where).__name__, np.zeros(0, np.int64), table, registry=registry)


# What the plan says of visible devices is in its own numbers, and perhaps for another vendor: only the live node knows.
MASKS = {
    name
    for accelerator in BUILT_IN.accelerators
    for name in (accelerator.visible_devices_variable, *accelerator.mirrored_variables)
}


def process_env(
    address: Address,
    world_size: int,
    process: Process,
    vendor: Accelerator | None,
    visible: Sequence[tuple[int, str]],
    master: tuple[str, int],
    interface: str = "",
) -> dict[str, str]:
    """All variables of one worker.

    `visible` are the accelerators it may see, as planned and as the vendor calls them. A worker that sees only its own
    is alone as far as its libraries can tell, so its local rank is 0 of 1; one that sees those of others too finds its
    first one by its local rank. Unless a user says otherwise, gloo uses the interface of the address that Ray uses: by
    itself it looks up the host's name, which is loopback on many machines.
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
    masks = vendor.visibility([name for _, name in visible]) if vendor is not None else {}
    given = {name: value for name, value in process.env.items() if name not in MASKS}
    network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {**network, **given, **{name: str(value) for name, value in place.items()}, **masks}


def visible_devices(
    process: Process, node: int, held: Mapping[tuple[int, int], int], physical_ids: Sequence[str]
) -> list[tuple[int, str]]:
    """The accelerators a process may see, of those that its job holds on the node: as planned, with the vendor's name.

    >>> from roost.placement.component_plan import Placement
    >>> place = Placement(0, 0, 0, 1, "NV_GPU", 0, 1, ["1", "2"], True, [1, 2], "cluster")
    >>> visible_devices(Process(place, {}, None), 0, {(0, 1): 5, (0, 2): 6}, list("abcdefgh"))
    [(1, 'f'), (2, 'g')]
    """
    planned = sorted(int(device) for device in process.placement.visible_accelerators)
    return [(device, physical_ids[held[node, device]]) for device in planned if (node, device) in held]


LOOPBACK = "127.0.0.1"
MANY = 100_000  # calls that an asynchronous worker may have under way


class Site(NamedTuple):
    """The live nodes, in the order of their ranks."""

    reports: Sequence[NodeReport]
    daemons: Sequence[DaemonContact]
    log_dirs: Sequence[str]
    inventory: Inventory


class Place(NamedTuple):
    """Where a process runs: known before it is known which accelerators stand for the planned ones."""

    address: Address
    node: int
    process: Process


def places(name: str, component: ComponentPlan, options: LaunchOptions, live_nodes: Sequence[int]) -> list[Place]:
    """The processes of a component in rank order, on the live nodes.

    A plan may number the nodes otherwise than the cluster does, as after a restart; `live_nodes` has the live node of
    each node of the plan.
    """
    if options.isolate_accelerator is not None:
        component = replace(component, table=replace(component.table, isolate=options.isolate_accelerator))
    return [
        Place(Address(name, process.placement.rank), live_nodes[process.placement.cluster_node_rank], process)
        for process in component.processes()
    ]


def process_setups(
    places: Sequence[Place],
    component: ComponentPlan,
    options: LaunchOptions,
    live_nodes: Sequence[int],
    site: Site,
    held: Mapping[tuple[int, int], int],
    master: tuple[str, int],
) -> list[ProcessSetup]:
    """What each process is told, in rank order; of nodes the live numbers."""
    setups = []
    for address, node, planned in places:
        report = site.reports[node]
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
            declared_devices(process, kind, site.inventory.nodes[node]),
            site.daemons[node],
            f"{site.log_dirs[node]}/{log_name(*address)}",
            options.restarts,
            simulated_devices(report, len(visible)),
        )
        setups.append(setup)
    return setups


def simulated_devices(report: NodeReport, count: int) -> SimulatedDevices | None:
    """What a process that may see so many accelerators of a node has to be shown of them, as no driver shows it."""
    is_simulated = report.accelerator_type == AcceleratorType.SIMULATED
    return SimulatedDevices(count, report.memory_gb) if is_simulated else None


def declared_devices(process: Process, kind: str, node: Node) -> tuple[Mapping[str, Any], ...]:
    """The configs of a process's declared devices, as the live node completed them where it knows them."""
    known = node.hardware.get(kind, ())
    ranks = process.placement.local_hardware_ranks
    if not process.hardware or len(known) <= max(ranks):
        return process.hardware
    return tuple({**known[rank], **written} for rank, written in zip(ranks, process.hardware, strict=True))


def packed(spec: GroupSpec) -> Any:
    """A group's class and arguments, ready to be sent; in the object store where they are large."""
    made: bytes = cloudpickle.dumps((spec.cls, spec.args, dict(spec.kwargs)))  # type: ignore[no-untyped-call]
    return ray.put(made) if len(made) > LARGE else made


def start_hosts(
    spec: GroupSpec,
    packed: Any,
    places: Sequence[Place],
    site: Site,
    options: LaunchOptions,
) -> list[Any]:
    """Start all processes at once; Ray starts them while this returns, and each asks its daemon what it is."""
    is_async = is_asynchronous(spec.cls)
    actor = ray.remote(host_class(spec.cls, public_methods(spec.cls)))
    # Packed, because Ray takes the daemon's handle in it for an object that might get lost.
    contacts = {node: cloudpickle.dumps(site.daemons[node]) for node in {place.node for place in places}}  # type: ignore[no-untyped-call]
    return [
        actor.options(
            num_cpus=0,
            max_restarts=options.restarts,
            max_concurrency=options.max_concurrency or (MANY if is_async else 1),
            scheduling_strategy=NodeAffinitySchedulingStrategy(site.reports[place.node].node_id, soft=False),
            runtime_env=runtime_env(place.process, options),
        ).remote(tuple(place.address), contacts[place.node], packed)
        for place in places
    ]


def runtime_env(process: Process, options: LaunchOptions) -> dict[str, Any] | None:
    """A user's variables and interpreter are given to Ray, so that they are there before Python starts.

    The plan's own are set by the worker's process itself: Ray takes twice as long to start one with variables.
    """
    written = {name: value for name, value in process.env.items() if name not in MASKS} | dict(options.env)
    env: dict[str, Any] = {"env_vars": written} if written else {}
    if process.interpreter is not None:
        env["py_executable"] = process.interpreter
    return env or None


def group_entry(name: str, setups: Sequence[ProcessSetup]) -> GroupEntry:
    """The group as the other groups know it."""
    return GroupEntry(
        name,
        tuple(setup.daemon.node for setup in setups),
        tuple(setup.physical_ids for setup in setups),
    )


def master_address(nodes: Sequence[int], reports: Sequence[NodeReport]) -> str:
    """Where rank 0 listens for the others: on loopback where they are all on its node."""
    return LOOPBACK if len(set(nodes)) == 1 else reports[nodes[0]].address


@dataclass(frozen=True, slots=True)
class Request:
    """A group that is to be launched."""

    name: str
    spec: GroupSpec
    component: ComponentPlan
    options: LaunchOptions
    packed: Any  # the class and the arguments of its workers, ready to be sent


class Launching:
    """Starts a group's processes; they wait at their daemons until `assign` says what each of them is."""

    def __init__(self, asked: Request, live_nodes: Sequence[int], site: Site, daemons: NodeDaemons) -> None:
        self._asked, self._live_nodes, self._site, self._daemons = asked, live_nodes, site, daemons
        self.places = places(asked.name, asked.component, asked.options, live_nodes)
        self.meeting_node = self.places[0].node
        self.port: int = daemons.ask(self.meeting_node, "lease_port")
        self.hosts: list[Any] = []
        try:
            self.hosts = start_hosts(asked.spec, asked.packed, self.places, site, asked.options)
        except BaseException:
            self.abandon()
            raise

    def assign(self, held: Mapping[tuple[int, int], int]) -> None:
        """Tell every process its place, and the job of the group. `held` are the accelerators that the job has."""
        nodes = [place.node for place in self.places]
        master = master_address(nodes, self._site.reports), self.port
        setups = process_setups(
            self.places, self._asked.component, self._asked.options, self._live_nodes, self._site, held, master
        )
        self._daemons.directory("add_group", group_entry(self._asked.name, setups))
        self._daemons.assign(setups)

    def abandon(self) -> None:
        """Leave nothing of it, however far it got; a node may be lost meanwhile."""
        addresses = [tuple(place.address) for place in self.places]
        with contextlib.suppress(ray.exceptions.RayError):
            self._daemons.tell_all("expect_end", addresses)
            for host in self.hosts:
                ray.kill(host)
            self._daemons.directory("remove_group", self._asked.name)
            self._daemons.tell_all("forget", addresses)
            self._daemons.ask(self.meeting_node, "release_port", self.port)
