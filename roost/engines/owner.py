"""Owners of engine servers: start and stop a server, and report whether its process runs."""

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
SEEDS = 2**31  # range of seeds that every engine supports


class Owner(Protocol):
    """Starts and stops one server."""

    @property
    def spec(self) -> ServerSpec: ...

    async def start(self, model: str | None = None) -> str:
        """Start the server, from another checkpoint of the model if given; return its URL once it is ready."""
        ...

    async def stop(self) -> None:
        """Stop the server and all its processes, even while it is starting; do nothing without one."""
        ...

    async def is_running(self) -> bool: ...


class LocalOwner:
    """Owns a server on this machine. The server always requires a key: `spec.api_key`, generated if not given."""

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
    """Return True if the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def with_key(spec: ServerSpec, key: str | None = None) -> ServerSpec:
    """The spec with its own key, else the given one, else a new one, because loopback is open to all local users.

    >>> from roost.engines.command import EngineKind
    >>> spec = ServerSpec(EngineKind.TORCH, "model")
    >>> with_key(spec, "abc").api_key, len(with_key(spec).api_key)
    ('abc', 32)
    """
    return replace(spec, api_key=spec.api_key or key or new_key())


def new_key() -> str:
    return secrets.token_hex(16)


def spec_of_start(spec: ServerSpec, number: int, model: str | None = None) -> ServerSpec:
    """Spec of one start; another checkpoint keeps the served name, which clients use."""
    return replace(
        spec,
        model=model or spec.model,
        served_name=spec.served_name or spec.model,
        seed=_seed_of_start(spec, number),
    )


def _seed_of_start(spec: ServerSpec, number: int) -> int:
    """Distinct seed per start, because servers with equal seeds sample equal completions for equal prompts."""
    if spec.seed is None:
        return secrets.randbelow(SEEDS)
    return zlib.crc32(f"{spec.seed} {spec.name} {number}".encode()) % SEEDS
