"""Placement of one process. A separate module, because every worker imports it and little else of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Placement(NamedTuple):
    """Node and devices of one process.

    `visible_accelerators` are the accelerators of its node that it may see: those assigned to it, or all if it is
    not isolated or holds none. `devices` lists everything assigned to it as (node, index on that node), in order; only
    a process that spans nodes has devices that are not among its `local_hardware_ranks`.
    """

    rank: int
    cluster_node_rank: int
    placement_node_rank: int
    local_accelerator_rank: int
    accelerator_type: str
    local_rank: int
    local_world_size: int
    visible_accelerators: list[str]
    isolate_accelerator: bool
    local_hardware_ranks: list[int]
    node_group_label: str
    devices: Sequence[tuple[int, int]] = ()
