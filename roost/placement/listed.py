"""Strategies for device lists and worker counts: order kept, nodes crossed, CPU workers dealt out (ROLL, ml-loop)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.cluster.inventory import Inventory
from roost.cluster.resources import Ints
from roost.config.errors import Findings, Where
from roost.config.node_groups import CLUSTER_GROUP, NODE_GROUP
from roost.placement.strategy import (
    PlacementStrategy,
    check_count,
    check_ranks,
    has_devices,
    in_range,
    without_devices,
)
from roost.placement.table import PlacementTable


@dataclass(frozen=True, eq=False)
class ListedPlacementStrategy(PlacementStrategy):
    """Cuts a list of accelerators into processes in the order written.

    A process may span nodes; it runs on the node of its first device.

    >>> inventory = Inventory.from_dict({"nodes": [{"accelerators": 4}, {"accelerators": 4}]})
    >>> [p.devices for p in ListedPlacementStrategy([7, 0, 3, 4], 2).get_placement(inventory)]
    [[(1, 3), (0, 0)], [(0, 3), (1, 0)]]
    """

    devices: Ints
    num_hardware_per_process: int = 1
    labels: tuple[str, ...] = (CLUSTER_GROUP,)

    def __init__(self, devices: Sequence[int], num_hardware_per_process: int = 1) -> None:
        check_ranks(np.array(devices, np.int64) if isinstance(devices, range) else devices, "the strategy")
        check_count(num_hardware_per_process, "num_hardware_per_process")
        object.__setattr__(self, "devices", np.array(devices, np.int64))
        object.__setattr__(self, "num_hardware_per_process", num_hardware_per_process)

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        fix = "plan on machines that have some, or give world_size instead of devices"
        if table is None or not has_devices(table, findings, where, fix):
            return None
        if not in_range(self.devices, table, findings, where, "device"):
            return None
        # The last process takes what is left over, where the list does not divide.
        offsets = np.append(np.arange(0, len(self.devices), self.num_hardware_per_process), len(self.devices))
        nodes, local = table.locate(self.devices)
        first = offsets[:-1]
        return PlacementTable(
            inventory,
            table.labels,
            table.kinds,
            nodes[first],
            np.zeros(len(first), np.int64),
            offsets,
            nodes,
            local,
            isolate,
        )


@dataclass(frozen=True)
class SpreadPlacementStrategy(PlacementStrategy):
    """Deals processes without devices out over all nodes in turn.

    >>> inventory = Inventory.from_dict({"nodes": [{}, {}]})
    >>> [p.cluster_node_rank for p in SpreadPlacementStrategy(3).get_placement(inventory)]
    [0, 1, 0]
    """

    world_size: int
    labels: tuple[str, ...] = (NODE_GROUP,)

    def __post_init__(self) -> None:
        check_count(self.world_size, "world_size")

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        if table is None:
            return None
        nodes = np.arange(self.world_size) % inventory.num_nodes
        return without_devices(inventory, table, nodes, np.zeros(self.world_size, np.int64), isolate)
