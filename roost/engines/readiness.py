"""Waiting until a server can be used, with an end in every case and the server's own words for what went wrong."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from roost.engines.errors import EngineError
from roost.engines.server_process import ServerProcess
from roost.engines.spec import ServerSpec
from roost.net.http_client import CallFailed, HttpClient

READY_LIMIT = 900.0  # seconds; large models are long in loading
REPORT_EVERY = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
REQUEST_LIMIT = 10.0
SUSPENDED_LIMIT = 30.0
LINES_TOLD, LINES_SEARCHED = 30, 300
STARTS = 3  # in all, where another one may succeed
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # no crash
# The words of the system, of uvicorn and of SGLang.
PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port \d+ is (already in use|not available)", re.IGNORECASE)

logger = logging.getLogger(__name__)


class PortTaken(EngineError):
    """Another program took the port while the server was starting: another port will do."""


class KilledAtStart(EngineError):
    """A signal from outside ended the server while it was starting: the next start may succeed."""


async def start_ready(
    spec: ServerSpec,
    log_folder: Path | str,
    limit: float = READY_LIMIT,
    report: Callable[[str], None] = logger.info,
    start: Callable[[ServerSpec, Path | str], Awaitable[ServerProcess]] = ServerProcess.start,
) -> ServerProcess:
    """Start a server and wait until it is ready; nothing of it is left if it does not get there."""
    for _ in range(STARTS - 1):
        try:
            return await _ready_or_gone(await start(spec, log_folder), limit, report)
        except PortTaken as error:
            report(f"{str(error).splitlines()[0]}; trying another one")
        except KilledAtStart as error:
            report(f"{str(error).splitlines()[0]}; starting it again")
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
    """Return when a server answers; raise when it has died, or has not come up within `limit` seconds."""
    begin = time.monotonic()
    pause, next_report = FIRST_PAUSE, report_every
    stopped_since: float | None = None
    client = HttpClient(process.url, process.spec.api_key, is_kept=False)
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
    """Whether the server is healthy and knows its models; that another program answers on its port does not count."""
    try:
        for route in ("/health", "/v1/models"):
            async with asyncio.timeout(REQUEST_LIMIT):
                if (await client.request("GET", route)).status != HTTPStatus.OK:
                    return False
    except (TimeoutError, CallFailed):
        return False
    return process.is_listening()


def _death(process: ServerProcess, waited: float) -> EngineError:
    name, tail = process.spec.name, process.log_tail(LINES_TOLD)
    if PORT_TAKEN.search(process.log_tail(LINES_SEARCHED)):
        return PortTaken(f"{name}: port {process.port} was taken by another program\n{tail}")
    is_killed = process.exit_code is not None and -process.exit_code in FROM_OUTSIDE
    return (KilledAtStart if is_killed else EngineError)(
        f"{name} ended with exit code {process.exit_code} after {waited:.0f} s, before it was ready. "
        f"The end of {process.log_path}:\n{tail}"
    )


def _never_ready(process: ServerProcess, limit: float) -> EngineError:
    return EngineError(
        f"{process.spec.name} was not ready within {limit:.0f} s; if it is only slow, allow more. "
        f"The end of {process.log_path}:\n{process.log_tail(LINES_TOLD)}"
    )


def _last_line(process: ServerProcess) -> str:
    return process.log_tail(1) or "nothing in its log yet"
