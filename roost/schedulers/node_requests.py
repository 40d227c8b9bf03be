"""The nodes, accelerators, CPUs and memory to request for a plan, by node group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.inventory import Inventory, Node
from roost.config.ranks import spell_ranks
from roost.placement.memory.host import host_uses
from roost.placement.plan import Plan
from roost.runtime.checks import Demand, demands_of

# CPUs
PER_ACCELERATOR_CPUS = 4.0  # time-shared by learner, engine and their data loading
PER_PROCESS_CPUS = 1.0  # of a process without an accelerator
NODE_CPUS = 2.0  # Ray's raylet and agents, and the node daemon
DRIVER_CPUS = 4.0  # on node 0: the driver's episodes and rewards, Ray's control service
# GB of host memory
MODEL_PROCESS_GB = 8.0  # torch, CUDA and pinned buffers of a process on an accelerator
PER_PROCESS_GB = 1.0  # of a process without an accelerator
NODE_GB = 4.0
DRIVER_GB = 8.0
SHARED_MEMORY = 0.3  # share of a node's memory that Ray's object store takes, in /dev/shm

DEFAULT_LABEL = "nodes"


@dataclass(frozen=True, slots=True)
class ProcessSizes:
    """CPUs and GB of host memory of one process of a component, as the user sets them."""

    cpus: Mapping[str, float] = field(default_factory=dict)
    memory_gb: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """Equal nodes with consecutive ranks, and what to request on each of them."""

    label: str
    node_ranks: range
    accelerators: int
    accelerator_type: str
    accelerator_model: str
    accelerator_memory_gb: float | None
    cpus: int
    memory_gb: int
    hardware: tuple[str, ...] = ()  # kinds of declared devices, which only certain machines have
    hosts: tuple[str, ...] = ()  # where the inventory names them

    @property
    def nodes(self) -> int:
        return len(self.node_ranks)

    @property
    def ranks(self) -> str:
        """The node ranks as text."""
        return spell_ranks(self.node_ranks)

    @property
    def requested_accelerators(self) -> int:
        """Number of devices that a scheduler allocates; simulated ones do not count."""
        return 0 if self.accelerator_type == AcceleratorType.SIMULATED else self.accelerators

    @property
    def shared_memory_gb(self) -> int:
        return max(1, math.floor(self.memory_gb * SHARED_MEMORY))


@dataclass(frozen=True, slots=True)
class NodeRequests:
    """Requests for all nodes of a job, in rank order."""

    requests: tuple[NodeRequest, ...]
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        return sum(request.nodes for request in self.requests)


def requests_of(plan: Plan, sizes: ProcessSizes = ProcessSizes(), num_nodes: int | None = None) -> NodeRequests:
    """Request the plan's nodes up to the last one in use, or `num_nodes`, by node group and kind of machine.

    All accelerators of a node are requested, because the plan's device numbers count all of them. CPUs and memory are
    those that the busiest node of a group needs.

    >>> import roost
    >>> cluster = {"num_nodes": 2, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}}
    >>> (request,) = requests_of(roost.plan({"cluster": cluster})).requests
    >>> request.nodes, request.accelerators, request.cpus, request.memory_gb
    (2, 8, 38, 200)
    """
    components = tuple(part for part in plan.components if not part.model.unused_because) or plan.components
    demands = {demand.node: demand for demand in demands_of(components, {}, {})}
    inventory = plan.inventory.first(max(max(demands, default=0) + 1, num_nodes or 0))
    host_gb = _host_memory(plan)
    cpus = _by_node(inventory, demands, lambda demand: _cpus(demand, sizes), NODE_CPUS, DRIVER_CPUS)
    memory = _by_node(
        inventory, demands, lambda demand: _memory(demand, sizes) + host_gb[demand.node], NODE_GB, DRIVER_GB
    )
    labels = _labels(inventory)
    keys = [(labels[rank], _machine(node)) for rank, node in enumerate(inventory.nodes)]
    requests = []
    for (label, _), same in groupby(range(inventory.num_nodes), key=keys.__getitem__):
        ranks = list(same)
        requests.append(_request(label, range(ranks[0], ranks[-1] + 1), inventory, cpus, memory))
    return NodeRequests(_with_own_labels(requests), tuple(_notes(requests, demands, memory)))


def _by_node(
    inventory: Inventory,
    demands: Mapping[int, Demand],
    of_processes: Callable[[Demand], float],
    of_node: float,
    of_driver: float,
) -> list[float]:
    """An amount for each node: of its processes, of the node itself, and on node 0 of the driver."""
    ranks = range(inventory.num_nodes)
    needed = [of_node + (of_processes(demands[rank]) if rank in demands else 0.0) for rank in ranks]
    needed[0] += of_driver
    return needed


def _cpus(demand: Demand, sizes: ProcessSizes) -> float:
    given = math.fsum(share.processes * sizes.cpus.get(share.component, 0.0) for share in demand.shares)
    others = [share for share in demand.shares if share.component not in sizes.cpus]
    without = sum(share.processes for share in others if not share.accelerators)
    # By accelerator, not by process: components on one accelerator time-share it.
    accelerators = demand.accelerators if any(share.accelerators for share in others) else 0
    return given + without * PER_PROCESS_CPUS + accelerators * PER_ACCELERATOR_CPUS


def _memory(demand: Demand, sizes: ProcessSizes) -> float:
    """GB of the processes themselves, without offloaded weights."""
    return math.fsum(
        share.processes
        * sizes.memory_gb.get(share.component, MODEL_PROCESS_GB if share.accelerators else PER_PROCESS_GB)
        for share in demand.shares
    )


def _host_memory(plan: Plan) -> Sequence[float]:
    """Peak GB of learners, scorers and engines in the host memory of each node.

    Offloaded state of unknown size counts as the memory of its device.
    """
    uses = host_uses(plan.components, plan.residency, plan.inventory, assumes_device=True)
    most: list[float] = np.max([use.total for use in uses], axis=0).tolist()
    return most


def _labels(inventory: Inventory) -> list[str]:
    """The first declared group of each node."""
    labels = [DEFAULT_LABEL] * inventory.num_nodes
    for group in reversed(inventory.groups):
        for rank in group.node_ranks.tolist():
            labels[rank] = group.label
    return labels


def _machine(node: Node) -> tuple[object, ...]:
    """Properties by which a scheduler distinguishes machines."""
    return (node.accelerators, node.accelerator_type, node.accelerator_model, node.memory_gb, tuple(node.hardware))


def _request(label: str, ranks: range, inventory: Inventory, cpus: list[float], memory: list[float]) -> NodeRequest:
    nodes = [inventory.nodes[rank] for rank in ranks]
    first = nodes[0]
    wanted = math.ceil(max(memory[rank] for rank in ranks) / (1 - SHARED_MEMORY))
    limit = min((node.host_memory_gb for node in nodes if node.host_memory_gb), default=None)
    return NodeRequest(
        label,
        ranks,
        first.accelerators,
        first.accelerator_type,
        first.accelerator_model,
        first.memory_gb,
        math.ceil(max(cpus[rank] for rank in ranks)),
        wanted if limit is None else min(wanted, math.floor(limit)),
        tuple(first.hardware),
        tuple(node.host for node in nodes) if all(node.host for node in nodes) else (),
    )


def _with_own_labels(requests: Iterable[NodeRequest]) -> tuple[NodeRequest, ...]:
    """Number the requests of one label: names of worker groups must differ."""
    seen: dict[str, int] = {}
    named = []
    for request in requests:
        seen[request.label] = seen.get(request.label, 0) + 1
        number = seen[request.label]
        named.append(request if number == 1 else replace(request, label=f"{request.label}-{number}"))
    return tuple(named)


def _notes(requests: Iterable[NodeRequest], demands: Mapping[int, Demand], memory: list[float]) -> Iterable[str]:
    for request in requests:
        used = max((demands[rank].accelerators for rank in request.node_ranks if rank in demands), default=0)
        if used < request.accelerators:
            yield (
                f"nodes {request.ranks}: {used} of {request.accelerators} accelerators are in use; all are requested, "
                "as device numbers of the config count them"
            )
        wanted = math.ceil(max(memory[rank] for rank in request.node_ranks) / (1 - SHARED_MEMORY))
        if wanted > request.memory_gb:
            yield (
                f"nodes {request.ranks}: the plan may need {wanted} GB of host memory, the inventory has "
                f"{request.memory_gb}; all of it is requested"
            )
