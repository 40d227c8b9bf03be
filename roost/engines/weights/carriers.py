"""Transports of a bucket of tensors to engines: shared memory, a shared device, or a broadcast."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from roost.engines.weights.payload import (
    BUCKET_BYTES,
    Broadcast,
    DeviceHandles,
    PackedHandle,
    SharedMemory,
    TensorInfo,
    WeightPayload,
    size_of,
)
from roost.engines.weights.source import WeightSource
from roost.procs.files import ScratchFolder

MEMORY_FOLDER = Path("/dev/shm")
Handle = Mapping[str, tuple[object, ...]]
Merge = Callable[[list[Handle]], list[Handle]]


class Carrier(Protocol):
    """Packs buckets for a transport. A payload's memory may be reused once every engine has loaded it."""

    @property
    def is_packed(self) -> bool:
        """True if tensors are packed into one buffer, which some engines must know in advance."""
        ...

    def pack(self, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], is_last: bool) -> WeightPayload:
        """Take the next tensors of the stream and pack them."""
        ...

    def accompany(self, payload: WeightPayload) -> None:
        """Run the sender's part while engines load the payload."""
        ...

    def release(self, payload: WeightPayload) -> None:
        """Free a payload that every engine has loaded or will never load."""
        ...

    def close(self) -> None:
        """Free everything at the end of an update."""
        ...


class SharedMemoryCarrier:
    """Writes tensors to safetensors files in memory, one per bucket, which engines on the same machine map."""

    is_packed = False

    def __init__(self, folder: Path | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._scratch = ScratchFolder("weights", folder or _memory_folder(bucket_bytes))
        self._count = 0

    def next_path(self) -> Path:
        """Path of a new file."""
        self._count += 1
        return self._scratch.path / f"{self._count - 1}.safetensors"

    def pack(self, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], is_last: bool) -> WeightPayload:
        from safetensors.torch import save_file

        path = self.next_path()
        save_file({info.name: next(tensors).cpu() for info in infos}, path)
        return WeightPayload(tuple(infos), SharedMemory(str(path)), is_last)

    def accompany(self, payload: WeightPayload) -> None:
        pass

    def release(self, payload: WeightPayload) -> None:
        if isinstance(payload.by, SharedMemory):
            Path(payload.by.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._scratch.remove()


class LiveDeviceCarrier:
    """Sends handles of tensors that stay on the device until the update ends, without a copy."""

    is_packed = False

    def __init__(self, merge: Merge | None = None) -> None:
        self._merge = merge
        self._kept: list[torch.Tensor] = []

    def pack(self, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], is_last: bool) -> WeightPayload:
        sent = [next(tensors) for _ in infos]
        self._kept += sent
        handles = [device_handle(tensor) for tensor in sent]
        return WeightPayload(
            tuple(infos), DeviceHandles(tuple(self._merge(handles) if self._merge else handles)), is_last
        )

    def accompany(self, payload: WeightPayload) -> None:
        pass

    def release(self, payload: WeightPayload) -> None:
        pass  # some engines read the tensors again when the update finishes

    def close(self) -> None:
        self._kept.clear()
        torch.cuda.ipc_collect()


class PackedDeviceCarrier:
    """Copies tensors into one of two buffers on the device, so that gathered weights never exist twice in full."""

    is_packed = True

    def __init__(self, merge: Merge | None = None) -> None:
        self._merge = merge
        self._free: list[torch.Tensor] = []
        self._used: list[torch.Tensor] = []

    def pack(self, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], is_last: bool) -> WeightPayload:
        sizes = tuple(size_of(info) for info in infos)
        buffer: torch.Tensor | None = None
        filled = 0
        for size in sizes:
            tensor = next(tensors)
            if buffer is None:
                buffer = self._buffer(sum(sizes), tensor.device)
            buffer[filled : filled + size].copy_(tensor.reshape(-1).view(torch.uint8))
            filled += size
            del tensor
        if buffer is None:
            raise ValueError("cannot pack a payload without tensors")
        torch.cuda.synchronize(buffer.device)
        self._used.append(buffer)
        handles = [device_handle(buffer)]
        return WeightPayload(
            tuple(infos), PackedHandle((self._merge(handles) if self._merge else handles)[0], sizes), is_last
        )

    def accompany(self, payload: WeightPayload) -> None:
        pass

    def release(self, payload: WeightPayload) -> None:
        self._free.append(self._used.pop(0))

    def close(self) -> None:
        self._free.clear()
        self._used.clear()
        torch.cuda.ipc_collect()

    def _buffer(self, size: int, device: torch.device) -> torch.Tensor:
        for index, free in enumerate(self._free):
            if free.numel() >= size:
                return self._free.pop(index)
        self._free.clear()
        return torch.empty(size, dtype=torch.uint8, device=device)


class BroadcastCarrier:
    """Broadcasts tensors one by one, in payload order, to the group that the engines have joined."""

    is_packed = False

    def __init__(self, broadcast: Callable[[torch.Tensor], None]) -> None:
        self._broadcast = broadcast
        self._packed: dict[int, list[torch.Tensor]] = {}

    def pack(self, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], is_last: bool) -> WeightPayload:
        payload = WeightPayload(tuple(infos), Broadcast(), is_last)
        self._packed[id(payload)] = [next(tensors) for _ in infos]
        return payload

    def accompany(self, payload: WeightPayload) -> None:
        for tensor in self._packed[id(payload)]:
            self._broadcast(tensor)

    def release(self, payload: WeightPayload) -> None:
        self._packed.pop(id(payload), None)

    def close(self) -> None:
        self._packed.clear()


def device_handle(tensor: torch.Tensor) -> Handle:
    """IPC handle of a tensor for other processes on the same device, by device UUID."""
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]
    return {uuid: arguments}


def device_carrier(source: WeightSource, merge: Merge | None = None) -> LiveDeviceCarrier | PackedDeviceCarrier:
    """Carrier for a shared device: handles if the weights stay there, buffers if they are gathered."""
    return LiveDeviceCarrier(merge) if source.is_live else PackedDeviceCarrier(merge)


def _memory_folder(bucket_bytes: int) -> str | None:
    """In-memory folder with room for the buckets in flight; None, for a temporary folder, if there is too little."""
    try:
        has_room = os.access(MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(MEMORY_FOLDER).free > 3 * bucket_bytes
    except OSError:
        return None
    return str(MEMORY_FOLDER) if has_room else None
