"""Weight routes from learner to engine processes, derived from the devices of each side.

For each engine shard, find the nearest learner device with the same part of the weights by intersecting sets of
devices; ranks need not be contiguous or aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from roost.cluster.inventory import ACCELERATOR, Ints, Inventory
from roost.config.findings import counted
from roost.config.job import Sharding
from roost.placement.component_plan import ComponentPlan, PlacementTable
from roost.placement.memory.model import GIB, known_shape, shards_of
from roost.placement.memory.phases import takes_policy, trains_policy


class WeightRoute(StrEnum):
    """Means by which an engine gets new weights."""

    SHARED_MEMORY = "shared memory"
    DEVICE = "shared device"
    BROADCAST = "broadcast"
    RELOAD = "reload from disk"
    ADAPTER = "adapter"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class ServerRoute:
    """Weight route to one engine, and the learner rank that sends."""

    route: WeightRoute
    sender: int = 0
    reason: str = field(default="", compare=False)  # why the weights go by disk, the slowest route


# Kinds of engines that take device handles of a learner of one process only.
TAKE_WHOLE_HANDLES = ("sglang",)


def server_routes(
    components: Sequence[ComponentPlan], engine: ComponentPlan, kind: str | None, on_gpu: bool
) -> tuple[ServerRoute, ...]:
    """Decide the weight route to each process of `engine`; none if it does not serve the policy.

    Weights go by handles on a shared device, else by a broadcast from rank 0. A broadcast cannot have two members on
    one device, so each engine has its own route. An engine sharded over several devices of the learner would need
    handles of several ranks at once and reads from disk instead; so does one of a kind that takes no packed handles
    from a sharded learner. On one node without GPUs all weights go through shared memory.
    """
    learner = _learner(components)
    if learner is None or not takes_policy(engine.name, engine.role):
        return ()
    if not (on_gpu and _holds_accelerators(learner.table) and _holds_accelerators(engine.table)):
        is_one_node = set(engine.table.nodes.tolist()) == {int(learner.table.nodes[0])}
        route = WeightRoute.SHARED_MEMORY if is_one_node else WeightRoute.BROADCAST
        return (ServerRoute(route),) * engine.world_size
    takes_handles = learner.world_size == 1 or kind not in TAKE_WHOLE_HANDLES
    senders = _device_senders(learner.table, engine.table).tolist()
    lengths = np.diff(engine.table.offsets).tolist()
    return tuple(
        _device_route(sender, num_devices, takes_handles) for sender, num_devices in zip(senders, lengths, strict=True)
    )


def _device_senders(learner: PlacementTable, engine: PlacementTable) -> Ints:
    """Learner process on the first device that each engine process shares with one; -1 if it shares none."""
    width = 1 + int(max(table.device_ranks.max(initial=0) for table in (learner, engine)))
    held, wanted = (table.device_nodes * width + table.device_ranks for table in (learner, engine))
    holders = np.full(1 + int(max(held.max(), wanted.max())), -1)
    holders[held] = learner.owners
    found = holders[wanted]
    shared = np.flatnonzero(found >= 0)[::-1]  # backwards, so that the first device of a process is assigned last
    senders = np.full(len(engine), -1)
    senders[engine.owners[shared]] = found[shared]
    return senders


def _device_route(sender: int, num_devices: int, takes_handles: bool) -> ServerRoute:
    if sender < 0:
        return ServerRoute(WeightRoute.BROADCAST)
    if num_devices > 1:
        return ServerRoute(WeightRoute.RELOAD, sender, "it spans several devices")
    if not takes_handles:
        return ServerRoute(WeightRoute.RELOAD, sender, "it takes no handles of a sharded learner")
    return ServerRoute(WeightRoute.DEVICE, sender)


class Reach(StrEnum):
    """Distance that a shard's weights travel."""

    SAME_DEVICE = "same device"
    SAME_NODE = "same node"
    OTHER_NODE = "other node"
    HOST = "host"  # one side has no accelerator


