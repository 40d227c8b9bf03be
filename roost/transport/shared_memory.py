"""Shared memory between the workers of one machine, and parcels that travel through it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from roost.transport.failure import Address
from roost.transport.waits import has_result, within

INLINE_LIMIT = 64 * 1024  # below this a copy through the socket is cheaper than a segment
HAS_SEGMENTS = hasattr(os, "memfd_create")  # not on macOS, where everything goes through the socket


def is_inline(nbytes: int) -> bool:
    """Return True if this many bytes go through the socket."""
    return nbytes <= INLINE_LIMIT or not HAS_SEGMENTS


class Packet(NamedTuple):
    """A message's header and buffers. Buffers of a shared parcel have several receivers, which must copy them."""

    header: bytes
    inline: tuple[bytes | memoryview, ...] = ()
    segment: SegmentRef | None = None
    places: tuple[tuple[int, int], ...] = ()
    is_shared: bool = False


def to_frames(parcels: Iterable[Packet]) -> tuple[list[Label], list[bytes | memoryview]]:
    """Labels of parcels for a socket message's first frame, and the frames that follow it."""
    labels: list[Label] = []
    frames: list[bytes | memoryview] = []
    for parcel in parcels:
        labels.append((parcel.header, len(parcel.inline), parcel.segment, parcel.places, parcel.is_shared))
        frames += parcel.inline
    return labels, frames


def from_frames(labels: Sequence[Label], frames: Sequence[Any]) -> list[Packet]:
    """The inverse of `to_frames`."""
    parcels = []
    start = 0
    for header, count, segment, places, is_shared in labels:
        inline = tuple(frames[start : start + count])
        start += count
        parcels.append(Packet(header, inline, segment and SegmentRef(*segment), places, is_shared))
    return parcels


BIG = 8 << 20  # bytes above which a thread copies, so that the daemon keeps serving others


class Freight(NamedTuple):
    """A parcel's header and buffers; numpy arrays travel through Ray without being pickled."""

    header: bytes
    buffers: tuple[Any, ...]
    is_shared: bool = False

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.buffers))


class Consignment:
    """Parcels for other nodes, copied and packed once for all of them.

    This happens when the first node can take them, so the creator must keep the parcels until then.
    """

    def __init__(
        self, parcels: Sequence[Packet], load: Callable[[Packet], asyncio.Future[Freight]], num_nodes: int = 1
    ) -> None:
        self._parcels, self._load = parcels, load
        self.num_nodes = num_nodes
        self._loading: list[asyncio.Future[Freight]] | None = None
        self._packing: asyncio.Future[Any] | None = None

    async def freight(self) -> list[Freight]:
        if self._loading is None:
            self._loading = [self._load(parcel) for parcel in self._parcels]
        return [await asyncio.shield(loading) for loading in self._loading]

    async def packed(self, pack: Callable[[list[Freight], int], Awaitable[Any]]) -> Any:
        """Result of `pack` for the freight and its number of nodes, computed once."""
        freight = await self.freight()
        if self._packing is None:
            self._packing = asyncio.ensure_future(pack(freight, self.num_nodes))
        return await asyncio.shield(self._packing)


def load(parcel: Packet) -> Freight:
    """Copy a parcel out of this machine's memory, to send it to another."""
    import numpy as np

    if parcel.segment is None:
        buffers = tuple(np.frombuffer(bytes(buffer), np.uint8) for buffer in parcel.inline)
        return Freight(parcel.header, buffers, parcel.is_shared)
    with mmap.mmap(parcel.segment.fd, parcel.segment.size) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        # Copied, because the segment may be reused before Ray has sent it.
        copies = tuple(whole[start : start + length].copy() for start, length in parcel.places)
        del whole  # so that the mapping can be closed
    return Freight(parcel.header, copies, parcel.is_shared)


async def unload(
    freight: Freight, allocate: Callable[[int], Awaitable[SegmentRef]], give_back: Callable[[Packet], None]
) -> Packet:
    """Copy freight from another machine into this one's memory."""
    if is_inline(freight.nbytes):
        return Packet(freight.header, tuple(bytes(buffer) for buffer in freight.buffers), is_shared=freight.is_shared)
    segment = await allocate(needed([len(buffer) for buffer in freight.buffers]))
    views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in freight.buffers]
    if segment.size < BIG:
        places = _write(segment, views)
    else:
        writing = asyncio.get_running_loop().run_in_executor(None, _write, segment, views)
        try:
            places = await asyncio.shield(writing)
        except BaseException:  # cancelled, but the thread may still be writing
            writing.add_done_callback(lambda _: give_back(Packet(b"", (), segment)))
            raise
    return Packet(freight.header, (), segment, places, freight.is_shared)


