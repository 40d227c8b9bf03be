"""Describe the nodes of a job: from its config alone, or with its groups bound to a known inventory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.accelerators.simulated import COUNT_VARIABLE
from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry, registry_for
from roost.cluster.inventory import NO_ACCELERATOR, Group, Inventory, Node, Software
from roost.config.findings import (
    MAX_ACCELERATORS,
    MAX_ACCELERATORS_PER_NODE,
    MAX_NODES,
    Findings,
    Where,
    counted,
    did_you_mean,
    shown,
)
from roost.config.job import DeviceList, EnvConfig, HardwareItem, Job, NodeGroup, Notation, Role
from roost.config.ranks import spell_ranks
from roost.config.source import Section

if TYPE_CHECKING:
    from roost.cluster.hardware.robot import HardwareConfig, Problem


MAX_MEMBERSHIPS = 1_048_576
Hardware = dict[int, dict[str, list[Mapping[str, Any]]]]  # node -> kind -> configs


def bind_groups(
    job: Job, num_nodes: int, findings: Findings, registry: HardwareRegistry
) -> tuple[tuple[Group, ...], Hardware]:
    """The job's node groups bound to `num_nodes` nodes, and the hardware they declare."""
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
    claimed: set[int] = set()
    for config, part in zip(group.env_configs, software, strict=True):
        shared = sorted(part.node_ranks & claimed)
        if shared:
            findings.error(
                "RST-H023",
                config.where,
                f"overlaps another entry of group {group.label}",
                f"both name {spell_ranks(shared)}",
                "give each node one entry",
            )
        claimed |= part.node_ranks


