"""HTTP client of a server of app worlds: POST a body to a route, return the `output` of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from roost.net.http_client import Answer, CallFailed, ClientClosed, HttpClient, server_message

ABOUT_LIMIT_S = 10.0


class ServerLost(ConnectionError):
    """The server did not answer."""


class ServerRefused(RuntimeError):
    """The server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """Connection to one server, for concurrent requests. Nothing is retried: code must not run twice."""

    def __init__(self, url: str, limit_s: float) -> None:
        self._limit_s = limit_s
        self._client = HttpClient(url, trust_env=True)  # a server of the user's may be behind a proxy

    @property
    def url(self) -> str:
        return self._client.url

    async def about(self) -> Mapping[str, Any]:
        """Information that the server gives about itself."""
        reply = await self._answer("GET", "/", None, min(self._limit_s, ABOUT_LIMIT_S))
        return reply if isinstance(reply, Mapping) else {}

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """The output of a route."""
        reply = await self._answer("POST", route, body, self._limit_s)
        if not isinstance(reply, Mapping) or "output" not in reply:
            raise ServerRefused(200, f"the server at {self.url} answered {route} without an output; is it AppWorld's?")
        return reply["output"]

    async def close(self) -> None:
        await self._client.close()

    async def _answer(self, method: str, route: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        answer = await self._request(method, route, body, limit_s)
        if not answer.is_success:
            why = server_message(answer.text)
            message = f"the server at {self.url} answered {route} with {answer.status}: {why}"
            raise ServerRefused(answer.status, message)
        try:
            return answer.json()
        except ValueError:
            return None  # not a server of app worlds

    async def _request(self, method: str, route: str, body: Mapping[str, Any] | None, limit_s: float) -> Answer:
        try:
            async with asyncio.timeout(limit_s):
                return await self._client.request(method, route, body)
        except TimeoutError:
            raise ServerLost(f"the server at {self.url} did not answer {route} in {limit_s:g} s") from None
        except ClientClosed:
            raise ServerLost(f"the server at {self.url} was closed before it answered {route}") from None
        except CallFailed as error:
            raise ServerLost(f"the server at {self.url} did not answer {route}: {error}") from error