TRANSPORTS = {
    Reach.SAME_DEVICE: "CUDA IPC",
    Reach.SAME_NODE: "NCCL over the node's links",
    Reach.OTHER_NODE: "NCCL over the network",
    Reach.HOST: "shared memory or gloo",
}
_ORDER = (Reach.SAME_DEVICE, Reach.SAME_NODE, Reach.OTHER_NODE)


@dataclass(frozen=True, eq=False)
class EngineRoutes:
    """Routes to the engine shards of one component, in the order of processes and their devices."""

    component: str
    processes: Ints  # the engine process of each shard
    shards: Ints  # index of the shard within its process
    sources: Ints  # nearest learner process with the weights; -1 if there is none
    reaches: Ints  # indices into `Reach`
    gathered: int = 1  # learner shards that are gathered into each engine shard before it is sent
    parts: int = 1  # parts of the weights; each sending rank gathers one
    weight_bytes: int | None = None  # of the whole model in the engine's type, per update; None if it is not known
    disk_reasons: tuple[str, ...] = ()  # for each engine process that Roost updates from disk, see `server_routes`

    @property
    def gathered_bytes(self) -> int | None:
        """Bytes that a sending rank receives from other ranks in an update; ranks that share files receive none."""
        if self.weight_bytes is None:
            return None
        return self.weight_bytes * (self.gathered - 1) // (self.gathered * self.parts)

    @property
    def from_disk(self) -> int:
        """Number of engine processes that Roost updates from disk."""
        return len(self.disk_reasons)

    def count(self, reach: Reach) -> int:
        return int((self.reaches == list(Reach).index(reach)).sum())

    @property
    def summary(self) -> str:
        """One-line summary of the routes.

        >>> EngineRoutes("rollout", np.zeros(2), np.arange(2), np.arange(2), np.array([0, 0])).summary
        '2 shards: 2 same device (CUDA IPC)'
        """
        parts = [f"{self.count(reach)} {reach.value} ({TRANSPORTS[reach]})" for reach in Reach if self.count(reach)]
        whole = f", each put together from {self.gathered} learner shards first" if self.gathered > 1 else ""
        size = f"; {self.weight_bytes / GIB:.3g} GiB per update" if self.weight_bytes is not None else ""
        return f"{counted(len(self.shards), 'shard')}: {', '.join(parts)}{whole}{size}{self.disk_note}"

    @property
    def disk_note(self) -> str:
        """Note that processes are updated from disk, and why; empty if none is."""
        if not self.from_disk:
            return ""
        reasons = " or ".join(dict.fromkeys(reason.removeprefix("it ") for reason in self.disk_reasons))
        which = f"{counted(self.from_disk, 'process')} from disk: {'each ' if self.from_disk > 1 else 'it '}{reasons}"
        return f"; instead of these routes `roost train` updates {which}"


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes to every engine that takes the learner's weights."""

    engines: tuple[EngineRoutes, ...]


def find_routes(components: Sequence[ComponentPlan], inventory: Inventory, engine: str | None = None) -> Routes:
    """Find the routes from `actor` to every engine of the policy; other engines (a judge) have their own weights.

    `engine` is the kind of engine, where the job has one; else each component's strategy says it.
    """
    actor = _learner(components)
    if actor is None:
        return Routes(())
    engines = [part for part in components if takes_policy(part.name, part.role)]
    found = []
    for part in engines:
        kind = engine or part.model.strategy
        routes = _engine_routes(actor, part, inventory, kind)
        if actor.model.lora_rank is None:  # an adapter is sent as a file
            planned = server_routes(components, part, kind, on_gpu=True)
            routes = replace(routes, disk_reasons=tuple(each.reason for each in planned if each.reason))
        found.append(routes)
    return Routes(tuple(found))


def _learner(components: Sequence[ComponentPlan]) -> ComponentPlan | None:
    return next((part for part in components if trains_policy(part.name, part.role)), None)


