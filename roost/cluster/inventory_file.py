"""Inventory files: machines described in YAML or JSON, for planning on a cluster that is not there.

nodes:
  - {count: 8, accelerators: 8, accelerator_model: A800, memory_gb: 80}
  - {accelerators: 0, hardware: {Franka: 1}}
node_groups:
  - {label: a800, node_ranks: 0-7}
  - {label: franka, node_ranks: [8], hardware: Franka}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from roost.cluster.inventory import DEFAULT_ACCELERATOR, NO_ACCELERATOR, Group, Inventory, Node, Software
from roost.config.errors import ConfigError, Findings, Where, shown
from roost.config.limits import MAX_ACCELERATORS, MAX_ACCELERATORS_PER_NODE, MAX_NODES
from roost.config.node_groups import RESERVED_LABELS
from roost.config.ranks import RankSyntaxError, parse_rank_list, spell_ranks
from roost.config.section import Section
from roost.config.source import Source, is_tame, read_yaml

NODE_KEYS = (
    "count",
    "accelerators",
    "accelerator_type",
    "accelerator_model",
    "memory_gb",
    "host_memory_gb",
    "hardware",
    "host",
)
GROUP_KEYS = ("label", "node_ranks", "hardware", "ignore_hardware", "software")
SOFTWARE_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


def inventory_from_file(path: str | Path) -> Inventory:
    findings = Findings()
    source = read_yaml(Path(path), findings)
    findings.raise_errors()
    return _read(source or Source({}), findings)


def inventory_from_dict(data: Mapping[str, Any]) -> Inventory:
    findings = Findings()
    if not isinstance(data, Mapping):
        findings.error(Where(), f"the inventory is {shown(data)}, not a mapping", fix="give nodes: [{accelerators: 8}]")
    elif is_tame(data, findings):
        return _read(Source(dict(data)), findings)
    raise ConfigError(findings.errors)


def _read(source: Source, findings: Findings) -> Inventory:
    root = Section.root(source, findings)
    root.refuse_unknown_keys(("nodes", "node_groups"))
    nodes: list[Node] = []
    accelerators = 0
    for section in root.mappings("nodes", fix="write - accelerators: 8 for each node"):
        count = section.whole_number("count", 1, 1) or 1
        if len(nodes) + count > MAX_NODES:
            section.error("count", f"makes more than {MAX_NODES:,} nodes", fix="describe fewer nodes")
            break
        node = _read_node(section)
        accelerators += node.accelerators * count
        if accelerators > MAX_ACCELERATORS:
            section.error("accelerators", f"makes more than {MAX_ACCELERATORS:,} in all", fix="describe fewer nodes")
            break
        nodes += [node] * count
    if not nodes and not findings.has_errors:
        root.error("nodes", "names no node", fix="write nodes: [{accelerators: 8}]")
    groups = tuple(
        group
        for section in root.mappings("node_groups", fix="write - label: a800 with node_ranks: 0-7 below it")
        if (group := _read_group(section, len(nodes))) is not None
    )
    labels = [group.label for group in groups]
    for label in (label for label, times in Counter(labels).items() if times > 1):
        root.error("node_groups", f"{label} is declared twice", fix="give each group its own label")
    findings.raise_errors()
    return Inventory(tuple(nodes), groups)


def _read_node(section: Section) -> Node:
    section.refuse_unknown_keys(NODE_KEYS)
    return Node(
        accelerators=section.whole_number("accelerators", 0, 0, MAX_ACCELERATORS_PER_NODE) or 0,
        accelerator_type=section.text("accelerator_type") or DEFAULT_ACCELERATOR,
        accelerator_model=section.text("accelerator_model") or "",
        memory_gb=section.number("memory_gb"),
        host_memory_gb=section.number("host_memory_gb"),
        hardware=_read_hardware(section),
        host=section.text("host") or "",
    )


def _read_hardware(section: Section) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Kinds with a number of devices, or with a list of their configs."""
    written = section.mapping("hardware")
    hardware: dict[str, tuple[Mapping[str, Any], ...]] = {}
    for kind, value in (written.values if written else {}).items():
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1024:
            hardware[str(kind)] = ({},) * value
        elif isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
            hardware[str(kind)] = tuple(dict(item) for item in value)
        elif written:
            written.error(
                str(kind),
                f"is {shown(value)}; it must be a number of devices or a list of their configs",
                fix=f"write {kind}: 1",
            )
    return hardware


