"""The machines: nodes, what is on them, and the groups they form. A value; it never asks a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from roost.cluster.resources import ACCELERATOR, NODE, Ints, ResourceTable
from roost.config.node_groups import CLUSTER_GROUP, NODE_GROUP, RESERVED_LABELS

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
    memory_gb: float | None = None  # of each accelerator
    host_memory_gb: float | None = None
    hardware: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    host: str = ""

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
    """A node group bound to nodes that exist: what it counts depends on its nodes and its declared hardware."""

    label: str
    node_ranks: Ints
    hardware_type: str | None = None
    ignore_hardware: bool = False
    software: tuple[Software, ...] = ()

    def software_of(self, node: int) -> Software:
        """The software for this group's workers on a node; empty where nothing is configured."""
        return next((part for part in self.software if node in part.node_ranks), Software(frozenset()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.label, self.node_ranks.tobytes(), self.hardware_type, self.ignore_hardware, self.software)


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

    @classmethod
    def uniform(cls, num_nodes: int, accelerators: int, **fields: Any) -> Inventory:
        """A cluster of equal nodes; they share one value, so a hundred thousand of them cost nothing."""
        return cls((Node(accelerators=accelerators, **fields),) * num_nodes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inventory:
        """An inventory as written in an inventory file; every mistake in it is raised at once as a `ConfigError`."""
        from roost.cluster.inventory_file import inventory_from_dict

        return inventory_from_dict(data)

    @classmethod
    def from_file(cls, path: Any) -> Inventory:
        """Read an inventory file (YAML or JSON)."""
        from roost.cluster.inventory_file import inventory_from_file

        return inventory_from_file(path)

    def first(self, count: int) -> Inventory:
        """The first nodes alone, and what is left of the groups on them."""
        groups = (replace(group, node_ranks=group.node_ranks[group.node_ranks < count]) for group in self.groups)
        return Inventory(self.nodes[:count], tuple(group for group in groups if len(group.node_ranks)))

    def to_dict(self) -> dict[str, Any]:
        """The form that `from_dict` reads; runs of equal nodes are folded."""
        from roost.cluster.inventory_file import inventory_to_dict

        return inventory_to_dict(self)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @cached_property
    def accelerator_counts(self) -> Ints:
        return np.fromiter((node.accelerators for node in self.nodes), np.int64, len(self.nodes))

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
        """What a rank of the group means: a declared device, an accelerator, or the node itself."""
        if group.ignore_hardware:
            return NODE
        if group.hardware_type is not None:
            return group.hardware_type
        return ACCELERATOR if self.accelerator_counts[group.node_ranks].any() else NODE

    def resources(self, labels: Sequence[str]) -> ResourceTable:
        """The resources of the groups in the order given, counted from 0 across all of them.

        Where one group has nothing but its nodes to count, nodes are counted in all of them.
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
