"""A component in a plan: its processes, the table of their placements, and its mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry
from roost.cluster.inventory import ACCELERATOR, NODE, Ints, Inventory
from roost.config.findings import counted
from roost.config.job import MeshSizes, ModelUse, ParallelSizes, Role, Sharding, family
from roost.config.ranks import spell_nodes
from roost.placement.placement import Placement

Bools = npt.NDArray[np.bool_]

# A fix for a model in float32. RLinf's own key is precision, ROLL's dtype.
IN_16_BITS = "write compute_dtype: bfloat16 in train (or the notation's own key)"
# Components that decide the mode. Rewards and references do not: whatever they share, the mode stays the same.
LOOP_COMPONENTS = ("actor", "rollout", "inference", "env", "student_train", "student_infer")


def offsets_of(lengths: Ints) -> Ints:
    """Offsets into device columns, for processes with these numbers of devices.

    >>> offsets_of(np.array([2, 1])).tolist()
    [0, 2, 3]
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@dataclass(frozen=True, eq=False)
class PlacementTable(Sequence[Placement]):
    """The processes of one component in rank order.

    Process i runs on node `nodes[i]` for group `labels[groups[i]]` and holds the devices
    `offsets[i]:offsets[i + 1]` of `device_nodes` and `device_ranks`.
    """

    inventory: Inventory
    labels: tuple[str, ...]
    kinds: tuple[str, ...]  # resource kind of each group
    nodes: Ints
    groups: Ints
    offsets: Ints
    device_nodes: Ints
    device_ranks: Ints
    isolate: bool = True

    def __post_init__(self) -> None:
        for column in (self.nodes, self.groups, self.offsets, self.device_nodes, self.device_ranks):
            column.flags.writeable = False  # plans are immutable

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def owners(self) -> Ints:
        """Process of each device."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def device_numbers(self) -> Ints:
        """Cluster-wide number of each device that is an accelerator."""
        return self.inventory.first_accelerators[self.device_nodes] + self.device_ranks

    @cached_property
    def processes_on_accelerators(self) -> Ints:
        """Number of processes on each accelerator of the cluster; robots and nodes do not count."""
        if ACCELERATOR not in self.kinds:
            return np.zeros(self.inventory.num_accelerators, np.int64)
        is_accelerator = np.array([kind == ACCELERATOR for kind in self.kinds])[self.groups]
        held = self.device_numbers[np.repeat(is_accelerator, np.diff(self.offsets))]
        return np.bincount(held, minlength=self.inventory.num_accelerators)

    @cached_property
    def local(self) -> tuple[Ints, Ints, Ints]:
        """For each process: index on its node, processes on that node, and index of the node among those used."""
        return _local_ranks(self.nodes)

    @overload
    def __getitem__(self, index: int) -> Placement: ...
    @overload
    def __getitem__(self, index: slice) -> list[Placement]: ...
    def __getitem__(self, index: int | slice) -> Placement | list[Placement]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return list(self._rows(start, max(start, stop)))[::step] if step > 0 else list(self)[index]
        position = range(len(self))[index]
        return next(self._rows(position, position + 1))

    def __iter__(self) -> Iterator[Placement]:
        return self._rows(0, len(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlacementTable):
            return NotImplemented
        mine, theirs = ((table.nodes, table.offsets, table.device_nodes, table.device_ranks) for table in (self, other))
        return (
            all(np.array_equal(one, two) for one, two in zip(mine, theirs, strict=True))
            and self.isolate == other.isolate
            and self._label_column() == other._label_column()
            and self.inventory == other.inventory
        )

    __hash__ = None  # type: ignore[assignment]  # compares by value and holds arrays

    def _label_column(self) -> list[str]:
        return [self.labels[index] for index in self.groups.tolist()]

    def _rows(self, start: int, stop: int) -> Iterator[Placement]:
        """Rows of a range of processes; converting whole columns at once is many times faster than row by row."""
        span, first = slice(start, stop), int(self.offsets[start])
        device_span = slice(first, int(self.offsets[stop]))
        ranks = self.device_ranks[device_span].tolist()
        devices = list(zip(self.device_nodes[device_span].tolist(), ranks, strict=True))
        bounds = (self.offsets[start : stop + 1] - first).tolist()
        local_ranks, local_sizes, node_indices = (column[span].tolist() for column in self.local)
        nodes = self.nodes[span].tolist()
        labels = [self.labels[group] for group in self.groups[span].tolist()]
        columns = zip(nodes, node_indices, local_ranks, local_sizes, labels, bounds[:-1], bounds[1:], strict=True)
        machines = self.inventory.nodes
        names = [str(rank) for rank in ranks] if self._sees_its_own_devices else []
        for rank, (node, node_index, local_rank, local_size, label, low, high) in enumerate(columns, start):
            if names:
                here, visible = ranks[low:high], names[low:high]
            else:
                here = [index for on, index in devices[low:high] if on == node]
                visible = self._visible(label, here, machines[node].accelerators)
            yield Placement(
                rank, node, node_index, int(visible[0]) if visible else -1, machines[node].accelerator_type,
                local_rank, local_size, visible, self.isolate, here, label, devices[low:high],
            )  # fmt: skip

    @cached_property
    def _sees_its_own_devices(self) -> bool:
        """Return True if every process sees exactly its own devices, on its node and ascending, as in most tables."""
        owners = self.owners
        is_ascending = (owners[1:] != owners[:-1]) | (self.device_ranks[1:] > self.device_ranks[:-1])
        return (
            self.isolate
            and set(self.kinds) == {ACCELERATOR}
            and bool(is_ascending.all())
            and np.array_equal(self.device_nodes, self.nodes[owners])
        )

    def _visible(self, label: str, here: list[int], accelerators: int) -> list[str]:
        holds_accelerators = self.kinds[self.labels.index(label)] == ACCELERATOR
        shown = sorted(here) if self.isolate and holds_accelerators else range(accelerators)
        return [str(index) for index in shown]


def _local_ranks(nodes: Ints) -> tuple[Ints, Ints, Ints]:
    """Index on the node, processes on the node, and index of the node in order of first use."""
    count = len(nodes)
    if count == 0:
        return nodes, nodes, nodes
    is_sorted = bool(np.all(nodes[1:] >= nodes[:-1]))
    order = np.arange(count) if is_sorted else np.argsort(nodes, kind="stable")
    by_node = nodes[order]
    starts = np.flatnonzero(np.concatenate([[True], by_node[1:] != by_node[:-1]]))
    sizes = np.diff(np.append(starts, count))
    run = np.repeat(np.arange(len(starts)), sizes)
    local, size, node_index = (np.empty(count, np.int64) for _ in range(3))
    local[order] = np.arange(count) - starts[run]
    size[order] = sizes[run]
    # A node's first process is the first of its run, because the sort is stable.
    index_of_run = np.empty(len(starts), np.int64)
    index_of_run[np.argsort(order[starts], kind="stable")] = np.arange(len(starts))
    node_index[order] = index_of_run[run]
    return local, size, node_index


class PlacementMode(StrEnum):
    """How components share devices; a job without engines or without learners has a mode of its own."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"
    HYBRID = "hybrid"
    AUTO = "auto"  # RLinf's auto_scheduler
    TRAINING_ONLY = "training-only"
    INFERENCE_ONLY = "inference-only"