def _engine_routes(actor: ComponentPlan, engine: ComponentPlan, inventory: Inventory, kind: str | None) -> EngineRoutes:
    lengths = np.diff(engine.table.offsets)
    size = _update_bytes(actor, engine)
    if not _holds_accelerators(actor.table) or not _holds_accelerators(engine.table):
        processes = np.arange(engine.world_size)
        host = np.full(engine.world_size, list(Reach).index(Reach.HOST))
        nothing = np.zeros_like(processes)
        is_one_node = len({*actor.table.nodes.tolist(), *engine.table.nodes.tolist()}) == 1
        # On one node, ranks write to files that built-in engines map; others read weights that rank 0 writes to disk.
        maps_files = is_one_node and kind not in ("vllm", "sglang")
        gathered = 1 if maps_files else shards_of(actor)
        return EngineRoutes(engine.name, processes, nothing, nothing, host, gathered, weight_bytes=size)
    processes = np.repeat(np.arange(engine.world_size), lengths)
    shards = np.arange(len(processes)) - np.repeat(engine.table.offsets[:-1], lengths)
    sources, reaches = _nearest(actor, engine, shards, inventory)
    one, two = actor.parallel, engine.parallel
    gathered, parts = max(1, one.tensor // two.tensor) * max(1, one.pipeline // two.pipeline), two.tensor * two.pipeline
    if actor.model.sharding is Sharding.FULL:
        gathered, parts = shards_of(actor), 1
    return EngineRoutes(engine.name, processes, shards, sources, reaches, gathered, parts, size)


def _update_bytes(actor: ComponentPlan, engine: ComponentPlan) -> int | None:
    """Bytes of the weights as an engine takes them; None if they are not known, or only an adapter is sent."""
    shape = known_shape(actor)
    if shape is None or actor.model.lora_rank is not None:
        return None
    return engine.model.weight_bytes * shape.parameters


def _holds_accelerators(table: PlacementTable) -> bool:
    return ACCELERATOR in table.kinds and bool(table.inventory.num_accelerators) and len(table.device_nodes) > 0


def _nearest(actor: ComponentPlan, engine: ComponentPlan, shards: Ints, inventory: Inventory) -> tuple[Ints, Ints]:
    """Find the nearest learner process with matching weights for each engine shard, and its distance."""
    devices = engine.table.device_numbers
    nodes = engine.table.device_nodes
    # Compare shards in units of the coarser sharding: a fine shard lies inside a coarse one on the other side.
    units = min(actor.parallel.tensor, engine.parallel.tensor)
    wanted = _wanted_units(engine, shards, units)
    learner_devices, learner_ranks = actor.table.device_numbers, actor.table.owners
    held = _held_units(actor, units)[learner_ranks]
    sources = np.full(len(devices), -1)
    reaches = np.full(len(devices), list(Reach).index(Reach.OTHER_NODE))
    # Search from far to near, so that the nearest match overwrites the others.
    keys = (
        (np.zeros_like(devices), np.zeros_like(learner_devices)),
        (nodes, actor.table.device_nodes),
        (devices, learner_devices),
    )
    for reach, (own, theirs) in zip(reversed(_ORDER), keys, strict=True):
        found = _first_match(own, wanted, theirs, held, learner_ranks)
        sources = np.where(found >= 0, found, sources)
        reaches = np.where(found >= 0, list(Reach).index(reach), reaches)
    return sources, reaches


def _held_units(actor: ComponentPlan, units: int) -> Ints:
    """Unit of the weights that each learner process holds; fully sharded learners gather whole weights."""
    return np.arange(actor.world_size) % actor.parallel.tensor * units // actor.parallel.tensor


def _wanted_units(engine: ComponentPlan, shards: Ints, units: int) -> Ints:
    return shards % engine.parallel.tensor * units // engine.parallel.tensor


def _first_match(own: Ints, wanted: Ints, theirs: Ints, held: Ints, ranks: Ints) -> Ints:
    """Return, for each engine shard, a learner rank with the same location and unit, or -1."""
    width = int(max(wanted.max(initial=0), held.max(initial=0))) + 1
    have, want = theirs * width + held, own * width + wanted
    order = np.argsort(have, kind="stable")
    first, end = (np.searchsorted(have[order], want, side=side) for side in ("left", "right"))
    # Spread shards over equally near sources, so that no learner sends everything.
    turn = np.arange(len(want)) % np.maximum(end - first, 1)
    return np.where(end > first, ranks[order][np.minimum(first + turn, len(have) - 1)], -1)
