"""Reaper: ends the processes of a local Ray that a killed driver leaves behind.

Ray's processes usually notice the end of their driver. This small process waits for it as well, by a pipe that closes
however the driver ends, then ends the remaining processes and removes their folder.
It recognizes them by a mark in their environment, or in that of an ancestor: a process that changes its title
overwrites parts of its environment.

The file is also that process's program, run by its path, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "ROOST_LOCAL_RAY"
LOOK_EVERY = 10.0  # seconds; children must be seen while their parent is alive
GRACE = 5.0  # seconds for Ray to end by itself
ROUNDS = 50
QUIET = 5  # rounds without any process before it stops: a starting process has no environment for a moment


def marked(mark: str) -> list[int]:
    """Processes started with a mark, except this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has exited, or belongs to another user
    return [pid for pid in found if pid != os.getpid()]


class Ours:
    """Processes started with a mark and their descendants, which stay known after their parent exits."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._known: dict[int, str] = {}  # pid -> start time

    def running(self) -> list[int]:
        """Known processes that have not ended."""
        running = dict(_running())
        ours = set(marked(self._mark)) | {
            pid for pid, started in self._known.items() if pid in running and running[pid][1] == started
        }
        count = 0
        while count < len(ours):
            count = len(ours)
            ours |= {pid for pid, (parent, _) in running.items() if parent in ours}
        ours.discard(os.getpid())
        self._known = {pid: running[pid][1] for pid in ours if pid in running}
        return list(self._known)


def _running() -> Iterator[tuple[int, tuple[int, str]]]:
    """All running processes of the machine by pid, with their parent and start time."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has exited
        if fields[0] not in "ZX":
            yield int(folder.name), (int(fields[1]), fields[19])


def main(mark: str, folder: str) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # srun sends it to every process
    ours = Ours(mark)
    while not _is_closed(sys.stdin.buffer.fileno()):  # closed when the driver exits
        ours.running()
    _end(ours)
    shutil.rmtree(folder, ignore_errors=True)


def _end(ours: Ours) -> None:
    deadline = time.monotonic() + GRACE
    while ours.running() and time.monotonic() < deadline:
        time.sleep(0.2)
    quiet = 0
    for _ in range(ROUNDS):  # a process may start another before it ends
        left = ours.running()
        quiet = 0 if left else quiet + 1
        if quiet == QUIET:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _is_closed(pipe: int) -> bool:
    """Return True if the other end of the pipe is closed; waits up to LOOK_EVERY seconds."""
    ready, _, _ = select.select([pipe], [], [], LOOK_EVERY)
    return bool(ready) and not os.read(pipe, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