def _write(segment: SegmentRef, views: list[memoryview]) -> tuple[tuple[int, int], ...]:
    return SegmentMaps().write(segment._replace(pid=os.getpid()), views)


SMALLEST = 1 << 20
ALIGNMENT = 64  # of each buffer in a segment, for SIMD code and torch
MAX_SPARES = 4
MAX_MAPS = 64  # mappings a worker keeps for reuse


class SegmentRef(NamedTuple):
    """Reference by which another process of the machine can open a segment."""

    number: int
    pid: int
    fd: int
    size: int


Label = tuple[bytes, int, SegmentRef | None, tuple[tuple[int, int], ...], bool]


class NoRoom(MemoryError):
    """Raised if the segments in use leave no room for another."""


@dataclass(slots=True)
class _Held:
    ref: SegmentRef
    users: int = 0


class SegmentPool:
    """Segments of one machine, in its daemon: allocated, reference counted and reused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[int, _Held] = {}
        self._free: dict[int, list[SegmentRef]] = {}  # size -> unused segments
        self._next = 0
        self.total = 0

    def allocate(self, nbytes: int) -> SegmentRef:
        """Allocate a segment of at least `nbytes` bytes, with one user."""
        size = rounded(nbytes)
        ref = self._free[size].pop() if self._free.get(size) else self._create(size)
        self._held[ref.number] = _Held(ref, users=1)
        return ref

    def share(self, number: int, users: int) -> None:
        """Add users to a segment."""
        self._held[number].users += users

    def release(self, number: int) -> None:
        """Remove a user; the last one frees the segment. An unknown number was released with its holder."""
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
        """Return True if half of the limit stays free with this many more bytes."""
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
        while self.total + size > self._limit and self._evict_free_segment():
            pass
        if self.total + size > self._limit:
            raise NoRoom(f"{size:,} bytes requested, {self.used:,} of {self._limit:,} in use")
        fd = os.memfd_create(f"roost-{self._next}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.total += size
        self._next += 1
        return SegmentRef(self._next, os.getpid(), fd, size)

    def _evict_free_segment(self) -> bool:
        size = max((size for size, refs in self._free.items() if refs), default=None)
        if size is None:
            return False
        fd = self._free[size].pop().fd
        os.ftruncate(fd, 0)  # workers' mappings would keep its memory
        os.close(fd)
        self.total -= size
        return True


class Spares:
    """Segments that a worker keeps for future messages, one per size; the oldest is evicted."""

    def __init__(self) -> None:
        self._by_size: OrderedDict[int, SegmentRef] = OrderedDict()

    def take(self, nbytes: int) -> SegmentRef | None:
        return self._by_size.pop(rounded(nbytes), None)

    def keep(self, segment: SegmentRef) -> SegmentRef | None:
        """Keep a segment; return the one evicted for it, if any."""
        if segment.size in self._by_size:
            return segment
        self._by_size[segment.size] = segment
        return self._by_size.popitem(last=False)[1] if len(self._by_size) > MAX_SPARES else None


class SegmentMaps:
    """Open segments of a worker. Mappings are kept, because a new one costs a page fault per page."""

    def __init__(self) -> None:
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self.released: deque[int] = deque()  # segments without views, reported to the daemon with the next request

    def write(self, ref: SegmentRef, buffers: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
        """Copy buffers into a segment; return the offset and length of each."""
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
        """Views of a segment's buffers; the segment is released with the last of them."""
        mapped = self._mapped(ref)
        end = max((start + length for start, length in places), default=0)
        # Only the views and objects made from them keep this object alive.
        whole = (ctypes.c_ubyte * max(end, 1)).from_buffer(mapped)
        weakref.finalize(whole, self.released.append, ref.number)
        view = memoryview(whole).cast("B")
        return [view[start : start + length] for start, length in places]

    def take_released(self) -> list[int]:
        """Remove and return the numbers of released segments."""
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
            self._evict_old_maps()
        self._maps.move_to_end(ref.number)
        return mapped

    def _evict_old_maps(self) -> None:
        for number in list(self._maps)[: max(0, len(self._maps) - MAX_MAPS)]:
            # Views in use keep the mapping alive; only this reference is dropped.
            del self._maps[number]


def rounded(nbytes: int) -> int:
    """Segment size for this many bytes: eight sizes per power of two, to waste little.

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
    """Half of the machine's memory: messages that do not fit wait, so that the machine does not swap."""
    return (memory_limit() or 8 << 30) // 2


def memory_limit() -> int | None:
    """Bytes of memory of this machine or container; None if unknown."""
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
    import numpy as np  # its copies release the GIL

    np.copyto(np.frombuffer(target, np.uint8, len(source), start), np.frombuffer(source, np.uint8))


ROOM_LIMIT = 600.0  # seconds that a message waits for segments to be released