def _read_group(section: Section, num_nodes: int) -> Group | None:
    section.refuse_unknown_keys(GROUP_KEYS)
    label = section.text("label")
    if label is None or label in RESERVED_LABELS:
        section.error("label", "is missing" if label is None else f"{label} is reserved", fix="write label: a800")
        return None
    software = tuple(
        _read_software(part, num_nodes) for part in section.mappings("software", fix="write - node_ranks: 0-7")
    )
    return Group(
        label,
        np.array(_node_ranks(section, num_nodes), np.int64),
        section.text("hardware"),
        section.flag("ignore_hardware"),
        software,
    )


def _read_software(section: Section, num_nodes: int) -> Software:
    section.refuse_unknown_keys(SOFTWARE_KEYS)
    variables = section.mapping("env_vars")
    return Software(
        frozenset(_node_ranks(section, num_nodes)),
        tuple((str(key), str(value)) for key, value in (variables.values if variables else {}).items()),
        section.text("python_interpreter_path"),
    )


def _node_ranks(section: Section, num_nodes: int) -> list[int]:
    """Sorted ranks within the inventory; outside of it they are a finding."""
    value = section.get("node_ranks")
    try:
        ranges = parse_rank_list(value)
    except RankSyntaxError as error:
        section.error("node_ranks", error.what, fix=error.fix)
        return []
    ranges = (range(num_nodes),) if ranges is None else ranges
    beyond = [part for part in ranges if part and part[-1] >= num_nodes]
    if beyond or not ranges:
        section.error(
            "node_ranks",
            f"{shown(value)} reaches past the last node" if beyond else "names no node",
            f"there are {num_nodes} nodes, 0 to {num_nodes - 1}",
            "name nodes that are in the inventory",
        )
        return []
    return sorted({rank for part in ranges for rank in part})


def inventory_to_dict(inventory: Inventory) -> dict[str, Any]:
    runs = [(node, sum(1 for _ in same)) for node, same in groupby(inventory.nodes)]
    return {
        "nodes": [_node_to_dict(node, count) for node, count in runs],
        "node_groups": [_group_to_dict(group) for group in inventory.groups],
    }


def _node_to_dict(node: Node, count: int) -> dict[str, Any]:
    described: dict[str, Any] = {"count": count} if count > 1 else {}
    described["accelerators"] = node.accelerators
    if node.accelerator_type not in (NO_ACCELERATOR, DEFAULT_ACCELERATOR):
        described["accelerator_type"] = node.accelerator_type
    for key in ("accelerator_model", "memory_gb", "host_memory_gb", "host"):
        if getattr(node, key):
            described[key] = getattr(node, key)
    if node.hardware:
        described["hardware"] = {
            kind: [dict(item) for item in items] if any(items) else len(items) for kind, items in node.hardware.items()
        }
    return described


def _group_to_dict(group: Group) -> dict[str, Any]:
    described: dict[str, Any] = {
        "label": group.label,
        "node_ranks": spell_ranks(group.node_ranks.tolist(), limit=10**9),
    }
    if group.hardware_type is not None:
        described["hardware"] = group.hardware_type
    if group.ignore_hardware:
        described["ignore_hardware"] = True
    if group.software:
        described["software"] = [_software_to_dict(part) for part in group.software]
    return described


def _software_to_dict(software: Software) -> dict[str, Any]:
    described: dict[str, Any] = {"node_ranks": spell_ranks(sorted(software.node_ranks), limit=10**9)}
    if software.env_vars:
        described["env_vars"] = dict(software.env_vars)
    if software.python_interpreter_path:
        described["python_interpreter_path"] = software.python_interpreter_path
    return described
