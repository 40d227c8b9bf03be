"""Server processes that end with this process, along with everything they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from roost.app_world.serving.command_line import ServingLimits, options_of
from roost.app_world.serving.connection import Connection, ServerLost, ServerRefused
from roost.net.addresses import PortLeases
from roost.procs.child import start_supervised
from roost.procs.child_env import child_env
from roost.procs.logs import last_lines
from roost.procs.server_keeper import KILL_LIMIT, TERMINATE_LIMIT, Link
from roost.sandbox.limits import remove

GRACE_S = 3.0
MARGIN_S = 5.0  # that a keeper may take longer than its own limits
LOOK_EVERY_S = 0.05
LINES_SHOWN = 15


class SupervisedProcess:
    """A program with a keeper process, which ends it when this process ends or drops the object."""

    def __init__(self, name: str, link: Link, pid: int, log: Path) -> None:
        self._name, self._link, self.pid, self._log = name, link, pid, log
        self._exit_code: int | None = None
        self._is_over = False

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> SupervisedProcess:
        """Start a program; its output goes to the log."""
        starting = asyncio.ensure_future(asyncio.to_thread(cls._start, name, command, env, log))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread cannot be cancelled: stop what it started
            await (await starting).stop()
            raise

    @classmethod
    def _start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> SupervisedProcess:
        return cls(name, *start_supervised(name, command, env, log), log)

    @property
    def is_alive(self) -> bool:
        self._look()
        return self._exit_code is None and not self._is_over and not self._link.is_closed

    def describe_end(self) -> str:
        """Describe how the process ended, with its last output."""
        self._look()
        how = "ended" if self._exit_code is None else f"ended with exit code {self._exit_code}"
        printed = last_lines(self._log, LINES_SHOWN).strip()
        return f"{self._name} {how}" + (f"; the last it said:\n{printed}" if printed else "")

    async def stop(self) -> None:
        """End the process with everything it started. May be called again."""
        self._link.tell(stop=GRACE_S)
        deadline = time.monotonic() + GRACE_S + TERMINATE_LIMIT + KILL_LIMIT + MARGIN_S
        while not self._is_over and not self._link.is_closed and time.monotonic() < deadline:
            self._look()
            await asyncio.sleep(LOOK_EVERY_S)
        self._link.close()

    def _look(self) -> None:
        """Read messages of the keeper."""
        for message in self._link.receive(wait=0.0):
            self._exit_code = message["ended"]
            self._is_over = self._is_over or "ending" in message


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
PACKAGES_FROM = str(Path(__file__).parents[3])

Command = Callable[[int], Sequence[str]]  # from the port


class Host(Protocol):
    """Starts and stops one server."""

    @property
    def is_running(self) -> bool: ...

    async def start(self) -> str:
        """Start or restart the server; return its URL once it answers."""
        ...

    async def stop(self) -> None: ...


class GivenServer:
    """A server that Roost does not start or stop."""

    is_running = True

    def __init__(self, url: str) -> None:
        self._url = url

    async def start(self) -> str:
        return self._url

    async def stop(self) -> None:
        pass


class LocalServer:
    """A server in this event loop."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._serving = contextlib.AsyncExitStack()
        self.is_running = False

    async def start(self) -> str:
        from roost.app_world.serving.server import serving

        await self.stop()
        url = await self._serving.enter_async_context(serving(self._limits))
        self.is_running = True
        return url

    async def stop(self) -> None:
        self.is_running = False
        await self._serving.aclose()


class ServerChild:
    """A server in its own process, with a folder for its log and the files of its sandboxes."""

    def __init__(self, name: str, command: Command, env: Mapping[str, str], start_limit_s: float) -> None:
        self._name, self._command, self._env, self._limit_s = name, command, dict(env), start_limit_s
        self._process: SupervisedProcess | None = None
        self._ports = PortLeases()
        self._folder: Path | None = None
        self._at_exit: weakref.finalize[..., ServerChild] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        await self.stop()
        try:
            return await self._started()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        self._ports.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove, folder)
        if self._at_exit is not None:
            self._at_exit.detach()

    async def _started(self) -> str:
        self._folder = Path(tempfile.mkdtemp(prefix="roost-app-world-"))
        self._at_exit = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # if not closed
        port = self._ports.lease()
        env = child_env(os.environ, {**self._env, "TMPDIR": str(self._folder)})
        process = await SupervisedProcess.start(self._name, self._command(port), env, self._folder / "log")
        self._process = process
        url = f"http://127.0.0.1:{port}"
        await _answering(url, process, self._limit_s)
        return url


def own_server(number: int, limits: ServingLimits, start_limit_s: float) -> ServerChild:
    """Roost's server in its own process."""
    command = [sys.executable, "-m", "roost.app_world.serving", *options_of(limits), "--port"]
    path = os.pathsep.join(filter(None, (PACKAGES_FROM, os.environ.get("PYTHONPATH"))))
    return ServerChild(f"app world {number}", lambda port: [*command, str(port)], {"PYTHONPATH": path}, start_limit_s)


def appworld_server(number: int, python: str, root: Path, start_limit_s: float) -> ServerChild:
    """AppWorld's server, run by an interpreter that has it, as its packages conflict with Roost's."""
    command = [python, "-m", "appworld.cli", "serve", "environment", "--root", str(root), "--port"]
    env = {"APPWORLD_ROOT": str(root), "PYTHONPATH": ""}
    return ServerChild(f"AppWorld {number}", lambda port: [*command, str(port)], env, start_limit_s)


async def _answering(url: str, process: SupervisedProcess, limit_s: float) -> None:
    """Wait until the server of this process answers."""
    connection, deadline, pause = Connection(url, limit_s), time.monotonic() + limit_s, FIRST_PAUSE_S
    try:
        while True:
            try:
                await connection.about()
                return
            except (ServerLost, ServerRefused):
                if not process.is_alive:
                    raise ServerLost(process.describe_end()) from None
                if time.monotonic() > deadline:
                    raise ServerLost(f"the server at {url} did not answer within {limit_s:g} s of its start") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
    finally:
        await connection.close()
