"""The memory of one component on one device, in each of the states it can be in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.config.job import ParallelSizes, Role, Sharding
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory import (
    CONTEXT_GIB,
    ENGINE_FRACTION,
    ENGINE_OVERHEAD_GIB,
    GIB,
    SLEEPING_ENGINE_GIB,
    LearnerMemory,
    engine_memory,
    held_parameters,
    learner_memory,
)
from roost.placement.model_shape import ModelShape, UnknownShape, shape_from_config

DEFAULT_TOKENS = 4_096  # that a learner works on at a time, where the config does not say


@dataclass(frozen=True, slots=True)
class Footprint:
    """GiB of one component on each of its devices; None where it cannot be known."""

    active: float | None  # while it generates or learns
    scoring: float | None  # while a learner computes log-probabilities
    syncing: float | None  # while new weights travel and the others have freed what they can
    resident: float | None  # while it is idle but stays as it is; working memory is given back
    idle: float | None  # on the device while it sleeps or is offloaded
    host: float | None  # in host memory meanwhile

    def times(self, count: int) -> Footprint:
        """The same for several processes on one device."""
        sizes = (self.active, self.scoring, self.syncing, self.resident, self.idle, self.host)
        return Footprint(*(None if size is None else size * count for size in sizes))


UNKNOWN = Footprint(None, None, None, None, None, None)
NOTHING = Footprint(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def footprint(component: ComponentPlan, device_gib: float | None, fraction: float | None = None) -> Footprint:
    """The component's memory, computed from its model's `config.json` and the engine's settings.

    An engine whose model is not known still takes its fraction of the device; `fraction` is used instead of its own.
    """
    shape = known_shape(component)
    if component.role is Role.LEARNER and shape is not None:
        return _learner(component, shape)
    if component.role is Role.SCORER and shape is not None:
        return _scorer(component, shape)
    if component.role is Role.ENGINE and device_gib is not None:
        return _engine(component, shape, device_gib, component.model.memory_fraction if fraction is None else fraction)
    if component.role is Role.HELPER and component.model.path is None and component.name != "env":
        return NOTHING  # rewards by rule and agents compute on the CPU, whatever device they are near
    return UNKNOWN


def known_shape(component: ComponentPlan) -> ModelShape | None:
    """The shape of the component's model, where its config is known and of a family that Roost counts."""
    if component.model.config is None:
        return None
    try:
        return shape_from_config(component.model.config)
    except UnknownShape:
        return None


def engine_sizes(component: ComponentPlan) -> ParallelSizes:
    """The sizes of the smallest engine; a last one that got fewer devices is cut over those."""
    fewest = int(np.diff(component.table.offsets).min(initial=10**9))
    sizes = component.parallel
    return ParallelSizes(tensor=fewest) if 0 < fewest < sizes.tensor * sizes.pipeline else sizes


def _scorer(component: ComponentPlan, shape: ModelShape) -> Footprint:
    sharding = component.model.sharding
    per_worker = int(np.diff(component.table.offsets).max(initial=1)) or 1
    parts = component.world_size if sharding is Sharding.FULL else per_worker
    sizes = component.parallel if sharding is Sharding.OPTIMIZER else ParallelSizes()
    held = held_parameters(shape, sizes, 1 if sharding is Sharding.OPTIMIZER else parts)
    weights = held * component.model.weight_bytes / GIB
    whole = weights + CONTEXT_GIB
    return Footprint(whole, whole, whole, whole, CONTEXT_GIB, weights)


def _learner(component: ComponentPlan, shape: ModelShape) -> Footprint:
    sharding = component.model.sharding
    memory = learner_memory(
        shape,
        component.parallel,
        1 if sharding is Sharding.NONE else component.world_size,
        component.model.tokens or DEFAULT_TOKENS,
        component.model.weight_bytes,
        sharding,
        component.model.lora_rank,
    )
    kept, moved = _split_by_offload(memory, component.model.offloads)
    # Between its phases a learner holds what it does not offload; while it scores or sends, its weights as well.
    weights = memory.weights if "weight" in component.model.offloads else 0.0
    return Footprint(
        active=memory.total + CONTEXT_GIB,
        scoring=kept + weights + memory.activations + CONTEXT_GIB,
        syncing=kept + weights + CONTEXT_GIB,
        resident=memory.total - memory.activations + CONTEXT_GIB,
        idle=kept + CONTEXT_GIB,
        host=moved,
    )


def _split_by_offload(memory: LearnerMemory, offloads: tuple[str, ...]) -> tuple[float, float]:
    """What stays on the device between the learner's phases, and what moves to the host; gradients are simply freed."""
    parts = {"weight": memory.weights, "grad": memory.gradients, "optimizer": memory.optimizer}
    kept = sum(size for name, size in parts.items() if name not in offloads)
    return kept, sum(size for name, size in parts.items() if name in offloads and name != "grad")


def _engine(component: ComponentPlan, shape: ModelShape | None, device_gib: float, fraction: float | None) -> Footprint:
    taken = device_gib * (ENGINE_FRACTION if fraction is None else fraction)
    if shape is None:
        # Its KV cache is woken after the weights have arrived, but how much that is cannot be known.
        return Footprint(taken, taken, None, taken, SLEEPING_ENGINE_GIB, None)
    memory = engine_memory(shape, engine_sizes(component), device_gib, fraction, component.model.weight_bytes)
    syncing = memory.weights + ENGINE_OVERHEAD_GIB
    return Footprint(taken, taken, syncing, taken, SLEEPING_ENGINE_GIB, memory.weights)
