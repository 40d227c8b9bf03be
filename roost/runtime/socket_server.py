"""The socket through which the processes of a node reach its agent: a Unix socket that only their user may open."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from roost.runtime.address import Address
from roost.runtime.parcel import Parcel, from_frames, to_frames

Serve = Callable[[Address, str, tuple[Any, ...], Sequence[Parcel]], Awaitable[tuple[Any, list[Parcel]]]]


class SocketServer:
    """Reads requests and answers each when it is served, in any order.

    A process has two sockets: one it sends on, and one on which only its own reader receives; a request names the
    latter. So its threads can send without waiting for each other's answers.
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            _, reply_to, head, *frames = await self._socket.recv_multipart()
            number, who, op, args, labels = pickle.loads(head)
            sender = Address(*who)
            if number is None:
                self._tell(sender, op, args)
                continue
            task = asyncio.get_running_loop().create_task(
                self._answer(reply_to, number, sender, op, args, from_frames(labels, frames))
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, reply_to: bytes, number: int, who: Address, op: str, args: tuple[Any, ...], parcels: list[Parcel]
    ) -> None:
        try:
            value, out = await self._serve(who, op, args, parcels)
            labels, frames = to_frames(out)
            head = pickle.dumps((number, True, value, labels), 5)
        except Exception as error:
            head, frames = pickle.dumps((number, False, _portable(error), []), 5), []
        await self._socket.send_multipart([reply_to, head, *frames])

    def close(self) -> None:
        self._reader.cancel()
        self._context.destroy(linger=0)
        self.path.unlink(missing_ok=True)


def _portable(error: Exception) -> Exception:
    """An error that another process can read; one that cannot travel must not leave its caller without an answer."""
    try:
        pickle.loads(pickle.dumps(error, 5))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
