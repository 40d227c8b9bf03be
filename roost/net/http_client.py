"""HTTP client of one server, with unlimited connections and errors that tell whether a request was sent."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

LONGEST_MESSAGE = 2000  # characters; a validation error can repeat a whole prompt

CONNECT_LIMIT_S = 5.0
KEEP_ALIVE_S = 2.0  # shorter than servers keep an idle connection: vLLM and uvicorn close it after 5 s

# A lost machine does not close connections; without this limit a call would wait for its own, which may be minutes.
GONE_AFTER_S = 30

CLOSED = "the connections to this server were closed"


def watched_socket(address: Any) -> socket.socket:
    """Create a socket that fails if the other machine acknowledges nothing for GONE_AFTER_S, as even busy ones do."""
    family, kind, protocol, *_ = address
    created = socket.socket(family, kind, protocol)
    if family in (socket.AF_INET, socket.AF_INET6):
        created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": GONE_AFTER_S // 2,
            "TCP_KEEPINTVL": GONE_AFTER_S // 6,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": GONE_AFTER_S * 1000,  # milliseconds
        }
        for name, value in options.items():
            if hasattr(socket, name):  # not on every system
                created.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return created


class CallFailed(Exception):
    """The call got no answer."""


class NothingSent(CallFailed):
    """No connection was established, so any request may be retried."""


class ClientClosed(CallFailed):
    """The client was closed, perhaps during this call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of a server."""

    status: int
    content: bytes
    retry_after: str | None = None  # as the server wrote it

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Parsed JSON; raises ValueError for other content."""
        return json.loads(self.content)


class HttpClient:
    """Calls to one server. Cancelling a call closes its connection, and the server stops working on it.

    A server may close an idle connection just when it is reused. For calls that must not be repeated, use
    `keep_alive=False`: a new connection for each call. `trust_env` takes a proxy from the environment, for servers
    outside the cluster. Each event loop has its own connections.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, keep_alive: bool = True, trust_env: bool = False
    ) -> None:
        self.url = url.rstrip("/")
        self.is_closed = False
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._keep_alive = keep_alive
        self._proxy = proxy_for(self.url) if trust_env else None
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def request(self, method: str, path: str, body: Any = None, query: Any = ()) -> Answer:
        """Send a request and return the whole answer; only connecting has a time limit."""
        if self.is_closed:
            raise ClientClosed(CLOSED)
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            session = self._sessions.get(asyncio.get_running_loop()) or await self._new_session()
            async with session.request(
                method,
                self.url + path,
                params=query or None,
                data=data,
                headers={"Content-Type": "application/json"} if body is not None else None,
                proxy=self._proxy,
                allow_redirects=False,
            ) as response:
                return Answer(response.status, await response.read(), response.headers.get("Retry-After"))
        except Exception as error:
            if self.is_closed:  # closing fails calls in progress, with one of many aiohttp errors
                raise ClientClosed(CLOSED) from error
            if isinstance(error, aiohttp.ClientConnectorError):
                raise NothingSent(f"no connection, {error.os_error}") from error
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise NothingSent(f"no connection within {CONNECT_LIMIT_S:g} s") from error
            if isinstance(error, (aiohttp.ClientError, OSError)):
                raise CallFailed(_named(error)) from error
            raise

    async def close(self) -> None:
        """Close all connections; calls in progress fail."""
        self.is_closed = True
        here = asyncio.get_running_loop()
        while self._sessions:
            loop, session = self._sessions.popitem()
            if loop is here or loop.is_closed():
                await session.close()
                continue
            closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
            if loop.is_running():  # in another thread; a stopped loop closes them when it runs again
                await asyncio.wrap_future(closing)

    async def _new_session(self) -> aiohttp.ClientSession:
        for loop in [loop for loop in self._sessions if loop.is_closed()]:
            await self._sessions.pop(loop).close()
        # Held requests keep their connections: with a limit there might be none left for resume.
        connector = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=watched_socket)
            if self._keep_alive
            else aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=watched_socket)
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_LIMIT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._sessions[asyncio.get_running_loop()] = session
        return session


def proxy_for(url: str) -> str | None:
    """Proxy from the environment for a server; None if the server's address is in a private network."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_private:
            return None
    return None if proxy_bypass(host) else getproxies().get(parts.scheme)


def _named(error: Exception) -> str:
    """Type and message of an error; some have no message."""
    return f"{type(error).__name__} {error}".strip()


def server_message(text: str) -> str:
    """Error message in a server's response, in any of the usual formats.

    >>> server_message('{"error": {"message": "too long", "code": 400}}')
    'too long'
    >>> server_message('{"detail": [{"loc": ["body", "tags"], "msg": "Field required"}]}')
    'body.tags: Field required'
    >>> server_message('{"success": false, "message": "no session is open"}')
    'no session is open'
    >>> server_message('')
    'without a message'
    """
    try:
        reply = json.loads(text)
    except ValueError:
        reply = text
    return (_found_message(reply) or text.strip() or "without a message")[:LONGEST_MESSAGE]


def _found_message(reply: Any) -> str:
    if isinstance(reply, str):
        return reply.strip()
    if isinstance(reply, list):
        return "; ".join(filter(None, map(_found_message, reply)))
    if isinstance(reply, Mapping):
        if "msg" in reply:
            return ".".join(map(str, reply.get("loc", ()))) + f": {reply['msg']}"
        for key in ("error", "message", "error_message", "detail"):
            if reply.get(key):
                return _found_message(reply[key])
    return ""
