"""ASGI middleware that requires the job's key on every route but /health.

vLLM's `--api-key` protects paths below /v1 only, and SGLang has no variable for its keys. The folder of this file is on
the import path of both servers, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "ROOST_ENGINE_API_KEY"  # only the server's own user can read the environment of its process
OPEN_TO_ALL = frozenset({"/health"})
MESSAGE = "this server requires its key: send Authorization: Bearer KEY"
BODY = {"error": {"message": MESSAGE, "type": "AuthenticationError", "param": None, "code": 401}}
POLICY_VIOLATION = 1008  # close code of a WebSocket

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """Let in requests and WebSockets with the key as a bearer token; answer 401 to others."""

    def __init__(self, app: App, key: str | None = None) -> None:
        self._app = app
        self._key = (key or os.environ[KEY_VARIABLE]).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_TO_ALL)
        if is_open or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            body = json.dumps(BODY).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, token = bytes(given).partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key)
