"""The keeper of a server: a small process that starts it, and ends it and its descendants when its owner ends.

An owner that is killed cannot end anything. The kernel's parent-death signal comes as soon as the thread that started
the process ends, and does not reach grandchildren. So the keeper stands between the two: its socket to the owner closes
with the owner, and orphaned descendants become the keeper's own children (PR_SET_CHILD_SUBREAPER).

The file is also the keeper's program, run by its path, so it imports nothing of Roost.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

with contextlib.suppress(ModuleNotFoundError):  # a plan-only install lacks it, and keeps no server
    import psutil

SEND_LIMIT = 60.0  # seconds; messages are small, so only a hung peer delays them
LOOK_EVERY = 0.2  # seconds between checks of the server and its owner
CHECK_EVERY = 0.05  # seconds between checks while processes are being ended
ORPHAN_GRACE = 3.0  # seconds, for a server without its owner and for children of a dead server
TERMINATE_LIMIT = 5.0  # or the grace period, if shorter
KILL_LIMIT = 10.0  # a process inside a device driver dies only when the driver returns
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from the kernel's prctl.h


Find: TypeAlias = "Callable[[], list[psutil.Process]]"


class Ending(StrEnum):
    """How the processes of a server ended."""

    HAD_ENDED = "had ended"
    ASKED = "asked"  # after a SIGTERM to the server alone
    TERMINATED = "terminated"  # after a SIGTERM to each of its processes
    KILLED = "killed"


class Link:
    """Messages between an owner and a keeper, one per line."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._rest = end, b""
        self.is_closed = False

    def tell(self, **message: Any) -> None:
        """Send a message. A closed peer is no error here; `receive` notices it after the peer's last messages."""
        with contextlib.suppress(OSError):
            self._end.settimeout(SEND_LIMIT)
            self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, wait: float) -> list[dict[str, Any]]:
        """Received messages; waits up to `wait` seconds for the first one."""
        if self.is_closed:
            return []
        self._end.settimeout(wait)
        try:
            read = self._end.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return []
        except OSError:
            read = b""
        self.is_closed = not read
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._end.close()
        self.is_closed = True


def has_ended(process: psutil.Process) -> bool:
    """Return True if a process and all its threads have ended; its resources are freed with the last thread."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() < 2)
    except psutil.NoSuchProcess:
        return True


def members(server: psutil.Process, ancestor: psutil.Process) -> list[psutil.Process]:
    """Running processes of a server: those of its session, and all descendants of `ancestor`."""
    if psutil.pid_exists(server.pid) and not server.is_running():
        return []  # its pid was reused, so it has exited
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == server.pid:
                found[pid] = psutil.Process(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update((child.pid, child) for child in ancestor.children(recursive=True))
    return [process for process in found.values() if not has_ended(process)]


def end_all(find: Find, ask: Callable[[], None], grace: float) -> tuple[Ending, list[int]]:
    """End the processes that `find` returns by `ask`, then SIGTERM, then SIGKILL; return how, and the pids left."""
    if not find():
        return Ending.HAD_ENDED, []
    ask()
    if _are_gone(find, grace):
        return Ending.ASKED, []
    _signal(find(), signal.SIGTERM)
    if _are_gone(find, min(grace, TERMINATE_LIMIT)):
        return Ending.TERMINATED, []
    # Repeatedly, because a process may start another before it ends.
    _are_gone(lambda: _signal(find(), signal.SIGKILL), KILL_LIMIT)
    return Ending.KILLED, [process.pid for process in find()]


def _signal(processes: list[psutil.Process], number: int) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has exited, or cannot be signalled and is reported as left
            process.send_signal(number)
    return processes


def _are_gone(find: Find, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while find():
        if time.monotonic() > deadline:
            return False
        time.sleep(CHECK_EVERY)
    return True


def keep(link: Link) -> None:
    """Start the server for the owner, watch both, and end the remaining processes when either ends."""
    orders: list[dict[str, Any]] = []
    while not orders and not link.is_closed:
        orders = link.receive(wait=LOOK_EVERY)
    if not orders:
        return
    try:
        owner, server = psutil.Process(orders[0]["owner"]), _start(orders[0])
    except (OSError, psutil.NoSuchProcess) as error:
        link.tell(failed=str(error))
        return
    process, keeper = psutil.Process(server.pid), psutil.Process()
    link.tell(started=server.pid)
    grace = _watch(link, owner, server)
    ending, left = end_all(lambda: members(process, keeper), server.terminate, grace)
    exit_code = server.poll()
    _reap_children()
    link.tell(ended=exit_code, ending=ending, left=left)


def _reap_children() -> None:
    """Reap ended children, because the init process of many containers does not."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _watch(link: Link, owner: psutil.Process, server: subprocess.Popen[bytes]) -> float:
    """Wait until the server should end; return the grace period in seconds."""
    while True:
        for message in link.receive(wait=LOOK_EVERY):
            return float(message["stop"])
        # The socket stays open if the owner was killed while a fork of it is alive.
        if link.is_closed or has_ended(owner):
            return ORPHAN_GRACE
        if server.poll() is not None:
            link.tell(ended=server.returncode)
            return ORPHAN_GRACE


def _start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def end_with_keeper() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    with contextlib.ExitStack() as opened:
        log = opened.enter_context(Path(order["log"]).open("ab")) if order["log"] is not None else None
        return subprocess.Popen(
            order["argv"],
            env=order["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_keeper,  # safe here: the keeper has one thread
        )


def main() -> None:
    # Not a child of its owner: Ray kills the children of a worker that it stops, the keeper first.
    if os.fork():
        os._exit(0)
    os.setsid()
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # srun sends it to every process. Not SIG_IGN, which the server would inherit.
        signal.signal(signal.SIGUSR1, lambda *_: None)
    keep(Link(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
