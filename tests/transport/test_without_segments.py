"""Machines without anonymous shared memory, such as Macs: everything goes through the socket."""

import asyncio

import pytest

from roost.transport import shared_memory as packet
from roost.transport.shared_memory import WirePacket, from_wire


@pytest.mark.parametrize(
    ("nbytes", "has_segments", "expected"),
    [
        pytest.param(100, True, True, id="small"),
        pytest.param(packet.INLINE_LIMIT + 1, True, False, id="large"),
        pytest.param(1 << 30, False, True, id="large, where there is none"),
    ],
)
def test_what_goes_through_the_socket(monkeypatch, nbytes, has_segments, expected):
    monkeypatch.setattr(packet, "HAS_SEGMENTS", has_segments)
    assert packet.is_inline(nbytes) is expected


def test_what_comes_from_another_machine_stays_out_of_shared_memory(monkeypatch):
    import numpy as np

    monkeypatch.setattr(packet, "HAS_SEGMENTS", False)

    async def refuse(nbytes):
        raise AssertionError("no segment may be asked for")

    data = np.arange(100_000, dtype=np.uint8)
    arrived = asyncio.run(from_wire(WirePacket(b"header", (data,)), refuse, print))
    assert arrived.segment is None
    assert bytes(arrived.inline[0]) == data.tobytes()
