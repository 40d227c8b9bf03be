"""The limit on the size of a request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roost.torch_engine.http_errors import error_response

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
