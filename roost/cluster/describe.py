"""Describe the nodes of a job: from its config alone, or with its groups bound to a known inventory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry, registry_for
from roost.cluster.inventory import NO_ACCELERATOR, Group, Inventory, Node
from roost.cluster.node_groups import Hardware, bind_groups
from roost.config.findings import (
    MAX_ACCELERATORS,
    MAX_ACCELERATORS_PER_NODE,
    MAX_NODES,
    Findings,
    Where,
    counted,
    did_you_mean,
)
from roost.config.job import Job, Notation
from roost.config.ranks import spell_ranks
from roost.config.section import Section

DEFAULT_ACCELERATORS_PER_NODE = 8
Devices = tuple[Mapping[str, Any], ...]


def known_hardware(job: Job, inventory: Inventory | None, findings: Findings) -> HardwareRegistry:
    """Return Roost's hardware registry with the user's additions; an addition that fails to load is a finding."""
    kinds = {group.hardware_type for group in job.node_groups if group.hardware_type is not None}
    types = {node.accelerator_type for node in inventory.nodes} if inventory is not None else set()
    try:
        return registry_for(kinds, types - {NO_ACCELERATOR}, os.environ)
    except ValueError as error:
        findings.error("RST-H013", Where("hardware registry"), str(error), fix="correct the entry, or remove it")
        return BUILT_IN


def describe(
    job: Job,
    findings: Findings,
    inventory: Inventory | None = None,
    accelerators_per_node: int | None = None,
    registry: HardwareRegistry = BUILT_IN,
) -> Inventory | None:
    """The inventory to plan on; None where not even the number of nodes is known.

    A given inventory says what the machines are, and the config is checked against it. Without one the config describes
    them: `num_nodes` equal nodes with the accelerators it names, and the hardware its node groups declare.
    """
    if inventory is None:
        inventory = _described_by_config(job, findings, accelerators_per_node)
        is_known = False
    else:
        inventory = _first_nodes(job, inventory, findings)
        _check_against(job, inventory, accelerators_per_node, findings)
        is_known = True
    if inventory is None:
        return None
    _check_accelerator_types(inventory, registry, findings)
    groups, hardware = bind_groups(job, inventory.num_nodes, findings, registry)
    nodes = _with_hardware(inventory, hardware, is_known, job, findings)
    return Inventory(nodes, _merged_groups(inventory.groups, groups, job, findings))


def _first_nodes(job: Job, inventory: Inventory, findings: Findings) -> Inventory:
    """The nodes that the job is for, where the inventory has more: ml-loop runs on one, RLinf on `num_nodes`."""
    count = 1 if job.notation is Notation.LOOP else job.num_nodes
    if count is None or count >= inventory.num_nodes:
        return inventory
    where = job.source.where() if job.notation is Notation.LOOP else _num_nodes_key(job)
    what = f"the first {counted(count, 'node')} of the inventory's {inventory.num_nodes} are used"
    findings.warn(
        "RST-H008",
        where,
        what,
        fix="raise num_nodes to use more" if job.notation is not Notation.LOOP else "give one node",
    )
    return inventory.first(count)


def _num_nodes_key(job: Job) -> Where:
    return job.source.where(("cluster", "num_nodes") if job.notation is Notation.RLINF else ("num_nodes",))


def _check_accelerator_types(inventory: Inventory, registry: HardwareRegistry, findings: Findings) -> None:
    """Every accelerator must be of a known vendor, or processes could not be kept apart on it."""
    for kind in sorted({node.accelerator_type for node in inventory.nodes} - {NO_ACCELERATOR}):
        if registry.accelerator(kind) is None:
            known = [accelerator.type for accelerator in registry.accelerators]
            findings.error(
                "RST-H012",
                Where("inventory", path=("nodes", "accelerator_type")),
                f"{kind} is not an accelerator Roost knows",
                did_you_mean(kind, known),
                f"use one of {', '.join(known)}, or register your own (docs/hardware.md)",
            )


def _described_by_config(job: Job, findings: Findings, given: int | None) -> Inventory | None:
    """Equal nodes, as many as the config names or its devices reach over."""
    written = job.accelerators_per_node
    if given is not None and written is not None and given != written:
        what = f"is {written}, but --gpus-per-node gives {given}"
        findings.error("RST-H003", _accelerator_key(job), what, fix="give the same number in both places")
    per_node = given if given is not None else written
    if per_node is None and job.notation is Notation.LOOP:
        per_node = job.last_device + 1
    if per_node is None:
        per_node = DEFAULT_ACCELERATORS_PER_NODE
    if given is None and not _is_written(job):
        findings.warn(
            "RST-H002",
            _accelerator_key(job),
            f"is not written; {per_node} accelerators per node are assumed",
            fix="write it, or give --gpus-per-node or --inventory",
        )
    num_nodes = _num_nodes(job, per_node, findings)
    if num_nodes is None:
        return None
    if num_nodes > MAX_NODES or per_node > MAX_ACCELERATORS_PER_NODE or num_nodes * per_node > MAX_ACCELERATORS:
        what = f"{num_nodes:,} nodes of {per_node:,} accelerators are more than Roost plans for"
        why = f"at most {MAX_NODES:,} nodes, {MAX_ACCELERATORS_PER_NODE:,} on a node and {MAX_ACCELERATORS:,} in all"
        findings.error("RST-H004", job.source.where(), what, why, "check the device and node numbers")
        return None
    return Inventory.uniform(num_nodes, per_node)


def _num_nodes(job: Job, per_node: int, findings: Findings) -> int | None:
    if job.notation is Notation.RLINF:
        if (
            job.num_nodes is None
            and Section.root(job.source, findings).below("cluster").values.get("num_nodes") is None
        ):
            findings.error(
                "RST-H001", job.source.where(("cluster", "num_nodes")), "is missing", fix="write num_nodes: 1"
            )
        return job.num_nodes
    if job.notation is Notation.LOOP:
        return 1
    last = job.last_device
    if last >= 0 and per_node == 0:
        findings.error(
            "RST-H005",
            _accelerator_key(job),
            f"is 0, but device {last} is used",
            fix=f"write {DEFAULT_ACCELERATORS_PER_NODE}",
        )
        return None
    needed = last // per_node + 1 if last >= 0 else 1
    if job.num_nodes is not None and job.num_nodes < needed:
        findings.error(
            "RST-H006",
            job.source.where(("num_nodes",)),
            f"is {job.num_nodes}, but the devices reach over {needed} nodes",
            f"device {last} with {per_node} per node is on node {last // per_node}",
            f"write num_nodes: {needed}",
        )
    return max(job.num_nodes or 1, needed)


def _accelerator_key(job: Job) -> Where:
    return job.source.where(
        ("cluster", "num_gpus_per_node") if job.notation is Notation.RLINF else ("num_gpus_per_node",)
    )


def _is_written(job: Job) -> bool:
    """Return True if the config sets the accelerators per node; a wrong value is reported where it is read."""
    root = Section.root(job.source, Findings())
    section = root.below("cluster") if job.notation is Notation.RLINF else root
    return job.notation is Notation.LOOP or section.values.get("num_gpus_per_node") is not None


def _check_against(job: Job, inventory: Inventory, given: int | None, findings: Findings) -> None:
    """Check the config's statements about nodes against the inventory."""
    if job.notation is not Notation.LOOP and job.num_nodes is not None and job.num_nodes > inventory.num_nodes:
        findings.error(
            "RST-H007",
            _num_nodes_key(job),
            f"is {job.num_nodes}, but the inventory has {counted(inventory.num_nodes, 'node')}",
            fix=f"write num_nodes: {inventory.num_nodes}, or give the inventory of the cluster that is meant",
        )
    written = job.accelerators_per_node if given is None else given
    other = {int(count) for count in np.unique(inventory.accelerator_counts)} - {0, written}
    if written and not inventory.num_accelerators:
        findings.error(
            "RST-H009",
            _accelerator_key(job),
            f"is {written}, but the inventory has no accelerators",
            fix="leave it out",
        )
    if written is not None and other:
        rank = int(np.argmax(np.isin(inventory.accelerator_counts, list(other))))
        findings.error(
            "RST-H009",
            _accelerator_key(job),
            f"is {written}, but node {rank} has {inventory.accelerator_counts[rank]} accelerators",
            fix="leave it out: the inventory says how many there are",
        )


