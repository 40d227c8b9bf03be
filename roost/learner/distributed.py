"""The process group of a learner's ranks, and reductions over it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from roost.net.bound_store import file_store, tcp_store
from roost.procs.files import DiskFull

LIMIT_S = 600.0  # timeout of collectives
ALIGNMENT = 16  # bytes
T = TypeVar("T")
MAXIMUM = "max/"  # prefix of statistics that are reduced by maximum instead of sum


def init_distributed(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device: torch.device,
    limit_s: float = LIMIT_S,
    file: Path | None = None,
) -> None:
    """Join the process group of all ranks. They rendezvous at a new private file if given, else at the address."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not among the {world_size} ranks from 0")
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=limit_s)
    is_first = rank == 0
    dist.init_process_group(
        # Reductions of small host values must not wait for the device.
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=file_store(file, world_size, limit) if file else tcp_store(address, port, world_size, is_first, limit),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )


def close_distributed() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def patient_group(limit_s: float) -> Iterator[Any]:
    """A group of all ranks with its own timeout, which may be longer than that of others; None with a single rank."""
    if world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def results_of_ranks(act: Callable[[], T], group: Any) -> list[T]:
    """Call a function on each rank of a group and return all results; an error of one rank is raised on all.

    Without a group it is called on this rank alone.
    """
    given: T | None = None
    problem: Exception | None = None
    try:
        given = act()
    except Exception as error:
        # Errors of other types may not survive pickling.
        known = isinstance(error, OSError | DiskFull)
        problem = error if known or group is None else RuntimeError(f"{type(error).__name__}: {error}")
    of_ranks: list[Any] = [(given, problem)]
    if group is not None:
        of_ranks = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, (given, problem), group=group)
    for _, failed in of_ranks:
        if failed is not None:
            raise failed
    return [found for found, _ in of_ranks]


def max_over_ranks(count: int) -> int:
    """The largest count of all ranks."""
    if world_size() == 1:
        return count
    number = torch.tensor(count)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def reduced_over_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Statistics of all ranks, reduced as `reduced` does; a rank without work may omit names."""
    if world_size() == 1:
        return dict(metrics)
    of_ranks: list[Mapping[str, float]] = [{}] * world_size()
    dist.all_gather_object(of_ranks, dict(metrics))
    return reduced(of_ranks)


def gathered(own: T, group: Any) -> list[T]:
    """Objects of all ranks of a group; this rank's is the same object. Arrays are sent without pickling."""
    lengths, payload = flattened(own)
    of_ranks: list[list[int]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, lengths, group=group)
    received = torch.empty(len(of_ranks), max(_starts(each)[-1] for each in of_ranks), dtype=torch.uint8)
    sent = torch.zeros_like(received[0])
    sent[: len(payload)] = torch.from_numpy(payload)
    dist.all_gather(list(received), sent, group=group)
    found = [restored(each, row.numpy()) for each, row in zip(of_ranks, received, strict=True)]
    return [own if each == dist.get_rank(group) else other for each, other in enumerate(found)]


def flattened(value: Any) -> tuple[list[int], npt.NDArray[np.uint8]]:
    """An object as bytes, and the lengths of its parts: its structure, and each of its arrays.

    >>> restored(*flattened({"a": np.arange(3)}))
    {'a': array([0, 1, 2])}
    """
    buffers: list[pickle.PickleBuffer] = []
    structure = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(structure), *(each.raw() for each in buffers)]
    lengths = [len(part) for part in parts]
    starts = _starts(lengths)
    payload = np.zeros(starts[-1], np.uint8)
    for start, part in zip(starts, parts, strict=False):
        payload[start : start + len(part)] = part
    return lengths, payload


def restored(lengths: Sequence[int], payload: npt.NDArray[np.uint8]) -> Any:
    """Inverse of `flattened`; arrays are views of the payload."""
    starts = _starts(lengths)
    structure, *arrays = (payload[start : start + length] for start, length in zip(starts, lengths, strict=False))
    return pickle.loads(structure.data, buffers=arrays)


def _starts(lengths: Sequence[int]) -> list[int]:
    """Start of each part, and the end of the last. Starts are aligned for arrays of any dtype."""
    return list(accumulate((-(-length // ALIGNMENT) * ALIGNMENT for length in lengths), initial=0))


def reduced(parts: list[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name, and maxima for names that begin with max/.

    >>> reduced([{"tokens": 3, "max/ratio": 1.5}, {}, {"tokens": 4, "max/ratio": 1.25}])
    {'tokens': 7, 'max/ratio': 1.5}
    """
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: max(values) if name.startswith(MAXIMUM) else sum(values) for name, values in found.items()}