def _check_across_groups(job: Job, groups: list[Group], findings: Findings) -> None:
    """Check nodes that are in several groups: a variable may be set by one group only; a second interpreter warns."""
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
    """Check the devices that a group declares, and add them to `hardware` by node.

    A device with mistakes is added too, so that placements on it are not reported as well.
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
    from roost.cluster.hardware.robot import parse_config  # imports pydantic, which most jobs do not need

    parsed = parse_config(config_class, fields)
    return parsed if isinstance(parsed, list) else ()


def _warn_same_device(
    group: NodeGroup, item: HardwareItem, seen: dict[tuple[str, Any], Where], findings: Findings
) -> None:
    """Warn of two devices with the same address: often a copied line that was not changed."""
    for key, value in item.fields.items():
        if key.endswith("_ip") and isinstance(value, str):
            first = seen.setdefault((key, value), item.where)
            if first is not item.where:
                what = f"has the same {key} as another device of group {group.label}"
                findings.warn(
                    "RST-H037", item.where, what, f"{value}, as at {first}", "give each device its own address"
                )


DEFAULT_ACCELERATORS_PER_NODE = 8

# Frameworks whose key for nodes counts those of the learner.
_KEY_OF_LEARNER = frozenset(
    (Notation.VERL, Notation.SLIME, Notation.MILES, Notation.PRIME, Notation.SKYRL, Notation.TRL)
)
_OTHER_INVENTORY = "give the inventory of the cluster that is meant"


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
    """The inventory to plan on; None if the number of nodes is not known.

    If an inventory is given, the config is checked against it. Otherwise the config describes the machines: `num_nodes`
    equal nodes with the accelerators it names, and the hardware that its node groups declare.
    """
    if inventory is None:
        inventory = _described_by_config(job, findings, accelerators_per_node)
        is_known = False
    else:
        if job.assumes_machines and job.last_device >= inventory.num_accelerators:
            findings.error(
                "RST-H007",
                _accelerator_key(job),
                f"needs {counted(job.last_device + 1, 'GPU')}, but the inventory has {inventory.num_accelerators}",
                fix="give an inventory with more machines, or fewer GPUs to the roles",
            )
            return None
        inventory = _first_nodes(job, inventory, accelerators_per_node, findings)
        _check_against(job, inventory, accelerators_per_node, findings)
        is_known = True
    if inventory is None:
        return None
    _check_accelerator_types(inventory, registry, findings)
    groups, hardware = bind_groups(job, inventory.num_nodes, findings, registry)
    nodes = _with_hardware(inventory, hardware, is_known, job, findings)
    return Inventory(nodes, _merged_groups(inventory.groups, groups, job, findings), inventory.bandwidth)


def _first_nodes(job: Job, inventory: Inventory, given: int | None, findings: Findings) -> Inventory:
    """The inventory, cut to the nodes that the job uses: one for ml-loop, else `num_nodes`."""
    count = 1 if job.notation is Notation.LOOP else job.num_nodes
    if count is None or count >= inventory.num_nodes:
        return inventory
    usable = _usable_nodes(job, inventory, given)
    to_write = _nodes_to_write(job, usable) if usable > count else None
    what = f"the first {counted(count, 'node')} of the inventory's {inventory.num_nodes} are used"
    where, fix = job.source.where(), f"use more nodes, or give an inventory of {counted(count, 'node')}"
    if job.notation is Notation.LOOP:
        fix = "give one node"
    elif to_write is not None:
        use = "all" if usable == inventory.num_nodes else f"the first {usable}"
        where, fix = _num_nodes_key(job), f"write {_spelled(job, job.notation.nodes_key, to_write)} to use {use}"
    findings.warn("RST-H008", where, what, fix=fix)
    return inventory.first(count)


def _usable_nodes(job: Job, inventory: Inventory, given: int | None) -> int:
    """Number of leading nodes that have as many accelerators as the job takes from each."""
    per_node = job.accelerators_per_node if given is None else given
    if per_node is None:
        return inventory.num_nodes
    is_usable = inventory.accelerator_counts == per_node
    if job.notation.is_trained:
        is_usable |= inventory.accelerator_counts == 0  # nodes for CPU workers
    return inventory.num_nodes if is_usable.all() else int(np.argmin(is_usable))


def _nodes_to_write(job: Job, total: int) -> int | None:
    """The value of the job's key for nodes with which it takes `total`; None if the key does not decide it alone.

    Frameworks that have a key for the learner's nodes only take more of them for engines on nodes of their own.
    """
    if job.notation not in _KEY_OF_LEARNER or job.num_nodes is None:
        return total
    written = _written_nodes(job)
    if written is None or job.notation is Notation.TRL:  # TRL divides its processes among the machines
        return None
    learner = _devices_of(job, Role.LEARNER)
    others = _devices_of(job, Role.ENGINE)
    is_whole = len(learner) == written * (job.accelerators_per_node or 0)
    if not is_whole or not (others <= learner or others.isdisjoint(learner)):
        return None
    needed = total - (job.num_nodes - written)
    return needed if needed > 0 else None


def _written_nodes(job: Job) -> int | None:
    """The value of the job's key for nodes, whose default is 1; prime-rl has others for jobs without it."""
    *above, key = job.notation.nodes_key
    section = Section.root(job.source, Findings()).below(*above)
    return section.whole_number(key, 1, None if job.notation is Notation.PRIME else 1)


def _devices_of(job: Job, role: Role) -> set[int]:
    requested = (part.requested for part in job.components if part.role is role)
    return {device for one in requested if isinstance(one, DeviceList) for device in one.devices}


def _spelled(job: Job, path: Sequence[str], value: object) -> str:
    """A key with a value, spelled as in the file or script of the job."""
    return Section.root(job.source, Findings()).below(*path[:-1]).spell(path[-1], value)


def _num_nodes_key(job: Job) -> Where:
    return job.source.where(job.notation.nodes_key)


def _check_accelerator_types(inventory: Inventory, registry: HardwareRegistry, findings: Findings) -> None:
    """Report accelerators of unknown vendors: Roost would not know how to set visible devices."""
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
    """Equal nodes, as many as the config names or its device numbers need."""
    written = job.accelerators_per_node
    if given is not None and written is not None and given != written:
        what = f"is {written}, but --gpus-per-node gives {given}"
        fix = f"write {_spelled(job, _accelerator_path(job), given)}, or give --gpus-per-node {written}"
        findings.error("RST-H003", _accelerator_key(job), what, fix=fix)
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
            _num_nodes_key(job),
            f"is {job.num_nodes}, but the devices reach over {needed} nodes",
            f"device {last} with {per_node} per node is on node {last // per_node}",
            f"write {_spelled(job, job.notation.nodes_key, needed)}",
        )
    return max(job.num_nodes or 1, needed)


