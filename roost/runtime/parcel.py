"""A packed object on its way between workers of one machine: its buffers inline where small, else in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from roost.runtime.segments import SegmentRef

INLINE_LIMIT = 64 * 1024  # below this a copy through the socket is cheaper than a segment
HAS_SEGMENTS = hasattr(os, "memfd_create")  # not so on macOS, where everything goes through the socket


def is_inline(nbytes: int) -> bool:
    """Whether so many bytes go through the socket."""
    return nbytes <= INLINE_LIMIT or not HAS_SEGMENTS


class Parcel(NamedTuple):
    """A message's header and its buffers. Those of a shared parcel belong to several receivers, who must copy them."""

    header: bytes
    inline: tuple[bytes | memoryview, ...] = ()
    segment: SegmentRef | None = None
    places: tuple[tuple[int, int], ...] = ()
    is_shared: bool = False


Label = tuple[bytes, int, SegmentRef | None, tuple[tuple[int, int], ...], bool]


def to_frames(parcels: Iterable[Parcel]) -> tuple[list[Label], list[bytes | memoryview]]:
    """What is written of parcels in a socket message's first frame, and the frames that follow it."""
    labels: list[Label] = []
    frames: list[bytes | memoryview] = []
    for parcel in parcels:
        labels.append((parcel.header, len(parcel.inline), parcel.segment, parcel.places, parcel.is_shared))
        frames += parcel.inline
    return labels, frames


def from_frames(labels: Sequence[Label], frames: Sequence[Any]) -> list[Parcel]:
    """The inverse of `to_frames`."""
    parcels = []
    start = 0
    for header, count, segment, places, is_shared in labels:
        inline = tuple(frames[start : start + count])
        start += count
        parcels.append(Parcel(header, inline, segment and SegmentRef(*segment), places, is_shared))
    return parcels
