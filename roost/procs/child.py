"""Start child processes that end with their parent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.procs import server_keeper
from roost.procs.logs import last_lines
from roost.procs.server_keeper import Link

START_LIMIT = 60.0  # seconds for the process to start, not for its service to be ready
LINES_SHOWN = 15


def start_supervised(name: str, command: Sequence[str], env: Mapping[str, str], log: Path | None) -> tuple[Link, int]:
    """Start a program whose prints go to the log, or to those of this process; its keeper, and its process number.

    Closing the link, or losing it, ends the program. OSError where it cannot be started.
    """
    link = _keeper(name, log)
    link.tell(argv=list(command), env=dict(env), log=None if log is None else str(log), owner=os.getpid())
    deadline = time.monotonic() + START_LIMIT
    received: list[dict[str, Any]] = []
    while not received and not link.is_closed and time.monotonic() < deadline:
        received = link.receive(wait=max(0.0, deadline - time.monotonic()))
    if received and "started" in received[0]:
        return link, received[0]["started"]
    link.close()
    shown = last_lines(log, LINES_SHOWN) if log is not None else "its keeper ended"
    why = received[0]["failed"] if received else shown
    raise OSError(f"{name} could not be started with {command[0]}: {why}")


def left_keepers(name: str, folder: Path) -> list[int]:
    """Keepers that another process left, by their name and log folder; each ends together with its server.

    Names repeat: every run has a rollout-0, and several runs may share a machine.
    """
    command = _command(name, folder)
    found = []
    import psutil  # not at module level: a plan-only install lacks it

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == command:
                found.append(process.pid)
    return found


def _command(name: str, folder: Path) -> list[str]:
    # -P: the folder of the program is no place to import from; name and folder identify it in a list of processes
    return [sys.executable, "-P", server_keeper.__file__, name, str(folder)]


def _keeper(name: str, log: Path | None) -> Link:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as opened:
        printed = opened.enter_context(log.open("ab")) if log is not None else None
        launcher = subprocess.Popen(
            _command(name, log.parent if log is not None else Path.cwd()),
            stdin=theirs.fileno(),
            stdout=printed,
            stderr=printed,
            start_new_session=True,  # an interrupt from the terminal is for the owner
        )
    try:
        launcher.wait(START_LIMIT)  # it exits as soon as the keeper runs
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
        ours.close()
        raise OSError(f"{name}: no process could be started within {START_LIMIT:g} s") from None
    return Link(ours)
