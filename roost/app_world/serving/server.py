"""The server of app worlds: in this event loop, or as a program of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from roost.app_world.serving.limits import ServingLimits
from roost.app_world.serving.routes import app_world_app
from roost.app_world.serving.worlds import Worlds
from roost.net.server import BACKLOG, GRACE_S, KEEP_ALIVE_S, LoopServer, bound_socket, url_of


def ready_line(url: str, limits: ServingLimits) -> str:
    """What the program says when it is ready.

    >>> ready_line("http://127.0.0.1:8000", ServingLimits(worlds=8))
    'app world ready for 8 worlds at http://127.0.0.1:8000'
    """
    return f"app world ready for {limits.worlds} worlds at {url}"


@contextlib.asynccontextmanager
async def serving(limits: ServingLimits | None = None, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve in the running event loop; gives the address."""
    server = LoopServer(app_world_app(Worlds(limits or ServingLimits())), host, port, in_order=True)
    try:
        yield server.url
    finally:
        await server.stop()


def run(limits: ServingLimits, host: str, port: int) -> None:
    """Serve until the process is told to end; the first line printed tells the address."""
    bound = bound_socket(host, port)
    _Server(app_world_app(Worlds(limits)), ready_line(url_of(bound), limits)).run([bound])


class _Server(uvicorn.Server):
    def __init__(self, app: FastAPI, ready: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, flush=True)
