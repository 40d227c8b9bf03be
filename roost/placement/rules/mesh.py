"""Rules about a learner's device mesh: parallel sizes that ranks, heads or layers cannot be divided by."""

from __future__ import annotations

from collections.abc import Iterable

from roost.config.findings import Findings, Where, remainder
from roost.config.job import ParallelSizes, Role, heads_divide
from roost.placement.component_plan import ComponentPlan, mesh_of
from roost.placement.memory.model import EXPERT_FAMILIES, ModelShape, known_shape


def data_groups(learner: ComponentPlan) -> int:
    """Groups of a learner's ranks that have samples of their own."""
    mesh = learner.mesh
    return max(1, learner.world_size) if mesh is None else mesh.data


def check_mesh(part: ComponentPlan, place: Where, findings: Findings, ranks: int | None = None) -> None:
    """Check that the ranks (without `ranks`, those it has) and the model of a learner or scorer can be divided."""
    if part.role not in (Role.LEARNER, Role.SCORER):
        return
    ranks = part.world_size if ranks is None else ranks
    shape = known_shape(part)
    _check_pipeline(part.parallel, shape is not None and shape.family in EXPERT_FAMILIES, place, findings)
    _check_ranks(part.parallel, ranks, place, findings)
    if shape is not None:
        _check_context(shape, part.parallel, place, findings)
        _check_tensor(shape, part.parallel, place, findings)
        _check_experts(shape, part.parallel, ranks, place, findings)


def has_mesh(part: ComponentPlan, ranks: int) -> bool:
    """Return True if Roost's learner can divide its model over so many ranks."""
    findings = Findings()
    check_mesh(part, Where(), findings, ranks)
    return not findings.errors


def most_ranks(part: ComponentPlan, ranks: int) -> int:
    """The most of these ranks that its model can be divided over.

    A plan for another program may have sizes that Roost's learner has not: then it is a multiple of their product.
    """
    size = part.parallel.model
    most = ranks - ranks % size
    if not has_mesh(part, part.world_size):
        return most
    return next((count for count in range(most, 0, -size) if has_mesh(part, count)), 0)


def _check_pipeline(sizes: ParallelSizes, is_mixture: bool, place: Where, findings: Findings) -> None:
    if sizes.pipeline > 1:
        instead = f"tensor size {sizes.tensor * sizes.pipeline} divides layers over as many ranks"
        if is_mixture:  # a tensor size would need a multiple of it as expert size
            instead = "an expert size divides the experts of a mixture, a context size its tokens"
        findings.error(
            "RST-T034",
            place,
            f"pipeline size {sizes.pipeline}, but Roost's learner has no pipeline stages",
            "it shards all layers over its ranks (FSDP), which needs no more memory than stages do",
            f"write pipeline size 1; {instead}",
        )


def _check_ranks(sizes: ParallelSizes, ranks: int, place: Where, findings: Findings) -> None:
    if ranks % sizes.context:
        fix = "write a context_parallel_size that divides it"
        what = f"{ranks} ranks cannot be divided into context groups of {sizes.context}"
        findings.error("RST-T120", place, what, fix=fix)
        return
    if ranks % (sizes.tensor * sizes.context):
        findings.error(
            "RST-T121",
            place,
            f"{ranks} ranks cannot be divided into tensor groups of {sizes.tensor}",
            f"{ranks} % (tensor {sizes.tensor} * context {sizes.context}) = {ranks % (sizes.tensor * sizes.context)}",
            "write sizes whose product divides the ranks",
        )
        return
    shard, largest = sizes.shard or ranks, ranks // sizes.tensor
    if shard < ranks and (shard % sizes.context or ranks % (shard * sizes.tensor)):
        findings.error(
            "RST-T121",
            place,
            f"{ranks} ranks cannot be divided into FSDP groups of {shard}",
            f"tensor {sizes.tensor}, context {sizes.context}; context groups lie within FSDP groups",
            f"write a multiple of {sizes.context} that divides {largest}, or leave it out: {largest}",
        )
        return
    copy = min(shard, largest) * sizes.tensor
    if copy % sizes.expert:
        findings.error(
            "RST-T123",
            place,
            f"copies of {copy} ranks cannot be divided into expert groups of {sizes.expert}",
            remainder(copy, sizes.expert),
            f"write an expert size that divides {copy}",
        )


def _check_context(shape: ModelShape, sizes: ParallelSizes, place: Where, findings: Findings) -> None:
    """Check that context groups can exchange tokens for the heads that a tensor-parallel rank has."""
    heads, key_heads = shape.heads // sizes.tensor, shape.kv_heads // sizes.tensor
    if key_heads and not heads_divide(sizes.context, heads, key_heads):
        findings.error(
            "RST-T120",
            place,
            f"{heads} heads and {key_heads} key heads cannot be divided over {sizes.context} ranks",
            "context parallelism exchanges tokens for heads in attention",
            "write a context_parallel_size that divides it",
        )


def _check_tensor(shape: ModelShape, sizes: ParallelSizes, place: Where, findings: Findings) -> None:
    tensor = sizes.tensor
    if shape.family in EXPERT_FAMILIES and sizes.expert % tensor:
        findings.error(
            "RST-T122",
            place,
            f"experts of {shape.family} cannot be divided by tensor size {tensor}",
            "ranks of a tensor group have whole experts",
            f"write an expert size that is a multiple of {tensor}, or tensor size 1",
        )
        return
    for name, size in _uneven(shape, tensor):
        findings.error(
            "RST-T122",
            place,
            f"tensor size {tensor} does not divide the model's {size} {name}",
            remainder(size, tensor),
            f"write a tensor size that divides {size}",
        )


def _check_experts(shape: ModelShape, sizes: ParallelSizes, ranks: int, place: Where, findings: Findings) -> None:
    """Check that expert groups have whole experts, and that FSDP can shard those that a rank has."""
    size, mesh = sizes.expert, mesh_of(sizes, ranks)
    if size == 1 or mesh is None:
        return
    if not shape.experts:
        findings.error(
            "RST-T123",
            place,
            f"expert size {size}, but a model of type {shape.family} has no experts",
            fix="write expert size 1",
        )
    elif shape.experts % size:
        findings.error(
            "RST-T123",
            place,
            f"expert size {size} does not divide the model's {shape.experts} experts",
            remainder(shape.experts, size),
            f"write an expert size that divides {shape.experts}",
        )
    for rows in (2 * shape.expert_feed_forward, shape.hidden):
        if shape.experts and rows % mesh.expert_shards:
            findings.error(
                "RST-T123",
                place,
                f"FSDP over {mesh.expert_shards} ranks does not divide the {rows} rows of each expert",
                f"copies of {mesh.fsdp * mesh.tensor} ranks / expert size {size} = {mesh.expert_shards}",
                "write a larger expert size",
            )


def _uneven(shape: ModelShape, tensor: int) -> Iterable[tuple[str, int]]:
    """Numbers that Roost's learner divides beside heads, which are checked for every learner."""
    sizes = {"feed-forward units": shape.feed_forward, "vocabulary entries": shape.vocabulary}
    return [(name, size) for name, size in sizes.items() if size % tensor]
