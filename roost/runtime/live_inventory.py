"""A live cluster as an inventory: its nodes, and the node groups that a config lays over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from roost.cluster.describe import describe, known_hardware
from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry, registry_for
from roost.cluster.inventory import NO_ACCELERATOR, Inventory
from roost.config.compose import load
from roost.config.errors import Findings
from roost.config.job import Job, Notation
from roost.config.notation import read_job
from roost.runtime.membership import report_device, report_interpreter
from roost.runtime.node_report import to_node
from roost.runtime.nodes import LiveNode

ASK_LIMIT = 120.0  # seconds

ClusterConfig = Mapping[str, Any] | str | Path | None


def read_cluster_config(config: ClusterConfig, findings: Findings) -> Job | None:
    """A job from a whole config, or from its `cluster` section alone."""
    if config is None:
        return None
    if not isinstance(config, Mapping | str | Path) and not hasattr(config, "keys"):
        raise TypeError(f"cluster_cfg is {config!r}; give a config's path, or its cluster section as a mapping")
    if not isinstance(config, str | Path) and "cluster" not in config:
        config = {"cluster": _plain(config)}
    source = load(config, (), findings)
    # Who runs where is for plans to say; a config that says nothing of it describes machines all the same.
    return read_job(source, findings, needs_components=False) if source is not None else None


def _plain(section: Mapping[str, Any]) -> Any:
    """A section as plain values; what OmegaConf's interpolations in it refer to is outside of it."""
    if not type(section).__module__.startswith("omegaconf"):
        return section
    from omegaconf import OmegaConf

    return OmegaConf.to_container(section, resolve=True)


def live_inventory(
    nodes: Sequence[LiveNode], job: Job | None, findings: Findings
) -> tuple[Inventory, HardwareRegistry]:
    """The inventory of the nodes, with the job's groups on it, checked by the nodes themselves."""
    bare = Inventory(tuple(to_node(node.report) for node in nodes))
    if job is None or job.notation is not Notation.RLINF:
        types = {node.accelerator_type for node in bare.nodes} - {NO_ACCELERATOR}
        return bare, registry_for((), types, {}) if types else BUILT_IN
    registry = known_hardware(job, bare, findings)
    bound = describe(job, findings, bare, registry=registry)
    if bound is None:
        return bare, registry
    _check_interpreters(bound, nodes, findings)
    return _with_devices(bound, nodes, job, findings), registry


def _check_interpreters(inventory: Inventory, nodes: Sequence[LiveNode], findings: Findings) -> None:
    paths = {
        (rank, part.python_interpreter_path)
        for group in inventory.groups
        for part in group.software
        if part.python_interpreter_path is not None
        for rank in part.node_ranks
    }
    ordered = sorted(paths)
    answers = ray.get(
        [nodes[rank].agent.ask.remote("check_interpreter", path) for rank, path in ordered], timeout=ASK_LIMIT
    )
    for (rank, _), wrong in zip(ordered, answers, strict=True):
        if wrong:
            report_interpreter(rank, nodes[rank].report.name, wrong, findings)


def _with_devices(inventory: Inventory, nodes: Sequence[LiveNode], job: Job, findings: Findings) -> Inventory:
    """Declared devices with what their nodes' variables say of them."""
    wanted = [
        (rank, kind, configs) for rank, node in enumerate(inventory.nodes) for kind, configs in node.hardware.items()
    ]
    undeclared = [
        (int(rank), group.hardware_type, ())
        for group in inventory.groups
        if group.hardware_type is not None
        for rank in group.node_ranks
        if group.hardware_type not in inventory.nodes[int(rank)].hardware
    ]
    asked = [*wanted, *undeclared]
    answers = ray.get(
        [
            nodes[rank].agent.ask.remote("robots", kind, [dict(config) for config in configs], rank)
            for rank, kind, configs in asked
        ],
        timeout=ASK_LIMIT,
    )
    machines = list(inventory.nodes)
    for (rank, kind, _), (filled, problems) in zip(asked, answers, strict=True):
        for problem in problems:
            report_device(rank, kind, problem, findings)
        if filled:
            machines[rank] = replace(machines[rank], hardware={**machines[rank].hardware, kind: filled})
    return Inventory(tuple(machines), inventory.groups)
