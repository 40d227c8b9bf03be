"""Who serves a judge's model: others, or the judge itself with a server where it runs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from roost.engines.errors import EngineError
from roost.engines.http_calls import HttpCalls
from roost.engines.owner import LocalOwner
from roost.engines.restarts import RestartLimit
from roost.procs.files import ScratchFolder
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.judge_engine import server_of
from roost.transport import current


class Served(Protocol):
    """A model that is served."""

    @property
    def counts(self) -> dict[str, int]: ...

    async def calls(self) -> HttpCalls:
        """The way to it, once it is ready; others than before where the server is another one."""
        ...

    async def is_lost(self) -> bool:
        """Whether asking again helps only after a new start, which `calls` makes."""
        ...

    async def close(self) -> None: ...


class ServedByOthers:
    """A server that others start and end."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._calls = HttpCalls(base_url, api_key, asks_proxy=True)

    @property
    def counts(self) -> dict[str, int]:
        return {}

    async def calls(self) -> HttpCalls:
        return self._calls

    async def is_lost(self) -> bool:
        return False

    async def close(self) -> None:
        await self._calls.close()


class OwnServer:
    """A server on the accelerators of this worker, or on the CPU where it has none, and in the driver.

    It is started when it is first needed, and again when it has died, so often. It ends with this process.
    """

    def __init__(self, engine: Mapping[str, Any], model: str, limit: RestartLimit | None = None) -> None:
        setup = current.worker_setup()
        name = "judge" if setup is None else f"{setup.address.group}-{setup.address.rank}"
        self._spec = server_of(engine, model, name, 0 if setup is None else len(setup.physical_ids))
        self._logs = None if setup is None else Path(setup.log_path).parent
        self._limit = limit or RestartLimit()
        self._scratch: ScratchFolder | None = None  # for logs, in the driver
        self._owner: LocalOwner | None = None
        self._start: asyncio.Task[HttpCalls] | None = None
        self._calls: HttpCalls | None = None
        self._recent: deque[float] = deque()  # restarts
        self._restarts = 0
        self._is_closed = False

    @property
    def counts(self) -> dict[str, int]:
        return {"restarts": self._restarts}

    async def calls(self) -> HttpCalls:
        """One start is for all who wait, so it goes on when one of them gives up."""
        is_lost = await self.is_lost()
        if self._is_closed:
            raise RewardFailed("the judge was closed")
        if self._start is None or is_lost:
            self._start = asyncio.create_task(self._started())
        start = self._start
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if self._is_closed and start.cancelled():
                raise RewardFailed("the judge was closed") from None
            raise

    async def is_lost(self) -> bool:
        has_tried = self._start is not None and self._start.done()
        return has_tried and not (self._owner is not None and await self._owner.is_running())

    async def close(self) -> None:
        self._is_closed = True
        if self._start is not None:
            self._start.cancel()
            await asyncio.wait([self._start])
        if self._calls is not None:
            await self._calls.close()
        if self._owner is not None:
            await self._owner.stop()
        if self._scratch is not None:
            self._scratch.remove()

    async def _started(self) -> HttpCalls:
        if self._owner is None:
            self._owner = LocalOwner(self._spec, self._logs_folder())
        else:
            self._count_restart(time.monotonic())
        if self._calls is not None:
            await self._calls.close()
        try:
            url = await self._owner.start()
        except EngineError as error:
            raise RewardFailed(f"the judge's engine does not start: {error}") from error
        self._calls = HttpCalls(f"{url}/v1", self._owner.spec.api_key)
        return self._calls

    def _logs_folder(self) -> Path:
        if self._logs is None:
            self._scratch = ScratchFolder("judge")
            self._logs = self._scratch.path
        return self._logs

    def _count_restart(self, now: float) -> None:
        limit = self._limit
        if not limit.allows(self._recent, now):
            raise RewardFailed(
                f"the judge's engine {self._spec.name} is gone, and was started again {len(self._recent)} times in the "
                f"last {limit.within_s:g} s; see its logs for why it ends"
            )
        self._recent.append(now)
        self._restarts += 1
