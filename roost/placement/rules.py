"""Rules about whole plans: what elsewhere is found only after the models have loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.cluster.inventory import Inventory
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory import ENGINE_FRACTION, ENGINE_OVERHEAD_GIB, engine_memory, kv_tokens
from roost.placement.model_shape import ModelShape, UnknownShape, shape_from_config
from roost.placement.phases import Phase
from roost.placement.residency import Decision, Residency
from roost.spec.errors import Findings, Where
from roost.spec.job import Notation, Role


def check_rules(
    components: Sequence[ComponentPlan],
    residency: Residency,
    inventory: Inventory,
    notation: Notation,
    places: Mapping[str, Where],
    findings: Findings,
) -> None:
    """Every rule, each with its finding."""
    for part in components:
        place = places.get(part.name, Where(path=(part.name,)))
        _check_used(part, place, findings)
        _check_spans(part, place, findings)
        _check_tensor_groups(part, place, findings)
        _check_shape(part, residency, place, findings)
    _check_async(components, residency, notation, places, findings)
    _check_sizes(components, places, findings)
    _check_host_memory(residency, inventory, findings)


def _check_used(part: ComponentPlan, place: Where, findings: Findings) -> None:
    if part.model.unused_because:
        findings.warn(place, "is placed, but no phase ever uses it", part.model.unused_because, "remove it")


def _check_spans(part: ComponentPlan, place: Where, findings: Findings) -> None:
    """A process whose devices are on several nodes sends every layer over the network."""
    table = part.table
    if not len(table.device_nodes):
        return
    owners = np.repeat(np.arange(len(table)), np.diff(table.offsets))
    astray = np.flatnonzero(table.device_nodes != table.nodes[owners])
    if len(astray):
        process = int(owners[astray[0]])
        nodes = sorted({node for node, _ in table[process].devices})
        findings.warn(
            place,
            f"process {process} spans nodes {', '.join(map(str, nodes))}",
            f"its {len(table[process].devices)} devices exchange every layer's results over the network",
            "use a smaller tensor parallel size, or cut the model over the nodes by pipeline parallelism",
        )


def _check_tensor_groups(part: ComponentPlan, place: Where, findings: Findings) -> None:
    """Learner processes of one tensor-parallel group should share a node."""
    tensor, table = part.parallel.tensor, part.table
    if part.role is Role.ENGINE or tensor <= 1 or len(table) % tensor:
        return
    nodes = table.nodes.reshape(-1, tensor)
    astray = np.flatnonzero((nodes != nodes[:, :1]).any(axis=1))
    if len(astray):
        group = int(astray[0])
        findings.warn(
            place,
            f"the tensor-parallel group of processes {group * tensor}-{(group + 1) * tensor - 1} spans nodes",
            f"tensor parallel size {tensor}, nodes {', '.join(map(str, sorted(set(nodes[group].tolist()))))}",
            f"start at a multiple of {tensor} on a node, or use a tensor parallel size that divides the node",
        )


def _check_shape(part: ComponentPlan, residency: Residency, place: Where, findings: Findings) -> None:
    """What the model's own sizes allow: heads divided by the tensor size, and room for a KV cache."""
    if part.model.config is None:
        return
    try:
        shape = shape_from_config(part.model.config)
    except UnknownShape as error:
        fix = "check its memory yourself, or ask for this family to be counted"
        findings.warn(place, "the memory of its model cannot be computed", str(error), fix)
        return
    if part.role in (Role.ENGINE, Role.LEARNER) and shape.heads % part.parallel.tensor:
        findings.error(
            place,
            f"a model of {shape.heads} attention heads cannot be cut {part.parallel.tensor} ways",
            f"{shape.heads} % {part.parallel.tensor} = {shape.heads % part.parallel.tensor}",
            f"use a tensor parallel size that divides {shape.heads}",
        )
    if part.role is Role.ENGINE:
        _check_kv_cache(part, shape, residency, place, findings)


