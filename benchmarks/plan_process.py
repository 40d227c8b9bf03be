"""Roost's side of one measurement, in a process of its own: `plan_process.py growth|placements NODES`.

Prints one JSON object. Imports are done before the clock starts.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

GPUS_PER_NODE = 8


def config(nodes: int) -> dict[str, Any]:
    """One process on every accelerator of the cluster."""
    cluster = {"num_nodes": nodes, "num_gpus_per_node": GPUS_PER_NODE, "component_placement": {"actor": "all"}}
    return {"cluster": cluster}


def measure_growth(nodes: int) -> dict[str, Any]:
    """A plan in a fresh process, with the columns that are otherwise derived on demand; a one-node plan first."""
    from roost import plan

    plan(config(1))  # imports what plans need
    config_of_size = config(nodes)
    start = time.perf_counter()
    made = plan(config_of_size)
    table = made["actor"].table
    _ = table.local
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "processes": len(table), "peak_mb": peak_mb()}


def measure_placements(nodes: int) -> dict[str, Any]:
    """A list of placements from a config and an inventory; a one-node plan first, as on the peer's side."""
    start = time.perf_counter()
    from omegaconf import OmegaConf

    from roost import HybridComponentPlacement, Inventory

    import_seconds = time.perf_counter() - start

    def timed(count: int) -> tuple[float, list[Any]]:
        config_of_size = OmegaConf.create(config(count))
        inventory = Inventory.from_dict({"nodes": [{"accelerators": GPUS_PER_NODE} for _ in range(count)]})
        begun = time.perf_counter()
        placements = HybridComponentPlacement(config_of_size, inventory).get_strategy("actor").get_placement(inventory)
        return time.perf_counter() - begun, placements

    timed(1)
    seconds, placements = timed(nodes)
    rows = [(made.rank, made.cluster_node_rank, made.local_hardware_ranks) for made in placements]
    return {"seconds": seconds, "import_seconds": import_seconds, "rows": rows}


def peak_mb() -> float:
    """The most memory that this process held at once.

    On Linux `getrusage` starts from the peak of the process that started this one, so the kernel's own mark is read.
    """
    if sys.platform == "linux":
        marks = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(marks["VmHWM"].split()[0]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def main() -> None:
    what, nodes = sys.argv[1], int(sys.argv[2])
    measure = {"growth": measure_growth, "placements": measure_placements}[what]
    print(json.dumps(measure(nodes)))


if __name__ == "__main__":
    main()