class NodeMemory:
    """Tracks which worker holds which segments, so that those of a lost worker are released."""

    def __init__(self, limit: int) -> None:
        self.pool = SegmentPool(limit)
        self._held: defaultdict[Address, Counter[int]] = defaultdict(Counter)  # segments held by each worker
        self._waiters: list[asyncio.Future[None]] = []

    async def allocate(self, nbytes: int) -> SegmentRef:
        """Allocate a segment; if there is no room, wait until one is released."""
        while True:
            try:
                return self.pool.allocate(nbytes)
            except NoRoom as error:
                late = f"no room in shared memory for {ROOM_LIMIT:g} s: {error}"
                if not self.pool.can_ever_hold(nbytes):
                    raise
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await within(waiter, ROOM_LIMIT, late.__str__)

    def spare(self, who: Address, size: int) -> SegmentRef | None:
        """Allocate a segment for the sender's next message, often of the same size, to save it a request."""
        if not self.pool.has_plenty_for(size):
            return None
        try:
            segment = self.pool.allocate(size)
        except NoRoom:
            return None
        self.hand_over(who, segment)
        return segment

    def hand_over(self, who: Address, segment: SegmentRef) -> None:
        self._held[who][segment.number] += 1

    def take_over(self, who: Address, parcels: Iterable[Packet]) -> None:
        """Transfer the segments of sent parcels from a worker to the daemon."""
        numbers = Counter(parcel.segment.number for parcel in parcels if parcel.segment is not None)
        if not numbers <= self._held.get(who, Counter()):
            raise ValueError(f"{who} sends shared memory that it does not hold")
        self._held[who].subtract(numbers)
        self._drop_zero_counts(who)

    def release(self, who: Address, numbers: Iterable[int]) -> None:
        """Release segments that a worker no longer uses."""
        held = self._held[who]
        for number in numbers:
            if held[number] > 0:  # otherwise it was released with a lost worker
                held[number] -= 1
                self.pool.release(number)
        self._drop_zero_counts(who)
        self._wake_waiters()

    def free(self, who: Address) -> None:
        """Release all segments of a worker."""
        for number, count in self._held.pop(who, Counter()).items():
            for _ in range(count):
                self.pool.release(number)
        self._wake_waiters()

    def share(self, parcel: Packet) -> None:
        """Add a user to the parcel's segment."""
        if parcel.segment is not None:
            self.pool.share(parcel.segment.number, 1)

    def give_back(self, parcel: Packet) -> None:
        if parcel.segment is not None:
            self.pool.release(parcel.segment.number)
            self._wake_waiters()

    def consign(self, parcels: Sequence[Packet] = (), num_nodes: int = 1) -> Consignment:
        """Consignment of parcels for other nodes; keep the parcels until it is sent."""
        return Consignment(parcels, self._load, num_nodes)

    async def load_all(self, parcels: Sequence[Packet]) -> list[Freight]:
        """Load parcels for another node, and release them."""
        try:
            return await self.consign(parcels).freight()
        finally:
            for parcel in parcels:
                self.give_back(parcel)

    async def taken(
        self, future: asyncio.Future[list[Packet]], timeout: float | None, otherwise: Callable[[], str]
    ) -> list[Packet]:
        """Wait for parcels, with a timeout."""
        try:
            return await within(future, timeout, otherwise)
        except asyncio.CancelledError:
            if has_result(future):  # they arrived just as the waiting worker was lost
                for parcel in future.result():
                    self.give_back(parcel)
            raise

    def give_back_unless_in(self, parcel: Packet, wait: asyncio.Future[None]) -> None:
        """Release a parcel if the wait to put it somewhere fails or is cancelled."""
        wait.add_done_callback(lambda wait: None if has_result(wait) else self.give_back(parcel))

    async def unload_all(self, freight: Sequence[Freight]) -> list[Packet]:
        parcels: list[Packet] = []
        try:
            for piece in freight:
                parcels.append(await unload(piece, self.allocate, self.give_back))
        except BaseException:
            for parcel in parcels:
                self.give_back(parcel)
            raise
        return parcels

    def _load(self, parcel: Packet) -> asyncio.Future[Freight]:
        loop = asyncio.get_running_loop()
        if sum(length for _, length in parcel.places) < BIG:
            loaded: asyncio.Future[Freight] = loop.create_future()
            loaded.set_result(load(parcel))
            return loaded
        self.share(parcel)  # the thread may still be reading after a cancellation
        loading = loop.run_in_executor(None, load, parcel)
        loading.add_done_callback(lambda _: self.give_back(parcel))
        return loading

    def _drop_zero_counts(self, who: Address) -> None:
        self._held[who] = +self._held[who]
        if not self._held[who]:
            del self._held[who]

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
