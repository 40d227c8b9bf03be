"""Plan a job: from a config in any notation, and an inventory, to a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from roost.cluster.describe import describe, known_hardware
from roost.cluster.hardware.registry import HardwareRegistry
from roost.cluster.inventory import Inventory
from roost.config.compose import load
from roost.config.engine_options import is_count
from roost.config.findings import MAX_ACCELERATORS_PER_NODE, ConfigError, Findings, Where, bug, did_you_mean, shown
from roost.config.job import AUTO, Component, Job, Layout, ModelUse, Notation, Role, Sharding, bytes_of
from roost.config.notations.loop import MEMORY_KEYS
from roost.config.notations.notation import read_job
from roost.placement.component_plan import ComponentPlan
from roost.placement.components import PlacedComponent, place_job
from roost.placement.memory.phases import takes_policy, trains_policy
from roost.placement.memory.residency import ResidencySettings, find_residency, with_checkpoints
from roost.placement.memory.shape import model_positions
from roost.placement.plan import Plan
from roost.placement.rules.components import check_rules
from roost.placement.rules.heads import check_groups
from roost.placement.strategies import inventory_of

if TYPE_CHECKING:
    from roost.config.train import TrainSettings

Choice = TypeVar("Choice", bound=StrEnum)
Config = Job | Mapping[str, Any] | str | Path


class PlanOptions(TypedDict, total=False):
    """Options of planning."""

    overrides: Sequence[str]  # Hydra overrides: key=value, +key=value, group@package=option
    notation: Notation | str | None  # None: recognized from the keys
    layout: Layout | str | None  # RLinf: as_written or model_parallel; None: what the config implies
    accelerators_per_node: int | None  # used if the config does not set it
    strict: bool  # a written worker size that contradicts the engine's is an error
    isolate_accelerator: bool  # a process sees only its own accelerators
    registry: HardwareRegistry | None  # known hardware


def plan(job_or_path: Config, inventory: Any = None, **options: Unpack[PlanOptions]) -> Plan:
    """Plan a job, given as a path, a dict, a DictConfig or a `Job`. Raise ConfigError with all mistakes at once.

    The inventory is an `Inventory`, a live cluster, a dict or the path of an inventory file; without one, the config
    describes the nodes. `PlanOptions` lists the options.

    >>> result = plan({"num_gpus_per_node": 4, "actor_train": {"device_mapping": "list(range(0,4))"}})
    >>> result["actor"].world_size
    4
    """
    findings = Findings()
    result = try_plan(job_or_path, findings, inventory, **options)
    findings.raise_errors()
    if result is None:
        raise bug("there is no plan, and no finding says why")
    return result


def try_plan(
    job_or_path: Config,
    findings: Findings,
    inventory: Any = None,
    *,
    overrides: Sequence[str] = (),
    notation: Notation | str | None = None,
    layout: Layout | str | None = None,
    accelerators_per_node: int | None = None,
    strict: bool = False,
    isolate_accelerator: bool = True,
    registry: HardwareRegistry | None = None,
    trains: bool = False,
    despite: Collection[str] = (),
) -> Plan | None:
    """Return the plan, or None if there are errors other than `despite`; errors and warnings go to `findings`.

    Without a registry, hardware from installed packages and ROOST_HARDWARE is known as well.
    """
    notation, layout = _chosen(Notation, notation, findings), _chosen(Layout, layout, findings)
    if accelerators_per_node is not None and not _is_count(accelerators_per_node):
        what = f"is {shown(accelerators_per_node)}; it must be a whole number"
        findings.error(
            "RST-C024", Where(path=("accelerators_per_node",)), what, fix=f"give 0 to {MAX_ACCELERATORS_PER_NODE}"
        )
        return None
    job = _read(job_or_path, findings, overrides, notation, layout, strict, trains)
    known = _known_machines(inventory, findings)
    if job is None or (inventory is not None and known is None):
        return None
    if job.assumes_machines and (known is not None or accelerators_per_node is not None):
        job = replace(job, num_nodes=None, accelerators_per_node=None)
    job = _on_known_machines(job, known, accelerators_per_node, findings)
    if registry is None:
        registry = known_hardware(job, known, findings)
    machines = describe(job, findings, known, accelerators_per_node, registry)
    placed = place_job(job, machines, findings, isolate_accelerator) if machines is not None else None
    if placed is None or machines is None or findings.has_errors:
        if not findings.has_errors:  # a bug in Roost, which must not be silent
            findings.error(
                "RST-P004",
                job.source.where(),
                "cannot be planned",
                fix="this is a bug in Roost, please report the config",
            )
        return None
    components = tuple(_component_plan(part, job, registry) for part in placed.components)
    places = {component.name: component.where for component in job.components}
    places |= {key: job.source.where(("rl", key)) for key in (*MEMORY_KEYS, "async_rollouts")}
    places["max_gpu_mem_utilization"] = job.source.where(("llm", "max_gpu_mem_utilization"))
    if job.training is not None and job.training.max_staleness:
        from roost.config.train_read import setting_location

        places["max_staleness"] = setting_location("max_staleness", job)
    settings = ResidencySettings.of(job.notation, job.settings)
    if job.training is not None and job.training.learner.activation_checkpointing == AUTO:
        components = _with_checkpoints(job, components, machines, settings, findings)
    residency = find_residency(components, machines, settings, places, findings)
    check_rules(components, residency, machines, job.notation, places, findings)
    if job.training is not None:
        _check_training(job, job.training, components, findings, trains)
    else:
        for part in components:
            check_groups(part, job.notation, places.get(part.name, Where(path=(part.name,))), findings)
    if any(error.code not in despite for error in findings.errors):
        return None
    return Plan(
        notation=job.notation,
        file=job.source.file,
        mode=placed.mode,
        inventory=machines,
        components=components,
        settings=job.settings,
        training=job.resolved if job.training is not None else (),
        keys=tuple(use for use in job.keys if use.is_unused(trains=job.training is not None)),
        warnings=findings.warnings,
        notes=findings.notes,
    )


def _on_known_machines(job: Job, known: Inventory | None, per_node: int | None, findings: Findings) -> Job:
    """The job with its pools on machines of the width that is known, if its reader had to assume one."""
    widths = {int(count) for count in known.accelerator_counts if count} if known is not None else {per_node or 0}
    if not job.pools or len(widths) != 1 or widths == {0}:
        return job
    from roost.config.frameworks.pools import on_machines_of  # imported late: other jobs have no pools

    findings.drop("RST-N065")  # the machines are no longer assumed
    return on_machines_of(widths.pop(), job)


def _with_checkpoints(
    job: Job,
    components: tuple[ComponentPlan, ...],
    machines: Inventory,
    settings: ResidencySettings,
    findings: Findings,
) -> tuple[ComponentPlan, ...]:
    """Components with the layers that learners recompute; a warning where all are, as memory is not known."""
    found = with_checkpoints(components, machines, settings)
    for part in found:
        if part.role is Role.LEARNER and part.model.recomputed_layers is None:
            findings.warn(
                "RST-M011",
                job.source.where(("train", "activation_checkpointing")),
                f"is auto, but {part.name} recomputes all layers",
                "its memory, or that of its devices, is not known",
                "give an inventory with memory_gb and a model folder on this machine, or write true",
            )
    return found


def _check_training(
    job: Job, training: TrainSettings, components: Sequence[ComponentPlan], findings: Findings, trains: bool
) -> None:
    # Only now: jobs that are only placed do not wait for them.
    from roost.config.train_read import setting_location, settings_in_train
    from roost.placement.rules.engines import check_engines
    from roost.placement.rules.idle import check_idle
    from roost.placement.rules.training import check_training

    def place(name: str) -> Where:
        return setting_location(name, job)

    check_training(training, components, job.notation, place, findings)
    check_idle(training, settings_in_train(job), place, findings)
    check_engines(training, components, place, findings, trains)


def _read(
    config: Config,
    findings: Findings,
    overrides: Sequence[str],
    notation: Notation | None,
    layout: Layout | None,
    strict: bool,
    trains: bool,
) -> Job | None:
    if isinstance(config, Job):
        findings.collected.update(dict.fromkeys((*config.warnings, *config.notes)))
        return config
    source = load(config, overrides, findings)
    return None if source is None else read_job(source, findings, notation, layout, strict, trains=trains)


def _known_machines(inventory: Any, findings: Findings) -> Inventory | None:
    if inventory is None:
        return None
    try:
        if isinstance(inventory, str | Path):
            return Inventory.from_file(inventory)
        if isinstance(inventory, Mapping):
            return Inventory.from_dict(inventory)
        return inventory_of(inventory)
    except ConfigError as error:
        for finding in error.findings:
            where = finding.where if str(finding.where) else Where("inventory")
            findings.error(finding.code, where, finding.what, finding.why, finding.fix)
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ACCELERATORS_PER_NODE


def _chosen(kind: type[Choice], value: Choice | str | None, findings: Findings) -> Choice | None:
    """Return the enum member of a name; an unknown name is a finding."""
    names = [choice.value for choice in kind]
    if value is None or value in names:
        return None if value is None else kind(value)
    what = f"{shown(value)} is not a {kind.__name__.lower()}"
    findings.error(
        "RST-C036", Where(path=(kind.__name__.lower(),)), what, did_you_mean(value, names), f"use {', '.join(names)}"
    )
    return None


def _model_use(component: Component, training: TrainSettings | None) -> ModelUse:
    """The component's model with what the training settings say of its memory, as Roost will run it."""
    model = component.model
    if training is None:
        return model
    learner = training.learner
    positions, scales = model_positions(model.config)
    longest = training.longest_sample(model.sequence, None if scales else positions) or None
    if component.role is Role.ENGINE:
        fraction = training.engine_options.get("memory_fraction", model.memory_fraction)
        if not takes_policy(component.name, component.role):
            return replace(model, memory_fraction=fraction, kv_sequences=None)
        size = bytes_of(learner.compute_dtype)  # as its server is started
        context = training.engine_options.get("max_context")
        return replace(
            model,
            memory_fraction=fraction,
            kv_sequences=training.kv_sequences,
            weight_bytes=size,
            longest=context if is_count(context) else longest,
        )
    if component.role is Role.SCORER:
        size = bytes_of(learner.compute_dtype)
        tokens = learner.micro_batch_tokens
        moves = component.name == "reference" and training.moves_reference
        return replace(
            model,
            weight_bytes=size,
            compute_bytes=size,
            tokens=tokens,
            longest=longest,
            compiles=learner.compile,
            is_saved=moves,
        )
    if component.role is not Role.LEARNER:
        return model
    adapter = learner.adapter if trains_policy(component.name, component.role) else None  # a critic is trained whole
    return replace(
        model,
        weight_bytes=bytes_of(learner.weight_dtype if adapter is None else learner.compute_dtype),
        tokens=learner.micro_batch_tokens,
        longest=longest,
        lora_rank=None if adapter is None else adapter.lora_rank,
        recomputes=learner.activation_checkpointing is not False,
        compute_bytes=bytes_of(learner.compute_dtype),
        compiles=learner.compile,
        optimizer=learner.optimizer.optimizer.value,
        trained_bytes=bytes_of(learner.weight_dtype),
        optimizer_on_host=learner.optimizer.optimizer_cpu_offload,
        is_saved=True,
    )


def _as_run(component: Component, trains: bool) -> Component:
    """The component as Roost's learner runs it, with FSDP, on a mesh of copies (HSDP) where a job shards nothing.

    Plans that Roost is not to train show Megatron's way.
    """
    sharding = component.model.sharding
    is_other = sharding is Sharding.NONE or (sharding is Sharding.OPTIMIZER and trains)
    if component.role not in (Role.LEARNER, Role.SCORER) or not is_other:
        return component
    sizes = component.parallel
    if sharding is Sharding.NONE:
        sizes = replace(sizes, shard=sizes.context)  # it counts ranks of context groups
    return replace(component, parallel=sizes, model=replace(component.model, sharding=Sharding.FULL))


def _component_plan(placed: PlacedComponent, job: Job, registry: HardwareRegistry) -> ComponentPlan:
    component = placed.component if job.training is None else _as_run(placed.component, job.trains)
    return ComponentPlan(
        component.name,
        component.written_name,
        type(placed.strategy).__name__,
        placed.hardware_ranks,
        placed.table,
        component.parallel,
        component.env,
        component.role,
        _model_use(component, job.training),
        job.managers.get(component.name),
        registry,
    )
