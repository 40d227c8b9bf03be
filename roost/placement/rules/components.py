"""Rules about whole plans: mistakes that would otherwise show up only after models are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.cluster.inventory import Inventory
from roost.config.findings import Findings, Where
from roost.config.job import Notation, Role, size_place
from roost.config.ranks import spell_nodes
from roost.placement.component_plan import IN_16_BITS, ComponentPlan
from roost.placement.memory.host import host_uses
from roost.placement.memory.model import (
    ENGINE_FRACTION,
    ENGINE_OVERHEAD_GIB,
    cached_bytes,
    engine_memory,
    engine_sizes,
    kv_tokens,
)
from roost.placement.memory.phases import takes_policy
from roost.placement.memory.residency import Decision, Residency, displaced_devices, spelled_sum
from roost.placement.memory.shape import ModelShape, UnknownShape, shape_from_config
from roost.placement.rules.heads import check_heads


def check_rules(
    components: Sequence[ComponentPlan],
    residency: Residency,
    inventory: Inventory,
    notation: Notation,
    places: Mapping[str, Where],
    findings: Findings,
) -> None:
    """Check all rules."""
    for part in components:
        place = places.get(part.name, Where(path=(part.name,)))
        _check_used(part, place, findings)
        _check_lost(part, inventory, place, findings)
        _check_spans(part, place, findings)
        _check_tensor_groups(part, place, findings)
        _check_shape(part, residency, place, findings)
    _check_async(components, residency, notation, places, findings)
    _check_sizes(components, notation, places, findings)
    _check_host_memory(components, residency, inventory, findings)


def _check_used(part: ComponentPlan, place: Where, findings: Findings) -> None:
    if part.model.unused_because:
        findings.warn("RST-P025", place, "is placed, but no phase ever uses it", part.model.unused_because, "remove it")


def _check_lost(part: ComponentPlan, inventory: Inventory, place: Where, findings: Findings) -> None:
    """Nothing runs on a node that the inventory marks as lost."""
    if not inventory.lost:
        return
    used = np.intersect1d(inventory.lost, np.concatenate([part.table.nodes, part.table.device_nodes]))
    if len(used):
        what = f"is placed on {spell_nodes(used.tolist())}, which the inventory marks as lost"
        findings.error("RST-P046", place, what, fix="place it on other nodes, or remove lost from the inventory")


def _check_spans(part: ComponentPlan, place: Where, findings: Findings) -> None:
    """A process whose devices are on several nodes sends every layer over the network."""
    table = part.table
    if not len(table.device_nodes):
        return
    owners = table.owners
    astray = np.flatnonzero(table.device_nodes != table.nodes[owners])
    if len(astray):
        process = int(owners[astray[0]])
        devices = table[process].devices
        nodes, tensor = sorted({node for node, _ in devices}), part.parallel.tensor
        groups = [devices[start : start + tensor] for start in range(0, len(devices), tensor)]
        has_sizes = part.parallel.model > 1 or part.parallel.expert > 1
        if has_sizes and all(len({node for node, _ in group}) == 1 for group in groups):
            return  # stages or copies of the model on several nodes, each layer on one
        findings.warn(
            "RST-P032",
            place,
            f"process {process} spans nodes {', '.join(map(str, nodes))}",
            f"its {len(devices)} devices exchange every layer's results over the network",
            "use a smaller tensor parallel size, or split the model by pipeline parallelism",
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
            "RST-P032",
            place,
            f"the tensor-parallel group of processes {group * tensor}-{(group + 1) * tensor - 1} spans nodes",
            f"tensor parallel size {tensor}, nodes {', '.join(map(str, sorted(set(nodes[group].tolist()))))}",
            f"start at a multiple of {tensor} on a node, or use a tensor parallel size that divides the node",
        )


def _check_shape(part: ComponentPlan, residency: Residency, place: Where, findings: Findings) -> None:
    """Check heads and layers against the parallel sizes, and the room for a KV cache."""
    if part.model.config is None:
        return
    try:
        shape = shape_from_config(part.model.config)
    except UnknownShape as error:
        fix = "check its memory yourself, or ask for this family to be counted"
        findings.warn("RST-M002", place, "the memory of its model cannot be computed", str(error), fix)
        return
    check_heads(part, shape, len(part.table.device_nodes) or part.world_size, place, findings)
    if part.role is Role.ENGINE:
        _check_kv_cache(part, shape, residency, place, findings)


def _check_kv_cache(
    part: ComponentPlan, shape: ModelShape, residency: Residency, place: Where, findings: Findings
) -> None:
    sizes = [held.device_class.memory_gb for held in residency.of(part.name) if held.device_class.memory_gb is not None]
    if not sizes:
        return
    shared = [held.sharing.inference_fraction for held in residency.of(part.name) if held.sharing is not None]
    fraction = next((one for one in shared if one is not None), part.model.memory_fraction) or ENGINE_FRACTION
    sizes_of_engine = engine_sizes(part)
    memory = engine_memory(shape, sizes_of_engine, min(sizes), fraction, part.model.weight_bytes)
    room = kv_tokens(shape, sizes_of_engine, memory.kv_cache, cached_bytes(part))
    needed = part.model.longest or part.model.sequence or 1
    if room < needed:
        kind, narrower = (" in float32", f"{IN_16_BITS}, or ") if part.is_float32 else ("", "")
        weights = f"weights {memory.weights:.1f}{kind}"
        findings.error(
            "RST-M003",
            place,
            f"leaves room for {room:,} tokens of KV cache, and one sequence may have {needed:,}",
            f"{fraction:g} of {min(sizes):g} GiB, less {weights} and engine {ENGINE_OVERHEAD_GIB:g}",
            narrower + "raise the engine's memory fraction or its tensor parallel size",
        )


def _check_async(
    components: Sequence[ComponentPlan],
    residency: Residency,
    notation: Notation,
    places: Mapping[str, Where],
    findings: Findings,
) -> None:
    """Asynchronous generation needs engines that no learner displaces; ml-loop's memory figures have their own rule."""
    if not residency.is_async or notation is Notation.LOOP:
        return
    switching = [held for held in residency.classes if held.decision is not Decision.KEEP]
    if not switching:
        return
    shared = np.concatenate([held.device_class.devices for held in switching])
    for part in components:
        if not takes_policy(part.name, part.role) or not len(part.table.device_nodes):
            continue
        if len(displaced_devices(part, shared)) == len(part.table.device_nodes):
            findings.error(
                "RST-P034",
                places.get(part.name, Where(path=(part.name,))),
                "generates while the learner learns, but every engine shares its devices with the learner",
                f"{switching[0].reason}, and both would need them at the same time",
                f"give rollout devices of its own, or generate synchronously{_how(notation, places)}",
            )


