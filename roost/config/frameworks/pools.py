"""Rules that several frameworks share: engines cut from a pool of devices, and sizes that must divide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.config.findings import Where, counted
from roost.config.job import Component, CpuWorkers, DeviceList, ModelUse, ParallelSizes, Role
from roost.config.section import Section

USUAL_WIDTH = 8  # GPUs of a machine that pools are taken to share


@dataclass(frozen=True, slots=True)
class Pool:
    """So many GPUs on each of some nodes; `devices` are their numbers over all machines, node by node."""

    nodes: int
    per_node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines of equal width, and the pools on them."""

    count: int
    width: int
    pools: Mapping[str, Pool]


def machines_for(sizes: Mapping[str, tuple[int, int]]) -> Machines:
    """The machines to plan on, for pools of (nodes, GPUs per node) in order.

    Pools of as many nodes share machines if all fit into usual ones. Otherwise machines are as wide as the widest pool,
    and each node of a pool is the first machine with enough GPUs left, so that no node's part is cut in two.

    >>> machines_for({"trainer": (1, 4), "rollout": (1, 8)}).pools["rollout"].devices
    (8, 9, 10, 11, 12, 13, 14, 15)
    """
    together = sum(per_node for _, per_node in sizes.values())
    is_shared = len({nodes for nodes, _ in sizes.values()}) == 1 and together <= USUAL_WIDTH
    width = together if is_shared else max(per_node for _, per_node in sizes.values())
    used: list[int] = []  # GPUs of each machine
    pools = {}
    for name, (nodes, per_node) in sizes.items():
        fitting = [index for index, count in enumerate(used) if count + per_node <= width][:nodes]
        fitting += range(len(used), len(used) + nodes - len(fitting))
        used += [0] * (fitting[-1] + 1 - len(used))
        devices: list[int] = []
        for index in fitting:
            start = index * width + used[index]
            devices += range(start, start + per_node)
            used[index] += per_node
        pools[name] = Pool(nodes, per_node, tuple(devices))
    return Machines(len(used), width, pools)


def engines_on(devices: Sequence[int], size: int, where: Where, root: Section, what: str = "engine") -> list[int]:
    """The devices of as many engines as fit; those left over are warned about, and too few are an error."""
    count = len(devices) // size
    if count == 0:
        root.findings.error(
            "RST-N057",
            where,
            f"makes each {what} {counted(size, 'GPU')} large, but there are {len(devices)} for it",
            f"{len(devices)} // {size} = 0",
            f"give it at least {size} GPUs, or make it smaller",
        )
        return []
    left = len(devices) % size
    if left:
        root.findings.warn(
            "RST-N055",
            where,
            f"leaves {counted(left, 'GPU')} without {'an' if what[0] in 'aeiou' else 'a'} {what}",
            f"{counted(len(devices), 'GPU')} % {size} for each = {left}; the program rounds down and says nothing",
            f"choose a size that divides {len(devices)}",
        )
    return list(devices[: count * size])


def check_divides(sizes: ParallelSizes, count: int, where: Where, root: Section, names: str) -> None:
    """A learner's model must be cut into parts that divide its devices."""
    if count % sizes.model:
        root.findings.error(
            "RST-N056",
            where,
            f"gives the learner {counted(count, 'GPU')}, which the model's {sizes.model} parts do not divide",
            f"{names}: {count} % {sizes.model} = {count % sizes.model}",
            f"use a multiple of {sizes.model} GPUs, or smaller sizes",
        )


def component(
    name: str,
    written: str,
    where: Where,
    requested: DeviceList | CpuWorkers,
    role: Role,
    parallel: ParallelSizes | None = None,
    model: ModelUse | None = None,
) -> Component:
    return Component(name, written, where, requested, parallel or ParallelSizes(), (), role, model or ModelUse())
