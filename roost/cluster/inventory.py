"""The inventory: nodes, their hardware, and node groups. A plain value that never queries a machine.

Resource ranks are numbered node by node, group after group. Their table has one entry for each node of each group with
the first rank on it (a prefix sum), so that a million ranks are located by one binary search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.config.findings import (
    MAX_ACCELERATORS,
    MAX_ACCELERATORS_PER_NODE,
    MAX_NODES,
    ConfigError,
    Findings,
    Where,
    shown,
)
from roost.config.node_groups import CLUSTER_GROUP, NODE_GROUP, RESERVED_LABELS
from roost.config.ranks import RankSyntaxError, parse_rank_list, spell_ranks
from roost.config.source import Section, Source, is_within_limits, read_yaml

Ints = npt.NDArray[np.int64]
ACCELERATOR = "accelerator"
NODE = "node"


@dataclass(frozen=True)
class ResourceTable:
    """The resources of some node groups in order; `kinds` says what each group counts.

    >>> table = ResourceTable.build(("a", "b"), ("accelerator", "accelerator"),
    ...                             [np.array([0, 1]), np.array([2])], [np.array([2, 2]), np.array([4])])
    >>> table.total, [part.tolist() for part in table.locate(np.array([1, 3, 4, 7]))]
    (8, [[0, 1, 2, 2], [1, 1, 0, 3]])
    """

    labels: tuple[str, ...]
    kinds: tuple[str, ...]
    nodes: Ints  # the node of each entry
    groups: Ints  # the index into `labels` of each entry
    starts: Ints  # the first rank of each entry, and the total at the end

    @classmethod
    def build(
        cls, labels: tuple[str, ...], kinds: tuple[str, ...], nodes: list[Ints], counts: list[Ints]
    ) -> ResourceTable:
        all_counts = np.concatenate(counts) if counts else np.zeros(0, np.int64)
        return cls(
            labels,
            kinds,
            nodes=np.concatenate(nodes) if nodes else np.zeros(0, np.int64),
            groups=np.repeat(np.arange(len(nodes)), [len(part) for part in nodes]),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(all_counts)]),
        )

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    @property
    def counts_nodes(self) -> bool:
        """Return True if ranks mean nodes, which one group without accelerators or hardware decides for all."""
        return NODE in self.kinds

    @property
    def is_mixed(self) -> bool:
        return self.counts_nodes and any(kind != NODE for kind in self.kinds)

    def entries(self, ranks: Ints) -> Ints:
        """Entry of each rank; ranks must be within the total."""
        return np.searchsorted(self.starts, ranks, side="right") - 1

    def locate(self, ranks: Ints) -> tuple[Ints, Ints]:
        """The node of each rank and the index of the device on that node."""
        entries = self.entries(ranks)
        return self.nodes[entries], ranks - self.starts[entries]

    def node_table(self) -> ResourceTable:
        """The same groups, with one resource per node."""
        nodes = [self.nodes[self.groups == index] for index in range(len(self.labels))]
        return ResourceTable.build(
            self.labels, (NODE,) * len(self.labels), nodes, [np.ones(len(part), np.int64) for part in nodes]
        )


NO_ACCELERATOR = "NO_ACCEL"
DEFAULT_ACCELERATOR = "NV_GPU"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. Its rank is its position in the inventory, so that equal machines are one value.

    `hardware` maps a kind of declared device to the configs of the devices of that kind on this node.
    """

    accelerators: int = 0
    accelerator_type: str = DEFAULT_ACCELERATOR
    accelerator_model: str = ""
    memory_gb: float | None = None  # per accelerator
    host_memory_gb: float | None = None
    hardware: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    host: str = ""
    lost: bool = False  # failed: it keeps its rank, and nothing may be placed on it

    def __post_init__(self) -> None:
        if self.accelerators == 0:
            object.__setattr__(self, "accelerator_type", NO_ACCELERATOR)


