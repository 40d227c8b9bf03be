"""Shared memory between the workers of one machine, and packets that travel through it."""

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

from roost.transport.context import Address
from roost.transport.waits import has_result, within

INLINE_LIMIT = 64 * 1024  # below this a copy through the socket is cheaper than a segment
HAS_SEGMENTS = hasattr(os, "memfd_create")  # false on macOS, where everything goes through the socket


def is_inline(nbytes: int) -> bool:
    """Return True if this many bytes go through the socket."""
    return nbytes <= INLINE_LIMIT or not HAS_SEGMENTS


class Packet(NamedTuple):
    """A message's header and buffers. Buffers of a shared packet have several receivers, which must copy them."""

    header: bytes
    inline: tuple[bytes | memoryview, ...] = ()
    segment: SegmentRef | None = None
    places: tuple[tuple[int, int], ...] = ()
    is_shared: bool = False


def to_frames(packets: Iterable[Packet]) -> tuple[list[Label], list[bytes | memoryview]]:
    """Labels of packets for a socket message's first frame, and the frames that follow it."""
    labels: list[Label] = []
    frames: list[bytes | memoryview] = []
    for packet in packets:
        labels.append((packet.header, len(packet.inline), packet.segment, packet.places, packet.is_shared))
        frames += packet.inline
    return labels, frames


def from_frames(labels: Sequence[Label], frames: Sequence[Any]) -> list[Packet]:
    """The inverse of `to_frames`."""
    packets = []
    start = 0
    for header, count, segment, places, is_shared in labels:
        inline = tuple(frames[start : start + count])
        start += count
        packets.append(Packet(header, inline, segment and SegmentRef(*segment), places, is_shared))
    return packets


BIG = 8 << 20  # bytes above which a thread copies, so that the daemon keeps serving others


class WirePacket(NamedTuple):
    """A packet's header and buffers; numpy arrays travel through Ray without being pickled."""

    header: bytes
    buffers: tuple[Any, ...]
    is_shared: bool = False

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.buffers))


class OutgoingBatch:
    """Packets for other nodes, copied and packed once for all of them.

    This happens when the first node can take them, so the creator must keep the packets until then.
    """

    def __init__(
        self, packets: Sequence[Packet], load: Callable[[Packet], asyncio.Future[WirePacket]], num_nodes: int = 1
    ) -> None:
        self._packets, self._to_wire = packets, load
        self.num_nodes = num_nodes
        self._loading: list[asyncio.Future[WirePacket]] | None = None
        self._packing: asyncio.Future[Any] | None = None

    async def wire_packets(self) -> list[WirePacket]:
        if self._loading is None:
            self._loading = [self._to_wire(packet) for packet in self._packets]
        return [await asyncio.shield(loading) for loading in self._loading]

    async def packed(self, pack: Callable[[list[WirePacket], int], Awaitable[Any]]) -> Any:
        """Result of `pack` for the wire packets and their number of nodes, computed once."""
        wire = await self.wire_packets()
        if self._packing is None:
            self._packing = asyncio.ensure_future(pack(wire, self.num_nodes))
        return await asyncio.shield(self._packing)


def to_wire(packet: Packet) -> WirePacket:
    """Copy a packet out of this machine's memory, to send it to another."""
    import numpy as np

    if packet.segment is None:
        buffers = tuple(np.frombuffer(bytes(buffer), np.uint8) for buffer in packet.inline)
        return WirePacket(packet.header, buffers, packet.is_shared)
    with mmap.mmap(packet.segment.fd, packet.segment.size) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        # Copied, because the segment may be reused before Ray has sent it.
        copies = tuple(whole[start : start + length].copy() for start, length in packet.places)
        del whole  # so that the mapping can be closed
    return WirePacket(packet.header, copies, packet.is_shared)


