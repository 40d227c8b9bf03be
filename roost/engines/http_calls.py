"""HTTP calls to engines with time limits and retries, and parsing of what their servers return."""

from __future__ import annotations

import asyncio
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from roost.engines.protocol import (
    Capabilities,
    ContextFull,
    EngineError,
    EngineLost,
    EngineRefused,
    Finish,
    VersionSpan,
    joined_spans,
)
from roost.engines.version_ledger import VersionLedger, version_number
from roost.net.http_client import Answer, CallFailed, ClientClosed, HttpClient, NothingSent, server_message

# Messages for a full context: of the built-in engine; of OpenAI, vLLM and SGLang; of vLLM; of SGLang.
NO_ROOM = re.compile(
    r"which leaves no room for|a context of \d+ has room for|context.length|maximum model length|"
    r"exceeds the maximum allowed length",
    re.IGNORECASE,
)


def refusal(message: str) -> EngineRefused:
    """Error for a server's refusal, by its message.

    >>> type(refusal("This model's maximum context length is 64 tokens. However, you requested 80")).__name__
    'ContextFull'
    >>> type(refusal("token id 900 is not in the vocabulary of 512")).__name__
    'EngineRefused'
    """
    return ContextFull(message) if NO_ROOM.search(message) else EngineRefused(message)


def version_spans(reply: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    """Version spans of a completion's tokens.

    >>> version_spans([{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}])
    (VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3))
    """
    return joined_spans(tuple(VersionSpan(version_number(s["version"]), s["start"], s["end"]) for s in reply))


def finish(reason: str | None) -> Finish:
    """Finish reason of a completion; raise EngineError if it is unknown."""
    try:
        return Finish(reason or "")
    except ValueError:
        raise EngineError(f"unknown finish reason {reason!r}") from None


def served_model(models: Mapping[str, Any]) -> Mapping[str, Any]:
    """The base model among those listed; adapters have a parent."""
    return next(model for model in models["data"] if not model.get("parent"))


T = TypeVar("T")
BUSY = frozenset({429, 502, 503, 504})  # status codes that are retried
SECOND_TRY_S = 5.0

Query = Sequence[tuple[str, str]]


class ServerFailed(EngineLost):
    """The server answered with 5xx: it may be dying, or only this call failed."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of calls by kind, in seconds."""

    answer: float = 30.0  # queries and control routes
    health: float = 10.0  # health checks; several must fail before a server counts as hung
    step: float = 900.0  # one step of the engine; with a long prompt it may take minutes
    generate: float = 3600.0  # including the time a request is queued or held
    drain: float = 3600.0  # pausing after all requests are finished
    memory: float = 300.0  # sleep and wake
    join: float = 300.0  # joining a process group
    update: float = 600.0  # one step of a weight update
    checkpoint: float = 1800.0  # weights or adapters read from disk
    cache: float = 30.0  # until requests release the prefix cache


@dataclass(frozen=True, slots=True)
class RetryRule:
    """Number of tries of a call, and the waits between them.

    >>> [RetryRule().wait_s(failures, chance=1.0) for failures in (1, 2, 3)]
    [0.2, 0.4, 0.8]
    """

    tries: int = 4
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0
    longest_retry_after_s: float = 60.0  # limit for a server's Retry-After

    def wait_s(self, failures: int, chance: float, retry_after: str | None = None) -> float:
        """Exponential backoff with jitter of one half, so that clients do not return together.

        `retry_after` is the server's header, if any, and a lower bound.
        """
        longest = min(self.first_wait_s * 2.0 ** (failures - 1), self.longest_wait_s)
        retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
        return min(retry_after_s, self.longest_retry_after_s) + longest * (0.5 + 0.5 * chance)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call to a server."""

    method: str
    path: str
    limit_s: float
    body: Any = None
    query: Query = ()
    is_idempotent: bool = False  # safe to repeat, even if the first try was half done
    about: str = ""  # for errors


class HttpCalls:
    """Calls to one server. Cancelling a call closes its connection, and the server stops working on it."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        retry: RetryRule | None = None,
        trust_env: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._retry = retry or RetryRule()
        self._sleep = sleep
        self._chance = chance
        # A server may close an idle connection just when it is reused. Idempotent calls are then repeated on a new
        # one; others use a new one from the start.
        self._persistent = HttpClient(url, api_key, trust_env=trust_env)
        self._new = HttpClient(url, api_key, keep_alive=False, trust_env=trust_env)

    @property
    def url(self) -> str:
        return self._new.url

    async def get(self, path: str, *, limit_s: float, query: Query = ()) -> Any:
        """GET a route; the call is idempotent."""
        return await self._answer(Call("GET", path, limit_s, query=query, is_idempotent=True))

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        limit_s: float,
        query: Query = (),
        is_idempotent: bool = False,
        about: str = "",
    ) -> Any:
        """POST to a route; return JSON if the server sends it, else text."""
        return await self._answer(Call("POST", path, limit_s, body, query, is_idempotent, about))

    async def status(self, method: str, path: str, body: Any = None, *, limit_s: float) -> int | None:
        """Status code of an idempotent call, or None if there is no answer.

        It is tried twice, the second time briefly: a broken connection, or a timeout because this event loop was
        blocked, does not mean that the server is dead.
        """
        for limit in (limit_s, min(limit_s, SECOND_TRY_S)):
            try:
                async with asyncio.timeout(limit):
                    return (await self._new.request(method, path, body)).status
            except ClientClosed:
                return None
            except (TimeoutError, CallFailed):
                continue
        return None

    async def close(self) -> None:
        """Close all connections, even if the caller is cancelled."""
        await asyncio.shield(asyncio.gather(self._persistent.close(), self._new.close()))

    async def _answer(self, call: Call) -> Any:
        requested = f"{call.method} {self.url}{call.path}" + (f" ({call.about})" if call.about else "")
        try:
            async with asyncio.timeout(call.limit_s):
                answer = await self._until_answered(call)
        except TimeoutError as error:
            raise EngineLost(f"{requested}: no answer within {call.limit_s:g} s") from error
        except CallFailed as error:
            raise EngineLost(f"{requested}: {error}") from error
        if answer.is_success:
            return _content(answer)
        reply = f"{requested}: {answer.status}, {server_message(answer.text)}"
        if answer.status in BUSY or answer.status >= 500:
            raise ServerFailed(reply)
        raise refusal(reply)

    async def _until_answered(self, call: Call) -> Answer:
        failures, end = 0, asyncio.get_running_loop().time() + call.limit_s
        while True:
            client = self._new if failures or not call.is_idempotent else self._persistent
            try:
                answer = await client.request(call.method, call.path, call.body, call.query)
                if not (call.is_idempotent and answer.status in BUSY):
                    return answer
                failures += 1
                wait_s = self._retry.wait_s(failures, self._chance(), answer.retry_after)
                # Report the server's own error rather than a timeout.
                if failures >= self._retry.tries or asyncio.get_running_loop().time() + wait_s > end:
                    return answer
            except ClientClosed:
                raise
            except CallFailed as error:
                failures += 1
                is_safe = call.is_idempotent or isinstance(error, NothingSent)
                if not is_safe or failures >= self._retry.tries:
                    raise
                wait_s = self._retry.wait_s(failures, self._chance())
            await self._sleep(wait_s)


