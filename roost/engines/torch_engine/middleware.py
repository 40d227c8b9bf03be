"""What happens to every request before a route sees it: the key, and the limit on its size."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roost.engines.torch_engine.http_errors import error_response

OPEN_TO_ALL = frozenset({"/health"})
MOST_BYTES = 256 * 2**20  # weights never travel in a body, and prompts of a million tokens fit


class KeyRequired:
    """Lets in only those who bring the key as a bearer token."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_TO_ALL and not self._is_known(scope):
            answer = error_response("this server wants its key: send Authorization: Bearer KEY", 401)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), self._key)


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
