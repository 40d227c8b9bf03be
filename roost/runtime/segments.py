"""Shared memory between the workers of one machine.

A segment is anonymous memory of the node's agent (a memfd). Workers open it through /proc, so it has no name that could
be left behind: when the last process that uses it ends, however it ends, the memory is gone. Segments are used again,
because memory whose pages are there already is written several times faster than new memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SMALLEST = 1 << 20
ALIGNMENT = 64  # of each buffer in a segment, as SIMD code and torch like it
MAX_SPARES = 4
MAX_MAPS = 64  # mappings a worker keeps for the next time


class SegmentRef(NamedTuple):
    """Where a segment is: enough for another process of the machine to open it."""

    number: int
    pid: int
    fd: int
    size: int


class NoRoom(MemoryError):
    """The segments in use leave no room for another."""


@dataclass(slots=True)
class _Held:
    ref: SegmentRef
    users: int = 0


class SegmentPool:
    """The segments of one machine, in its agent: handed out, counted and used again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[int, _Held] = {}
        self._free: dict[int, list[SegmentRef]] = {}  # size -> segments nobody uses
        self._next = 0
        self.total = 0

    def allocate(self, nbytes: int) -> SegmentRef:
        """A segment of at least so many bytes, with one user."""
        size = rounded(nbytes)
        ref = self._free[size].pop() if self._free.get(size) else self._create(size)
        self._held[ref.number] = _Held(ref, users=1)
        return ref

    def share(self, number: int, users: int) -> None:
        """Count further users."""
        self._held[number].users += users

    def release(self, number: int) -> None:
        """One user less; the last one makes the segment free. An unknown number was released with its holder."""
        held = self._held.get(number)
        if held is None:
            return
        held.users -= 1
        if held.users <= 0:
            del self._held[number]
            self._free.setdefault(held.ref.size, []).append(held.ref)

    def can_ever_hold(self, nbytes: int) -> bool:
        return rounded(nbytes) <= self._limit

    def has_plenty_for(self, nbytes: int) -> bool:
        """Whether half of the limit stays for others."""
        return self.used + rounded(nbytes) <= self._limit // 2

    @property
    def used(self) -> int:
        return sum(held.ref.size for held in self._held.values())

    def close(self) -> None:
        for ref in [
            *(held.ref for held in self._held.values()),
            *(ref for refs in self._free.values() for ref in refs),
        ]:
            os.close(ref.fd)
        self._held, self._free, self.total = {}, {}, 0

    def _create(self, size: int) -> SegmentRef:
        while self.total + size > self._limit and self._drop_a_free_one():
            pass
        if self.total + size > self._limit:
            raise NoRoom(f"{size:,} bytes asked for, {self.used:,} of {self._limit:,} in use")
        fd = os.memfd_create(f"roost-{self._next}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.total += size
        self._next += 1
        return SegmentRef(self._next, os.getpid(), fd, size)

    def _drop_a_free_one(self) -> bool:
        size = max((size for size, refs in self._free.items() if refs), default=None)
        if size is None:
            return False
        fd = self._free[size].pop().fd
        os.ftruncate(fd, 0)  # workers keep mappings of it, and with them its memory
        os.close(fd)
        self.total -= size
        return True


class Spares:
    """Segments that a worker was given for messages to come, one of each size; the oldest goes when there are many."""

    def __init__(self) -> None:
        self._by_size: OrderedDict[int, SegmentRef] = OrderedDict()

    def take(self, nbytes: int) -> SegmentRef | None:
        return self._by_size.pop(rounded(nbytes), None)

    def keep(self, segment: SegmentRef) -> SegmentRef | None:
        """Keep a segment; the one that has to go for it, if any."""
        if segment.size in self._by_size:
            return segment
        self._by_size[segment.size] = segment
        return self._by_size.popitem(last=False)[1] if len(self._by_size) > MAX_SPARES else None


class SegmentMaps:
    """The segments that a worker has open. Mappings are kept, because making one costs a page fault for every page."""

    def __init__(self) -> None:
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self.released: deque[int] = deque()  # numbers whose last view is gone; the agent is told with the next request

    def write(self, ref: SegmentRef, buffers: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
        """Copy buffers into a segment, one after the other; where each lies."""
        view = memoryview(self._mapped(ref))
        places = []
        start = 0
        for buffer in buffers:
            _copy(view, start, buffer)
            places.append((start, len(buffer)))
            start += -(-len(buffer) // ALIGNMENT) * ALIGNMENT
        view.release()
        return tuple(places)

    def read(self, ref: SegmentRef, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Views of a segment's buffers; when the last of them is gone, the segment is released."""
        mapped = self._mapped(ref)
        end = max((start + length for start, length in places), default=0)
        # Whatever is made of the views keeps this object alive, and nothing else does.
        whole = (ctypes.c_ubyte * max(end, 1)).from_buffer(mapped)
        weakref.finalize(whole, self.released.append, ref.number)
        view = memoryview(whole).cast("B")
        return [view[start : start + length] for start, length in places]

    def take_released(self) -> list[int]:
        numbers = []
        while self.released:
            numbers.append(self.released.popleft())
        return numbers

    def _mapped(self, ref: SegmentRef) -> mmap.mmap:
        mapped = self._maps.get(ref.number)
        if mapped is None:
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR)
            try:
                mapped = mmap.mmap(fd, ref.size)
            finally:
                os.close(fd)
            self._maps[ref.number] = mapped
            self._forget_old_ones()
        self._maps.move_to_end(ref.number)
        return mapped

    def _forget_old_ones(self) -> None:
        for number in list(self._maps)[: max(0, len(self._maps) - MAX_MAPS)]:
            # Views that are still used keep the mapping itself alive; only this reference goes.
            del self._maps[number]


def rounded(nbytes: int) -> int:
    """The size of the segment for so many bytes: eight sizes for each power of two, so that few are wasted.

    >>> [rounded(n) >> 20 for n in (1, 3 << 20, (64 << 20) + 1)]
    [1, 3, 72]
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = max(1 << (nbytes.bit_length() - 4), mmap.PAGESIZE)
    return -(-nbytes // step) * step


def needed(lengths: Sequence[int]) -> int:
    """Bytes for buffers of these lengths, each aligned."""
    return sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)


def shared_memory_limit() -> int:
    """Half of the machine's memory: what does not fit waits, and the machine does not start to swap."""
    return (memory_limit() or 8 << 30) // 2


def memory_limit() -> int | None:
    """Bytes of memory of this machine, or of the container it is; None where that cannot be told."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return min(total, int(Path(path).read_text()))
    return total


def _copy(target: memoryview, start: int, source: memoryview) -> None:
    if len(source) < SMALLEST:
        target[start : start + len(source)] = source
        return
    import numpy as np  # copies without holding up the process's other threads

    np.copyto(np.frombuffer(target, np.uint8, len(source), start), np.frombuffer(source, np.uint8))