async def all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Results of concurrent calls. The first error is raised when all have ended, so that none keeps running."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return cast(list[T], ended)


def _content(answer: Answer) -> Any:
    if not answer.content:
        return None
    try:
        return answer.json()
    except ValueError:
        return answer.text


class ServerClient(ABC):
    """The client of one server. Create a new one after a restart: its state is of the old server."""

    def __init__(
        self,
        url: str,
        *,
        sleeps: bool = False,
        api_key: str | None = None,
        limits: TimeLimits | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._calls = HttpCalls(url, api_key, sleep=sleep)
        self._limits = limits or TimeLimits()
        self._sleeps = sleeps  # started so that sleeping frees memory; its routes do not show it
        self._sleep = sleep
        self._known: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._versions = VersionLedger()
        self._has_written = False  # the open update has changed some weights

    @property
    def url(self) -> str:
        return self._calls.url

    async def capabilities(self) -> Capabilities:
        async with self._probing:
            if self._known is None:
                self._known = await self._probe()
            return self._known

    async def close(self) -> None:
        await self._calls.close()

    @abstractmethod
    async def _probe(self) -> Capabilities:
        """Query the server's capabilities."""

    async def _order(self, path: str, body: Any = None, is_idempotent: bool = False) -> Any:
        return await self._calls.post(path, body, limit_s=self._limits.answer, is_idempotent=is_idempotent)
