"""Accelerators grouped by who holds them: what is true of one device of a class is true of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.cluster.inventory import Inventory
from roost.cluster.resources import Ints
from roost.placement.component_plan import ComponentPlan
from roost.placement.mode import held_accelerators


@dataclass(frozen=True, eq=False)
class DeviceClass:
    """Accelerators of equal memory that the same components hold."""

    devices: Ints  # cluster-wide numbers, ascending
    components: tuple[str, ...]
    memory_gb: float | None


def device_classes(components: Sequence[ComponentPlan], inventory: Inventory) -> tuple[DeviceClass, ...]:
    """The classes in the order of their first device; accelerators that nobody holds are left out."""
    held = [held_accelerators(part.table) for part in components]
    sizes = sorted({node.memory_gb or 0.0 for node in inventory.nodes})
    numbers = {size: number for number, size in enumerate(sizes)}
    per_node = np.fromiter((numbers[node.memory_gb or 0.0] for node in inventory.nodes), np.int64, inventory.num_nodes)
    memory = np.repeat(per_node, inventory.accelerator_counts)
    key = memory
    for flags in held:
        # Renumbering after each component keeps the keys small, however many components there are.
        key = _renumbered(key * 2 + flags)
    classes = []
    for number in range(int(key.max(initial=-1)) + 1):
        devices = np.flatnonzero(key == number)
        names = tuple(part.name for part, flags in zip(components, held, strict=True) if flags[devices[0]])
        if names:
            classes.append(DeviceClass(devices, names, sizes[memory[devices[0]]] or None))
    return tuple(sorted(classes, key=lambda part: int(part.devices[0])))


def _renumbered(keys: Ints) -> Ints:
    """The keys as 0, 1, 2, ... in the same order, without gaps."""
    is_used = np.bincount(keys) > 0
    return (np.cumsum(is_used) - 1)[keys]
