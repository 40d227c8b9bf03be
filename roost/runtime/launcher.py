"""Starting the processes of a component exactly where its plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.inventory import Inventory, Node
from roost.cluster.resources import ACCELERATOR
from roost.placement.component_plan import ComponentPlan, Process
from roost.runtime.address import Address
from roost.runtime.directory import GroupEntry
from roost.runtime.group import LARGE, GroupSpec, LaunchOptions
from roost.runtime.host import host_class, is_asynchronous
from roost.runtime.logs import log_name
from roost.runtime.node_report import NodeReport
from roost.runtime.process import AgentContact, ProcessSetup, SimulatedDevices
from roost.runtime.process_env import MASKS, process_env, visible_devices
from roost.runtime.worker import public_methods

LOOPBACK = "127.0.0.1"
MANY = 100_000  # calls that an asynchronous worker may have under way


class Site(NamedTuple):
    """The live nodes, in the order of their ranks."""

    reports: Sequence[NodeReport]
    agents: Sequence[AgentContact]
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
            site.agents[node],
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
    """Start all processes at once; Ray starts them while this returns, and each asks its agent what it is."""
    is_async = is_asynchronous(spec.cls)
    actor = ray.remote(host_class(spec.cls, public_methods(spec.cls)))
    # Packed, because Ray takes the agent's handle in it for an object that might get lost.
    contacts = {node: cloudpickle.dumps(site.agents[node]) for node in {place.node for place in places}}  # type: ignore[no-untyped-call]
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
        tuple(setup.agent.node for setup in setups),
        tuple(setup.physical_ids for setup in setups),
    )


def master_address(nodes: Sequence[int], reports: Sequence[NodeReport]) -> str:
    """Where rank 0 listens for the others: on loopback where they are all on its node."""
    return LOOPBACK if len(set(nodes)) == 1 else reports[nodes[0]].address
