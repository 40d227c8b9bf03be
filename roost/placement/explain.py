"""Explain placements: the rule that placed a process, in a few sentences with numbers."""

from __future__ import annotations

import numpy as np

from roost.cluster.inventory import ACCELERATOR, NODE
from roost.config.findings import counted, plural
from roost.config.job import Role
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan, Process
from roost.placement.placement import Placement
from roost.placement.plan import Plan


def explain_component(plan: Plan, part: ComponentPlan) -> list[str]:
    """Sentences about a whole component.

    >>> import roost
    >>> cluster = {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor": "0-3:0-1"}}
    >>> planned = roost.plan({"cluster": cluster})
    >>> print(explain_component(planned, planned["actor"])[1])
    It was given ranks 0-3 of cluster, where a rank is an accelerator: 4 ranks for 2 processes.
    """
    first = f"{part.name} ({part.written_name} in the config) has {part.extent}."
    return [first, _given(part), _rule(part), *_division(part), *_sharing(plan, part)]


def explain_process(plan: Plan, part: ComponentPlan, rank: int) -> list[str]:
    """Sentences about one process, after those about the rule that its component follows."""
    placement = part.table[rank]
    process = part.process(rank)
    return [
        f"{part.name} {rank} runs on node {placement.cluster_node_rank}{_holding(part, placement)}.",
        _given(part),
        _rule(part),
        f"It is process {placement.local_rank} of {placement.local_world_size} of its component on that node.",
        *_environment(part, placement, process),
        *_sharing(plan, part, placement),
    ]


def shown_mesh(part: ComponentPlan) -> str:
    """The device mesh of a learner or scorer as text; empty if FSDP alone divides its ranks.

    >>> import roost
    >>> cluster = {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor": "all", "rollout": "all"}}
    >>> actor = {"model": {"context_parallel_size": 4}}
    >>> shown_mesh(roost.plan({"cluster": cluster, "actor": actor}, layout="as_written")["actor"])
    '2 shard x 4 context (weights over 8 ranks)'
    """
    mesh = part.sharded_mesh
    if mesh is None or (mesh.shard == part.world_size and mesh.expert == 1):
        return ""
    # FSDP shards over context groups too, which the size named shard leaves out.
    over = f" (weights over {mesh.fsdp * mesh.tensor} ranks)" if mesh.context > 1 else ""
    return f"{mesh}{over}"


def shown_sizes(part: ComponentPlan) -> str:
    """The parallel sizes above 1, and a size of its own for the tensors of each expert."""
    sizes = part.parallel
    named = {"tensor": sizes.tensor, "pipeline": sizes.pipeline, "context": sizes.context, "expert": sizes.expert}
    words = [f"{name} {size}" for name, size in (named | {"shard": sizes.shard or 1}).items() if size > 1]
    is_split = sizes.expert > 1 and sizes.expert_tensor is not None
    return ", ".join([*words, *([f"expert tensor {sizes.expert_tensor}"] if is_split else [])])


def _division(part: ComponentPlan) -> list[str]:
    """Parallel sizes or mesh of a learner or scorer, as text."""
    if part.role not in (Role.LEARNER, Role.SCORER):
        return []
    mesh, sizes = shown_mesh(part), shown_sizes(part)
    if part.sharded_mesh is not None:
        return [f"Its device mesh is {mesh}."] if mesh else []
    return [f"Its parallel sizes are {sizes}."] if sizes else []


def _holding(part: ComponentPlan, placement: Placement) -> str:
    if not placement.devices:
        return " without devices"
    kind = _kind(part, placement.node_group_label)
    several = plural(kind) if len(placement.local_hardware_ranks) > 1 else kind
    own = f" with {several} {spell_ranks(placement.local_hardware_ranks)}"
    away = [device for device in placement.devices if device[0] != placement.cluster_node_rank]
    others = ", ".join(f"{index} of node {node}" for node, index in away)
    return f"{own}, and {kind} {others}" if away else own


