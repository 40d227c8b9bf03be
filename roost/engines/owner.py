"""Who starts and stops an engine's server, and knows whether its process is there."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from roost.engines.command import ServerSpec
from roost.engines.protocol import EngineError
from roost.engines.server_process import ServerProcess, start_ready

START_LIMIT_S = 900.0
SEEDS = 2**31  # every engine takes so many


class Owner(Protocol):
    """The owner of one server."""

    @property
    def spec(self) -> ServerSpec: ...

    async def start(self, model: str | None = None) -> str:
        """Start the server, on another checkpoint of the same model if one is given; its url, once it is ready."""
        ...

    async def stop(self) -> None:
        """End the server and everything it started, also one that is being started; nothing happens without one."""
        ...

    async def is_running(self) -> bool: ...


class LocalOwner:
    """Owns a server on this machine. The server requires a key, which is in `spec`, also where none was given."""

    def __init__(self, spec: ServerSpec, log_folder: Path | str, start_limit_s: float = START_LIMIT_S) -> None:
        self.spec = with_key(spec)
        self._folder = Path(log_folder)
        self._limit_s = start_limit_s
        self._starts = 0
        self._process: ServerProcess | None = None
        self._starting: asyncio.Future[ServerProcess] | None = None
        self._changing = asyncio.Lock()  # a server that is being stopped still holds its device memory

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, model: str | None = None) -> str:
        self._cancel_start()
        async with self._changing:
            await self._end()
            self._starts += 1
            spec = spec_of_start(self.spec, self._starts, model)
            self._starting = asyncio.ensure_future(start_ready(spec, self._folder, self._limit_s))
            try:
                self._process = await self._starting
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                raise EngineError(f"{self.spec.name} was stopped while it was starting") from None
            finally:
                self._starting = None
            return self._process.url

    async def stop(self) -> None:
        self._cancel_start()
        async with self._changing:
            await self._end()

    def _cancel_start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def is_running(self) -> bool:
        return self._process is not None and self._process.alive


def _is_cancelled() -> bool:
    """Whether the task that runs is itself to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def with_key(spec: ServerSpec, key: str | None = None) -> ServerSpec:
    """The server with its own key, else with the given one, else with a new one: loopback is open to all local users.

    >>> from roost.engines.command import EngineKind
    >>> spec = ServerSpec(EngineKind.TORCH, "model")
    >>> with_key(spec, "abc").api_key, len(with_key(spec).api_key)
    ('abc', 32)
    """
    return replace(spec, api_key=spec.api_key or key or new_key())


def new_key() -> str:
    return secrets.token_hex(16)


def spec_of_start(spec: ServerSpec, number: int, model: str | None = None) -> ServerSpec:
    """What a server is started with; on another checkpoint it has the same name, which clients know it by."""
    return replace(
        spec,
        model=model or spec.model,
        served_name=spec.served_name or spec.model,
        seed=_seed_of_start(spec, number),
    )


def _seed_of_start(spec: ServerSpec, number: int) -> int:
    """A seed of its own, because servers with the same one draw the same completions for the same prompts."""
    if spec.seed is None:
        return secrets.randbelow(SEEDS)
    return zlib.crc32(f"{spec.seed} {spec.name} {number}".encode()) % SEEDS
