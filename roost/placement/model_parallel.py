"""The model-parallel layout of the RLinf notation: processes split by the parallel sizes of the models.

Collocated: learner and engines hold the same accelerators, and engines are laid out with a stride so that each engine
shard sits on an accelerator that holds the matching learner shard. Disaggregated: each has its own accelerators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roost.cluster.inventory import ACCELERATOR, Ints
from roost.config.findings import Findings, Where
from roost.config.job import Component, Job, size_place
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.notations.rlinf import MODEL_PARALLEL_COMPONENTS
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import PlacementMode
from roost.placement.memory.model import known_shape
from roost.placement.rank_map import BoundRanks
from roost.placement.rules.heads import check_heads
from roost.placement.strategies import FlexiblePlacementStrategy, PackedPlacementStrategy, PlacementStrategy

CONTIGUOUS = MODEL_PARALLEL_COMPONENTS
MANAGED = (*CONTIGUOUS, "reward")


@dataclass(frozen=True, eq=False)
class Bound:
    """A component of the layout with its ranks and the cluster-wide ids of its accelerators."""

    component: Component
    ranks: BoundRanks
    devices: Ints

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def where(self) -> Where:
        return self.component.where


@dataclass(frozen=True, eq=False)
class ModelParallelLayout:
    """The mode and the strategies that replace those of the ranks as written."""

    mode: PlacementMode
    strategies: Mapping[str, PlacementStrategy]


def lay_out(
    job: Job, bound: Mapping[str, Bound], num_accelerators: int, findings: Findings
) -> ModelParallelLayout | None:
    """Return the layout, or None with findings if the accelerators fit neither mode."""
    errors = findings.num_errors
    where = job.source.where(("cluster", "component_placement"))
    is_evaluation = not any(component.name == "actor" for component in job.components)
    for name in ("rollout",) if is_evaluation else ("actor", "rollout"):
        if name not in bound:
            findings.error(
                "RST-P020",
                where,
                f"has no {name} on accelerators, which the model-parallel layout needs",
                why="" if num_accelerators else "the machines have no accelerators",
                fix=f"write {name}: all, or plan with --layout as_written"
                if num_accelerators
                else "write cluster.num_gpus_per_node, or name machines that have accelerators",
            )
    if findings.num_errors > errors:
        return None
    _check_contiguous(bound, findings)
    _warn_ignored_processes(bound, findings)
    if is_evaluation:
        return _evaluation(bound, findings, errors)
    mode = _mode(job, bound, num_accelerators, findings, where)
    _check_sizes(bound, findings)
    if mode is None or findings.num_errors > errors:
        return None
    strategies = {name: _one_each(part) for name, part in bound.items() if name in MANAGED}
    strategies |= _other_engines(bound, findings)
    if mode is PlacementMode.AUTO:
        strategies["actor"] = PackedPlacementStrategy(0, num_accelerators - 1)
    rollout = _rollout_strategy(job, bound, mode, findings)
    return None if rollout is None else ModelParallelLayout(mode, {**strategies, "rollout": rollout})


def _evaluation(bound: Mapping[str, Bound], findings: Findings, errors: int) -> ModelParallelLayout | None:
    """Engines alone, without a learner whose shards they would have to lie on."""
    _check_sizes(bound, findings)
    rollout = _engines(bound["rollout"], findings)
    if rollout is None or findings.num_errors > errors:
        return None
    strategies = {name: _one_each(part) for name, part in bound.items() if name == "reward"}
    return ModelParallelLayout(PlacementMode.COLLOCATED, {**strategies, "rollout": rollout})


def _other_engines(bound: Mapping[str, Bound], findings: Findings) -> dict[str, PlacementStrategy]:
    """Further engines (`rollout_judge`), split by the sizes of their own sections, or by rollout's."""
    result = {}
    for name, part in bound.items():
        if name.startswith("rollout_"):
            engines = _engines(part, findings)
            if engines is not None:
                result[name] = engines
    return result


def _engines(part: Bound, findings: Findings) -> PlacementStrategy | None:
    """One process for each engine, packed without a stride."""
    sizes = part.component.parallel
    if part.count % sizes.model:
        findings.error(
            "RST-P028",
            part.where,
            f"{part.count} accelerators are not a multiple of {sizes.model}, the size of one engine",
            f"tensor {sizes.tensor} * pipeline {sizes.pipeline}; {part.count % sizes.model} would be left over",
            f"give {part.component.name} {max(part.count // sizes.model, 1) * sizes.model} accelerators",
        )
        return None
    ranks = part.ranks.hardware_ranks
    return PackedPlacementStrategy(int(ranks[0]), int(ranks[-1]), sizes.model, node_group=part.ranks.table.labels)


