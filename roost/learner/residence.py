"""Offloading of a learner's weights, gradients and optimizer moments to the host."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

WEIGHTS, GRADIENTS, MOMENTS = PARTS = ("weight", "grad", "optimizer")
ALIGNMENT = 256  # bytes
ALLOCATION, SMALL_ALLOCATION = 512, 1 << 20  # torch's CUDA allocator: granularity, and largest size from small blocks
TOUCHED_TOGETHER = 1 << 28  # bytes
TOUCHING_THREADS = 16


@dataclass(frozen=True, eq=False, slots=True)
class Away:
    """Freed device storage, and its content on the host."""

    storage: torch.UntypedStorage
    content: Tensor  # bytes


class HostBuffer:
    """Host memory with a slot for each of several storages, page-locked for copies from and to a CUDA device.

    torch's own page-locked memory is rounded up to powers of two, and page-locking small pages one by one takes 0.5 s
    per GiB. Huge pages, touched by many threads first, took 0.08 s per GiB on an H200's host.
    """

    def __init__(self, sizes: Sequence[int], is_pinned: bool) -> None:
        self.sizes = list(sizes)
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        memory = _pinned(starts[-1], self) if is_pinned and sizes else torch.empty(starts[-1], dtype=torch.uint8)
        self.slots = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _pinned(size: int, owner: object) -> Tensor:
    """Bytes that are page-locked until the owner is garbage collected."""
    # Private: huge pages of shared memory are off on most machines.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    pages.madvise(mmap.MADV_DONTFORK)  # after a fork, a write would move the page that the device knows
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    # Not torch's own threads: Ray gives a worker only one.
    with ThreadPoolExecutor(min(TOUCHING_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(Tensor.zero_, memory.split(TOUCHED_TOGETHER)))
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)))
    weakref.finalize(owner, lambda: runtime.cudaHostUnregister(memory.data_ptr()))  # keeps the memory until then
    return memory


class Residence:
    """Tracks and moves weights, gradients and optimizer moments between device and host.

    Tensors stay the same objects and lose only their storage, so references to them (optimizer, FSDP, tied weights)
    remain valid.
    """

    def __init__(self, module: nn.Module, moments: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._module = module
        self._moments = moments
        self._device = device
        self._away: dict[str, list[Away]] = {}
        self._arriving: torch.cuda.Event | None = None  # end of a copy of moments that may still run
        self._leaving: tuple[torch.cuda.Stream | None, dict[str, list[Away]]] | None = None  # copies that may still run
        self._pinned: dict[str, HostBuffer] = {}  # kept, because page-locking takes longer than a copy

    @property
    def away(self) -> tuple[str, ...]:
        """Parts that are on the host."""
        return tuple(self._away)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Parts that a background offload has copied, or still copies: changes to them would be lost."""
        return () if self._leaving is None else tuple(part for part, copies in self._leaving[1].items() if copies)

    def offload(self, parts: Iterable[str], in_background: bool = False) -> None:
        """Move parts to the host; offloaded parts are skipped.

        In the background, parts stay readable on the device, which the next `offload` or `load` frees. They must not
        be changed (`leaving`).
        """
        self._free_copied()
        self.wait_for_moments()
        leaving = {part: list(_storages(self._tensors(part))) for part in _known(parts) if part not in self._away}
        with _copy_stream(self._device) as stream:
            # Copy everything before freeing any memory: if the host has too little, nothing has changed.
            self._leaving = stream, {part: self._to_host(part, storages) for part, storages in leaving.items()}
        if not in_background:
            self._free_copied()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on the device

    def _free_copied(self) -> None:
        """Free the device memory of parts that were copied to the host."""
        if self._leaving is None:
            return
        (stream, copies), self._leaving = self._leaving, None
        if stream is not None:
            stream.synchronize()
        for part, away in copies.items():
            for each in away:
                each.storage.resize_(0)
            if away:  # between steps there are no gradients
                self._away[part] = away

    def load(self, parts: Iterable[str]) -> None:
        """Move parts back to the device; loaded parts are skipped.

        On a GPU, moments are copied in the background, as scoring does not need them: call `wait_for_moments` before
        the optimizer uses them.
        """
        self._free_copied()
        arriving_parts = sorted((part for part in _known(parts) if part in self._away), key=PARTS.index)
        arriving = [each for part in arriving_parts for each in self._away[part]]
        try:
            for part in arriving_parts:
                self._reserve(self._away[part])
                for each in self._away[part]:
                    each.storage.resize_(each.content.numel())
        except torch.OutOfMemoryError:
            for each in arriving:
                each.storage.resize_(0)
            raise
        with _copy_stream(self._device) as stream:
            for part in arriving_parts:
                for each in self._away[part]:
                    _bytes(each.storage).copy_(each.content, non_blocking=True)
                if stream is not None and part == MOMENTS:
                    self._arriving = stream.record_event()
                elif stream is not None:
                    stream.synchronize()
        for part in arriving_parts:
            del self._away[part]

    def wait_for_moments(self) -> None:
        """Make the current stream wait until the optimizer's moments are on the device."""
        if self._arriving is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arriving)
            self._arriving = None

    def _reserve(self, arriving: Sequence[Away]) -> None:
        """Let torch's allocator reserve the memory of a part at once: hundreds of allocations take as long as the copy.

        Part by part: a block that two parts share could not be freed when only one of them is offloaded.
        """
        if self._device.type == "cuda":
            sizes = [each.content.numel() for each in arriving if each.content.numel() > SMALL_ALLOCATION]
            total = sum(-(-size // ALLOCATION) * ALLOCATION for size in sizes)
            with suppress(torch.OutOfMemoryError):  # fragmented memory may still have room for the pieces
                torch.empty(total, device=self._device, dtype=torch.uint8)  # freed into the allocator's cache

    def _to_host(self, part: str, storages: Sequence[torch.UntypedStorage]) -> list[Away]:
        sizes = [storage.nbytes() for storage in storages]
        is_pinned = self._device.type == "cuda"
        buffer = self._pinned.get(part)
        if buffer is None or buffer.sizes != sizes:
            buffer = None
            self._pinned.pop(part, None)  # free it before more is allocated
            buffer = HostBuffer(sizes, is_pinned)
        if is_pinned:
            self._pinned[part] = buffer
        pairs = zip(storages, buffer.slots, strict=True)
        return [Away(storage, slot.copy_(_bytes(storage), non_blocking=True)) for storage, slot in pairs]

    def _tensors(self, part: str) -> Iterator[Tensor]:
        if part == WEIGHTS:
            yield from self._module.parameters()
        elif part == GRADIENTS:
            yield from (each.grad for each in self._module.parameters() if each.grad is not None)
        else:
            yield from self._moments()


def _known(parts: Iterable[str]) -> list[str]:
    parts = list(parts)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"a learner has no {', '.join(unknown)} to offload; it has {', '.join(PARTS)}")
    return parts


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Unique storages of tensors."""
    seen: set[int] = set()
    for tensor in tensors:
        for plain in plain_tensors(tensor.detach()):
            storage = plain.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a tensor, which may be sharded (DTensor) or quantized."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for part in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(part, Tensor):  # a DTensor names its mesh as well
            yield from plain_tensors(part)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _copy_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Context in which CUDA work is queued on a new stream, after all work queued so far; yields None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
