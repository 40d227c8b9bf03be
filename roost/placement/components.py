"""Place the components of a job, with strategies for device lists and worker counts (ROLL, ml-loop)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roost.cluster.describe import describe, known_hardware
from roost.cluster.hardware.registry import BUILT_IN
from roost.cluster.inventory import ACCELERATOR, Ints, Inventory
from roost.config.compose import load
from roost.config.findings import Findings, Where, bug, did_you_mean
from roost.config.job import Component, CpuWorkers, DeviceList, Job, Layout, Notation, RankMap
from roost.config.node_groups import CLUSTER_GROUP, NODE_GROUP
from roost.config.notations.notation import read_job
from roost.placement.component_plan import PlacementMode, PlacementTable, mode_of
from roost.placement.model_parallel import Bound, lay_out
from roost.placement.rank_map import BoundRanks, bind_rank_map
from roost.placement.strategies import (
    PlacementStrategy,
    check_count,
    check_has_devices,
    check_in_range,
    check_ranks,
    inventory_of,
    without_devices,
)


@dataclass(frozen=True, eq=False)
class ListedPlacementStrategy(PlacementStrategy):
    """Splits a list of accelerators into processes, in the given order.

    A process may span nodes; it runs on the node of its first device.

    >>> inventory = Inventory.from_dict({"nodes": [{"accelerators": 4}, {"accelerators": 4}]})
    >>> [p.devices for p in ListedPlacementStrategy([7, 0, 3, 4], 2).get_placement(inventory)]
    [[(1, 3), (0, 0)], [(0, 3), (1, 0)]]
    """

    devices: Ints
    num_hardware_per_process: int = 1
    labels: tuple[str, ...] = (CLUSTER_GROUP,)

    def __init__(self, devices: Sequence[int], num_hardware_per_process: int = 1) -> None:
        check_ranks(np.array(devices, np.int64) if isinstance(devices, range) else devices, "the strategy")
        check_count(num_hardware_per_process, "num_hardware_per_process")
        object.__setattr__(self, "devices", np.array(devices, np.int64))
        object.__setattr__(self, "num_hardware_per_process", num_hardware_per_process)

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        fix = "plan on machines that have some, or give world_size instead of devices"
        if table is None or not check_has_devices(table, findings, where, fix):
            return None
        if not check_in_range(self.devices, table, findings, where, "device"):
            return None
        # The last process takes the remainder, if the list does not divide evenly.
        offsets = np.append(np.arange(0, len(self.devices), self.num_hardware_per_process), len(self.devices))
        nodes, local = table.locate(self.devices)
        first = offsets[:-1]
        return PlacementTable(
            inventory,
            table.labels,
            table.kinds,
            nodes[first],
            np.zeros(len(first), np.int64),
            offsets,
            nodes,
            local,
            isolate,
        )


@dataclass(frozen=True)
class SpreadPlacementStrategy(PlacementStrategy):
    """Spreads processes without devices round robin over all nodes.

    >>> inventory = Inventory.from_dict({"nodes": [{}, {}]})
    >>> [p.cluster_node_rank for p in SpreadPlacementStrategy(3).get_placement(inventory)]
    [0, 1, 0]
    """

    world_size: int
    labels: tuple[str, ...] = (NODE_GROUP,)

    def __post_init__(self) -> None:
        check_count(self.world_size, "world_size")

    def place(
        self, inventory: Inventory, findings: Findings, where: Where = Where(), isolate: bool = True
    ) -> PlacementTable | None:
        table = self._resources(inventory, findings, where)
        if table is None:
            return None
        nodes = np.arange(self.world_size) % inventory.num_nodes
        return without_devices(inventory, table, nodes, np.zeros(self.world_size, np.int64), isolate)


@dataclass(frozen=True, eq=False)
class PlacedComponent:
    """A component with its strategy, resource ranks and placements."""

    component: Component
    strategy: PlacementStrategy
    hardware_ranks: Ints
    table: PlacementTable


@dataclass(frozen=True, eq=False)
class PlacedJob:
    """All placed components of a job, and the placement mode."""

    mode: PlacementMode
    components: tuple[PlacedComponent, ...]


def place_job(job: Job, inventory: Inventory, findings: Findings, isolate: bool = True) -> PlacedJob | None:
    """Place every component of a job; None if findings prevent it."""
    errors = findings.num_errors
    strategies: dict[str, tuple[PlacementStrategy, Ints]] = {}
    bound: dict[str, BoundRanks] = {}
    # Components placed by one config line share its strategy and table.
    by_line: dict[int, BoundRanks | None] = {}
    for component in job.components:
        if isinstance(component.requested, RankMap):
            if id(component.requested) not in by_line:
                by_line[id(component.requested)] = bind_rank_map(component.requested, inventory, findings)
            ranks = by_line[id(component.requested)]
            if ranks is not None:
                bound[component.name] = ranks
                strategies[component.name] = (ranks.strategy, ranks.hardware_ranks)
        else:
            strategies[component.name] = _listed_strategy(component.requested)
    layout = None
    if job.layout is Layout.AS_WRITTEN and job.model_parallel.auto_scheduler:
        where = job.source.where(("cluster", "auto_scheduler"))
        findings.warn(
            "RST-P003",
            where,
            "is not used",
            "the ranks are placed as written",
            "remove it, or plan with --layout model_parallel",
        )
    if job.layout is Layout.MODEL_PARALLEL and findings.num_errors == errors:
        layout = lay_out(job, _on_accelerators(job, bound, inventory), inventory.num_accelerators, findings)
        for name, strategy in (layout.strategies if layout else {}).items():
            strategies[name] = (strategy, strategies[name][1])
    placed = []
    tables: dict[int, PlacementTable | None] = {}
    for component in job.components:
        if component.name not in strategies:
            continue  # already reported
        own, ranks_named = strategies[component.name]
        if id(own) not in tables:
            tables[id(own)] = own.place(inventory, findings, _ranks_where(component), isolate)
        table = tables[id(own)]
        if table is not None:
            placed.append(PlacedComponent(component, own, ranks_named, table))
    if findings.num_errors > errors:
        return None
    held = {part.component.name: part.table.processes_on_accelerators > 0 for part in placed}
    roles = {part.component.name: part.component.role for part in placed}
    return PlacedJob(layout.mode if layout else mode_of(held, roles), tuple(placed))


def _ranks_where(component: Component) -> Where:
    return component.requested.where if isinstance(component.requested, RankMap) else component.where


def _listed_strategy(requested: DeviceList | CpuWorkers) -> tuple[PlacementStrategy, Ints]:
    if isinstance(requested, CpuWorkers):
        return SpreadPlacementStrategy(requested.count), np.zeros(0, np.int64)
    return ListedPlacementStrategy(requested.devices, requested.per_process), np.array(requested.devices, np.int64)


def _on_accelerators(job: Job, bound: Mapping[str, BoundRanks], inventory: Inventory) -> dict[str, Bound]:
    """The components placed on accelerators, with the cluster-wide numbers of these."""
    found = {}
    for component in job.components:
        ranks = bound.get(component.name)
        if ranks is not None and set(ranks.table.kinds) == {ACCELERATOR}:
            nodes, local = ranks.table.locate(ranks.hardware_ranks)
            found[component.name] = Bound(component, ranks, inventory.first_accelerators[nodes] + local)
    return found


class ComponentPlacement:
    """The placement that `cluster.component_placement` of a config describes.

    The config is a dict, an OmegaConf DictConfig or the path of a file. The cluster is a live one or an `Inventory`;
    without one, the config describes it (`num_nodes`, `num_gpus_per_node`). All mistakes are raised as one
    `ConfigError`.

    >>> placement = ComponentPlacement({"cluster": {"num_nodes": 1, "num_gpus_per_node": 4,
    ...                                             "component_placement": {"actor,rollout": "0-3"}}})
    >>> placement.components, placement.get_world_size("actor"), placement.get_hardware_ranks("rollout")
    (['actor', 'rollout'], 4, [0, 1, 2, 3])
    """

    layout = Layout.AS_WRITTEN

    def __init__(self, config: Mapping[str, Any] | str | Path, cluster: Any = None) -> None:
        findings = Findings()
        source = load(config, (), findings)
        job = read_job(source, findings, Notation.RLINF, self.layout) if source is not None else None
        known = inventory_of(cluster) if cluster is not None else None
        hardware = known_hardware(job, known, findings) if job is not None else BUILT_IN
        inventory = describe(job, findings, known, registry=hardware) if job is not None else None
        placed = place_job(job, inventory, findings) if job is not None and inventory is not None else None
        findings.raise_errors()
        if placed is None or job is None or inventory is None:
            raise bug("there is no placement, and no finding says why")
        self.job = job
        self.inventory = inventory
        self.warnings = findings.warnings
        self._placed = {part.component.name: part for part in placed.components}
        self._mode = placed.mode

    @property
    def placement_mode(self) -> PlacementMode:
        return self._mode

    @property
    def components(self) -> list[str]:
        return list(self._placed)

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """The resource ranks named for a component."""
        ranks: list[int] = self._component(component_name).hardware_ranks.tolist()
        return ranks

    def get_world_size(self, component_name: str) -> int:
        """Number of processes of the component."""
        return len(self._component(component_name).table)

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """The strategy to launch the component with."""
        return self._component(component_name).strategy

    def _component(self, name: str) -> PlacedComponent:
        if name not in self._placed:
            findings = Findings()
            findings.error(
                "RST-P001",
                Where(),
                f"there is no component {name}",
                did_you_mean(name, self._placed),
                f"components: {', '.join(self._placed)}",
            )
            findings.raise_errors()
        return self._placed[name]


class HybridComponentPlacement(ComponentPlacement):
    """Components on any sets of resources, exactly as written."""

    @property
    def placement_mode(self) -> PlacementMode:
        return PlacementMode.HYBRID


class ModelParallelComponentPlacement(ComponentPlacement):
    """Actor, rollout and optionally inference and critic, split by the parallel sizes of their models.

    >>> sizes = {"actor": {"model": {"tensor_model_parallel_size": 4}}, "rollout": {"tensor_parallel_size": 2}}
    >>> cluster = {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}}
    >>> placement = ModelParallelComponentPlacement({"cluster": cluster, **sizes})
    >>> placement.placement_mode.value, placement.get_strategy("rollout").hardware_ranks_list
    ('collocated', [[0, 2], [1, 3], [4, 6], [5, 7]])
    """

    layout = Layout.MODEL_PARALLEL

    @property
    def is_collocated(self) -> bool:
        return self._mode is PlacementMode.COLLOCATED

    @property
    def is_disaggregated(self) -> bool:
        return self._mode is PlacementMode.DISAGGREGATED

    @property
    def is_auto(self) -> bool:
        return self._mode is PlacementMode.AUTO

    @property
    def is_pipeline(self) -> bool:
        return self.is_disaggregated or self.is_auto

    @property
    def has_dedicated_inference(self) -> bool:
        return self.is_pipeline and bool({"inference", "actor_inference"} & self._placed.keys())
