"""What travels to an engine: a manifest of all tensors, then parcels of some of them, each with the way it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROUP_NAME = "roost_weights"
DEVICE_ARGUMENT = (
    6  # where torch's reduction of a CUDA tensor says which device; another process may number it otherwise
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's name in the Hugging Face checkpoint, its type as torch writes it without `torch.`, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def announced(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """How tensors are named in a message to vLLM's routes, which the built-in engine has, too."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything an update brings, so that an engine can refuse before the first byte is written."""

    version: int
    tensors: tuple[TensorInfo, ...]
    is_packed: bool = False  # whether the parcels will have packed handles, which some engines must know before


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The tensors lie in a safetensors file that both sides map; on Linux it is in memory, not on disk."""

    path: str


@dataclass(frozen=True, slots=True)
class DeviceHandles:
    """The tensors lie on a device that both sides use: per tensor, by device UUID, what torch's reductions give."""

    handles: tuple[Mapping[str, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True)
class PackedHandle:
    """The tensors lie one after the other in one buffer of bytes on a device that both sides use."""

    handle: Mapping[str, tuple[object, ...]]
    sizes: tuple[int, ...]  # bytes of each tensor


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The tensors follow by broadcast from rank 0 of the group that was joined, in the order named."""


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """Some of the tensors, and the way they go."""

    tensors: tuple[TensorInfo, ...]
    by: SharedMemory | DeviceHandles | PackedHandle | Broadcast
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class GroupInvitation:
    """A process group of the sender (rank 0) and the engines' processes."""

    master_address: str
    master_port: int
    rank_offset: int  # the rank of this engine's first process
    world_size: int
    backend: str  # nccl, or gloo where there is no accelerator
    name: str = GROUP_NAME
