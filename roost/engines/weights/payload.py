"""Messages of a weight update: a manifest of all tensors, then payloads of some of them with their transport."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROUP_NAME = "roost_weights"
# Position of the device index in torch's reduction of a CUDA tensor; other processes may number devices differently.
DEVICE_ARGUMENT = 6


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name in the Hugging Face checkpoint, dtype without `torch.`, and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def announced(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """Names, dtypes and shapes in the format of vLLM's routes, which the built-in engine shares."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of an update, so that an engine can refuse it before anything is written."""

    version: int
    tensors: tuple[TensorInfo, ...]
    is_packed: bool = False  # payloads have packed handles, which some engines must know in advance


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Tensors in a safetensors file that both sides map: in /dev/shm if it has room."""

    path: str


@dataclass(frozen=True, slots=True)
class DeviceHandles:
    """Tensors on a shared device: per tensor, the arguments of torch's reduction by device UUID."""

    handles: tuple[Mapping[str, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True)
class PackedHandle:
    """Tensors packed into one byte buffer on a shared device."""

    handle: Mapping[str, tuple[object, ...]]
    sizes: tuple[int, ...]  # bytes of each tensor


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tensors follow by broadcast from rank 0 of the joined group, in the order named."""


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """Some of the tensors and their transport."""

    tensors: tuple[TensorInfo, ...]
    by: SharedMemory | DeviceHandles | PackedHandle | Broadcast
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class GroupInvitation:
    """A process group of the sender (rank 0) and the engines' processes."""

    master_address: str
    master_port: int
    rank_offset: int  # rank of this engine's first process
    world_size: int
    backend: str  # nccl, or gloo without accelerators
    name: str = GROUP_NAME


BUCKET_BYTES = 512 * 2**20
WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}


def size_of(tensor: TensorInfo) -> int:
    """Bytes of a tensor; dtypes not in WIDTHS (int8, float8_e4m3fn, bool) have one byte.

    >>> size_of(TensorInfo("a", "bfloat16", (3, 4)))
    24
    """
    return math.prod(tensor.shape) * WIDTHS.get(tensor.dtype, 1)


def split_buckets(tensors: Iterable[TensorInfo], limit: int = BUCKET_BYTES) -> Iterator[tuple[TensorInfo, ...]]:
    """Split tensors in order into buckets of at most `limit` bytes; a larger tensor gets its own bucket.

    >>> rows = [TensorInfo(name, "float32", (size,)) for name, size in (("a", 2), ("b", 1), ("c", 9), ("d", 1))]
    >>> [[tensor.name for tensor in bucket] for bucket in split_buckets(rows, limit=12)]
    [['a', 'b'], ['c'], ['d']]
    """
    bucket: list[TensorInfo] = []
    filled = 0
    for tensor in tensors:
        size = size_of(tensor)
        if bucket and filled + size > limit:
            yield tuple(bucket)
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield tuple(bucket)