def mode_of(held: Mapping[str, Bools], roles: Mapping[str, Role]) -> PlacementMode:
    """The mode of components that hold these accelerators of the cluster (one flag for each accelerator).

    Collocated if all hold the same ones, disaggregated if no two share any, hybrid otherwise.

    >>> first, second, both = (np.array(flags) for flags in ([True, False], [False, True], [True, True]))
    >>> roles = {"actor": Role.LEARNER, "rollout": Role.ENGINE}
    >>> [mode_of({"actor": both, "rollout": other}, roles).value for other in (both, first)]
    ['collocated', 'hybrid']
    >>> mode_of({"actor": first, "rollout": second}, roles).value
    'disaggregated'
    >>> mode_of({"actor": both}, {"actor": Role.LEARNER}).value
    'training-only'
    >>> mode_of({"actor": both, "rollout.prefill": first, "rollout.decode": second}, {}).value
    'collocated'
    """
    taking_part = [name for name, flags in held.items() if flags.any() and family(name) in LOOP_COMPONENTS]
    taking_part = taking_part or [name for name, flags in held.items() if flags.any()]
    for role, other, mode in (
        (Role.LEARNER, Role.ENGINE, PlacementMode.TRAINING_ONLY),
        (Role.ENGINE, Role.LEARNER, PlacementMode.INFERENCE_ONLY),
    ):
        if other not in roles.values() and taking_part and all(roles.get(name) is role for name in taking_part):
            return mode
    whole: dict[str, Bools] = {}  # the parts of a component count as one
    for name in taking_part:
        whole[family(name)] = held[name] | whole.get(family(name), held[name])
    sets = list(whole.values())
    if all(np.array_equal(sets[0], other) for other in sets[1:]):
        return PlacementMode.COLLOCATED
    return PlacementMode.DISAGGREGATED if np.sum(sets, axis=0).max() == 1 else PlacementMode.HYBRID


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a component with its placement, environment, interpreter and devices."""

    placement: Placement
    start_env: Mapping[str, str]  # the user's variables and those of the accelerator's vendor
    interpreter: str | None
    hardware: tuple[Mapping[str, Any], ...] = ()  # configs of its declared devices
    masks: Mapping[str, str] = field(default_factory=dict)  # visible devices (CUDA_VISIBLE_DEVICES), as planned

    @property
    def env(self) -> dict[str, str]:
        return {**self.start_env, **self.masks}


def mesh_of(sizes: ParallelSizes, ranks: int) -> MeshSizes | None:
    """The device mesh of so many ranks; None if the sizes do not divide them."""
    try:
        return MeshSizes.of(sizes, ranks)
    except ValueError:
        return None


@dataclass(frozen=True, eq=False)
class ComponentPlan:
    """One component of a plan."""

    name: str
    written_name: str
    strategy: str
    hardware_ranks: Ints
    table: PlacementTable
    parallel: ParallelSizes = field(default_factory=ParallelSizes)
    env: tuple[tuple[str, str], ...] = ()
    role: Role = Role.HELPER
    model: ModelUse = field(default_factory=ModelUse)
    managed_by: str | None = None  # the component whose process 0 starts and stops this one's processes
    registry: HardwareRegistry = BUILT_IN  # known accelerators; not part of the plan's value

    @property
    def world_size(self) -> int:
        return len(self.table)

    @property
    def extent(self) -> str:
        """Number of processes, and their nodes."""
        nodes = np.unique(self.table.nodes).tolist()
        return f"{counted(len(self.table), 'process')} on {spell_nodes(nodes)}"

    @property
    def mesh(self) -> MeshSizes | None:
        """The device mesh of a learner or scorer; None if its sizes do not divide its ranks."""
        return mesh_of(self.parallel, len(self.table))

    @property
    def sharded_mesh(self) -> MeshSizes | None:
        """The mesh of a learner or scorer with FSDP; None for other shardings."""
        is_sharded = self.role in (Role.LEARNER, Role.SCORER) and self.model.sharding is Sharding.FULL
        return self.mesh if is_sharded else None

    @property
    def node_groups(self) -> tuple[str, ...]:
        return self.table.labels

    @property
    def is_float32(self) -> bool:
        """Return True if a model computes in 32 bits. A learner may keep weights in 32 bits and compute in 16."""
        return (self.model.compute_bytes if self.role is Role.LEARNER else self.model.weight_bytes) == 4

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComponentPlan):
            return NotImplemented
        return (
            self._values() == other._values()
            and np.array_equal(self.hardware_ranks, other.hardware_ranks)
            and self.table == other.table
        )

    __hash__ = None  # type: ignore[assignment]  # compares by value and holds arrays

    def _values(self) -> tuple[object, ...]:
        return (
            self.name,
            self.written_name,
            self.strategy,
            self.parallel,
            self.env,
            self.role,
            self.model,
            self.managed_by,
        )

    def processes(self) -> Iterator[Process]:
        """The processes in rank order."""
        return map(self._process, self.table)

    def process(self, rank: int) -> Process:
        """The process of a rank."""
        return self._process(self.table[rank])

    def _process(self, placement: Placement) -> Process:
        inventory = self.table.inventory
        software = inventory.group(placement.node_group_label).software_of(placement.cluster_node_rank)
        kind = self.table.kinds[self.table.labels.index(placement.node_group_label)]
        hardware = inventory.nodes[placement.cluster_node_rank].hardware
        declared = hardware.get(kind, ()) if kind not in (ACCELERATOR, NODE) else ()
        vendor = self.registry.accelerator(placement.accelerator_type) if placement.visible_accelerators else None
        return Process(
            placement,
            start_env={**dict(software.env_vars), **dict(vendor.extra_environment if vendor else ()), **dict(self.env)},
            interpreter=software.python_interpreter_path,
            hardware=tuple(declared[rank] for rank in placement.local_hardware_ranks) if declared else (),
            masks=vendor.masks(placement.visible_accelerators) if vendor else {},
        )
