"""RLinf's side of one measurement, run by the interpreter that has `rlinf`: `peer_rlinf.py NODES`.

Prints one JSON object. Its planner asks a cluster for its nodes and groups only, so a described one is enough. Imports
are done before the clock starts, and logging is off, because it writes every placement to the terminal.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class DescribedCluster:
    """The cluster interface of the peer's planner, for machines that do not exist."""

    nodes: list[Any]
    groups: dict[str, Any]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        return len(self.nodes) * GPUS_PER_NODE

    def get_node_group(self, label: str | None = None) -> Any:
        return self.groups.get(label or "cluster")

    def get_node_info(self, node_rank: int) -> Any:
        return self.nodes[node_rank]


def describe_cluster(count: int) -> DescribedCluster:
    from rlinf.scheduler.cluster.node import NodeGroupInfo
    from rlinf.scheduler.hardware import Accelerator

    nodes = [describe_node(rank, Accelerator.HW_TYPE) for rank in range(count)]
    groups = (NodeGroupInfo("cluster", nodes), NodeGroupInfo("node", nodes, ignore_hardware=True))
    return DescribedCluster(nodes, {group.label: group for group in groups})


def describe_node(rank: int, kind: str) -> Any:
    from rlinf.scheduler.cluster.node import NodeInfo
    from rlinf.scheduler.hardware import HardwareInfo, HardwareResource

    devices = [HardwareInfo(type=kind, model="NV_GPU:H100") for _ in range(GPUS_PER_NODE)]
    return NodeInfo(
        node_labels=["cluster"],
        node_rank=rank,
        ray_id=str(rank),
        node_ip="",
        num_cpus=1,
        python_interpreter_path=sys.executable,
        default_env_vars={},
        env_vars={},
        hardware_resources=[HardwareResource(type=kind, infos=devices)],
    )


def timed(count: int) -> tuple[float, list[Any]]:
    from omegaconf import OmegaConf
    from rlinf.utils.placement import HybridComponentPlacement

    cluster = {"num_nodes": count, "num_gpus_per_node": GPUS_PER_NODE, "component_placement": {"actor": "all"}}
    config = OmegaConf.create({"cluster": cluster})
    cluster = describe_cluster(count)
    start = time.perf_counter()
    placements = HybridComponentPlacement(config, cluster).get_strategy("actor").get_placement(cluster)
    return time.perf_counter() - start, placements


def main() -> None:
    start = time.perf_counter()
    importlib.import_module("rlinf.utils.placement")
    import_seconds = time.perf_counter() - start
    logging.disable(logging.CRITICAL)
    timed(1)
    seconds, placements = timed(int(sys.argv[1]))
    rows = [(made.rank, made.cluster_node_rank, made.local_hardware_ranks) for made in placements]
    print(json.dumps({"seconds": seconds, "import_seconds": import_seconds, "rows": rows}))


if __name__ == "__main__":
    main()