@dataclass(frozen=True, slots=True)
class Software:
    """Environment variables and interpreter of some nodes of a group."""

    node_ranks: frozenset[int]
    env_vars: tuple[tuple[str, str], ...] = ()
    python_interpreter_path: str | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """A node group bound to nodes that exist."""

    label: str
    node_ranks: Ints
    hardware_type: str | None = None
    ignore_hardware: bool = False
    software: tuple[Software, ...] = ()

    def software_of(self, node: int) -> Software:
        """The software for this group's workers on a node; empty if none is configured."""
        return next((part for part in self.software if node in part.node_ranks), Software(frozenset()))

    def first(self, count: int) -> Group:
        """The group on the first nodes of the cluster alone."""
        cut = (
            replace(part, node_ranks=frozenset(rank for rank in part.node_ranks if rank < count))
            for part in self.software
        )
        software = tuple(part for part in cut if part.node_ranks)
        return replace(self, node_ranks=self.node_ranks[self.node_ranks < count], software=software)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.label, self.node_ranks.tobytes(), self.hardware_type, self.ignore_hardware, self.software)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Measured GB/s between devices; None where it was not measured."""

    all_reduce_gb_s: float | None = None  # over all devices (bus bandwidth)
    within_node_gb_s: float | None = None  # from one device to another, the slowest pair
    between_nodes_gb_s: float | None = None


class UnknownGroup(KeyError):
    """A node group label that the inventory does not have."""

    def __init__(self, label: str, known: Sequence[str]) -> None:
        super().__init__(label)
        self.label, self.known = label, tuple(known)


@dataclass(frozen=True)
class Inventory:
    """Nodes in rank order and their declared groups.

    >>> inventory = Inventory.from_dict({"nodes": [{"accelerators": 8}, {"accelerators": 4}]})
    >>> inventory.num_nodes, inventory.num_accelerators, inventory.resources(("cluster",)).total
    (2, 12, 12)
    """

    nodes: tuple[Node, ...]
    groups: tuple[Group, ...] = ()
    bandwidth: Bandwidth | None = None

    @classmethod
    def uniform(cls, num_nodes: int, accelerators: int, **fields: Any) -> Inventory:
        """A cluster of equal nodes; they share one value, so a hundred thousand of them cost nothing."""
        return cls((Node(accelerators=accelerators, **fields),) * num_nodes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inventory:
        """An inventory as written in an inventory file; every mistake in it is raised at once as a `ConfigError`."""
        return inventory_from_dict(data)

    @classmethod
    def from_file(cls, path: Any) -> Inventory:
        """Read an inventory file (YAML or JSON)."""
        return inventory_from_file(path)

    def first(self, count: int) -> Inventory:
        """The first nodes alone, with the groups and their software cut to them."""
        groups = (group.first(count) for group in self.groups)
        return Inventory(self.nodes[:count], tuple(group for group in groups if len(group.node_ranks)), self.bandwidth)

    def without(self, ranks: Iterable[int]) -> Inventory:
        """The same nodes, with some marked as lost; all keep their ranks."""
        lost = set(ranks)
        nodes = (replace(node, lost=node.lost or rank in lost) for rank, node in enumerate(self.nodes))
        return replace(self, nodes=tuple(nodes))

    def to_dict(self) -> dict[str, Any]:
        """The form that `from_dict` reads; runs of equal nodes are folded."""
        return inventory_to_dict(self)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @cached_property
    def accelerator_counts(self) -> Ints:
        return np.fromiter((node.accelerators for node in self.nodes), np.int64, len(self.nodes))

    @cached_property
    def lost(self) -> tuple[int, ...]:
        """Ranks of lost nodes."""
        return tuple(rank for rank, node in enumerate(self.nodes) if node.lost)

    @cached_property
    def first_accelerators(self) -> Ints:
        """The cluster-wide number of each node's first accelerator."""
        return np.cumsum(self.accelerator_counts) - self.accelerator_counts

    @property
    def num_accelerators(self) -> int:
        return int(self.accelerator_counts.sum())

    @cached_property
    def _by_label(self) -> dict[str, Group]:
        everywhere = np.arange(self.num_nodes)
        implicit = {
            CLUSTER_GROUP: Group(CLUSTER_GROUP, everywhere),
            NODE_GROUP: Group(NODE_GROUP, everywhere, ignore_hardware=True),
        }
        return {**implicit, **{group.label: group for group in self.groups}}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that a placement may name, declared ones first."""
        return (*(group.label for group in self.groups), *RESERVED_LABELS)

    def group(self, label: str) -> Group:
        if label not in self._by_label:
            raise UnknownGroup(label, self.labels)
        return self._by_label[label]

    def kind(self, group: Group) -> str:
        """Meaning of a rank in the group: a declared device, an accelerator, or the node itself."""
        if group.ignore_hardware:
            return NODE
        if group.hardware_type is not None:
            return group.hardware_type
        return ACCELERATOR if self.accelerator_counts[group.node_ranks].any() else NODE

    def resources(self, labels: Sequence[str]) -> ResourceTable:
        """The resources of the groups in the order given, numbered from 0 across all of them.

        If one group has only nodes to count, nodes are counted in all of them.
        """
        groups = [self.group(label) for label in labels]
        kinds = tuple(self.kind(group) for group in groups)
        table = ResourceTable.build(
            tuple(labels),
            kinds,
            [group.node_ranks for group in groups],
            [self._counts(group, kind) for group, kind in zip(groups, kinds, strict=True)],
        )
        if not table.is_mixed:
            return table
        nodes = table.node_table()
        return ResourceTable(table.labels, table.kinds, nodes.nodes, nodes.groups, nodes.starts)

    def _counts(self, group: Group, kind: str) -> Ints:
        if kind == NODE:
            return np.ones(len(group.node_ranks), np.int64)
        if kind == ACCELERATOR:
            return self.accelerator_counts[group.node_ranks]
        return np.array([len(self.nodes[rank].hardware.get(kind, ())) for rank in group.node_ranks.tolist()], np.int64)


NODE_KEYS = (
    "count",
    "accelerators",
    "accelerator_type",
    "accelerator_model",
    "memory_gb",
    "host_memory_gb",
    "hardware",
    "host",
    "lost",
)
GROUP_KEYS = ("label", "node_ranks", "hardware", "ignore_hardware", "software")
BANDWIDTH_KEYS = ("all_reduce_gb_s", "within_node_gb_s", "between_nodes_gb_s")
SOFTWARE_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


def inventory_from_file(path: str | Path) -> Inventory:
    findings = Findings()
    source = read_yaml(Path(path), findings)
    findings.raise_errors()
    return _read(source or Source({}), findings)


def inventory_from_dict(data: Mapping[str, Any]) -> Inventory:
    findings = Findings()
    if not isinstance(data, Mapping):
        findings.error(
            "RST-H014", Where(), f"the inventory is {shown(data)}, not a mapping", fix="give nodes: [{accelerators: 8}]"
        )
    elif is_within_limits(data, findings):
        return _read(Source(dict(data)), findings)
    raise ConfigError(findings.errors)


def _read(source: Source, findings: Findings) -> Inventory:
    root = Section.root(source, findings)
    root.refuse_unknown_keys(("nodes", "node_groups", "bandwidth"))
    nodes: list[Node] = []
    accelerators = 0
    for section in root.mappings("nodes", fix="write - accelerators: 8 for each node"):
        count = section.whole_number("count", 1, 1) or 1
        if len(nodes) + count > MAX_NODES:
            section.error("RST-H004", "count", f"makes more than {MAX_NODES:,} nodes", fix="describe fewer nodes")
            break
        node = _read_node(section)
        accelerators += node.accelerators * count
        if accelerators > MAX_ACCELERATORS:
            section.error(
                "RST-H004", "accelerators", f"makes more than {MAX_ACCELERATORS:,} in all", fix="describe fewer nodes"
            )
            break
        nodes += [node] * count
    if not nodes and not findings.has_errors:
        root.error("RST-H015", "nodes", "names no node", fix="write nodes: [{accelerators: 8}]")
    groups = tuple(
        group
        for section in root.mappings("node_groups", fix="write - label: a800 with node_ranks: 0-7 below it")
        if (group := _read_group(section, len(nodes))) is not None
    )
    labels = [group.label for group in groups]
    for label in (label for label, times in Counter(labels).items() if times > 1):
        root.error("RST-H016", "node_groups", f"{label} is declared twice", fix="give each group its own label")
    bandwidth = _read_bandwidth(root)
    findings.raise_errors()
    return Inventory(tuple(nodes), groups, bandwidth)


def _read_bandwidth(root: Section) -> Bandwidth | None:
    section = root.mapping("bandwidth")
    if section is None:
        return None
    section.refuse_unknown_keys(BANDWIDTH_KEYS)
    return Bandwidth(**{key: section.number(key) for key in BANDWIDTH_KEYS})


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
        lost=section.flag("lost"),
    )


def _read_hardware(section: Section) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Configs of declared devices by kind; a number stands for so many devices without fields."""
    written = section.mapping("hardware")
    hardware: dict[str, tuple[Mapping[str, Any], ...]] = {}
    for kind, value in (written.values if written else {}).items():
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1024:
            hardware[str(kind)] = ({},) * value
        elif isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
            hardware[str(kind)] = tuple(dict(item) for item in value)
        elif written:
            written.error(
                "RST-H021",
                str(kind),
                f"is {shown(value)}; it must be a number of devices or a list of their configs",
                fix=f"write {kind}: 1",
            )
    return hardware


