"""Node groups as written, bound to nodes that exist: their nodes, their software, and the devices they declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.cluster.hardware.registry import HardwareRegistry
from roost.cluster.inventory import Group, Software
from roost.config.findings import Findings, Where, counted, did_you_mean, shown
from roost.config.job import EnvConfig, HardwareItem, Job, NodeGroup
from roost.config.ranks import spell_ranks

if TYPE_CHECKING:
    from roost.cluster.hardware.problem import Problem
    from roost.cluster.hardware.robot import HardwareConfig

MAX_MEMBERSHIPS = 1_048_576
Hardware = dict[int, dict[str, list[Mapping[str, Any]]]]  # node -> kind -> configs


def bind_groups(
    job: Job, num_nodes: int, findings: Findings, registry: HardwareRegistry
) -> tuple[tuple[Group, ...], Hardware]:
    groups = []
    hardware: Hardware = {}
    declared: dict[tuple[int, str], str] = {}
    memberships = 0
    for written in job.node_groups:
        parts = written.node_ranks if written.node_ranks is not None else (range(num_nodes),)
        memberships += sum(len(range(part.start, min(part.stop, num_nodes))) for part in parts)
        if memberships > MAX_MEMBERSHIPS:
            what = f"the groups have more than {MAX_MEMBERSHIPS:,} nodes together"
            findings.error("RST-H031", written.ranks_where, what, fix="declare fewer or smaller groups")
            break
        ranks = _bound_ranks(written, num_nodes, findings)
        software = tuple(
            Software(
                frozenset(_bound_env_ranks(config, ranks, written, findings)),
                config.env_vars,
                config.python_interpreter_path,
            )
            for config in written.env_configs
        )
        _check_overlaps(written, software, findings)
        _read_items(job, written, ranks, findings, registry, hardware, declared)
        groups.append(
            Group(written.label, np.array(ranks, np.int64), written.hardware_type, written.ignore_hardware, software)
        )
    _check_across_groups(job, groups, findings)
    return tuple(groups), hardware


def _bound_ranks(group: NodeGroup, num_nodes: int, findings: Findings) -> list[int]:
    written = group.node_ranks
    if written is None:
        return list(range(num_nodes))
    beyond = [part for part in written if part[-1] >= num_nodes]
    if beyond:
        findings.error(
            "RST-H019",
            group.ranks_where,
            f"node group {group.label} names node {beyond[0][-1]}, which does not exist",
            f"there are {counted(num_nodes, 'node')}, counted from 0",
            f"name nodes up to {num_nodes - 1}, or raise num_nodes",
        )
    inside = [range(part.start, min(part.stop, num_nodes)) for part in written]
    return sorted({rank for part in inside for rank in part})


def _bound_env_ranks(config: EnvConfig, group_ranks: list[int], group: NodeGroup, findings: Findings) -> list[int]:
    if config.node_ranks is None or not group_ranks:
        return group_ranks
    inside = set(group_ranks)
    end = group_ranks[-1] + 1
    named = {rank for part in config.node_ranks for rank in range(part.start, min(part.stop, end))}
    outside = sorted(named - inside) + [part[-1] for part in config.node_ranks if part[-1] >= end]
    if outside:
        findings.error(
            "RST-H022",
            config.where,
            f"names nodes outside its group {group.label}",
            f"node {outside[0]} is not in {spell_ranks(group_ranks)}",
            "name nodes of the group only",
        )
    return sorted(named & inside)


def _check_overlaps(group: NodeGroup, software: tuple[Software, ...], findings: Findings) -> None:
    taken: dict[int, int] = {}
    for index, part in enumerate(software):
        shared = sorted(part.node_ranks & taken.keys())
        if shared:
            findings.error(
                "RST-H023",
                group.env_configs[index].where,
                f"overlaps another entry of group {group.label}",
                f"both name {spell_ranks(shared)}",
                "give each node one entry",
            )
        taken |= dict.fromkeys(part.node_ranks, index)


def _check_across_groups(job: Job, groups: list[Group], findings: Findings) -> None:
    """On one node a variable is set by one group only. Two interpreters are allowed: a worker takes its own group's."""
    variables: dict[tuple[int, str], str] = {}
    interpreters: dict[int, tuple[str, str]] = {}
    for group, written in zip(groups, job.node_groups, strict=False):
        for part, config in zip(group.software, written.env_configs, strict=True):
            nodes = sorted(part.node_ranks)
            for key, _ in part.env_vars:
                owners = [(variables.setdefault((node, key), group.label), node) for node in nodes]
                clash = next(((label, node) for label, node in owners if label != group.label), None)
                if clash is not None:
                    findings.error(
                        "RST-H029",
                        config.where,
                        f"sets {key} on node {clash[1]}, which group {clash[0]} sets already",
                        fix="set it in one group, or keep the groups' nodes apart",
                    )
            _warn_second_interpreter(group.label, part, config, nodes, interpreters, findings)


