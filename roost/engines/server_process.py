"""Server processes: start, readiness and stop. A server ends with its owner, and takes all its processes with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import psutil

from roost.engines.command import EngineKind, ServerCommand, ServerSpec, ask_for_vllm, server_command
from roost.engines.protocol import EngineError
from roost.net.addresses import PortLeases
from roost.net.http_client import CallFailed, HttpClient
from roost.procs.child import last_lines, start_supervised
from roost.procs.child_env import child_env
from roost.procs.server_keeper import KILL_LIMIT, TERMINATE_LIMIT, Ending, Link, end_all, members

GRACE = 10.0
MARGIN = 5.0  # seconds that a keeper may take longer than its own limits
LOOK_EVERY = 0.05
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> address for clients


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a server was stopped. None of its processes is left, and its port is free."""

    ending: Ending
    exit_code: int | None  # None if unknown, because the keeper was killed


class ServerProcess:
    """A started server. It ends with this process, or when this object is garbage collected."""

    def __init__(
        self, spec: ServerSpec, port: int, log_path: Path, link: Link, server: psutil.Process, leases: PortLeases
    ) -> None:
        self.spec, self.port, self.log_path, self.pid = spec, port, log_path, server.pid
        self._link, self._server, self._leases = link, server, leases
        self._exit_code: int | None = None
        self._ending: tuple[Ending, list[int]] | None = None
        self._is_asked_to_stop = False
        self._has_listened = False

    @classmethod
    async def start(cls, spec: ServerSpec, log_folder: Path | str, port: int | None = None) -> ServerProcess:
        """Start a server on a free or given port; it is not ready yet when this returns.

        If this is cancelled, the server is stopped first.
        """
        # In a thread, because it waits for other processes.
        starting = asyncio.ensure_future(asyncio.to_thread(cls._start, spec, log_folder, port))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):
                await (await starting).stop(grace=0.0)
            raise

    @classmethod
    def _start(cls, spec: ServerSpec, log_folder: Path | str, port: int | None) -> ServerProcess:
        leases = PortLeases()
        try:
            port = leases.lease() if port is None else port
            command = _command(spec, port)
            log_path = _new_log(Path(log_folder), spec.name, f"$ {command.shown(spec.api_key)}\n")
            try:
                link, pid = start_supervised(spec.name, command.argv, child_env(os.environ, command.env), log_path)
            except OSError as error:
                raise EngineError(f"{error}. Log: {log_path}") from error
            server = psutil.Process(pid)  # exists even if it has ended: the keeper has not reaped it yet
        except BaseException:
            leases.close()
            raise
        return cls(spec, port, log_path, link, server, leases)

    @property
    def url(self) -> str:
        host = EVERY_ADDRESS.get(self.spec.host, self.spec.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def alive(self) -> bool:
        self._look()
        return self._exit_code is None and self._ending is None and not self._link.is_closed

    @property
    def is_suspended(self) -> bool:
        """True if a signal such as SIGSTOP has suspended its process."""
        try:
            return self._server.status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative signal number if it was killed; None while it is alive."""
        self._look()
        return self._exit_code

    def log_tail(self, lines: int) -> str:
        return last_lines(self.log_path, lines)

    def is_listening(self) -> bool:
        """Return True if this server listens on its port, and not another program."""
        for process in self._members():
            try:
                connections = process.net_connections("tcp")
            except psutil.Error:
                continue
            if any(one.status == psutil.CONN_LISTEN and one.laddr[1:] == (self.port,) for one in connections):
                self._has_listened = True
                return True
        return False

    async def stop(self, grace: float = GRACE) -> Stopped:
        """Terminate the server, and kill all of its processes if it does not exit within `grace` seconds.

        May be called repeatedly, and for a server that has already exited.
        """
        if not self._is_asked_to_stop:
            self._is_asked_to_stop = True
            self._link.tell(stop=grace)
        deadline = time.monotonic() + grace + TERMINATE_LIMIT + KILL_LIMIT + MARGIN
        while self._ending is None and not self._link.is_closed and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_EVERY)
            self._look()
        if self._ending is None:  # the keeper was killed, or hangs
            self._ending = await asyncio.to_thread(end_all, self._members, lambda: None, 0.0)
        ending, left = self._ending
        left = [pid for pid in left if psutil.pid_exists(pid)]  # some may have exited meanwhile
        if left:
            raise EngineError(
                f"{self.spec.name}: processes {left} did not end within {KILL_LIMIT:.0f} s of being killed, so their "
                f"device memory may still be in use; reboot the node if they do not end. Log: {self.log_path}"
            )
        if self._has_listened:  # else another program may have the port
            await self._wait_for_free_port()
        self._link.close()
        self._leases.close()
        return Stopped(ending, self._exit_code)

    async def _wait_for_free_port(self) -> None:
        deadline = time.monotonic() + MARGIN
        while not _is_free(self.spec.host, self.port):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.spec.name} has ended, but its port {self.port} is still in use; end processes "
                    f"{_listeners(self.port)}"
                )
            await asyncio.sleep(LOOK_EVERY)

    def _members(self) -> list[psutil.Process]:
        return members(self._server, self._server)

    def _look(self) -> None:
        """Read messages of the keeper."""
        for message in self._link.receive(wait=0.0):
            self._exit_code = message["ended"]
            if "ending" in message:
                self._ending = Ending(message["ending"]), message["left"]


def _command(spec: ServerSpec, port: int) -> ServerCommand:
    python = spec.python or sys.executable
    vllm = ask_for_vllm(python, child_env(os.environ, spec.env)) if spec.kind is EngineKind.VLLM else None
    return server_command(spec, port, python, vllm)


def _new_log(folder: Path, name: str, first_line: str) -> Path:
    """Create a new log for every start, so that logs of failed starts are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]", "_", name)
    numbers = itertools.count(1)
    while True:
        path = folder / f"{stem}-{next(numbers)}.log"
        with contextlib.suppress(FileExistsError), open(path, "x", opener=_private) as log:
            log.write(first_line)
            return path