def _read_group(section: Section, num_nodes: int) -> Group | None:
    section.refuse_unknown_keys(GROUP_KEYS)
    label = section.text("label")
    if label is None or label in RESERVED_LABELS:
        section.error(
            "RST-H017" if label is None else "RST-H018",
            "label",
            "is missing" if label is None else f"{label} is reserved",
            fix="write label: a800",
        )
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
    """Sorted ranks of nodes in the inventory; report ranks outside of it."""
    value = section.get("node_ranks")
    try:
        ranges = parse_rank_list(value)
    except RankSyntaxError as error:
        section.error(error.code, "node_ranks", error.what, fix=error.fix)
        return []
    ranges = (range(num_nodes),) if ranges is None else ranges
    beyond = [part for part in ranges if part and part[-1] >= num_nodes]
    if beyond or not ranges:
        section.error(
            "RST-H019" if beyond else "RST-H020",
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
        **_bandwidth_to_dict(inventory.bandwidth),
    }


def _bandwidth_to_dict(bandwidth: Bandwidth | None) -> dict[str, Any]:
    measured = {} if bandwidth is None else {key: getattr(bandwidth, key) for key in BANDWIDTH_KEYS}
    known = {key: value for key, value in measured.items() if value is not None}
    return {"bandwidth": known} if known else {}


def _node_to_dict(node: Node, count: int) -> dict[str, Any]:
    described: dict[str, Any] = {"count": count} if count > 1 else {}
    described["accelerators"] = node.accelerators
    if node.accelerator_type not in (NO_ACCELERATOR, DEFAULT_ACCELERATOR):
        described["accelerator_type"] = node.accelerator_type
    for key in ("accelerator_model", "memory_gb", "host_memory_gb", "host", "lost"):
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