def _accelerator_key(job: Job) -> Where:
    return job.source.where(_accelerator_path(job))


def _accelerator_path(job: Job) -> tuple[str, ...]:
    """The key that decides the accelerators of a node; nodes of slime have at least those of the learner."""
    path = job.notation.accelerators_key
    if job.notation not in (Notation.SLIME, Notation.MILES):
        return path
    written = Section.root(job.source, Findings()).whole_number(path[0], 1)
    is_below = written is not None and written < (job.accelerators_per_node or 0)
    return ("--actor-num-gpus-per-node",) if is_below else path


def _is_written(job: Job) -> bool:
    """Return True if the config sets the accelerators per node; a wrong value is reported where it is read."""
    *above, key = job.notation.accelerators_key
    written = Section.root(job.source, Findings()).below(*above).values.get(key) is not None
    return job.notation is Notation.LOOP or written or not job.notation.is_trained  # frameworks have defaults


def _check_against(job: Job, inventory: Inventory, given: int | None, findings: Findings) -> None:
    """Check the numbers of nodes and accelerators in the config against the inventory."""
    _check_nodes(job, inventory, findings)
    written = job.accelerators_per_node if given is None else given
    other = {int(count) for count in np.unique(inventory.accelerator_counts)} - {0, written}
    if given is None and not job.notation.is_trained and job.num_nodes == 1 and written is not None:
        other = {count for count in other if count < written}  # a job of another framework need not fill its node
    if written and not inventory.num_accelerators:
        findings.error(
            "RST-H009",
            _accelerator_key(job),
            f"is {written}, but the inventory has no accelerators",
            fix="leave it out; to train on the CPU of such nodes, simulate accelerators: "
            f"{COUNT_VARIABLE}={written} on each, before Ray or `roost up` starts there"
            if job.notation.is_trained
            else _OTHER_INVENTORY,
        )
    if written is not None and other:
        rank = int(np.argmax(np.isin(inventory.accelerator_counts, list(other))))
        count = int(inventory.accelerator_counts[rank])
        is_simulated = inventory.nodes[rank].accelerator_type == AcceleratorType.SIMULATED
        simulate = f", or simulate {written} there ({COUNT_VARIABLE}={written} before Ray or `roost up` starts)"
        findings.error(
            "RST-H009",
            _accelerator_key(job),
            f"is {written}, but node {rank} has {count} accelerators",
            fix="leave it out: the inventory says how many there are" + (simulate if is_simulated else "")
            if job.notation.is_trained
            else f"write {_spelled(job, _accelerator_path(job), count)}, or {_OTHER_INVENTORY}",
        )


def _check_nodes(job: Job, inventory: Inventory, findings: Findings) -> None:
    """Check that the inventory has the nodes of the job."""
    count, known = job.num_nodes, inventory.num_nodes
    if job.notation is Notation.LOOP or count is None or count <= known:
        return
    to_write = _nodes_to_write(job, known)
    smaller = f"write {_spelled(job, job.notation.nodes_key, to_write)}" if to_write is not None else "use fewer nodes"
    is_total = job.notation not in _KEY_OF_LEARNER or _written_nodes(job) == count
    findings.error(
        "RST-H007",
        _num_nodes_key(job) if is_total else job.source.where(),
        f"{'is' if is_total else 'the job takes'} {count if is_total else counted(count, 'node')}, "
        f"but the inventory has {counted(known, 'node') if is_total else known}",
        fix=f"{smaller}, or {_OTHER_INVENTORY}",
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
    """Devices of the config, with fields that it leaves out from the inventory."""
    if len(written) != len(known):
        return written
    return tuple({**there, **item} for item, there in zip(written, known, strict=True))


def _merged_groups(
    known: tuple[Group, ...], written: tuple[Group, ...], job: Job, findings: Findings
) -> tuple[Group, ...]:
    """The config's groups, and groups of the inventory that the config does not declare."""
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