def _private(path: str, flags: int) -> int:
    """Open with owner-only permissions, because SGLang logs its settings, including keys."""
    return os.open(path, flags, 0o600)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Ignore connections in TIME_WAIT, but not listeners.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _listeners(port: int) -> list[int | None]:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return []
    return [one.pid for one in connections if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,)]


READY_LIMIT = 900.0  # seconds; large models load slowly
REPORT_EVERY = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
REQUEST_LIMIT = 10.0
SUSPENDED_LIMIT = 30.0
LINES_SHOWN, LINES_SEARCHED = 30, 300
STARTS = 3  # attempts, for errors that a retry may fix
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # not sent by a crash
# Error messages of the system, uvicorn and SGLang.
PORT_IN_USE = re.compile(r"address already in use|EADDRINUSE|port \d+ is (already in use|not available)", re.IGNORECASE)

logger = logging.getLogger(__name__)


class PortInUse(EngineError):
    """Another program took the port while the server was starting; retry with another port."""


class KilledAtStart(EngineError):
    """An external signal ended the server while it was starting; a retry may succeed."""


async def start_ready(
    spec: ServerSpec,
    log_folder: Path | str,
    limit: float = READY_LIMIT,
    report: Callable[[str], None] = logger.info,
    start: Callable[[ServerSpec, Path | str], Awaitable[ServerProcess]] = ServerProcess.start,
) -> ServerProcess:
    """Start a server and wait until it is ready; on failure all of its processes are ended."""
    for _ in range(STARTS - 1):
        try:
            return await _ready_or_gone(await start(spec, log_folder), limit, report)
        except PortInUse as error:
            report(f"{str(error).splitlines()[0]}; retrying on another port")
        except KilledAtStart as error:
            report(f"{str(error).splitlines()[0]}; restarting it")
    return await _ready_or_gone(await start(spec, log_folder), limit, report)


async def _ready_or_gone(process: ServerProcess, limit: float, report: Callable[[str], None]) -> ServerProcess:
    try:
        await wait_ready(process, limit, report)
    except BaseException:
        await process.stop(grace=0.0)
        raise
    return process