def _check_contiguous(bound: Mapping[str, Bound], findings: Findings) -> None:
    for name in CONTIGUOUS:
        part = bound.get(name)
        if part is not None and part.ranks.hardware_ranks[-1] - part.ranks.hardware_ranks[0] + 1 != part.count:
            findings.error(
                "RST-P021",
                part.where,
                f"the ranks of {name} have gaps",
                f"{spell_ranks(part.ranks.hardware_ranks.tolist())}; parallel groups need them in one run",
                "write one range a-b, or plan with --layout as_written",
            )


def _warn_ignored_processes(bound: Mapping[str, Bound], findings: Findings) -> None:
    for name in CONTIGUOUS:
        part = bound.get(name)
        if part is not None and part.ranks.has_explicit_processes:
            findings.warn(
                "RST-P022",
                part.where,
                f"the process ranks of {name} are not used",
                "the parallel sizes say how many processes there are",
                "leave out the part after the colon",
            )


def _mode(
    job: Job, bound: Mapping[str, Bound], num_accelerators: int, findings: Findings, where: Where
) -> PlacementMode | None:
    actor, rollout = bound["actor"], bound["rollout"]
    inferring = [name for name in ("inference", "actor_inference", "critic_inference") if name in bound]
    if job.model_parallel.auto_scheduler:
        key = job.source.where(("cluster", "auto_scheduler"))
        if "critic" not in bound:
            _are_apart(job, bound, findings)
            return _auto_mode(bound, num_accelerators, findings, where)
        findings.warn(
            "RST-P003", key, "is not used", "the dynamic scheduler knows no critic", "remove it, or remove the critic"
        )
    others = [part for name, part in bound.items() if name.startswith("rollout_")]
    is_multi_agent = bool(others) and all(np.isin(part.devices, actor.devices).all() for part in (rollout, *others))
    if np.array_equal(np.sort(actor.devices), np.sort(rollout.devices)) or is_multi_agent:
        for name in inferring:
            findings.error(
                "RST-P023",
                bound[name].where,
                f"{name} has no place in the collocated mode",
                "actor and rollout hold the same accelerators",
                f"remove {name}, or give actor and rollout accelerators of their own",
            )
        return PlacementMode.COLLOCATED
    return PlacementMode.DISAGGREGATED if _are_apart(job, bound, findings) else None


def _are_apart(job: Job, bound: Mapping[str, Bound], findings: Findings) -> bool:
    """Return True if components that must be apart share no accelerator; each pair that does is a finding."""
    pairs = [
        ("actor", "rollout"),
        ("actor", "inference"),
        ("rollout", "inference"),
        ("actor", "actor_inference"),
        ("rollout", "actor_inference"),
        ("critic", "actor"),
        ("critic", "rollout"),
        ("critic", "critic_inference"),
        ("rollout", "critic_inference"),
    ]
    is_apart = True
    for one, two in pairs:
        if one not in bound or two not in bound:
            continue
        shared = np.intersect1d(bound[one].devices, bound[two].devices)
        if len(shared):
            is_apart = False
            findings.error(
                "RST-P024",
                bound[two].where,
                f"{one} and {two} share some accelerators but are not collocated",
                f"{one} has {bound[one].count}, {two} has {bound[two].count}, {len(shared)} are shared",
                "give each accelerators of its own, or plan with --layout as_written"
                + ("; actor and rollout may also have the same" if {one, two} == {"actor", "rollout"} else ""),
            )
    for name in ("inference", "actor_inference"):
        if name in bound and not job.model_parallel.recompute_logprobs:
            findings.error(
                "RST-P025",
                bound[name].where,
                f"{name} has nothing to do",
                "algorithm.recompute_logprobs is not true",
                f"write algorithm.recompute_logprobs: true, or remove {name}",
            )
    return is_apart


def _auto_mode(bound: Mapping[str, Bound], num_accelerators: int, findings: Findings, where: Where) -> PlacementMode:
    """The dynamic scheduler hands accelerators over in a fixed order, so components stand in it without gaps."""
    expected = 0
    for name in ("actor", "rollout", "inference", "actor_inference"):
        part = bound.get(name)
        if part is None:
            continue
        if part.ranks.table.labels != (CLUSTER_GROUP,):
            what = f"{name} is placed through a node group, and auto_scheduler hands out the whole cluster"
            findings.error("RST-P026", part.where, what, fix="leave node_group out, or auto_scheduler")
            return PlacementMode.AUTO
        if part.devices[0] != expected:
            findings.error(
                "RST-P027",
                part.where,
                f"{name} starts at accelerator {part.devices[0]}",
                f"with auto_scheduler it must start at {expected}",
                "order them actor, rollout, inference without gaps",
            )
        expected = int(part.devices[-1]) + 1
    if expected != num_accelerators:
        findings.error(
            "RST-P027",
            where,
            f"the components end at accelerator {expected - 1}",
            f"with auto_scheduler they must end at the last, {num_accelerators - 1}",
            "use all accelerators",
        )
    return PlacementMode.AUTO