async def from_wire(
    wire: WirePacket, allocate: Callable[[int], Awaitable[SegmentRef]], release: Callable[[Packet], None]
) -> Packet:
    """Copy a packet from another machine into this one's memory."""
    if is_inline(wire.nbytes):
        return Packet(wire.header, tuple(bytes(buffer) for buffer in wire.buffers), is_shared=wire.is_shared)
    segment = await allocate(needed([len(buffer) for buffer in wire.buffers]))
    views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in wire.buffers]
    if segment.size < BIG:
        places = _write(segment, views)
    else:
        writing = asyncio.get_running_loop().run_in_executor(None, _write, segment, views)
        try:
            places = await asyncio.shield(writing)
        except BaseException:  # cancelled, but the thread may still be writing
            writing.add_done_callback(lambda _: release(Packet(b"", (), segment)))
            raise
    return Packet(wire.header, (), segment, places, wire.is_shared)


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
            raise NoRoom(
                f"{size:,} bytes requested, {self.used:,} of {self._limit:,} in use; send smaller messages, or drop "
                "received values earlier"
            )
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
    """Segment size for this many bytes: there are eight sizes per power of two, so that little is wasted.

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
                no_room = f"no room in shared memory for {ROOM_LIMIT:g} s: {error}"
                if not self.pool.can_ever_hold(nbytes):
                    raise
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await within(waiter, ROOM_LIMIT, no_room)

    def spare(self, who: Address, size: int) -> SegmentRef | None:
        """Allocate a segment for the sender's next message, which is often of the same size, to save a request."""
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

    def take_over(self, who: Address, packets: Iterable[Packet]) -> None:
        """Transfer the segments of sent packets from a worker to the daemon."""
        numbers = Counter(packet.segment.number for packet in packets if packet.segment is not None)
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

    def share(self, packet: Packet) -> None:
        """Add a user to the packet's segment."""
        if packet.segment is not None:
            self.pool.share(packet.segment.number, 1)

    def release_packet(self, packet: Packet) -> None:
        if packet.segment is not None:
            self.pool.release(packet.segment.number)
            self._wake_waiters()

    def outgoing(self, packets: Sequence[Packet] = (), num_nodes: int = 1) -> OutgoingBatch:
        """OutgoingBatch of packets for other nodes; keep the packets until it is sent."""
        return OutgoingBatch(packets, self._to_wire, num_nodes)

    async def to_wire_packets(self, packets: Sequence[Packet]) -> list[WirePacket]:
        """Wire packets for another node, and release them."""
        try:
            return await self.outgoing(packets).wire_packets()
        finally:
            for packet in packets:
                self.release_packet(packet)

    async def wait_for(
        self, future: asyncio.Future[list[Packet]], timeout: float | None, otherwise: str | Callable[[], str]
    ) -> list[Packet]:
        """Wait for packets, with a timeout."""
        try:
            return await within(future, timeout, otherwise)
        except asyncio.CancelledError:
            if has_result(future):  # they arrived just as the waiting worker was lost
                for packet in future.result():
                    self.release_packet(packet)
            raise

    def release_unless_delivered(self, packet: Packet, wait: asyncio.Future[None]) -> None:
        """Release a packet if the wait to put it somewhere fails or is cancelled."""
        wait.add_done_callback(lambda wait: None if has_result(wait) else self.release_packet(packet))

    async def from_wire_packets(self, wire: Sequence[WirePacket]) -> list[Packet]:
        packets: list[Packet] = []
        try:
            for piece in wire:
                packets.append(await from_wire(piece, self.allocate, self.release_packet))
        except BaseException:
            for packet in packets:
                self.release_packet(packet)
            raise
        return packets

    def _to_wire(self, packet: Packet) -> asyncio.Future[WirePacket]:
        loop = asyncio.get_running_loop()
        if sum(length for _, length in packet.places) < BIG:
            loaded: asyncio.Future[WirePacket] = loop.create_future()
            loaded.set_result(to_wire(packet))
            return loaded
        self.share(packet)  # the thread may still be reading after a cancellation
        loading = loop.run_in_executor(None, to_wire, packet)
        loading.add_done_callback(lambda _: self.release_packet(packet))
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
