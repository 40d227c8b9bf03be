"""Node groups of the RLinf notation: labels, nodes, software per node, declared hardware."""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.findings import shown
from roost.config.job import EnvConfig, HardwareItem, NodeGroup
from roost.config.ranks import RankSyntaxError, parse_rank_list
from roost.config.source import Section

CLUSTER_GROUP = "cluster"  # all nodes, counting their accelerators
NODE_GROUP = "node"  # all nodes, counting the nodes themselves
RESERVED_LABELS = (CLUSTER_GROUP, NODE_GROUP)
# Variables that a plan sets for every process, so that configs must not. The visibility masks are repeated here because
# this package cannot import the registry of accelerators; a test compares them.
PROTECTED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR", "MUSA_VISIBLE_DEVICES", "ROOST_VISIBLE_DEVICES",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_NAME", "WORKER_NAME", "CLUSTER_NODE_RANK", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE", "NODE_GROUP_LABEL",
    "LOCAL_HARDWARE_RANKS", "ACCELERATOR_TYPE",
)  # fmt: skip
PROTECTED_WHAT = "is set for every process by the plan"
PROTECTED_FIX = "remove it; the placement decides what a process sees"
GROUP_KEYS = ("label", "node_ranks", "env_configs", "hardware", "hardware_type", "ignore_hardware")
RESERVED_TYPES = ("accelerator", "node")
ENV_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


def read_node_groups(cluster: Section) -> tuple[NodeGroup, ...]:
    """The declared groups, each checked by itself; `roost.cluster` checks whether their nodes exist."""
    groups: dict[str, NodeGroup] = {}
    for section in cluster.mappings("node_groups", fix="write - label: a800 with node_ranks: 0-7 below it"):
        group = _read_group(section)
        if group is None:
            continue
        if group.label in groups:
            section.error(
                "RST-H016",
                "label",
                f"{group.label} is declared twice",
                f"the first is at {groups[group.label].where}",
                "give each group its own label",
            )
        else:
            groups[group.label] = group
    return tuple(groups.values())


def _read_group(section: Section) -> NodeGroup | None:
    section.refuse_unknown_keys(GROUP_KEYS)
    for key in ("label", "node_ranks"):
        if section.values.get(key) is None:
            section.error("RST-H017", key, "is missing", fix="each node group needs a label and node_ranks")
    label = section.text("label")
    node_ranks = _read_node_ranks(section)
    if label in RESERVED_LABELS:
        section.error(
            "RST-H018",
            "label",
            f"{label} is reserved",
            f"{CLUSTER_GROUP} and {NODE_GROUP} name all nodes already",
            "choose another label",
        )
        return None
    hardware_type, hardware = _read_hardware(section)
    ignore = section.flag("ignore_hardware")
    if ignore and (hardware_type is not None):
        section.error("RST-H035", "ignore_hardware", "cannot be combined with hardware", fix="keep one of the two")
    env_configs = tuple(
        config
        for part in section.mappings("env_configs", fix="put a dash before node_ranks: - node_ranks: 0-7")
        if (config := _read_env_config(part)) is not None
    )
    return (
        None
        if label is None
        else NodeGroup(
            label,
            node_ranks,
            section.where("label"),
            section.where("node_ranks"),
            section.where(*(("hardware", "type") if "hardware" in section else ("hardware_type",))),
            env_configs,
            hardware_type,
            hardware,
            ignore,
        )
    )


def _read_node_ranks(section: Section) -> tuple[range, ...] | None:
    """The ranks, None for all; () for a value that cannot be read, which is reported."""
    value = section.get("node_ranks")
    if value is None:
        return ()
    try:
        ranks = parse_rank_list(value)
    except RankSyntaxError as error:
        section.error(error.code, "node_ranks", error.what, fix=error.fix)
        return ()
    if ranks == ():
        section.error("RST-H020", "node_ranks", "names no node", fix="write ranks such as 0-7, or all")
    return ranks


def _read_env_config(section: Section) -> EnvConfig | None:
    section.refuse_unknown_keys(ENV_KEYS)
    if section.values.get("node_ranks") is None:
        section.error("RST-H024", "node_ranks", "is missing", fix="write the nodes this entry is for, or all")
        return None
    return EnvConfig(
        node_ranks=_read_node_ranks(section),
        env_vars=_read_env_vars(section),
        python_interpreter_path=section.text("python_interpreter_path") or None,
        where=section.where("node_ranks"),
    )


def _read_env_vars(section: Section) -> tuple[tuple[str, str], ...]:
    fix = 'write a list of single pairs: - GLOO_SOCKET_IFNAME: "eth0"'
    variables: dict[str, str] = {}
    for pair in section.mappings("env_vars", fix=fix):
        if len(pair.values) != 1:
            section.findings.error(
                "RST-H025", pair.where(), f"holds {len(pair.values)} pairs; each entry holds exactly one", fix=fix
            )
            continue
        for key in pair.values:
            value = pair.get(key)
            if value is None and pair.values[key] is not None:
                continue  # an interpolation that is reported
            if isinstance(value, Mapping | list):
                pair.error("RST-H026", str(key), f"is {shown(value)}; an environment variable holds text", fix=fix)
            elif not str(key) or "=" in str(key):
                pair.error("RST-H027", str(key), f"{shown(key)} is not a name for an environment variable", fix=fix)
            elif str(key) in PROTECTED_VARIABLES:
                pair.error("RST-H028", str(key), PROTECTED_WHAT, fix=PROTECTED_FIX)
            elif str(key) in variables:
                pair.error("RST-H029", str(key), "is set twice in this entry", fix="keep one of the two")
            else:
                variables[str(key)] = str(value)
    return tuple(variables.items())


def _read_hardware(section: Section) -> tuple[str | None, tuple[HardwareItem, ...] | None]:
    """The type of declared hardware and its items; items are None if only the type is named."""
    hardware = section.mapping("hardware")
    if hardware is None:
        return section.text("hardware_type"), None
    if "hardware_type" in section:
        section.error("RST-H035", "hardware_type", "cannot be combined with hardware", fix="keep hardware.type only")
    hardware.refuse_unknown_keys(("type", "configs"))
    kind = hardware.text("type")
    if kind is None:
        hardware.error("RST-H032", "type", "is missing", fix="write type: Franka")
    if "configs" not in hardware:
        hardware.error(
            "RST-H032",
            "configs",
            "is missing",
            fix="write configs: with one entry for each device, each with its node_rank",
        )
    items = hardware.mappings("configs", fix="write - node_rank: 0 for each device")
    seen: list[Mapping[object, object]] = []
    for item in items:
        if item.values in seen:
            section.findings.error(
                "RST-H036", item.where(), "is a duplicate of an earlier entry", fix="describe each device once"
            )
        seen.append(item.values)
    if kind in RESERVED_TYPES:
        hardware.error(
            "RST-H034", "type", f"{kind} is what groups without hardware count", fix="give the kind another name"
        )
        return None, None
    return kind, tuple(HardwareItem({str(key): item.get(key) for key in item.values}, item.where()) for item in items)