def _how(notation: Notation, places: Mapping[str, Where]) -> str:
    """The job's key that turns asynchronous generation off, in brackets; empty if none is known."""
    staleness = places.get("max_staleness", Where())
    if staleness.path[:1] == ("train",):
        return " (max_staleness: 0 in train)"
    return " (async_generation_ratio: 0)" if notation is Notation.ROLL else ""


def _check_sizes(
    components: Sequence[ComponentPlan], notation: Notation, places: Mapping[str, Where], findings: Findings
) -> None:
    """RLinf sends Megatron shards to engine shards as they are: of the two tensor sizes one must divide the other.

    Other learners, and ROLL's, put whole weights together first, so that engines split them as they like.
    """
    by_name = {part.name: part for part in components}
    actor, rollout = by_name.get("actor"), by_name.get("rollout")
    if notation is not Notation.RLINF or actor is None or rollout is None:
        return
    one, two = actor.parallel.tensor, rollout.parallel.tensor
    if max(one, two) % min(one, two):
        findings.error(
            "RST-P031",
            size_place(places.get("rollout", Where(path=("rollout",))), rollout.written_name, "tensor"),
            f"tensor sizes {one} (actor) and {two} (rollout) cannot be synchronised",
            f"{max(one, two)} % {min(one, two)} = {max(one, two) % min(one, two)}",
            "choose sizes of which one divides the other",
        )


def _check_host_memory(
    components: Sequence[ComponentPlan], residency: Residency, inventory: Inventory, findings: Findings
) -> None:
    """Check that what is in host memory at the same time fits into each node; report the first over-full node."""
    limits = np.array([node.host_memory_gb or np.inf for node in inventory.nodes])
    if not np.isfinite(limits).any():
        return
    for use in host_uses(components, residency, inventory):
        over = np.flatnonzero(use.total > limits)
        if len(over):
            node = int(over[0])
            findings.error(
                "RST-M005",
                Where(path=(f"node {node}",)),
                f"needs {use.total[node]:.1f} GiB of host memory in {use.moment}, and has {limits[node]:g} GiB",
                spelled_sum([(name, size[node]) for name, size in use.parts]),
                "offload less, or use more nodes",
            )
            return
