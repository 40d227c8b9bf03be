"""Probe and measure all nodes of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.findings import counted
from roost.doctor.bandwidth import LIMIT_S, Meter, Participant, measured_of
from roost.doctor.judge import Measured, NodeHealth
from roost.doctor.probe import probe_node
from roost.runtime.ray_connection import alive_nodes, connect
from roost.runtime.ray_errors import raised_line

PROBE_LIMIT_S = 120.0
CLOCK_TRIES = 5
PAIR = 2  # processes that measure a single machine without GPUs


class Prober:
    """Probes its node; a Ray actor on each."""

    def probe(self, name: str, folders: Sequence[Path], paths: Sequence[str], marker: Path | None) -> NodeHealth:
        return probe_node(name, folders, paths, marker, os.environ)

    def clock(self) -> float:
        return time.time()


@contextmanager
def joined(address: str | None, say: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """Context with a connection to Ray and its nodes, the driver's first."""
    connection = connect(address, say)
    try:
        driver = ray.get_runtime_context().get_node_id()
        nodes = sorted(alive_nodes(), key=lambda node: (node["NodeID"] != driver, node["NodeManagerAddress"]))
        if connection.local is None:
            say(f"joined the Ray at {connection.address}: {counted(len(nodes), 'node')}")
        else:
            say("no Ray is named or found: this machine alone is checked; name one with --address HOST:PORT")
        yield nodes
    finally:
        connection.close()


def probe_nodes(
    nodes: Sequence[dict[str, Any]], folders: Sequence[Path], paths: Sequence[str], runs: Path
) -> list[NodeHealth]:
    """Probe every node at the same time; a node whose probe fails is reported as such."""
    marker = None
    if len(nodes) > 1:
        runs.mkdir(parents=True, exist_ok=True)
        marker = runs.absolute() / f".roost-doctor-{uuid4().hex}"
        marker.touch()
    actor: Any = ray.remote(Prober)
    try:
        probers = [actor.options(num_cpus=0, scheduling_strategy=_on(node)).remote() for node in nodes]
        answers = [
            prober.probe.remote(_name(node), folders, paths, marker)
            for prober, node in zip(probers, nodes, strict=True)
        ]
        found = []
        for node, prober, answer in zip(nodes, probers, answers, strict=True):
            try:
                health: NodeHealth = ray.get(answer, timeout=PROBE_LIMIT_S)
                found.append(replace(health, clock_offset_s=_clock_offset(prober)))
            except ray.exceptions.RayError as error:
                found.append(NodeHealth(_name(node), gpu_problem=f"the probe failed: {raised_line(error)}"))
        return found
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)


def measure(nodes: Sequence[dict[str, Any]]) -> Measured:
    """Bandwidth between the GPUs of all nodes, or between nodes on CPUs."""
    gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in nodes}
    on_gpu = any(gpus.values()) and _has_cuda(next(node for node in nodes if gpus[node["NodeID"]]))
    actor: Any = ray.remote(Meter)
    participants, addresses = [], []
    meters: list[Any] = []
    for node in nodes:
        without = PAIR if len(nodes) == 1 else 1
        for index in range(gpus[node["NodeID"]] if on_gpu else without):
            label = f"{_name(node)} GPU {index}" if on_gpu else _name(node)
            participants.append(Participant(label, node["NodeID"]))
            meters.append(actor.options(num_cpus=0, num_gpus=int(on_gpu), scheduling_strategy=_on(node)).remote())
            addresses.append(node["NodeManagerAddress"])
    if len(participants) < 2:
        return Measured("nccl" if on_gpu else "gloo")
    try:
        init_method = ray.get(meters[0].rendezvous.remote(addresses[0]), timeout=PROBE_LIMIT_S)
        waits = [
            meter.measure.remote(rank, len(meters), init_method, addresses[rank], on_gpu)
            for rank, meter in enumerate(meters)
        ]
        return measured_of(participants, ray.get(waits, timeout=2 * LIMIT_S), on_gpu)
    except ray.exceptions.RayError as error:
        return Measured("nccl" if on_gpu else "gloo", problem=f"not measured: {raised_line(error)}")
    finally:
        for meter in meters:
            ray.kill(meter)


def _has_cuda(node: dict[str, Any]) -> bool:
    """Return True if torch sees a GPU there: Ray also counts simulated ones."""

    def ask() -> bool:
        import torch

        return torch.cuda.is_available()

    remote = ray.remote(ask).options(num_cpus=0, num_gpus=1, scheduling_strategy=_on(node))
    try:
        return bool(ray.get(remote.remote(), timeout=PROBE_LIMIT_S))
    except ray.exceptions.RayError:
        return False


def _on(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _name(node: dict[str, Any]) -> str:
    address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
    return str(address) if host in ("", address) else f"{address} ({host})"


def _clock_offset(prober: Any) -> float:
    """Seconds by which the node's clock is ahead, from the fastest of a few round trips."""
    seen = []
    for _ in range(CLOCK_TRIES):
        before = time.time()
        there: float = ray.get(prober.clock.remote(), timeout=PROBE_LIMIT_S)
        after = time.time()
        seen.append((after - before, there - (before + after) / 2))
    return min(seen)[1]
