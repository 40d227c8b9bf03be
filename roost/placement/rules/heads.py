"""Checks of sizes that divide a model's heads and layers, before and after processes are placed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from roost.config.findings import Findings, Where, remainder
from roost.config.job import Component, ParallelSizes, Role, Sharding, size_place
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.shape import ModelShape

Part = Component | ComponentPlan


def any_of(sizes: Iterable[int | str]) -> str:
    """Alternatives as text, for a fix.

    >>> any_of([1, 2, 4]), any_of([1])
    ('1, 2 or 4', '1')
    """
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last


def check_heads(part: Part, shape: ModelShape, devices: int, place: Where, findings: Findings) -> None:
    """Check heads and layers against the parallel sizes; fixes of a tensor size also divide `devices`."""
    for number, noun, name, size in _uneven(part, part.parallel, shape):
        fix = f"use a parallel size that divides {number}"
        if name == "tensor":
            fix = f"use a tensor parallel size of {any_of(tensor_sizes(part, shape, devices))}"
        findings.error(
            "RST-P033",
            size_place(place, part.written_name, name),
            f"{number} {noun} cannot be split over {name} parallel size {size}",
            remainder(number, size),
            fix,
        )


def tensor_sizes(part: Part, shape: ModelShape, devices: int) -> list[int]:
    """Tensor sizes that divide the model's heads, a learner's other split sizes, and the devices; [1] if none does."""
    found = []
    for tensor in range(1, min(shape.heads, devices) + 1):
        sizes = replace(part.parallel, tensor=tensor)
        split = () if part.role is Role.ENGINE else (shape.feed_forward, shape.vocabulary)
        if not any(each % tensor for each in (*split, devices // sizes.pipeline // sizes.context)):
            found += [tensor] if all(name != "tensor" for _, _, name, _ in _uneven(part, sizes, shape)) else []
    return found or [1]


def _uneven(part: Part, sizes: ParallelSizes, shape: ModelShape) -> list[tuple[int, str, str, int]]:
    """Sizes of the model that the parallel sizes must divide and do not: (number, noun, size's name, size)."""
    if part.role is Role.HELPER:
        return []
    tensor, pipeline = sizes.tensor, sizes.pipeline
    wanted = [(shape.heads, "attention heads", "tensor", tensor)]
    # An engine with a larger tensor size than KV heads keeps copies of them; Megatron does not.
    if part.role is not Role.ENGINE or tensor < shape.kv_heads:
        wanted.append((shape.kv_heads, "KV heads", "tensor", tensor))
    if part.role is not Role.ENGINE and part.model.sharding is Sharding.OPTIMIZER:  # FSDP has no pipeline stages
        wanted.append((shape.layers, "layers", "pipeline", pipeline))
    return [each for each in wanted if each[0] % each[-1]]
