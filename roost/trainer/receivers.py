"""Which rank of the learner sends weights to which engine, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roost.engines.fleet import Fleet
from roost.engines.weights.release import Way
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.trainer.learner_worker import Receiver


@dataclass(frozen=True, slots=True)
class Sending:
    """The way that all engines get weights by, and the learner's rank that sends to each, by the engine's name."""

    way: Way
    ranks: Mapping[str, int]


def plan_sending(plan: Plan, engines: str, learner: str, on_gpu: bool) -> Sending:
    """An engine that shares a device with a learner gets its weights from there; others from rank 0.

    On one machine without GPUs everything goes through shared memory. Between devices weights are broadcast; where
    engines are of both kinds, all take the broadcast, because an update has one way.
    """
    placed, learners = plan[engines], plan[learner]
    homes = {device: rank for rank in range(learners.world_size) for device in devices_of(learners, rank)}
    ranks = {
        f"{engines}-{rank}": next((homes[device] for device in devices_of(placed, rank) if device in homes), None)
        for rank in range(placed.world_size)
    }
    if not on_gpu:
        same_node = {placed.table[rank].cluster_node_rank for rank in range(placed.world_size)} == {
            learners.table[0].cluster_node_rank
        }
        return Sending(Way.SHARED_MEMORY if same_node else Way.BROADCAST, dict.fromkeys(ranks, 0))
    if all(rank is not None for rank in ranks.values()):
        return Sending(Way.DEVICE, {name: rank or 0 for name, rank in ranks.items()})
    return Sending(Way.BROADCAST, dict.fromkeys(ranks, 0))


def receiver_at(url: str, fleet: Fleet, sending: Sending) -> Receiver:
    """The engine at an address, as the learner needs to know it."""
    for member in fleet.crew.members.values():
        if member.is_connected and member.engine.url == url:
            spec = member.spec
            rank, size = sending.ranks[member.name], spec.tensor * spec.pipeline
            return Receiver(spec.kind, url, spec.sleeps, spec.api_key, rank, sending.way, size)
    raise LookupError(f"no engine of the fleet is at {url}")


def devices_of(part: ComponentPlan, rank: int) -> list[tuple[int, int]]:
    """The accelerators of a process, each as its node and its number there."""
    return [(int(node), int(device)) for node, device in part.table[rank].devices]
