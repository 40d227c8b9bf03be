"""Accelerators grouped by who holds them: what is true of one device of a class is true of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.cluster.inventory import Inventory
from roost.cluster.resources import Ints
from roost.placement.component_plan import ComponentPlan

FEW_CLASSES = 16


@dataclass(frozen=True, eq=False)
class DeviceClass:
    """Accelerators of equal memory that the same components hold, each with as many processes."""

    devices: Ints  # cluster-wide numbers, ascending
    components: tuple[str, ...]
    memory_gb: float | None
    processes: tuple[int, ...]  # of each component on one device


def device_classes(components: Sequence[ComponentPlan], inventory: Inventory) -> tuple[DeviceClass, ...]:
    """The classes in the order of their first device; accelerators that nobody holds are left out."""
    counts = [part.table.processes_on_accelerators for part in components]
    # Detected memory differs by some bytes between equal cards.
    sizes = {memory: round(memory or 0.0, 1) for memory in {node.memory_gb for node in inventory.nodes}}
    numbers = {size: number for number, size in enumerate(sorted(set(sizes.values())))}
    if len(numbers) > 1:
        per_node = np.array([numbers[sizes[node.memory_gb]] for node in inventory.nodes], np.int64)
        memory = np.repeat(per_node, inventory.accelerator_counts)
    else:
        memory = np.zeros(inventory.num_accelerators, np.int64)
    key = memory
    for column in counts:
        # Renumbering after each component keeps the keys small, however many components there are.
        key = _renumbered(key * (int(column.max(initial=0)) + 1) + column)
    classes = []
    for devices in _split(key):
        first = int(devices[0])
        held = [
            (part.name, int(column[first])) for part, column in zip(components, counts, strict=True) if column[first]
        ]
        if held:
            names, processes = zip(*held, strict=True)
            node = inventory.nodes[int(np.searchsorted(inventory.first_accelerators, first, side="right")) - 1]
            classes.append(DeviceClass(devices, names, node.memory_gb or None, processes))
    return tuple(sorted(classes, key=lambda part: int(part.devices[0])))


def _split(key: Ints) -> list[Ints]:
    """The devices of each class; few classes are picked out one by one, which is cheaper than sorting all devices."""
    count = int(key.max(initial=-1)) + 1
    if count <= FEW_CLASSES:
        return [np.flatnonzero(key == number) for number in range(count)]
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def _renumbered(keys: Ints) -> Ints:
    """The keys as 0, 1, 2, ... in the same order, without gaps."""
    is_used = np.bincount(keys) > 0
    return (np.cumsum(is_used) - 1)[keys]
