"""Unix socket server of a node daemon, which only its own user may connect to."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from roost.transport.context import Address
from roost.transport.shared_memory import Packet, from_frames, to_frames

logger = logging.getLogger(__name__)
Serve = Callable[[Address, str, tuple[Any, ...], Sequence[Packet]], Awaitable[tuple[Any, list[Packet]]]]


class SocketServer:
    """Reads requests and sends each answer when it is ready, in any order.

    A process has two sockets: its threads send on one, and its reader thread receives on the other, which each request
    names. So threads can send without waiting for each other's answers.
    """

    def __init__(self, path: Path, serve: Serve, tell: Callable[[Address, str, tuple[Any, ...]], None]) -> None:
        self.path = path
        self._serve, self._tell = serve, tell
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        mask = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(mask)
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._take(frames)
            except Exception:  # an invalid message must not stop the server
                logger.exception("a message of %d frames was dropped", len(frames))

    def _take(self, frames: Sequence[bytes]) -> None:
        _, reply_to, head, body, *rest = frames
        number, who, op, labels = pickle.loads(head)  # of builtin types and our own; what users may send is the body
        sender, packets = Address(*who), from_frames(labels, rest)
        if number is None and op == "cancel":
            task = self._tasks.get((reply_to, pickle.loads(body)[0]))
            if task is not None:
                task.cancel()
        elif number is None:
            self._tell(sender, op, pickle.loads(body))
        else:
            task = asyncio.get_running_loop().create_task(self._answer(reply_to, number, sender, op, body, packets))
            self._tasks[reply_to, number] = task
            task.add_done_callback(lambda _: self._tasks.pop((reply_to, number), None))

    async def _answer(
        self, reply_to: bytes, number: int, who: Address, op: str, body: bytes, packets: list[Packet]
    ) -> None:
        try:
            value, out = await self._serve(who, op, self._opened(who, op, body, packets), packets)
            labels, frames = to_frames(out)
            head, answer = pickle.dumps((number, True, labels), 5), pickle.dumps(value, 5)
        except Exception as error:
            head, answer, frames = pickle.dumps((number, False, []), 5), pickle.dumps(_portable(error), 5), []
        await self._socket.send_multipart([reply_to, head, answer, *frames])

    def _opened(self, who: Address, op: str, body: bytes, packets: list[Packet]) -> tuple[Any, ...]:
        try:
            args: tuple[Any, ...] = pickle.loads(body)
        except Exception as error:
            # Nobody holds the segments that came with it.
            self._tell(who, "release", ([packet.segment.number for packet in packets if packet.segment is not None],))
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"the daemon cannot read the request {op} of {who}: {why}") from None
        return args

    def close(self) -> None:
        self._reader.cancel()
        self._context.destroy(linger=0)
        self.path.unlink(missing_ok=True)


def _portable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if it cannot be pickled: the caller must get an answer."""
    try:
        pickle.loads(pickle.dumps(error, 5))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
