"""Checks of a learner's mesh, of mixtures of experts and of models that read images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.config.findings import Findings, Where, remainder
from roost.config.job import MeshSizes, ParallelSizes, Role, groups_of, heads_divide, size_place
from roost.config.train import AdvantageEstimator, TrainSettings
from roost.placement.component_plan import ComponentPlan, mesh_of
from roost.placement.memory.model import known_shape
from roost.placement.memory.shape import EXPERT_FAMILIES, FAMILIES, ModelShape
from roost.placement.rules.heads import any_of, context_sizes, tensor_sizes
from roost.placement.rules.placing import At

# Families whose layers Roost cannot divide: transformers has no tensor-parallel plan of columns and rows for them, or
# their embedding is no plain table. Other families that Roost does not count may work.
WITHOUT_TENSOR_PLAN = (
    *("bloom", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_oss"),
    *("gptj", "mpt", "olmo2", "olmo3", "olmoe", "opt", "phi3", "stablelm"),
)


def data_groups(learner: ComponentPlan) -> int:
    """Number of data-parallel groups of a learner."""
    mesh = learner.mesh
    return max(1, learner.world_size) if mesh is None else mesh.data


def check_mesh(part: ComponentPlan, place: Where, findings: Findings, ranks: int | None = None) -> None:
    """Check that the sizes of a learner or scorer divide its model and so many ranks (None: those it has)."""
    if part.role not in (Role.LEARNER, Role.SCORER):
        return
    ranks = part.world_size if ranks is None else ranks
    shape = known_shape(part)
    at = partial(size_place, place, part.written_name)
    _check_pipeline(part, shape, ranks, at, findings)
    _check_family(part, at, findings)
    sizes = part.parallel if shape is None else _check_has_experts(shape, part.parallel, at, findings)
    if ranks % sizes.context == 0 and shape is not None:
        _check_context(shape, sizes, ranks, at, findings)
    _check_ranks(sizes, shape, ranks, at, findings)
    if shape is not None:
        _check_tensor(part, shape, ranks, at, findings)
        _check_experts(shape, sizes, ranks, at, findings)


def has_mesh(part: ComponentPlan, ranks: int) -> bool:
    """Return True if Roost's learner can divide the component's model over so many ranks."""
    findings = Findings()
    check_mesh(part, Where(), findings, ranks)
    return not findings.errors


def most_ranks(part: ComponentPlan, ranks: int) -> int:
    """The largest number of ranks, up to `ranks`, that the component's model can be divided over.

    A plan for another program may have sizes that Roost's learner does not support; then only their product counts.
    """
    size = part.parallel.model
    most = ranks - ranks % size
    if not has_mesh(part, part.world_size):
        return most
    return next((count for count in range(most, 0, -size) if has_mesh(part, count)), 0)


def _check_pipeline(part: ComponentPlan, shape: ModelShape | None, ranks: int, at: At, findings: Findings) -> None:
    sizes = part.parallel
    if sizes.pipeline > 1:
        findings.error(
            "RST-T034",
            at("pipeline"),
            f"pipeline size {sizes.pipeline}, but Roost's learner has no pipeline stages",
            "it shards all layers over its ranks (FSDP), which needs no more memory than stages do",
            "; ".join(["write pipeline size 1", *_instead_of_stages(part, shape, ranks)]),
        )


def _instead_of_stages(part: ComponentPlan, shape: ModelShape | None, ranks: int) -> list[str]:
    """Fixes that divide the model's layers by other sizes than a pipeline's; empty if only FSDP can."""
    if "vision_config" in (part.model.config or {}):
        return ["FSDP alone shards a model that reads images"]
    if shape is not None and shape.family in EXPERT_FAMILIES:  # tensor sizes need a multiple of them as expert size
        return ["an expert size divides the experts of a mixture, a context size its tokens"]
    wanted = part.parallel.tensor * part.parallel.pipeline
    if shape is None:
        return [] if ranks % wanted else [f"tensor size {wanted} divides layers over as many ranks"]
    without = replace(part, parallel=replace(part.parallel, pipeline=1))
    fitting = [size for size in tensor_sizes(without, shape, ranks) if size > 1]
    if wanted in fitting:
        fitting = [wanted]
    return [f"tensor size {any_of(fitting)} divides layers over as many ranks"] if fitting else []


def _check_family(part: ComponentPlan, at: At, findings: Findings) -> None:
    """Report sizes of a family that Roost cannot divide; models that read images are in `check_undivided`."""
    config = part.model.config or {}
    family, sizes = config.get("model_type"), part.parallel
    if family is None or "vision_config" in config:
        return
    if sizes.expert > 1 and family not in FAMILIES:
        what = f"expert size {sizes.expert}, but Roost does not divide experts of a model of type {family}"
        why = f"it divides those of {', '.join(EXPERT_FAMILIES)}"
        findings.error("RST-T123", at("expert"), what, why, "write expert size 1")
    if sizes.tensor > 1 and family in WITHOUT_TENSOR_PLAN:
        what = f"tensor size {sizes.tensor}, but Roost does not divide layers of a model of type {family}"
        fix = "write tensor size 1; FSDP shards the model over all ranks"
        findings.error("RST-T122", at("tensor"), what, "transformers has no plan of columns and rows for it", fix)


def _check_has_experts(shape: ModelShape, sizes: ParallelSizes, at: At, findings: Findings) -> ParallelSizes:
    """Report an expert size of a model without experts; return the sizes to check further, with expert size 1."""
    if sizes.expert == 1 or shape.experts:
        return sizes
    what = f"expert size {sizes.expert}, but a model of type {shape.family} has no experts"
    findings.error("RST-T123", at("expert"), what, fix="write expert size 1")
    return replace(sizes, expert=1)


def _check_ranks(sizes: ParallelSizes, shape: ModelShape | None, ranks: int, at: At, findings: Findings) -> None:
    if ranks % sizes.context:
        fix = f"write {any_of(context_sizes(sizes, shape, ranks))}"
        what = f"{ranks} ranks cannot be divided into context groups of {sizes.context}"
        findings.error("RST-T120", at("context"), what, fix=fix)
        return
    product = sizes.tensor * sizes.context
    if ranks % product:
        findings.error(
            "RST-T121",
            at("tensor"),
            f"{ranks} ranks cannot be divided into {groups_of(sizes)}",
            f"tensor {sizes.tensor} * context {sizes.context} = {product}; {remainder(ranks, product)}",
            "write sizes whose product divides the ranks",
        )
        return
    shard, largest = sizes.shard or ranks, ranks // sizes.tensor
    if shard < ranks and (shard % sizes.context or ranks % (shard * sizes.tensor)):
        usable = [size for size in range(sizes.context, largest, sizes.context) if largest % size == 0]
        fix = f"write {any_of(usable)}, or leave it out: {largest}" if usable else f"leave it out: {largest}"
        what = f"{ranks} ranks cannot be divided into FSDP groups of {shard}"
        what += f" times tensor groups of {sizes.tensor}" if sizes.tensor > 1 else ""
        why = remainder(ranks, shard * sizes.tensor)
        if shard % sizes.context:
            what = f"FSDP groups of {shard} ranks cannot be divided into context groups of {sizes.context}"
            why = f"{remainder(shard, sizes.context)}; context groups lie within FSDP groups"
        findings.error("RST-T121", at("shard"), what, why, fix)
        return
    copy = min(shard, largest) * sizes.tensor
    if copy % sizes.expert:
        findings.error(
            "RST-T123",
            at("expert"),
            f"copies of {copy} ranks cannot be divided into expert groups of {sizes.expert}",
            remainder(copy, sizes.expert),
            f"write an expert size that divides {copy}",
        )


def _check_context(shape: ModelShape, sizes: ParallelSizes, ranks: int, at: At, findings: Findings) -> None:
    """Check that context groups can exchange tokens for the heads that a tensor-parallel rank has."""
    heads, key_heads = shape.heads // sizes.tensor, shape.kv_heads // sizes.tensor
    if key_heads and not heads_divide(sizes.context, heads, key_heads):
        findings.error(
            "RST-T120",
            at("context"),
            f"{heads} heads and {key_heads} KV heads cannot be divided over {sizes.context} ranks",
            "context parallelism exchanges tokens for heads in attention",
            f"write {any_of(context_sizes(sizes, shape, ranks))}",
        )


def _check_tensor(part: ComponentPlan, shape: ModelShape, ranks: int, at: At, findings: Findings) -> None:
    sizes, tensor = part.parallel, part.parallel.tensor
    if shape.family in EXPERT_FAMILIES and sizes.expert % tensor:
        findings.error(
            "RST-T122",
            at("tensor"),
            f"experts of {shape.family} cannot be divided by tensor size {tensor}",
            "ranks of a tensor group have whole experts",
            f"write an expert size that is a multiple of {tensor}, or tensor size 1",
        )
        return
    for name, size in _uneven(shape, tensor):
        findings.error(
            "RST-T122",
            at("tensor"),
            f"tensor size {tensor} does not divide the model's {size} {name}",
            remainder(size, tensor),
            f"write tensor size {any_of(tensor_sizes(part, shape, ranks))}",
        )


def _check_experts(shape: ModelShape, sizes: ParallelSizes, ranks: int, at: At, findings: Findings) -> None:
    """Check that the expert size divides the experts, and that FSDP can shard each of them."""
    size, mesh = sizes.expert, mesh_of(sizes, ranks)
    if size == 1 or mesh is None:
        return
    if shape.experts % size:
        findings.error(
            "RST-T123",
            at("expert"),
            f"expert size {size} does not divide the model's {shape.experts} experts",
            remainder(shape.experts, size),
            f"write an expert size that divides {shape.experts}",
        )
    for rows in _rows(shape):
        if rows % mesh.expert_shards:
            findings.error(
                "RST-T123",
                at("expert"),
                f"FSDP over {mesh.expert_shards} ranks does not divide the {rows} rows of each expert",
                f"copies of {mesh.fsdp * mesh.tensor} ranks / expert size {size} = {mesh.expert_shards}",
                _expert_fix(shape, mesh),
            )


def _rows(shape: ModelShape) -> tuple[int, int]:
    """Rows of the matrices of an expert, which FSDP shards."""
    return (2 * shape.expert_feed_forward, shape.hidden)


def _expert_fix(shape: ModelShape, mesh: MeshSizes) -> str:
    """Expert sizes whose shards divide the rows of experts, and that the tensor size divides."""
    copy = mesh.fsdp * mesh.tensor
    fitting = [
        size
        for size in range(1, shape.experts + 1)
        if shape.experts % size == 0 and copy % size == 0 and size % mesh.tensor == 0
        if size == 1 or not any(rows % (copy // size) for rows in _rows(shape))
    ]
    return f"write expert size {any_of(fitting)}" if fitting else "write sizes for another number of ranks"


def _uneven(shape: ModelShape, tensor: int) -> Iterable[tuple[str, int]]:
    """Sizes of the model that the tensor size does not divide; heads are checked in `check_heads`."""
    sizes = {"feed-forward units": shape.feed_forward, "vocabulary entries": shape.vocabulary}
    return [(name, size) for name, size in sizes.items() if size % tensor]


MIXTURE = f"a mixture of experts that Roost knows ({', '.join(EXPERT_FAMILIES)})"


def check_experts(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    actor = parts.get("actor")
    family = None if actor is None or actor.model.config is None else str(actor.model.config.get("model_type", ""))
    is_other = family is not None and family not in EXPERT_FAMILIES
    why = f"the model is of the family {family or 'without a name'}"
    asked = {
        "router_replay": settings.sampling.router_replay,
        "router_aux_loss_coef": settings.learner.router_aux_loss_coef > 0,
    }
    for key in (key for key, is_asked in asked.items() if is_asked and is_other):
        findings.error("RST-T112", at(key), f"needs {MIXTURE}", why, "remove it")
    if settings.sampling.router_replay and settings.engine == "sglang":
        fix = "write engine: torch or vllm, or router_replay: false"
        what = "needs an engine whose routed experts Roost reads"
        findings.error("RST-T111", at("router_replay"), what, "engine is sglang", fix)
    rollout = parts.get("rollout")
    if settings.sampling.router_replay and settings.engine == "vllm" and rollout is not None and _is_on_cpus(rollout):
        what = "needs routed experts, which vLLM's build for CPUs does not return"
        why = "its Model Runner V2, which returns them, needs Triton; accelerators are simulated here"
        findings.error("RST-T111", at("router_replay"), what, why, "write engine: torch, or router_replay: false")


def _is_on_cpus(part: ComponentPlan) -> bool:
    """Return True if the accelerators of a component are simulated, so that its models run on CPUs."""
    nodes = part.table.inventory.nodes
    return any(nodes[node].accelerator_type == AcceleratorType.SIMULATED for node in part.table.nodes)


WITH_IMAGES = ("qwen2_vl", "qwen2_5_vl")  # model types that read images and can be trained


def check_images(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    actor = parts.get("actor")
    config = None if actor is None else actor.model.config
    has_images = bool((settings.data or {}).get("images"))
    if has_images and settings.engine == "sglang":
        what = "has images, which Roost sends to its built-in engine and to vLLM"
        findings.error("RST-T160", at("data"), what, "engine is sglang", "write engine: torch or vllm in train")
    _check_critic(settings, parts, has_images, at, findings)
    if has_images:
        _check_scorers(settings, parts, at, findings)
    check_undivided(parts, at, findings)
    if config is None:
        return
    family = f"its model_type is {config.get('model_type')}"
    if has_images and "vision_config" not in config:
        fix = f"train a model of {any_of(WITH_IMAGES)}, or remove the columns of images"
        findings.error("RST-T160", at("data"), "has images, but the model reads text alone", family, fix)
    if "vision_config" in config and settings.learner.adapter is not None:
        what = "is not supported for a model that reads images"
        findings.error("RST-T160", at("lora_rank"), what, family, "leave it out, and train the whole model")


def check_no_images(settings: TrainSettings, at: At, findings: Findings) -> None:
    """Check that data of supervised training has no columns of images."""
    if images := (settings.data or {}).get("images"):
        what = "has images, which supervised training does not read"
        fix = "remove the columns of images, or train with a reward (roost train)"
        findings.error("RST-T160", at("data"), what, f"images is {images}", fix)


def _check_critic(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], has_images: bool, at: At, findings: Findings
) -> None:
    critic = parts.get("critic")
    if critic is None or settings.advantage.advantage_estimator is not AdvantageEstimator.GAE:
        return
    config = critic.model.config or {}
    if has_images or "vision_config" in config:
        why = "data has images" if has_images else f"model_type of the critic is {config.get('model_type')}"
        fix = "write an estimator without a critic, such as advantage_estimator: grpo, and remove critic"
        what = "is gae, but a critic reads text alone"
        findings.error("RST-T160", at("advantage_estimator"), what, why, fix)


def _check_scorers(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    """Check that a reference and the teachers of all samples read images, where their config.json is known."""
    scorers = [(each.name, "teacher") for each in settings.teachers if not each.tags]
    scorers += [("reference", "reference")] if settings.uses_reference else []
    for name, key in scorers:
        config = parts[name].model.config if name in parts else None
        if config is not None and "vision_config" not in config:
            why = f"its model_type is {config.get('model_type')}, and it scores samples with images"
            fix = f"give {name} a model of {any_of(WITH_IMAGES)}, or remove it or the columns of images"
            findings.error("RST-T160", at(key), f"data has images, but {name} reads text alone", why, fix)


def check_undivided(parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    """Check that learners and scorers have models that read images as Roost supports, and that none divides one."""
    for name, part in parts.items():
        sizes, config = part.parallel, part.model.config or {}
        family = config.get("model_type")
        if part.role in (Role.LEARNER, Role.SCORER) and config.get("vision_config") and family not in WITH_IMAGES:
            what = f"models of type {family} read images in a way that Roost does not support"
            fix = f"use {any_of(['a text model', *WITH_IMAGES])}"
            findings.error("RST-T160", at(name), what, fix=fix)
            continue
        is_divided = sizes.tensor * sizes.context * sizes.expert > 1
        if part.role in (Role.LEARNER, Role.SCORER) and is_divided and "vision_config" in config:
            given = {"tensor": sizes.tensor, "context": sizes.context, "expert": sizes.expert}
            given = {each: size for each, size in given.items() if size > 1}
            written = " and ".join(f"{each} size {size}" for each, size in given.items())
            what = f"{written}, but Roost does not divide a model that reads images"
            why, fix = f"its model_type is {config.get('model_type')}", "write tensor, context and expert sizes of 1"
            place = size_place(at(name), part.written_name, next(iter(given)))
            findings.error("RST-T160", place, what, f"{why}; FSDP shards it", fix)