def _kind(part: ComponentPlan, label: str) -> str:
    return dict(zip(part.table.labels, part.table.kinds, strict=True))[label]


def _given(part: ComponentPlan) -> str:
    if not len(part.hardware_ranks):
        return f"It asks for no device: only for {counted(part.world_size, 'worker')}."
    words = {ACCELERATOR: "an accelerator", NODE: "a node"}
    kinds = " or ".join(dict.fromkeys(words.get(kind, f"a {kind}") for kind in part.table.kinds))
    ranks = f"ranks {spell_ranks(part.hardware_ranks.tolist())} of {' and '.join(part.node_groups)}"
    counts = f"{counted(len(part.hardware_ranks), 'rank')} for {counted(part.world_size, 'process')}"
    return f"It was given {ranks}, where a rank is {kinds}: {counts}."


def _rule(part: ComponentPlan) -> str:
    first, sizes = part.table[0], part.parallel
    match part.strategy:
        case "FlexiblePlacementStrategy":
            rule = "each process gets an equal, contiguous share of the ranks, or each rank an equal block of processes"
            return f"Ranks are split evenly: {rule}, always on one node."
        case "PackedPlacementStrategy":
            held = first.local_hardware_ranks
            step = held[1] - held[0] if len(held) > 1 else 1
            stride = f", {step} apart so that each shard lies on the learner shard it is made from" if step > 1 else ""
            split = f"tensor {sizes.tensor}, pipeline {sizes.pipeline}"
            return (
                f"The models' parallel sizes ({split}) give each process {counted(len(held), 'accelerator')}{stride}."
            )
        case "NodePlacementStrategy":
            return "Its ranks are nodes: processes are dealt to them in blocks, and none gets a device."
        case "ListedPlacementStrategy":
            split = f"Its devices are split into processes of {len(first.devices)} in the order written"
            return f"{split}; a process runs on the node of its first device."
        case "SpreadPlacementStrategy":
            return f"Workers without devices go to the nodes in turn: rank modulo {part.table.inventory.num_nodes}."
    return f"It was placed by {part.strategy}."


def _environment(part: ComponentPlan, placement: Placement, process: Process) -> list[str]:
    sentences = []
    if placement.visible_accelerators:
        holds_some = _kind(part, placement.node_group_label) == ACCELERATOR
        reason = "only its own" if placement.isolate_accelerator and holds_some else "all of its node"
        seen = placement.visible_accelerators
        what = "accelerator" if len(seen) == 1 else "accelerators"
        sentences.append(f"It sees {what} {', '.join(seen)}: {reason}.")
    group = placement.node_group_label
    software = part.table.inventory.group(group).software_of(placement.cluster_node_rank)
    if software.python_interpreter_path or software.env_vars:
        words = [f"interpreter {process.interpreter}"] if process.interpreter else []
        words += [f"{key}={value}" for key, value in software.env_vars]
        sentences.append(f"Through group {group} it gets {', '.join(words)}.")
    if process.hardware:
        sentences.append(f"Its declared hardware: {', '.join(str(dict(item)) for item in process.hardware)}.")
    return sentences


def _sharing(plan: Plan, part: ComponentPlan, placement: Placement | None = None) -> list[str]:
    """Which components share accelerators with this one, or with one process of it, and how they share memory."""
    first = plan.inventory.first_accelerators
    own = None if placement is None else [int(first[node]) + index for node, index in placement.devices]
    sentences = []
    for held in plan.residency.of(part.name):
        others = [name for name in held.device_class.components if name != part.name]
        devices = held.device_class.devices
        count = len(devices) if own is None else int(np.isin(own, devices).sum())
        if others and count:
            what = f"It shares {counted(count, 'accelerator')} with {', '.join(others)}"
            sentences.append(f"{what}: {held.decision.value}, because {held.reason}.")
    return sentences
