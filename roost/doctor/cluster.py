"""Probe and measure all nodes of a Ray cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.findings import counted
from roost.doctor.judge import Link, Measured, NodeHealth
from roost.doctor.probe import probe_node
from roost.runtime.probe import interface_of
from roost.runtime.ray_connection import alive_nodes, connect
from roost.runtime.ray_errors import raised_line

TIMEOUT_S = 120.0  # of the rendezvous, and of each transfer
CPU_BYTES = 16 << 20
GPU_BYTES = 256 << 20
REPEATS = 3  # after one to warm up; the fastest counts


@dataclass(frozen=True, slots=True)
class Participant:
    """A process of a measurement, with one device of a node."""

    name: str
    node: str  # Ray's id of the node


class Meter:
    """Measures bandwidth; a Ray actor for each GPU, or for each node if there are none."""

    def rendezvous(self, address: str) -> str:
        """Address and free port of this process, for rank 0."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            host = f"[{address}]" if ":" in address else address
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def measure(
        self, rank: int, world: int, init_method: str, address: str, on_gpu: bool
    ) -> tuple[float, float | None]:
        """Seconds of an all-reduce, and of sending the same tensor to the next rank; None for the last rank."""
        import torch
        from torch import distributed

        if interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(address))
        backend, device, size = ("nccl", "cuda", GPU_BYTES) if on_gpu else ("gloo", "cpu", CPU_BYTES)
        limit = timedelta(seconds=TIMEOUT_S)
        distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=limit)
        try:
            data = torch.ones(size // 4, device=device)
            reduced = min(_timed(lambda: distributed.all_reduce(data), on_gpu) for _ in range(REPEATS + 1))
            sent = None
            for source in range(world - 1):  # one pair at a time, so that no two share a link
                if rank == source:
                    sent = min(_timed(lambda: _send(data, rank + 1), on_gpu) for _ in range(REPEATS + 1))
                elif rank == source + 1:
                    for _ in range(REPEATS + 1):
                        _receive(data, source)
                distributed.barrier()
            return reduced, sent
        finally:
            with suppress(RuntimeError):
                distributed.destroy_process_group()


def _send(data: Any, target: int) -> None:
    from torch import distributed

    distributed.send(data, target)
    distributed.recv(data[:1], target)  # acknowledges that all of it has arrived


def _receive(data: Any, source: int) -> None:
    from torch import distributed

    distributed.recv(data, source)
    distributed.send(data[:1], source)


def _timed(work: Any, on_gpu: bool) -> float:
    import torch

    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured_of(
    participants: Sequence[Participant], answers: Sequence[tuple[float, float | None]], on_gpu: bool
) -> Measured:
    """Bandwidth from the seconds of all participants.

    >>> two = [Participant("a", "1"), Participant("b", "2")]
    >>> round(measured_of(two, [(0.016777216, 0.016777216), (0.02, None)], on_gpu=False).links[0].gb_s, 3)
    1.0
    """
    size, world = GPU_BYTES if on_gpu else CPU_BYTES, len(participants)
    # Each link carries 2 (n - 1) / n of the data in a ring: the bus bandwidth that NCCL's tests report.
    carried = 2 * (world - 1) / world * size
    links = [
        Link(source.name, target.name, source.node == target.node, size / seconds / 1e9)
        for (_, seconds), source, target in zip(answers, participants, participants[1:], strict=False)
        if seconds is not None
    ]
    slowest = max(seconds for seconds, _ in answers)
    return Measured("nccl" if on_gpu else "gloo", world, carried / slowest / 1e9, tuple(links))


PROBE_TIMEOUT_S = 120.0
CLOCK_TRIES = 5


class Prober:
    """Probes its node; a Ray actor on each."""

    def probe(self, name: str, folders: Sequence[Path], paths: Sequence[str], marker: Path | None) -> NodeHealth:
        return probe_node(name, folders, paths, marker, os.environ)

    def clock(self) -> float:
        return time.time()


@contextmanager
def joined(address: str | None, say: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """Connect to Ray; the value is its nodes, the driver's first."""
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
    """Probe all nodes at the same time; a failed probe becomes the node's `gpu_problem`."""
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
                health: NodeHealth = ray.get(answer, timeout=PROBE_TIMEOUT_S)
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
        cpu_processes = 2 if len(nodes) == 1 else 1  # one process alone has nothing to measure
        for index in range(gpus[node["NodeID"]] if on_gpu else cpu_processes):
            label = f"{_name(node)} GPU {index}" if on_gpu else _name(node)
            participants.append(Participant(label, node["NodeID"]))
            meters.append(actor.options(num_cpus=0, num_gpus=int(on_gpu), scheduling_strategy=_on(node)).remote())
            addresses.append(node["NodeManagerAddress"])
    if len(participants) < 2:
        return Measured("nccl" if on_gpu else "gloo")
    try:
        init_method = ray.get(meters[0].rendezvous.remote(addresses[0]), timeout=PROBE_TIMEOUT_S)
        waits = [
            meter.measure.remote(rank, len(meters), init_method, addresses[rank], on_gpu)
            for rank, meter in enumerate(meters)
        ]
        return measured_of(participants, ray.get(waits, timeout=2 * TIMEOUT_S), on_gpu)
    except ray.exceptions.RayError as error:
        return Measured("nccl" if on_gpu else "gloo", problem=f"not measured: {raised_line(error)}")
    finally:
        for meter in meters:
            ray.kill(meter)


def _has_cuda(node: dict[str, Any]) -> bool:
    """Return True if torch sees a GPU there; Ray also counts simulated ones."""

    def ask() -> bool:
        import torch

        return torch.cuda.is_available()

    remote = ray.remote(ask).options(num_cpus=0, num_gpus=1, scheduling_strategy=_on(node))
    try:
        return bool(ray.get(remote.remote(), timeout=PROBE_TIMEOUT_S))
    except ray.exceptions.RayError:
        return False


def _on(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _name(node: dict[str, Any]) -> str:
    address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
    return str(address) if host in ("", address) else f"{address} ({host})"


def _clock_offset(prober: Any) -> float:
    """Seconds by which the node's clock is ahead, measured in the fastest of a few round trips."""
    seen = []
    for _ in range(CLOCK_TRIES):
        before = time.time()
        there: float = ray.get(prober.clock.remote(), timeout=PROBE_TIMEOUT_S)
        after = time.time()
        seen.append((after - before, there - (before + after) / 2))
    return min(seen)[1]