def _check_sizes(bound: Mapping[str, Bound], findings: Findings) -> None:
    for name in CONTIGUOUS:
        part = bound.get(name)
        if part is None:
            continue
        errors, shape = findings.num_errors, known_shape(part.component)
        if shape is not None:
            check_heads(part.component, shape, part.count, part.where, findings)
        if findings.num_errors > errors:
            continue  # other accelerators would not help
        tensor = part.component.parallel.tensor
        if tensor > part.count:
            findings.error(
                "RST-P029",
                part.where,
                f"{name} is split over {tensor} accelerators but has {part.count}",
                fix=f"give it {tensor} accelerators, or a tensor parallel size of at most {part.count}",
            )
        elif name in ("actor", "critic") and part.count % part.component.parallel.model:
            findings.warn(
                "RST-P030",
                part.where,
                f"{part.count} accelerators are not a multiple of {name}'s model size",
                f"tensor * pipeline * context = {part.component.parallel.model}",
                f"give it a multiple of {part.component.parallel.model} accelerators",
            )


def _one_each(part: Bound) -> PlacementStrategy:
    """One process per accelerator; as written where the component holds none (a reward on CPUs)."""
    is_rewarding = part.component.name == "reward" and part.ranks.has_explicit_processes
    if is_rewarding or part.ranks.table.kinds != (ACCELERATOR,) * len(part.ranks.table.kinds):
        return part.ranks.strategy  # as written
    ranks = part.ranks.hardware_ranks
    labels = part.ranks.table.labels
    if ranks[-1] - ranks[0] + 1 == len(ranks):
        return PackedPlacementStrategy(int(ranks[0]), int(ranks[-1]), node_group=labels)
    return FlexiblePlacementStrategy.from_columns(ranks, np.arange(len(ranks) + 1), labels)


def _rollout_strategy(
    job: Job, bound: Mapping[str, Bound], mode: PlacementMode, findings: Findings
) -> PlacementStrategy | None:
    rollout, actor = bound["rollout"], bound["actor"]
    sizes = rollout.component.parallel
    if mode is PlacementMode.COLLOCATED:
        return _collocated_rollout(rollout, actor, findings)
    if mode is PlacementMode.AUTO and job.model_parallel.use_pre_process_policy:
        if actor.count % sizes.model or rollout.count % sizes.model:
            findings.error(
                "RST-P028",
                actor.where,
                f"actor has {actor.count} and rollout {rollout.count} accelerators, not multiples of {sizes.model}",
                "use_pre_process_policy lets rollout start engines of that size on both",
                f"give both a multiple of {sizes.model} accelerators",
            )
            return None
        first, last = int(actor.ranks.hardware_ranks[0]), int(rollout.ranks.hardware_ranks[-1])
        return PackedPlacementStrategy(first, last, sizes.model, node_group=rollout.ranks.table.labels)
    return _engines(rollout, findings)


def _collocated_rollout(rollout: Bound, actor: Bound, findings: Findings) -> PlacementStrategy | None:
    """Engines over the learner's accelerators, strided so that each shard lies on a learner shard it is made from."""
    sizes, actor_tensor = rollout.component.parallel, actor.component.parallel.tensor
    if actor_tensor > sizes.tensor and actor_tensor % sizes.tensor:
        findings.error(
            "RST-P031",
            size_place(rollout.where, rollout.component.written_name, "tensor"),
            f"actor's tensor size {actor_tensor} is not a multiple of rollout's {sizes.tensor}",
            "engine shards could not be laid on the learner shards they are made from",
            "choose sizes of which one divides the other",
        )
        return None
    block = sizes.model * max(actor_tensor // sizes.tensor, 1)
    if rollout.count % block:
        findings.error(
            "RST-P028",
            rollout.where,
            f"{rollout.count} accelerators are not a multiple of {block}",
            f"engine size {sizes.model} * stride {block // sizes.model}",
            f"use {max(rollout.count // block, 1) * block} accelerators",
        )
        return None
    ranks = rollout.ranks.hardware_ranks
    return PackedPlacementStrategy(
        int(ranks[0]), int(ranks[-1]), sizes.model, block // sizes.model, rollout.ranks.table.labels
    )
