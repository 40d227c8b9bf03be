"""Which rank of the learner sends weights to which engine, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roost.engines.fleet import Fleet
from roost.engines.spec import EngineKind
from roost.engines.weights.release import Way
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.trainer.learner_worker import Receiver


@dataclass(frozen=True, slots=True)
class Sending:
    """How each engine gets weights, and from which rank of the learner; by the engine's name."""

    ways: Mapping[str, Way | None]  # None: from disk
    ranks: Mapping[str, int]


def plan_sending(plan: Plan, engines: str, learner: str, kind: EngineKind, on_gpu: bool) -> Sending:
    """An engine on a device of the learner gets its weights there; others by a broadcast from rank 0.

    A broadcast cannot have two members on one device, so that each engine has a way of its own. One that is cut over
    devices of the learner would need the handles of several ranks at once, and reads from disk instead; so does SGLang
    where the learner is sharded, as it takes no packed handles. On one machine without GPUs everything goes through
    shared memory.
    """
    placed, learners = plan[engines], plan[learner]
    names = [f"{engines}-{rank}" for rank in range(placed.world_size)]
    if not on_gpu:
        nodes = {placed.table[rank].cluster_node_rank for rank in range(placed.world_size)}
        way = Way.SHARED_MEMORY if nodes == {learners.table[0].cluster_node_rank} else Way.BROADCAST
        return Sending(dict.fromkeys(names, way), dict.fromkeys(names, 0))
    takes_handles = kind is not EngineKind.SGLANG or learners.world_size == 1
    homes = {device: rank for rank in range(learners.world_size) for device in devices_of(learners, rank)}
    ways: dict[str, Way | None] = {}
    ranks: dict[str, int] = {}
    for rank, name in enumerate(names):
        devices = devices_of(placed, rank)
        shared = [device for device in devices if device in homes]
        ways[name] = None if shared else Way.BROADCAST
        if shared and len(devices) == 1 and takes_handles:
            ways[name] = Way.DEVICE
        ranks[name] = homes[shared[0]] if shared else 0
    return Sending(ways, ranks)


def receiver_at(url: str, fleet: Fleet, sending: Sending) -> Receiver:
    """The engine at an address, as the learner needs to know it."""
    for member in fleet.crew.members.values():
        if member.is_connected and member.engine.url == url:
            spec = member.spec
            way, rank = sending.ways[member.name], sending.ranks[member.name]
            if way is None:
                raise LookupError(f"{member.name} is sent no weights: it reads them from disk")
            return Receiver(spec.kind, url, spec.sleeps, spec.api_key, rank, way, spec.tensor * spec.pipeline)
    raise LookupError(f"no engine of the fleet is at {url}")


def devices_of(part: ComponentPlan, rank: int) -> list[tuple[int, int]]:
    """The accelerators of a process, each as its node and its number there."""
    return [(int(node), int(device)) for node, device in part.table[rank].devices]
