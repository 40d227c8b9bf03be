"""Rules that several frameworks share: engines cut from a pool of devices, and sizes that must divide it."""

from __future__ import annotations

from collections.abc import Sequence

from roost.config.findings import Where, counted
from roost.config.job import Component, CpuWorkers, DeviceList, ModelUse, ParallelSizes, Role
from roost.config.section import Section


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
