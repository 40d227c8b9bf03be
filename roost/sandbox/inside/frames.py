"""Messages between the two processes: a length of four bytes, then JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

LENGTH = struct.Struct(">I")
LARGEST = 1 << 20  # bytes per message from a sandbox; messages to it are not limited


def packed(message: Any) -> bytes:
    """Encode a message.

    >>> packed({"a": 1})
    b'\\x00\\x00\\x00\\x08{"a": 1}'
    """
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class Channel:
    """The sandboxed end of the connection; calls block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def receive(self) -> Any:
        """Return the next message. Raise EOFError when the peer closed the connection."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return json.loads(self._exactly(length))

    def send(self, message: Any) -> None:
        """Send a message. Raise ValueError if it is too large."""
        frame = packed(message)
        if len(frame) > LARGEST:
            raise ValueError(f"a message of {len(frame)} bytes is too large; at most {LARGEST} can be sent")
        view = memoryview(frame)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._descriptor, min(size, 1 << 20))
            if not part:
                raise EOFError("the peer closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
