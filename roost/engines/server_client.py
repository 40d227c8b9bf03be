"""What the clients of all servers share: connections, limits, what the server can do, and the version it is on."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from roost.engines.capabilities import Capabilities
from roost.engines.http_calls import HttpCalls, TimeLimits
from roost.engines.version_ledger import VersionLedger


class ServerClient(ABC):
    """The client of one server. Make a new one when the server was restarted: what it knows is of the old one."""

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
        self._sleeps = sleeps  # it was to be started so that sleeping frees memory; its routes do not tell
        self._sleep = sleep
        self._known: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._versions = VersionLedger()
        self._has_taken = False  # the open update has changed some weights

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
        """Ask the server what it can do."""

    async def _order(self, path: str, body: Any = None, may_repeat: bool = False) -> Any:
        return await self._calls.post(path, body, limit_s=self._limits.answer, may_repeat=may_repeat)
