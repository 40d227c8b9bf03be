"""Measure all-reduce and point-to-point bandwidth in a process of each participant."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from roost.doctor.judge import Link, Measured
from roost.runtime.probe import interface_of

LIMIT_S = 120.0  # to meet, and for each transfer
CPU_BYTES = 16 << 20
GPU_BYTES = 256 << 20
TIMES = 3  # the fastest counts


@dataclass(frozen=True, slots=True)
class Participant:
    """A process that takes part, on a device of a node."""

    name: str
    node: str  # Ray's id of the node


class Meter:
    """Takes part in a measurement; a Ray actor on each device, or on each node without any."""

    def rendezvous(self, address: str) -> str:
        """Address and free port of this process, for rank 0."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            host = f"[{address}]" if ":" in address else address
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def measure(
        self, rank: int, world: int, init_method: str, address: str, on_gpu: bool
    ) -> tuple[float, float | None]:
        """Seconds of an all-reduce, and of sending the same to the next rank; None for the last rank."""
        import torch
        from torch import distributed

        if interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(address))
        backend, device, size = ("nccl", "cuda", GPU_BYTES) if on_gpu else ("gloo", "cpu", CPU_BYTES)
        limit = timedelta(seconds=LIMIT_S)
        distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=limit)
        try:
            data = torch.ones(size // 4, device=device)
            reduced = min(_timed(lambda: distributed.all_reduce(data), on_gpu) for _ in range(TIMES + 1))
            sent = None
            for source in range(world - 1):  # one pair at a time, so that none shares a link with another
                if rank == source:
                    sent = min(_timed(lambda: _send(data, rank + 1), on_gpu) for _ in range(TIMES + 1))
                elif rank == source + 1:
                    for _ in range(TIMES + 1):
                        _receive(data, source)
                distributed.barrier()
            return reduced, sent
        finally:
            with suppress(RuntimeError):
                distributed.destroy_process_group()


def _send(data: Any, target: int) -> None:
    from torch import distributed

    distributed.send(data, target)
    distributed.recv(data[:1], target)  # the other has all of it


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
