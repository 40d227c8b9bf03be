"""Serve a web application: sockets, request-size limits, and servers in a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roost.net.errors import error_response


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has its address but takes no connections yet; port 0 is any that is free."""
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


MOST_BYTES = 256 * 2**20  # weights never travel in a body, and prompts of a million tokens fit


class SizeLimited:
    """Refuses bodies that are too large, before and while they come."""

    def __init__(self, app: ASGIApp, most_bytes: int = MOST_BYTES) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                raise HTTPException(413, self._too_large)
            return message

        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._most_bytes:
            await error_response(self._too_large, 413)(scope, receive, send)
        else:
            await self._app(scope, counted, send)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._most_bytes} bytes"


BACKLOG = 1024  # connections that wait to be taken: many episodes begin at the same moment
KEEP_ALIVE_S = 60  # longer than clients keep a connection, so that none is closed just when it is used again
GRACE_S = 1  # for answers on their way out


class LoopServer:
    """Takes connections from the moment it is made, on any free port unless one is given.

    One that ends `in_order` lets answers out and tells the application; else whatever is under way is dropped.
    """

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0, *, in_order: bool = False) -> None:
        import uvicorn

        bound = bound_socket(host, port)
        bound.listen(BACKLOG)  # so that nobody is refused before the server runs
        self.url = url_of(bound)
        self._in_order = in_order
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="auto" if in_order else "off",
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
