"""Weights of a sharded module in files in shared memory: each rank of the node writes its shards, none gathers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from roost.engines.protocol import UpdateFailed
from roost.engines.weights.carriers import SharedMemoryCarrier
from roost.engines.weights.payload import BUCKET_BYTES, SharedMemory, TensorInfo, WeightPayload, size_of, split_buckets
from roost.engines.weights.source import Index, WeightStream

Box: TypeAlias = tuple[range, ...]  # rows of a tensor in each of its dimensions
HEADER_ALIGNMENT = 8  # bytes


class ShardFiles(WeightStream):
    """Weights that all ranks of one node write to files in shared memory, bucket by bucket; engines map them.

    The sender rank creates the files, streams their tensors, and is the carrier that packs them for engines.
    """

    is_packed = False

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None, sender: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(module, dtype)
        self.written = 0  # bytes, by this rank
        self._sender, self._bucket_bytes = sender, bucket_bytes
        self._is_sender = dist.get_rank() == sender
        self._files: SharedMemoryCarrier | None = None  # of the sender, from its first file on
        self._unclaimed: Path | None = None  # file of the current bucket, until it is packed
        self._is_over = False  # the sender needs no more buckets
        self._owners = {part: name for name, parts in self._parts.items() for part in parts}

    def stream(self) -> Iterator[torch.Tensor]:
        self._streaming = self._buckets()
        return self._rest(self._streaming)

    def finish(self) -> None:
        """Write this rank's shards of the remaining buckets; the sender ends the stream on all ranks instead."""
        self._is_over = self._is_sender
        try:
            super().finish()
        finally:
            self.close()

    def _buckets(self) -> Iterator[torch.Tensor]:
        """Write each bucket together with the other ranks; only the sender yields its tensors."""
        for infos in split_buckets(self.tensors, self._bucket_bytes):
            layout = _layout(infos)
            path = self._shared_path(layout)
            if path is None:
                return
            tensors = self._written(path, infos, layout)
            if self._is_sender:
                yield from tensors

    def _written(self, path: str, infos: Sequence[TensorInfo], layout: Layout) -> list[torch.Tensor]:
        """Tensors of a bucket, once all ranks have written their shards; an error of one rank is raised on all."""
        tensors: list[torch.Tensor] = []
        problem = ""
        try:
            file = torch.from_file(path, shared=True, size=layout.size, dtype=torch.uint8)
            tensors = [_tensor_at(file, info, start) for info, start in zip(infos, layout.starts, strict=True)]
            for info, tensor in zip(infos, tensors, strict=True):
                self._write(info, tensor)
        except Exception as error:
            problem = f"rank {dist.get_rank()} cannot write its shards: {error}"
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if any(problems):
            raise UpdateFailed(next(filter(None, problems)))
        return tensors

    def _shared_path(self, layout: Layout) -> str | None:
        """Path of the next bucket's file, which the sender creates; None if that fails or the stream is over."""
        path: list[str | None] = [None]
        try:
            if self._is_sender and not self._is_over:
                path = [self._new_file(layout)]
        finally:  # also after an error, so that the other ranks do not wait
            dist.broadcast_object_list(path, self._sender)
        return path[0]

    def _new_file(self, layout: Layout) -> str:
        if self._files is None:
            self._files = SharedMemoryCarrier(bucket_bytes=self._bucket_bytes)
        if self._unclaimed is not None:
            self._unclaimed.unlink(missing_ok=True)
        path = self._unclaimed = self._files.next_path()
        with path.open("wb") as file:
            file.write(layout.header)
            os.posix_fallocate(file.fileno(), 0, layout.size)  # else writing to a full file system raises SIGBUS
        return str(path)

    def _write(self, info: TensorInfo, target: torch.Tensor) -> None:
        name = self._owners[info.name]
        weight = self._weights[name]
        local = weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()
        held, own = _own_rows(weight, self._is_sender)
        part = part_rows(weight.shape, self._parts[name][info.name])
        if own is None or (shared := overlap(own, part)) is None:
            return
        rows = target.view([len(each) for each in part])[_slices(shared, part)]
        rows.copy_(local[_slices(shared, held)])
        self.written += rows.numel() * rows.element_size()

    # As a carrier -----------------------------------------------------------------------------------------------

    def pack(self, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], is_last: bool) -> WeightPayload:
        for _ in infos:
            next(tensors)
        if self._unclaimed is None:
            raise ValueError("no file holds this bucket; pack the tensors of exactly one bucket")
        path, self._unclaimed = self._unclaimed, None
        return WeightPayload(tuple(infos), SharedMemory(str(path)), is_last)

    def transfer(self, payload: WeightPayload) -> None:
        pass

    def release(self, payload: WeightPayload) -> None:
        if self._files is not None:
            self._files.release(payload)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