def _with_hardware(
    inventory: Inventory, hardware: Hardware, is_known: bool, job: Job, findings: Findings
) -> tuple[Node, ...]:
    if not hardware:
        return inventory.nodes
    nodes = list(inventory.nodes)
    for rank, kinds in hardware.items():
        for kind, items in kinds.items():
            present = len(nodes[rank].hardware.get(kind, items))
            if is_known and present != len(items):
                findings.error(
                    "RST-H010",
                    job.source.where(("cluster", "node_groups")),
                    f"declares {len(items)} {kind} on node {rank}, where the inventory has {present}",
                    fix="describe the devices that are there",
                )
        known = nodes[rank].hardware
        written = {kind: _completed(tuple(items), known.get(kind, ())) for kind, items in kinds.items()}
        nodes[rank] = replace(nodes[rank], hardware={**known, **written})
    return tuple(nodes)


def _completed(
    written: tuple[Mapping[str, Any], ...], known: tuple[Mapping[str, Any], ...]
) -> tuple[Mapping[str, Any], ...]:
    """Devices as the config has them, with what it leaves out as the inventory knows it."""
    if len(written) != len(known):
        return written
    return tuple({**there, **item} for item, there in zip(written, known, strict=True))


def _merged_groups(
    known: tuple[Group, ...], written: tuple[Group, ...], job: Job, findings: Findings
) -> tuple[Group, ...]:
    """The config's groups, and those of the inventory that the config does not declare itself."""
    own = {group.label: group for group in written}
    for group in known:
        mine = own.get(group.label)
        if mine is not None and not np.array_equal(mine.node_ranks, group.node_ranks):
            findings.warn(
                "RST-H011",
                job.source.where(("cluster", "node_groups")),
                f"node group {group.label} differs from the inventory's",
                f"{spell_ranks(mine.node_ranks.tolist())} here, {spell_ranks(group.node_ranks.tolist())} there",
                "make the two agree; the config's is used",
            )
    return (*written, *(group for group in known if group.label not in own))
