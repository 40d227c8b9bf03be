"""The process of a server: it ends with this one, however this one ends, and takes along what it started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from roost.procs.child import start_kept
from roost.procs.logs import last_lines
from roost.procs.server_keeper import KILL_LIMIT, TERMINATE_LIMIT, Link

GRACE_S = 3.0
MARGIN_S = 5.0  # that a keeper may take longer than its own limits
LOOK_EVERY_S = 0.05
LINES_TOLD = 15


class KeptProcess:
    """A program with a keeper, which ends it when this object's process ends or lets go of the object."""

    def __init__(self, name: str, link: Link, pid: int, log: Path) -> None:
        self._name, self._link, self.pid, self._log = name, link, pid, log
        self._exit_code: int | None = None
        self._is_over = False

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> KeptProcess:
        """Start a program; what it prints goes to the log."""
        starting = asyncio.ensure_future(asyncio.to_thread(cls._start, name, command, env, log))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # threads cannot be: end what it has started
            await (await starting).stop()
            raise

    @classmethod
    def _start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> KeptProcess:
        return cls(name, *start_kept(name, command, env, log), log)

    @property
    def is_alive(self) -> bool:
        self._look()
        return self._exit_code is None and not self._is_over and not self._link.is_closed

    def told_end(self) -> str:
        """How it ended, with the last that it printed."""
        self._look()
        how = "ended" if self._exit_code is None else f"ended with exit code {self._exit_code}"
        printed = last_lines(self._log, LINES_TOLD).strip()
        return f"{self._name} {how}" + (f"; the last it said:\n{printed}" if printed else "")

    async def stop(self) -> None:
        """End it with all that it started; may be called again."""
        self._link.tell(stop=GRACE_S)
        deadline = time.monotonic() + GRACE_S + TERMINATE_LIMIT + KILL_LIMIT + MARGIN_S
        while not self._is_over and not self._link.is_closed and time.monotonic() < deadline:
            self._look()
            await asyncio.sleep(LOOK_EVERY_S)
        self._link.close()

    def _look(self) -> None:
        """Take in what the keeper has told."""
        for message in self._link.heard(wait=0.0):
            self._exit_code = message["ended"]
            self._is_over = self._is_over or "ending" in message
