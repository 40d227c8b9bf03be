"""Parcels between machines: out of one node's shared memory, through Ray's object store, into the other's."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from roost.runtime.parcel import INLINE_LIMIT, Parcel
from roost.runtime.segments import SegmentMaps, SegmentRef, needed

BIG = 8 << 20  # copied by a thread, so that the agent goes on serving others meanwhile


class Freight(NamedTuple):
    """A parcel's header and buffers; numpy arrays travel through Ray without being pickled."""

    header: bytes
    buffers: tuple[Any, ...]
    is_shared: bool = False


def load(parcel: Parcel, give_back: Callable[[Parcel], None]) -> Freight:
    """Take a parcel out of this machine's memory, to send it to another."""
    import numpy as np

    if parcel.segment is None:
        buffers = tuple(np.frombuffer(bytes(buffer), np.uint8) for buffer in parcel.inline)
        return Freight(parcel.header, buffers, parcel.is_shared)
    with mmap.mmap(parcel.segment.fd, parcel.segment.size) as mapped:
        # A copy of its own: the segment may be used again before Ray has sent it.
        copies = tuple(np.frombuffer(mapped[start : start + length], np.uint8) for start, length in parcel.places)
    give_back(parcel)
    return Freight(parcel.header, copies, parcel.is_shared)


async def unload(
    freight: Freight, allocate: Callable[[int], Awaitable[SegmentRef]], give_back: Callable[[Parcel], None]
) -> Parcel:
    """Bring what has come from another machine into this one's memory."""
    buffers = [memoryview(buffer).cast("B") for buffer in freight.buffers if len(buffer)]
    if sum(map(len, buffers)) <= INLINE_LIMIT:
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
