"""Who starts and stops an engine's server, and knows whether its process is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from roost.engines.readiness import start_ready
from roost.engines.server_process import ServerProcess
from roost.engines.spec import ServerSpec

START_LIMIT_S = 900.0


class Owner(Protocol):
    """The owner of one server."""

    @property
    def spec(self) -> ServerSpec: ...

    async def start(self, model: str | None = None) -> str:
        """Start the server, on another checkpoint of the same model if one is given; its url, once it is ready."""
        ...

    async def stop(self) -> None:
        """End the server and everything it started; nothing happens where there is none."""
        ...

    async def is_running(self) -> bool: ...


class LocalOwner:
    """Owns a server on this machine."""

    def __init__(self, spec: ServerSpec, log_folder: Path | str, start_limit_s: float = START_LIMIT_S) -> None:
        self.spec = spec
        self._folder = Path(log_folder)
        self._limit_s = start_limit_s
        self._process: ServerProcess | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, model: str | None = None) -> str:
        await self.stop()
        self._process = await start_ready(
            replace(self.spec, model=model or self.spec.model), self._folder, self._limit_s
        )
        return self._process.url

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def is_running(self) -> bool:
        return self._process is not None and self._process.alive
