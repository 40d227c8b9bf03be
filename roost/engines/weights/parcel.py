"""Messages of a weight update: a manifest of all tensors, then parcels of some of them with their transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROUP_NAME = "roost_weights"
DEVICE_ARGUMENT = (
    6  # index of the device in torch's reduction of a CUDA tensor; its number may differ in another process
)


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
    is_packed: bool = False  # parcels will have packed handles, which some engines must know in advance


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Tensors in a safetensors file that both sides map; on Linux it is in memory, not on disk."""

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
