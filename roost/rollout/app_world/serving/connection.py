"""How a client speaks to a server of app worlds: a route, a body, and the `output` of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from roost.engines.http_calls import server_message
from roost.engines.http_lanes import LANE_WIDTH, Lanes

ABOUT_LIMIT_S = 10.0
KEPT_S = 2.0  # less than a server keeps a connection that nobody uses


class ServerLost(ConnectionError):
    """A server that did not answer."""


class ServerRefused(RuntimeError):
    """What a server answered instead of an output."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """To one server, for many requests at a time. Nothing is asked twice: code that ran must not run again."""

    def __init__(self, url: str, limit_s: float) -> None:
        self.url = url.rstrip("/")
        self._limit_s = limit_s
        self._clients = Lanes(self._client)

    async def about(self) -> Mapping[str, Any]:
        """What the server says of itself."""
        said = await self._answer("GET", "/", None, min(self._limit_s, ABOUT_LIMIT_S))
        return said if isinstance(said, Mapping) else {}

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """The output of a route."""
        said = await self._answer("POST", route, body, self._limit_s)
        if not isinstance(said, Mapping) or "output" not in said:
            raise ServerRefused(200, f"the server at {self.url} answered {route} without an output; is it AppWorld's?")
        return said["output"]

    async def close(self) -> None:
        await self._clients.close()

    async def _answer(self, method: str, route: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        response = await self._response(method, route, body, limit_s)
        if not response.is_success:
            told = server_message(response.text)
            message = f"the server at {self.url} answered {route} with {response.status_code}: {told}"
            raise ServerRefused(response.status_code, message)
        try:
            return response.json()
        except ValueError:
            return None  # some other server

    async def _response(
        self, method: str, route: str, body: Mapping[str, Any] | None, limit_s: float
    ) -> httpx.Response:
        if self._clients.is_closed:
            raise ServerLost(f"the server at {self.url} was left before {route}")
        try:
            async with asyncio.timeout(limit_s):
                return await self._clients.request(method, route, json=body)
        except TimeoutError:
            raise ServerLost(f"the server at {self.url} did not answer {route} in {limit_s:g} s") from None
        except httpx.TransportError as error:
            why = f"{type(error).__name__} {error}".strip()
            raise ServerLost(f"the server at {self.url} did not answer {route}: {why}") from error

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=LANE_WIDTH, keepalive_expiry=KEPT_S),
            timeout=httpx.Timeout(None, connect=5.0),
            trust_env=False,  # servers are in the cluster, never behind the proxy of a user's shell
        )
