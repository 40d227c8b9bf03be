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


def process_setups(
    name: str,
    component: ComponentPlan,
    options: LaunchOptions,
    live_nodes: Sequence[int],
    site: Site,
    held: Mapping[tuple[int, int], int],
    master: tuple[str, int],
) -> list[tuple[ProcessSetup, Process]]:
    """What each process is told, in rank order. `live_nodes` has the live node of each node of the plan.

    A plan may number the nodes otherwise than the cluster does, as after a restart; workers are told the live numbers.
    """
    reports, agents, log_dirs, inventory = site
    if options.isolate_accelerator is not None:
        component = replace(component, table=replace(component.table, isolate=options.isolate_accelerator))
    setups = []
    for process in component.processes():
        node = live_nodes[process.placement.cluster_node_rank]
        placement = process.placement._replace(
            cluster_node_rank=node,
            accelerator_type=reports[node].accelerator_type,
            devices=tuple((live_nodes[on], device) for on, device in process.placement.devices),
        )
        process = replace(process, placement=placement)
        address = Address(name, placement.rank)
        physical = reports[node].physical_ids
        visible = visible_devices(process, node, held, physical)
        vendor = component.registry.accelerator(reports[node].accelerator_type)
        env = process_env(address, component.world_size, process, vendor, visible, master, reports[node].interface)
        kind = component.table.kinds[component.table.labels.index(placement.node_group_label)]
        own = tuple(placement.local_hardware_ranks) if kind == ACCELERATOR else ()
        setup = ProcessSetup(
            address,
            component.world_size,
            placement,
            {**env, **options.env},
            own,
            tuple(physical[held[node, device]] for device in own),
            reports[node].accelerator_type,
            kind,
            declared_devices(process, kind, inventory.nodes[node]),
            agents[node],
            f"{log_dirs[node]}/{log_name(*address)}",
            options.restarts,
            simulated_devices(reports[node], len(visible)),
        )
        setups.append((setup, process))
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
    setups: Sequence[tuple[ProcessSetup, Process]],
    reports: Sequence[NodeReport],
    options: LaunchOptions,
) -> list[Any]:
    """Start all processes at once; Ray starts them while this returns."""
    is_async = is_asynchronous(spec.cls)
    actor = ray.remote(host_class(spec.cls, public_methods(spec.cls)))
    return [
        actor.options(
            num_cpus=0,
            max_restarts=options.restarts,
            max_concurrency=options.max_concurrency or (MANY if is_async else 1),
            scheduling_strategy=NodeAffinitySchedulingStrategy(reports[setup.agent.node].node_id, soft=False),
            runtime_env=runtime_env(process, options),
        ).remote(cloudpickle.dumps(setup), packed)  # type: ignore[no-untyped-call]
        for setup, process in setups
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


def group_entry(name: str, setups: Sequence[tuple[ProcessSetup, Process]]) -> GroupEntry:
    """The group as the other groups know it."""
    return GroupEntry(
        name,
        tuple(setup.agent.node for setup, _ in setups),
        tuple(setup.physical_ids for setup, _ in setups),
    )


def master_address(nodes: Sequence[int], reports: Sequence[NodeReport]) -> str:
    """Where rank 0 listens for the others: on loopback where they are all on its node."""
    return LOOPBACK if len(set(nodes)) == 1 else reports[nodes[0]].address