def _warn_second_interpreter(
    label: str,
    part: Software,
    config: EnvConfig,
    nodes: list[int],
    interpreters: dict[int, tuple[str, str]],
    findings: Findings,
) -> None:
    path = part.python_interpreter_path
    if path is None:
        return
    found = [(node, *interpreters.setdefault(node, (label, path))) for node in nodes]
    clash = next(((node, owner, other) for node, owner, other in found if other != path), None)
    if clash is not None:
        findings.warn(
            "RST-H030",
            config.where,
            f"gives node {clash[0]} a second interpreter",
            f"group {clash[1]} has {clash[2]}; each worker takes its own group's",
            "give the groups one interpreter, unless each is meant to have its own",
        )


def _read_items(
    job: Job,
    group: NodeGroup,
    ranks: list[int],
    findings: Findings,
    registry: HardwareRegistry,
    hardware: Hardware,
    declared: dict[tuple[int, str], str],
) -> None:
    """The devices a group declares, checked by their kind and laid on their nodes.

    A device with mistakes is reported and still counted, so that what is placed on it is not reported as well.
    """
    kind = group.hardware_type
    if kind is None or group.hardware is None:
        return
    config_class = registry.kind(kind)
    if config_class is None:
        findings.error(
            "RST-H033",
            group.hardware_where,
            f"declares hardware of an unknown type {kind}",
            did_you_mean(kind, registry.kind_names),
            f"use one of {', '.join(registry.kind_names)}, or register your own (docs/hardware.md)",
        )
    seen: dict[tuple[str, Any], Where] = {}
    for item in group.hardware:
        for problem in _problems_of(config_class, item.fields) if config_class is not None else ():
            findings.error(
                problem.code, job.source.where((*item.where.path, *problem.field)), problem.what, fix=problem.fix
            )
        _warn_same_device(group, item, seen, findings)
        node = item.fields.get("node_rank")
        if not isinstance(node, int) or isinstance(node, bool):
            continue  # reported above
        if node not in ranks:
            findings.error(
                "RST-H038",
                item.where,
                f"is on node {shown(node)}, outside its group {group.label}",
                f"the group has nodes {spell_ranks(ranks)}",
                "write a node_rank of the group",
            )
            node = ranks[0] if ranks else 0
        first = declared.setdefault((node, kind), group.label)
        if first != group.label:
            findings.error(
                "RST-H039",
                item.where,
                f"declares {kind} on node {node}, which group {first} declares already",
                fix="declare the devices of a node in one group",
            )
            continue
        hardware.setdefault(node, {}).setdefault(kind, []).append(dict(item.fields))


def _problems_of(config_class: type[HardwareConfig], fields: Mapping[str, Any]) -> Sequence[Problem]:
    from roost.cluster.hardware.robot import parse_config  # pydantic is only paid for where hardware is declared

    parsed = parse_config(config_class, fields)
    return parsed if isinstance(parsed, list) else ()


def _warn_same_device(
    group: NodeGroup, item: HardwareItem, seen: dict[tuple[str, Any], Where], findings: Findings
) -> None:
    """Two devices of a group with one address are mostly a line copied and not changed."""
    for key, value in item.fields.items():
        if key.endswith("_ip") and isinstance(value, str):
            first = seen.setdefault((key, value), item.where)
            if first is not item.where:
                what = f"has the same {key} as another device of group {group.label}"
                findings.warn(
                    "RST-H037", item.where, what, f"{value}, as at {first}", "give each device its own address"
                )
