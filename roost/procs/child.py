"""Start child processes that end with their parent, and collect the logs of workers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from roost.procs import server_keeper
from roost.procs.server_keeper import Link

MAX_READ = 4 << 20  # bytes of a log that are read at a time
LOOK_EVERY = 0.3  # seconds


def log_name(group: str, rank: int) -> str:
    """Path of a worker's log, relative to the log folder.

    >>> log_name("reward.math", 3)
    'reward.math/rank_3.log'
    """
    return f"{group}/rank_{rank}.log"


def redirect_output(path: Path) -> None:
    """Send all output of this process to a file, including that of native libraries and child processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Ray may have replaced Python's streams by others, which do not write to these descriptors.
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115


def last_lines(path: Path, count: int, begin: int = 0) -> str:
    """Last lines of a log, after its first `begin` bytes; empty if there is no log."""
    return "\n".join(_end_of(path, begin)[0].splitlines()[-count:])


def _end_of(path: Path, begin: int = 0) -> tuple[str, int]:
    """The last 64 KiB of a log, and the offset of its end."""
    try:
        with path.open("rb") as log:
            start = log.seek(max(begin, log.seek(0, os.SEEK_END) - 64 * 1024))
            content = log.read()
    except OSError:
        return "", begin
    return content.decode("utf-8", "replace"), start + len(content)


def read_from(path: Path, offset: int) -> bytes:
    """Content after the first `offset` bytes, up to a limit; empty if it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(offset)
            return log.read(MAX_READ)
    except OSError:
        return b""


class LogCollector:
    """Copies the logs of other nodes into the driver's folder, and shows lines on the console.

    `fetch` takes the sizes of the logs so far, and returns the bytes that other nodes have beyond them.
    """

    def __init__(
        self,
        folder: Path,
        fetch: Callable[[Mapping[str, int]], Mapping[str, bytes]] | None,
        console: TextIO | None,
    ) -> None:
        self._folder, self._fetch, self._console = folder, fetch, console
        self._shown: dict[Path, int] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._fetch is not None or self._console is not None:
            self._thread = threading.Thread(target=self._run, name="roost-logs", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Collect the rest, and stop."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5)
            while self.collect():
                pass
            self._show_unfinished_lines()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY):
            self.collect()

    def collect(self) -> bool:
        """Collect once; return True if there is more. Logs that cannot be fetched now are fetched the next time."""
        is_more = False
        if self._fetch is not None:
            sizes = {str(path.relative_to(self._folder)): path.stat().st_size for path in self._folder.rglob("*.log")}
            for name, text in self._fetch(sizes).items():
                path = self._folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as log:
                    log.write(text)
                is_more |= len(text) == MAX_READ
        if self._console is not None:
            for path in sorted(self._folder.rglob("*.log")):
                is_more |= self._show(path, self._console)
        return is_more

    def _show_unfinished_lines(self) -> None:
        if self._console is not None:
            for path in sorted(self._folder.rglob("*.log")):
                self._show(path, self._console, is_last=True)

    def _show(self, path: Path, console: TextIO, is_last: bool = False) -> bool:
        """Print whole lines with the worker's name before each; only a line longer than MAX_READ is cut."""
        new = read_from(path, self._shown.get(path, 0))
        is_more = len(new) == MAX_READ
        end = len(new) if is_last else new.rfind(b"\n") + 1
        if not end and is_more:
            end = len(new)
        self._shown[path] = self._shown.get(path, 0) + end
        name = f"{path.parent.relative_to(self._folder)}:{path.stem.removeprefix('rank_')}"
        for line in new[:end].decode("utf-8", "replace").splitlines():
            print(f"[{name}] {line}", file=console, flush=True)
        return is_more


class LogTail:
    """Reads logs below a folder as they grow; each line begins with the name of its process."""

    def __init__(self, folder: Path, is_wanted: Callable[[str], bool]) -> None:
        self._folder, self._is_wanted = folder, is_wanted
        self._offsets: dict[Path, int] = {}

    @property
    def names(self) -> list[str]:
        """Logs that were read."""
        return [str(path.relative_to(self._folder)) for path in self._offsets]

    def last(self, count: int) -> list[str]:
        """The last lines of each log; `new` continues after them."""
        found = []
        for path in self._logs():
            text, self._offsets[path] = _end_of(path)
            found += [f"{self._label(path)} {line}" for line in (text.splitlines()[-count:] if count else [])]
        return found

    def new(self) -> list[str]:
        """Whole lines written since the last call."""
        found = []
        for path in self._logs():
            text = read_from(path, self._offsets.get(path, 0))
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) == MAX_READ else 0)
            self._offsets[path] = self._offsets.get(path, 0) + end
            found += [f"{self._label(path)} {line}" for line in text[:end].decode("utf-8", "replace").splitlines()]
        return found

    def _logs(self) -> list[Path]:
        found = sorted(self._folder.rglob("*.log"))
        return [path for path in found if self._is_wanted(str(path.relative_to(self._folder)))]

    def _label(self, path: Path) -> str:
        return f"[{path.parent.name}:{path.stem.removeprefix('rank_')}]"


START_LIMIT = 60.0  # seconds for the process to start, not for its service to be ready
LINES_SHOWN = 15


def start_supervised(name: str, command: Sequence[str], env: Mapping[str, str], log: Path | None) -> tuple[Link, int]:
    """Start a program under a keeper; return the link to the keeper, and the program's pid.

    Its output goes to the log, else to that of this process. Closing the link, or losing it, ends the program. Raise
    OSError if it cannot be started.
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
    """Pids of keepers that another process left, by server name and log folder; each ends together with its server.

    The log folder tells runs on the same machine apart: every run has a rollout-0.
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
    # -P: do not import from the program's folder. The name and the folder identify the keeper in a list of processes.
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
            start_new_session=True,  # Ctrl-C in the terminal is for the owner only
        )
    try:
        launcher.wait(START_LIMIT)  # it exits as soon as the keeper runs
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
        ours.close()
        raise OSError(f"{name}: no process could be started within {START_LIMIT:g} s") from None
    return Link(ours)