def _check_kv_cache(
    part: ComponentPlan, shape: ModelShape, residency: Residency, place: Where, findings: Findings
) -> None:
    sizes = [held.device_class.memory_gb for held in residency.of(part.name) if held.device_class.memory_gb is not None]
    if not sizes:
        return
    memory = engine_memory(shape, part.parallel, min(sizes), part.model.memory_fraction, part.model.weight_bytes)
    room = kv_tokens(shape, part.parallel, memory.kv_cache)
    needed = part.model.sequence or 1
    fraction = ENGINE_FRACTION if part.model.memory_fraction is None else part.model.memory_fraction
    if room < needed:
        findings.error(
            place,
            f"leaves room for {room:,} tokens of KV cache, and one sequence may have {needed:,}",
            f"{fraction:g} of {min(sizes):g} GiB, less weights {memory.weights:.1f} and engine {ENGINE_OVERHEAD_GIB:g}",
            "raise the engine's memory fraction or its tensor parallel size",
        )


def _check_async(
    components: Sequence[ComponentPlan],
    residency: Residency,
    notation: Notation,
    places: Mapping[str, Where],
    findings: Findings,
) -> None:
    """Generating while learning needs engines that no learner displaces (ml-loop's figures have their own rule)."""
    if not residency.is_async or notation is Notation.LOOP:
        return
    for part in components:
        held = residency.of(part.name)
        if part.role is not Role.ENGINE or part.name != "rollout" or not held:
            continue
        free = [one for one in held if one.decision is Decision.KEEP]
        if not free:
            findings.error(
                places.get(part.name, Where(path=(part.name,))),
                "generates while the learner learns, but every engine shares its devices with the learner",
                f"{held[0].reason}, and both would need them at the same time",
                "give rollout devices of its own, or generate synchronously (async_generation_ratio: 0)",
            )


def _check_sizes(components: Sequence[ComponentPlan], places: Mapping[str, Where], findings: Findings) -> None:
    """Engine shards are made from learner shards: of the two tensor sizes one must divide the other."""
    by_name = {part.name: part for part in components}
    actor, rollout = by_name.get("actor"), by_name.get("rollout")
    if actor is None or rollout is None:
        return
    one, two = actor.parallel.tensor, rollout.parallel.tensor
    if max(one, two) % min(one, two):
        findings.error(
            places.get("rollout", Where(path=("rollout",))),
            f"tensor sizes {one} (actor) and {two} (rollout) cannot be synchronised",
            f"{max(one, two)} % {min(one, two)} = {max(one, two) % min(one, two)}",
            "choose sizes of which one divides the other",
        )


def _check_host_memory(residency: Residency, inventory: Inventory, findings: Findings) -> None:
    """What is offloaded and asleep must fit into the memory of its node; one over-full node is enough to report."""
    limits = np.array([node.host_memory_gb or np.inf for node in inventory.nodes])
    if not np.isfinite(limits).any():
        return
    node_of_device = np.repeat(np.arange(inventory.num_nodes), inventory.accelerator_counts)
    for phase in Phase:
        needed = np.zeros(inventory.num_nodes)
        parts: dict[str, float] = {}
        for held in residency.classes:
            per_node = np.bincount(node_of_device[held.device_class.devices], minlength=inventory.num_nodes)
            for share in held.phases[phase]:
                needed += per_node * (share.host_gib or 0.0)
                parts[share.component] = parts.get(share.component, 0.0) + float(per_node.max()) * (
                    share.host_gib or 0.0
                )
        over = np.flatnonzero(needed > limits)
        if len(over):
            node = int(over[0])
            findings.error(
                Where(path=(f"node {node}",)),
                f"needs {needed[node]:.1f} GiB of host memory in the phase {phase.value}, and has {limits[node]:g} GB",
                ", ".join(f"{name} {size:.1f}" for name, size in parts.items() if size) + " GiB",
                "offload less, keep engines awake, or drop their weights when they sleep",
            )
            return