async def wait_ready(
    process: ServerProcess,
    limit: float = READY_LIMIT,
    report: Callable[[str], None] = logger.info,
    report_every: float = REPORT_EVERY,
) -> None:
    """Return when a server answers; raise EngineError if it dies or is not ready within `limit` seconds."""
    begin = time.monotonic()
    pause, next_report = FIRST_PAUSE, report_every
    stopped_since: float | None = None
    client = HttpClient(process.url, process.spec.api_key, keep_alive=False)
    try:
        while not await _answers(client, process):
            waited = time.monotonic() - begin
            if not process.alive:
                raise _death(process, waited)
            if waited > limit:
                raise _never_ready(process, limit)
            stopped_since = (stopped_since or waited) if process.is_suspended else None
            if stopped_since is not None and waited - stopped_since > SUSPENDED_LIMIT:
                raise EngineError(
                    f"{process.spec.name} has been suspended by a signal (SIGSTOP) for {SUSPENDED_LIMIT:.0f} s while "
                    f"it was starting. Log: {process.log_path}"
                )
            if waited > next_report:
                report(f"{process.spec.name}: starting for {waited:.0f} s; {_last_line(process)}")
                next_report += report_every
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        await client.close()


async def _answers(client: HttpClient, process: ServerProcess) -> bool:
    """Return True if the server is healthy and lists its models, and no other program answered on its port."""
    try:
        for route in ("/health", "/v1/models"):
            async with asyncio.timeout(REQUEST_LIMIT):
                if (await client.request("GET", route)).status != HTTPStatus.OK:
                    return False
    except (TimeoutError, CallFailed):
        return False
    return process.is_listening()


def _death(process: ServerProcess, waited: float) -> EngineError:
    name, tail = process.spec.name, process.log_tail(LINES_SHOWN)
    if PORT_IN_USE.search(process.log_tail(LINES_SEARCHED)):
        return PortInUse(f"{name}: port {process.port} was taken by another program\n{tail}")
    is_killed = process.exit_code is not None and -process.exit_code in FROM_OUTSIDE
    return (KilledAtStart if is_killed else EngineError)(
        f"{name} ended with exit code {process.exit_code} after {waited:.0f} s, before it was ready. "
        f"The end of {process.log_path}:\n{tail}"
    )


def _never_ready(process: ServerProcess, limit: float) -> EngineError:
    return EngineError(
        f"{process.spec.name} was not ready within {limit:.0f} s. "
        f"The end of {process.log_path}:\n{process.log_tail(LINES_SHOWN)}"
    )


def _last_line(process: ServerProcess) -> str:
    return process.log_tail(1) or "nothing in its log yet"


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
        """Stop the server and all its processes, even while it is starting; do nothing if none runs."""
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
        self._changing = asyncio.Lock()  # no start before the last server has stopped and freed its device memory

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
    """The spec with a key: its own, else the given one, else a new one. All users of a machine can reach loopback.

    >>> from roost.engines.command import EngineKind
    >>> spec = ServerSpec(EngineKind.TORCH, "model")
    >>> with_key(spec, "abc").api_key, len(with_key(spec).api_key)
    ('abc', 32)
    """
    return replace(spec, api_key=spec.api_key or key or new_key())


def new_key() -> str:
    return secrets.token_hex(16)


def spec_of_start(spec: ServerSpec, number: int, model: str | None = None) -> ServerSpec:
    """Spec of one start of a server. With another checkpoint the served name stays, because clients use it."""
    return replace(
        spec,
        model=model or spec.model,
        served_name=spec.served_name or spec.model,
        seed=_seed_of_start(spec, number),
    )


def _seed_of_start(spec: ServerSpec, number: int) -> int:
    """Seed of one start. Each has its own: with equal seeds, servers sample equal completions of a prompt."""
    if spec.seed is None:
        return secrets.randbelow(SEEDS)
    return zlib.crc32(f"{spec.seed} {spec.name} {number}".encode()) % SEEDS
