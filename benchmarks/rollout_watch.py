"""Number of requests in an engine, seen from outside: `rollout_watch.py URL FILE` records it until it is stopped.

A process of its own, so that it looks at the same moments whoever plays, and however busy they are.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import psutil

EVERY_S = 0.05
LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """State of the engine at a moment of the machine's monotonic clock."""

    at: float
    running: int
    waiting: int


@contextmanager
def watching(url: str, file: Path) -> Iterator[None]:
    """Have an engine watched meanwhile."""
    watcher = subprocess.Popen([sys.executable, __file__, url, str(file)])
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


def looks_between(file: Path, begin: float, end: float) -> list[Look]:
    lines = file.read_text().splitlines(keepends=True)
    looks = [Look(*json.loads(line)) for line in lines if line.endswith("\n")]
    return [look for look in looks if begin <= look.at <= end]


def means(looks: Sequence[Look]) -> tuple[float, float, float]:
    """The mean number of requests in the batch, of those before it, and the share of time in which there was a batch.

    A look counts for the time since the one before: an engine that is busy answers late.

    >>> means([Look(0.0, 5, 0), Look(1.0, 4, 2), Look(3.0, 1, 2), Look(4.0, 0, 0)])
    (1.5, 1.5, 0.75)
    """
    if len(looks) < 2:
        return 0.0, 0.0, 0.0
    running = waiting = busy = 0.0
    for before, look in pairwise(looks):
        seconds = look.at - before.at
        running += seconds * look.running
        waiting += seconds * look.waiting
        busy += seconds * (look.running > 0)
    total = looks[-1].at - looks[0].at
    return running / total, waiting / total, busy / total


class Cores:
    """CPU seconds of the engine, of the processes that run episodes, and of all other programs."""

    def __init__(self, engine: int) -> None:
        self._engine = psutil.Process(engine)

    def used(self) -> tuple[float, float, float]:
        own = psutil.Process()
        workers = [child for child in own.children(recursive=True) if _is_agent_worker(child)]
        engine, runners = _seconds(self._engine), sum(map(_seconds, [own, *workers]))
        spent = psutil.cpu_times()._asdict()
        everything = sum(spent.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
        return engine, runners, everything - engine - runners


def _seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def _is_agent_worker(process: psutil.Process) -> bool:
    try:
        return any(part.startswith("ray::AgentWorker") for part in process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    url, file = urlsplit(sys.argv[1]), Path(sys.argv[2])
    connection = http.client.HTTPConnection(url.netloc, timeout=LIMIT_S)
    with file.open("w") as out:
        due = time.monotonic()
        while True:
            try:
                connection.request("GET", "/load")
                load = json.loads(connection.getresponse().read())
            except (OSError, http.client.HTTPException):
                return  # the engine has ended
            print(json.dumps([time.monotonic(), load["running"], load["waiting"]]), file=out, flush=True)
            due += EVERY_S
            time.sleep(max(due - time.monotonic(), 0.0))


if __name__ == "__main__":
    main()
