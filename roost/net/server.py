"""Serve web applications: bound sockets, and servers in a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 means any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


BACKLOG = 1024  # pending connections; many episodes begin at the same time
KEEP_ALIVE_S = 60  # longer than clients keep connections, so that none is closed just when it is reused
GRACE_S = 1  # for responses in progress


class LoopServer:
    """A server in the running event loop. It listens once created, on any free port unless one is given.

    `graceful`: `stop` sends pending responses and shuts the application down; else it drops open requests.
    """

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0, *, graceful: bool = False) -> None:
        import uvicorn

        bound = bound_socket(host, port)
        bound.listen(BACKLOG)  # so that no connection is refused before the server runs
        self.url = url_of(bound)
        self._in_order = graceful
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="auto" if graceful else "off",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # the trainer's
        self._serving = asyncio.create_task(self._server.serve([bound]))

    @property
    def is_running(self) -> bool:
        return not self._serving.done()

    async def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = not self._in_order
        await asyncio.wait([self._serving])
