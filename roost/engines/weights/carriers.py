"""Transports of weights to engines: buckets by shared memory, shared device or broadcast, or a checkpoint folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from roost.engines.protocol import NotOffered, UpdateFailed
from roost.engines.weights.payload import (
    BUCKET_BYTES,
    Broadcast,
    DeviceHandles,
    GroupInvitation,
    PackedHandle,
    SharedMemory,
    TensorInfo,
    WeightPayload,
    size_of,
    split_buckets,
)
from roost.engines.weights.source import WeightSource
from roost.net.bound_store import tcp_store
from roost.procs.files import ScratchFolder, put_in_place, unfinished

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

    def transfer(self, payload: WeightPayload) -> None:
        """Run the sender's side of the transfer, while engines load the payload."""
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

    def transfer(self, payload: WeightPayload) -> None:
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

    def transfer(self, payload: WeightPayload) -> None:
        pass

    def release(self, payload: WeightPayload) -> None:
        pass  # some engines read the tensors again when the update finishes

    def close(self) -> None:
        self._kept.clear()
        torch.cuda.ipc_collect()


class PackedDeviceCarrier:
    """Copies tensors into reused buffers on the device, so that gathered weights never exist there in full."""

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

    def transfer(self, payload: WeightPayload) -> None:
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

    def transfer(self, payload: WeightPayload) -> None:
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


LIMIT_S = 300.0


class WeightGroup:
    """A process group separate from the learner's default one, in which rank 0 broadcasts."""

    def __init__(self, invitation: GroupInvitation, rank: int, device: torch.device, limit_s: float = LIMIT_S) -> None:
        limit = timedelta(seconds=limit_s)
        # An engine may arrive before the sender has opened its store; the store's timeout covers that.
        self._store = tcp_store(
            invitation.master_address, invitation.master_port, invitation.world_size, rank == 0, limit
        )
        store = _prefixed(self._store, invitation.name, device.type)
        self._device = device
        self._group = _process_group(invitation, store, rank, limit)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send the tensor (rank 0) or fill it (others); return when this side is done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        placed = tensor if tensor.device == self._device else tensor.to(self._device)
        self._group.broadcast([placed.contiguous()], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._group.abort()


def _process_group(invitation: GroupInvitation, store: Store, rank: int, limit: timedelta) -> Any:
    if invitation.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, invitation.world_size, limit)
    if invitation.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, invitation.world_size, options)
    raise ValueError(f"{invitation.backend} is not a backend for weights; use nccl, or gloo on CPUs")


def _prefixed(store: Store, name: str, device: str) -> Store:
    """Use torch's key prefixes for a named group, so that engines that create theirs through torch can join."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


class VllmWeightGroup:
    """Rank 0 of the group that vLLM's workers join; create it while the servers execute `join_group`."""

    def __init__(self, invitation: GroupInvitation, device: torch.device) -> None:
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise NotOffered(
                "broadcasts to vLLM need its communicator: install vLLM in the learner's environment, or use another "
                "weight route"
            ) from error
        group = StatelessProcessGroup.create(
            host=invitation.master_address, port=invitation.master_port, rank=0, world_size=invitation.world_size
        )
        self._device = device
        self._communicator: Any = PyNcclCommunicator(group, device=device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to every worker; return when it is sent."""
        stream = torch.cuda.current_stream(self._device)
        self._communicator.broadcast(tensor.to(self._device).contiguous(), src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        """Destroy the communicator; older vLLM releases free it with the object."""
        destroy = getattr(self._communicator, "destroy", None)
        if destroy is not None:
            destroy()


FILE_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


def write_checkpoint(source: WeightSource, model: Path | str, folder: Path | str, file_bytes: int = FILE_BYTES) -> Path:
    """Write the weights with the config and tokenizer of their model; return the folder.

    Everything goes to a sibling folder first, which is then renamed: a reader never sees half a checkpoint, and a full
    disk leaves the previous one intact.
    """
    model, folder = _local_folder(str(model)), Path(folder)
    draft = unfinished(folder)
    size = sum(map(size_of, source.tensors))
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _check_room(draft, size)
        _copy_companions(model, draft)
        _write_weights(source, draft, file_bytes)
        put_in_place(folder, is_durable=False)  # of use to this run only
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UpdateFailed(
                f"the disk of {folder} is full: a checkpoint needs {size / 2**30:.2f} GiB; nothing was replaced. "
                "Free some room, or choose another folder"
            ) from error
        raise UpdateFailed(f"cannot write a checkpoint to {folder}: {error}; nothing was replaced") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def _local_folder(model: str) -> Path:
    """Local folder of a model; a Hub name is looked up in the Hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def _check_room(folder: Path, size: int) -> None:
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy_companions(model: Path, folder: Path) -> None:
    """Copy all files but weights from the model's folder: config, generation settings, tokenizer."""
    for file in model.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".gguf") and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)


def _write_weights(source: WeightSource, folder: Path, file_bytes: int) -> None:
    files = list(split_buckets(source.tensors, file_bytes))
    names = ["model.safetensors"] if len(files) == 1 else [_file_name(index, len(files)) for index in range(len(files))]
    stream = source.stream()
    for name, infos in zip(names, files, strict=True):
        _write_file(folder / name, infos, stream)
    if len(files) > 1:
        weight_map = {info.name: name for name, infos in zip(names, files, strict=True) for info in infos}
        index = {"metadata": {"total_size": sum(map(size_of, source.tensors))}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1))


def _write_file(path: Path, infos: Sequence[TensorInfo], stream: Iterator[torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({info.name: next(stream).cpu() for info in infos}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors does not expose errno
        number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(number, str(error)) from error


def _file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
