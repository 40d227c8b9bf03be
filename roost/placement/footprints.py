"""The memory of one component on one device, in each of the states it can be in."""

from __future__ import annotations

from dataclasses import dataclass

from roost.placement.component_plan import ComponentPlan
from roost.placement.memory import (
    CONTEXT_GIB,
    ENGINE_FRACTION,
    GIB,
    SLEEPING_ENGINE_GIB,
    LearnerMemory,
    engine_memory,
    learner_memory,
)
from roost.placement.model_shape import ModelShape, UnknownShape, shape_from_config
from roost.spec.job import Role, Sharding

DEFAULT_TOKENS = 4_096  # that a learner works on at a time, where the config does not say


@dataclass(frozen=True, slots=True)
class Footprint:
    """GiB of one component on each of its devices; None where it cannot be known."""

    active: float | None  # while it works
    resident: float | None  # while it is idle but stays as it is; a learner's working memory is given back
    idle: float | None  # on the device while it sleeps or is offloaded
    host: float | None  # in host memory meanwhile
    weights: float | None  # of its weights alone


UNKNOWN = Footprint(None, None, None, None, None)


def footprint(component: ComponentPlan, device_gb: float | None) -> Footprint:
    """The component's memory, computed from its model's `config.json` and the engine's settings.

    An engine whose model is not known still takes its fraction of the device.
    """
    shape = _shape(component)
    if component.role is Role.LEARNER and shape is not None:
        return _learner(component, shape)
    if component.role is Role.SCORER and shape is not None:
        weights = shape.parameters * component.model.weight_bytes / max(1, _model_parts(component)) / GIB
        return Footprint(weights + CONTEXT_GIB, weights + CONTEXT_GIB, CONTEXT_GIB, weights, weights)
    if component.role is Role.ENGINE and device_gb is not None:
        return _engine(component, shape, device_gb)
    if component.role is Role.HELPER and component.model.path is None and component.name != "env":
        return Footprint(
            0.0, 0.0, 0.0, 0.0, 0.0
        )  # rewards by rule and agents compute on the CPU, whatever device they are near
    return UNKNOWN


def _shape(component: ComponentPlan) -> ModelShape | None:
    if component.model.config is None:
        return None
    try:
        return shape_from_config(component.model.config)
    except UnknownShape:
        return None


def _model_parts(component: ComponentPlan) -> int:
    """Over how many processes the weights are cut: all of them where fully sharded."""
    if component.model.sharding is Sharding.FULL:
        return component.world_size
    return component.parallel.tensor * component.parallel.pipeline


def _learner(component: ComponentPlan, shape: ModelShape) -> Footprint:
    sharding = component.model.sharding
    memory = learner_memory(
        shape,
        component.parallel,
        1 if sharding is Sharding.NONE else component.world_size,
        component.model.tokens or DEFAULT_TOKENS,
        component.model.weight_bytes,
        is_fully_sharded=sharding is not Sharding.OPTIMIZER,
    )
    kept, moved = _split_by_offload(memory, component.model.offloads)
    resident = memory.total - memory.activations + CONTEXT_GIB
    return Footprint(memory.total + CONTEXT_GIB, resident, kept + CONTEXT_GIB, moved, memory.weights)


def _split_by_offload(memory: LearnerMemory, offloads: tuple[str, ...]) -> tuple[float, float]:
    """What stays on the device between the learner's phases, and what moves to the host; gradients are simply freed."""
    parts = {"weight": memory.weights, "grad": memory.gradients, "optimizer": memory.optimizer}
    kept = sum(size for name, size in parts.items() if name not in offloads)
    return kept, sum(size for name, size in parts.items() if name in offloads and name != "grad")


def _engine(component: ComponentPlan, shape: ModelShape | None, device_gb: float) -> Footprint:
    fraction = component.model.memory_fraction
    if shape is None:
        taken = device_gb * (fraction or ENGINE_FRACTION)
        return Footprint(taken, taken, SLEEPING_ENGINE_GIB, None, None)
    memory = engine_memory(shape, component.parallel, device_gb, fraction, component.model.weight_bytes)
    return Footprint(memory.total, memory.total, SLEEPING_ENGINE_GIB, memory.weights, memory.weights)
