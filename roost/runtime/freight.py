"""Parcels between machines: out of one node's shared memory, through Ray's object store, into the other's."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from roost.runtime.parcel import Parcel, is_inline
from roost.runtime.segments import SegmentMaps, SegmentRef, needed

BIG = 8 << 20  # copied by a thread, so that the agent goes on serving others meanwhile


class Freight(NamedTuple):
    """A parcel's header and buffers; numpy arrays travel through Ray without being pickled."""

    header: bytes
    buffers: tuple[Any, ...]
    is_shared: bool = False

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.buffers))


class Consignment:
    """Parcels for one or several other nodes: they are copied, and packed for the way, once for all of these.

    That is done when the first node can take them, so whoever makes one keeps the parcels until then.
    """

    def __init__(
        self, parcels: Sequence[Parcel], load: Callable[[Parcel], asyncio.Future[Freight]], num_nodes: int = 1
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
        """What `pack` makes of the freight and the number of nodes it is for."""
        freight = await self.freight()
        if self._packing is None:
            self._packing = asyncio.ensure_future(pack(freight, self.num_nodes))
        return await asyncio.shield(self._packing)


def load(parcel: Parcel) -> Freight:
    """Copy a parcel out of this machine's memory, to send it to another."""
    import numpy as np

    if parcel.segment is None:
        buffers = tuple(np.frombuffer(bytes(buffer), np.uint8) for buffer in parcel.inline)
        return Freight(parcel.header, buffers, parcel.is_shared)
    with mmap.mmap(parcel.segment.fd, parcel.segment.size) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        # A copy of its own: the segment may be used again before Ray has sent it.
        copies = tuple(whole[start : start + length].copy() for start, length in parcel.places)
        del whole  # or the mapping could not be closed
    return Freight(parcel.header, copies, parcel.is_shared)


async def unload(
    freight: Freight, allocate: Callable[[int], Awaitable[SegmentRef]], give_back: Callable[[Parcel], None]
) -> Parcel:
    """Bring what has come from another machine into this one's memory."""
    if is_inline(freight.nbytes):
        return Parcel(freight.header, tuple(bytes(buffer) for buffer in freight.buffers), is_shared=freight.is_shared)
    segment = await allocate(needed([len(buffer) for buffer in freight.buffers]))
    views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in freight.buffers]
    if segment.size < BIG:
        places = _write(segment, views)
    else:
        writing = asyncio.get_running_loop().run_in_executor(None, _write, segment, views)
        try:
            places = await asyncio.shield(writing)
        except BaseException:  # nobody waits for it any more, but the thread may still be writing
            writing.add_done_callback(lambda _: give_back(Parcel(b"", (), segment)))
            raise
    return Parcel(freight.header, (), segment, places, freight.is_shared)


def _write(segment: SegmentRef, views: list[memoryview]) -> tuple[tuple[int, int], ...]:
    return SegmentMaps().write(segment._replace(pid=os.getpid()), views)
