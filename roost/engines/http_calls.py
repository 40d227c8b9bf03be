"""HTTP calls to an engine: bounded in time, repeated only where that is safe, with errors that say what was asked."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from roost.engines.errors import EngineLost, EngineRefused
from roost.engines.http_lanes import LANE_WIDTH, Lanes

BUSY = frozenset({429, 502, 503, 504})  # answers that another try may not get
NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
LONGEST_MESSAGE = 2000  # characters; a validation error can repeat a whole prompt

Query = Sequence[tuple[str, str]]


class ServerFailed(EngineLost):
    """The server answered that it failed (5xx): it may be dying, or only this call may have gone wrong."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long each kind of call may take, in seconds."""

    answer: float = 30.0  # questions and switches
    generate: float = 3600.0  # with the time that a request is queued or held
    drain: float = 3600.0  # pausing once all requests are finished
    memory: float = 300.0  # sleep and wake
    join: float = 300.0  # a process group, until all have joined
    update: float = 600.0  # one step of a weight update
    checkpoint: float = 1800.0  # weights or adapters read from disk
    cache: float = 30.0  # until nothing holds the cache that is to be emptied


@dataclass(frozen=True, slots=True)
class RetryRule:
    """How often a call is tried, and how long to wait in between.

    >>> [RetryRule().wait_s(failures, chance=1.0) for failures in (1, 2, 3)]
    [0.2, 0.4, 0.8]
    """

    tries: int = 4
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0

    def wait_s(self, failures: int, chance: float) -> float:
        """Twice as long after each failure; half of it is left to chance, so that clients do not return together."""
        longest = min(self.first_wait_s * 2.0 ** (failures - 1), self.longest_wait_s)
        return longest * (0.5 + 0.5 * chance)


@dataclass(frozen=True, slots=True)
class Call:
    """One question to a server."""

    method: str
    path: str
    limit_s: float
    body: Any = None
    query: Query = ()
    may_repeat: bool = False  # a second time does no harm, even if the first one was half done
    about: str = ""  # for errors


class HttpCalls:
    """Calls to one server. Cancelling one closes its connection, which tells the server to stop working on it."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        retry: RetryRule | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.url = url.rstrip("/")
        self._retry = retry or RetryRule()
        self._sleep = sleep
        self._chance = chance
        # A server may close an idle connection just when it is used again. What may be repeated then is; what may not
        # gets a connection of its own.
        self._client = Lanes(lambda: _client(self.url, api_key, kept=LANE_WIDTH))
        self._orders = Lanes(lambda: _client(self.url, api_key, kept=0))

    async def get(self, path: str, *, limit_s: float, query: Query = ()) -> Any:
        """The answer to a question that changes nothing."""
        return await self._answer(Call("GET", path, limit_s, query=query, may_repeat=True))

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        limit_s: float,
        query: Query = (),
        may_repeat: bool = False,
        about: str = "",
    ) -> Any:
        """The answer to an order; JSON where the server sends it, else text."""
        return await self._answer(Call("POST", path, limit_s, body, query, may_repeat, about))

    async def status(self, method: str, path: str, body: Any = None, *, limit_s: float) -> int | None:
        """The status code of a single try, or None where no answer came, as from connections that were closed."""
        try:
            async with asyncio.timeout(limit_s):
                return (await self._send(Call(method, path, limit_s, body))).status_code
        except (TimeoutError, httpx.TransportError, EngineLost):
            return None

    async def close(self) -> None:
        await self._client.close()
        await self._orders.close()

    async def _answer(self, call: Call) -> Any:
        asked = f"{call.method} {self.url}{call.path}" + (f" ({call.about})" if call.about else "")
        try:
            async with asyncio.timeout(call.limit_s):
                response = await self._until_answered(call)
        except TimeoutError as error:
            raise EngineLost(f"{asked}: no answer within {call.limit_s:g} s") from error
        except httpx.TransportError as error:
            raise EngineLost(f"{asked}: {_named(error)}") from error
        if response.is_success:
            return _content(response)
        told = f"{asked}: {response.status_code}, {server_message(response.text)}"
        if response.status_code in BUSY or response.is_server_error:
            raise ServerFailed(told)
        raise EngineRefused(told)

    async def _until_answered(self, call: Call) -> httpx.Response:
        failures = 0
        while True:
            try:
                response = await self._send(call)
                if not (call.may_repeat and response.status_code in BUSY):
                    return response
                failures += 1
                if failures >= self._retry.tries:
                    return response
            except httpx.TransportError as error:
                failures += 1
                safe = call.may_repeat or isinstance(error, NOTHING_SENT)
                if not safe or failures >= self._retry.tries:
                    raise
            await self._sleep(self._retry.wait_s(failures, self._chance()))

    async def _send(self, call: Call) -> httpx.Response:
        if self._client.is_closed:  # by whoever saw that the server is gone, perhaps between two tries
            raise EngineLost(f"{call.method} {self.url}{call.path}: the connections to this server were closed")
        client = self._client if call.may_repeat else self._orders
        return await client.request(call.method, call.path, json=call.body, params=list(call.query))


def _client(url: str, api_key: str | None, kept: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        # A held generation keeps its connection: with a limit there might be none left to say resume.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=2.0),
        timeout=httpx.Timeout(None, connect=5.0),
        trust_env=False,  # engines are in the cluster, never behind the proxy of a user's shell
    )


def server_message(text: str) -> str:
    """What a server says went wrong, in whichever of the usual forms it says it.

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
        said = json.loads(text)
    except ValueError:
        said = text
    return (_found_message(said) or text.strip() or "without a message")[:LONGEST_MESSAGE]


def _found_message(said: Any) -> str:
    if isinstance(said, str):
        return said.strip()
    if isinstance(said, list):
        return "; ".join(filter(None, map(_found_message, said)))
    if isinstance(said, Mapping):
        if "msg" in said:
            return ".".join(map(str, said.get("loc", ()))) + f": {said['msg']}"
        for key in ("error", "message", "error_message", "detail"):
            if said.get(key):
                return _found_message(said[key])
    return ""


def _content(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        return response.text


def _named(error: Exception) -> str:
    """An error as words: some of httpx's have no text."""
    return f"{type(error).__name__} {error}".strip()
