"""Checks of sizes that divide a model's heads and layers, before and after processes are placed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import gcd

from roost.config.findings import Findings, Where, remainder
from roost.config.job import Component, Notation, ParallelSizes, Role, Sharding, heads_divide, size_place
from roost.placement.component_plan import ComponentPlan, mesh_of
from roost.placement.memory.model import known_shape
from roost.placement.memory.shape import ModelShape

Part = Component | ComponentPlan
ULYSSES = (Notation.RLINF, Notation.ROLL, Notation.VERL)  # whose context groups of FSDP exchange tokens for heads
MAX_CONTEXT = 64  # the largest context size that a fix suggests


def any_of(sizes: Iterable[int | str]) -> str:
    """Alternatives as text, for a fix.

    >>> any_of([1, 2, 4]), any_of([1])
    ('1, 2 or 4', '1')
    """
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last


def context_sizes(sizes: ParallelSizes, shape: ModelShape | None, ranks: int) -> list[int]:
    """Context sizes that divide the ranks and, where they are known, the heads of a tensor-parallel rank."""
    groups = max(1, ranks if ranks % sizes.tensor else ranks // sizes.tensor)
    dividing = [size for size in range(1, min(groups, MAX_CONTEXT) + 1) if groups % size == 0]
    if shape is None or not shape.kv_heads // sizes.tensor:
        return dividing
    heads, key_heads = shape.heads // sizes.tensor, shape.kv_heads // sizes.tensor
    return [size for size in dividing if heads_divide(size, heads, key_heads)]


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


def check_groups(part: ComponentPlan, notation: Notation, place: Where, findings: Findings) -> None:
    """Check expert and context sizes of a learner or scorer that another program trains, as that program would."""
    shape = known_shape(part)
    if shape is None or part.role not in (Role.LEARNER, Role.SCORER):
        return
    sizes = part.parallel
    at = partial(size_place, place, part.written_name)
    if sizes.expert > 1 and not shape.experts:
        what = f"expert parallel size {sizes.expert}, but a model of type {shape.family} has no experts"
        findings.error("RST-P033", at("expert"), what, fix="use an expert parallel size of 1")
    elif shape.experts % sizes.expert:
        what = f"{shape.experts} experts cannot be split over expert parallel size {sizes.expert}"
        fix = f"use an expert parallel size that divides {shape.experts}"
        findings.error("RST-P033", at("expert"), what, remainder(shape.experts, sizes.expert), fix)
    elif (copy := _expert_ranks(part)) % sizes.expert:
        what = f"{copy} ranks that hold all experts cannot be split over expert parallel size {sizes.expert}"
        fix = f"use an expert parallel size that divides {gcd(copy, shape.experts)}"
        findings.error("RST-P033", at("expert"), what, remainder(copy, sizes.expert), fix)
    heads, key_heads = shape.heads // sizes.tensor, shape.kv_heads // sizes.tensor
    is_ulysses = part.model.sharding is Sharding.FULL and notation in ULYSSES
    if is_ulysses and key_heads and not heads_divide(sizes.context, heads, key_heads):
        findings.error(
            "RST-P033",
            at("context"),
            f"{heads} heads and {key_heads} KV heads cannot be split over context parallel size {sizes.context}",
            "context parallelism exchanges tokens for heads in attention",
            f"use a context parallel size of {any_of(context_sizes(sizes, shape, part.world_size))}",
        )


def _expert_ranks(part: ComponentPlan) -> int:
    """Ranks over which the program divides the experts of one layer: a multiple of the expert size."""
    sizes, ranks = part.parallel, part.world_size
    if part.model.sharding is Sharding.OPTIMIZER:  # Megatron: those of a stage, whose experts may themselves be split
        return ranks // sizes.pipeline // (sizes.expert_tensor or sizes.tensor)
    mesh = mesh_of(replace(sizes, expert=1), ranks)
    return sizes.expert if mesh is None else mesh.fsdp * mesh.tensor


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