class Layout(NamedTuple):
    """A safetensors file: its header, its total size in bytes, and the offset of each tensor."""

    header: bytes
    size: int
    starts: tuple[int, ...]


TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def _layout(infos: Sequence[TensorInfo]) -> Layout:
    # Widest dtypes first, so that all tensors are aligned.
    widest = sorted(infos, key=lambda info: -getattr(torch, info.dtype).itemsize)
    offsets: dict[str, int] = {}
    filled = 0
    for info in widest:
        offsets[info.name] = filled
        filled += size_of(info)
    entries = {
        info.name: {
            "dtype": TYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offsets[info.name], offsets[info.name] + size_of(info)],
        }
        for info in widest
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    start = HEADER_ALIGNMENT + len(text)
    header = len(text).to_bytes(HEADER_ALIGNMENT, "little") + text
    return Layout(header, start + filled, tuple(start + offsets[info.name] for info in infos))


def _tensor_at(file: torch.Tensor, info: TensorInfo, start: int) -> torch.Tensor:
    return file[start : start + size_of(info)].view(getattr(torch, info.dtype)).view(info.shape)


def _own_rows(weight: torch.Tensor, is_sender: bool) -> tuple[Box, Box | None]:
    """Rows of a weight that this rank has, and those it writes: ranks with the same shard write a part of it each."""
    if not isinstance(weight, DTensor):
        whole = tuple(map(range, weight.shape))
        return whole, whole if is_sender else None
    mesh = weight.device_mesh
    copy, copies = 0, 1
    for coordinate, size, placement in zip(mesh.get_coordinate() or (), mesh.shape, weight.placements, strict=True):
        if placement.is_replicate():
            copy, copies = copy * size + coordinate, copies * size
    shape, start = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    first, *others = (range(begin, begin + count) for count, begin in zip(shape, start, strict=True))
    own = first[len(first) * copy // copies : len(first) * (copy + 1) // copies]
    return (first, *others), (own, *others)


def part_rows(shape: torch.Size, index: Index) -> Box:
    """Rows of a weight that make up a tensor of the checkpoint.

    >>> part_rows(torch.Size((4, 6, 5)), (2, slice(3, 6)))
    (range(2, 3), range(3, 6), range(0, 5))
    """
    if isinstance(index, EllipsisType):
        return tuple(map(range, shape))
    expert, rows = index
    return (range(expert, expert + 1), range(rows.start, rows.stop), *map(range, shape[2:]))


def overlap(one: Box, other: Box) -> Box | None:
    """Rows that both boxes have; None if there are none.

    >>> overlap((range(0, 4), range(2)), (range(3, 9), range(2)))
    (range(3, 4), range(0, 2))
    """
    shared = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return shared if all(shared) else None


def _slices(rows: Box, inside: Box) -> tuple[slice, ...]:
    """Index that selects `rows` in a tensor whose rows are those of `inside`."""
    return tuple(
        slice(each.start - whole.start, each.stop - whole.start) for each, whole in zip(rows, inside, strict=True)
    )
