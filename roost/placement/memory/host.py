"""Host memory of nodes: offloaded state and its pinned buffers, checkpoints being written, and the exported policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.cluster.inventory import Inventory
from roost.config.job import Role, Sharding
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.model import (
    GIB,
    MOMENT_BYTES,
    copy_parameters,
    known_shape,
    moment_bytes,
    shards_of,
    trained_parameters,
)
from roost.placement.memory.phases import Phase, trains_policy
from roost.placement.memory.residency import Residency
from roost.placement.memory.shape import ModelShape

Gib = npt.NDArray[np.float64]  # of each node


@dataclass(frozen=True, eq=False)
class HostUse:
    """Host memory in use at one moment, by part."""

    moment: str  # in words
    parts: tuple[tuple[str, Gib], ...]

    @property
    def total(self) -> Gib:
        total: Gib = np.sum([size for _, size in self.parts], axis=0, dtype=np.float64)
        return total


def host_uses(
    components: Sequence[ComponentPlan], residency: Residency, inventory: Inventory, assumes_device: bool = False
) -> Iterator[HostUse]:
    """Host memory in each phase, and during the export of the policy at the end of a run.

    A checkpoint is copied after learning and written in the background, which may take until the next one; the export
    waits for it. Offloaded state of unknown size counts as 0, or as the memory of its device with `assumes_device`.
    """

    def on_nodes(what: str, size: Callable[[ComponentPlan], float], count: int | None = None) -> list[tuple[str, Gib]]:
        """Memory of each component, for its first `count` processes (None: all)."""
        return [(f"{what} of {part.name}", _at(part.table.nodes[:count], size(part), inventory)) for part in components]

    copied = on_nodes("checkpoint", checkpoint_gib)
    converted = on_nodes("8-bit moments", converted_moments_gib)
    exported = on_nodes("export", export_gib, 1)
    for phase in Phase:
        state = _state(components, residency, inventory, phase, assumes_device)
        more = [*copied, *converted] if phase is Phase.LEARN else copied
        yield HostUse(f"the phase {phase.value}", (*state, *more))
        if phase is Phase.LEARN:
            yield HostUse("the export of the policy", (*state, *exported))


def checkpoint_gib(component: ComponentPlan) -> float:
    """GiB that a process copies for a checkpoint: trained weights and moments, or the weights of a scorer."""
    shape, model = known_shape(component), component.model
    if shape is None or not model.is_saved or model.unused_because:
        return 0.0
    if component.role is not Role.LEARNER:
        held = copy_parameters(shape, component.parallel, model.sharding)
        return held * model.weight_bytes / shards_of(component) / GIB
    width = model.trained_bytes or MOMENT_BYTES
    # 8-bit moments are saved in 32 bits.
    moments = moment_bytes(shape, model.optimizer, model.lora_rank, width, MOMENT_BYTES)
    return _trained_gib(component, shape) * (width + moments)


def converted_moments_gib(component: ComponentPlan) -> float:
    """GiB of 8-bit moments that a process has converted to 32 bits, until they are copied for a checkpoint."""
    shape, model = known_shape(component), component.model
    if shape is None or component.role is not Role.LEARNER or not model.is_saved or model.unused_because:
        return 0.0
    return _trained_gib(component, shape) * moment_bytes(shape, model.optimizer, model.lora_rank, 0, MOMENT_BYTES)


def _trained_gib(component: ComponentPlan, shape: ModelShape) -> float:
    """Trained parameters of a process, in units of 2^30."""
    model = component.model
    trained = trained_parameters(shape, component.parallel, model.sharding, model.lora_rank)
    return trained / (1 if model.sharding is Sharding.NONE else shards_of(component)) / GIB


def export_gib(component: ComponentPlan) -> float:
    """GiB of the whole policy, which rank 0 gathers to write it; 0 for components that do not train it."""
    shape, model = known_shape(component), component.model
    is_trained = model.is_saved and not model.unused_because and trains_policy(component.name, component.role)
    if shape is None or not is_trained:
        return 0.0
    return shape.parameters * model.compute_bytes / GIB


def _at(nodes: npt.NDArray[np.int64], size: float, inventory: Inventory) -> Gib:
    return np.bincount(nodes, minlength=inventory.num_nodes) * np.float64(size)


def _state(
    components: Sequence[ComponentPlan],
    residency: Residency,
    inventory: Inventory,
    phase: Phase,
    assumes_device: bool,
) -> list[tuple[str, Gib]]:
    """State of components on the host. Roost's learners and scorers keep the pinned buffers of an offload."""
    is_training = any(part.model.is_saved for part in components)
    keeping = {part.name for part in components if is_training and part.role in (Role.LEARNER, Role.SCORER)}
    node_of_device = np.repeat(np.arange(inventory.num_nodes), inventory.accelerator_counts)
    found = []
    for held in residency.classes:
        unknown = (held.device_class.memory_gb or 0.0) if assumes_device else 0.0
        nodes = node_of_device[held.device_class.devices]
        for index, share in enumerate(held.phases[phase]):
            now = unknown if share.host_gib is None else share.host_gib
            phases = Phase if share.component in keeping else ()
            kept = [held.phases[each][index].host_gib or 0.0 for each in phases]
            found.append((share.component, _at(nodes, max(now, *kept, 0.0), inventory)))
    return found
