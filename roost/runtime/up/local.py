"""Processes of `roost up` on one node: Ray with the allocation's CPUs and accelerators, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.cluster.allocation import NODES, RANK, Allocation
from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.registry import installed_registry
from roost.procs import reaper
from roost.procs.child import last_lines, start_supervised
from roost.procs.server_keeper import Link
from roost.runtime.ray_connection import STARTS, Reaper, private_folder
from roost.runtime.up.ray_node import RayOptions

Say = Callable[[str], None]

STOP_LIMIT = 20.0  # seconds for Ray to end by itself
REAPER_LIMIT = 30.0
LINES_SHOWN = 15
QUOTA = Path("/sys/fs/cgroup/cpu.max")
OLD_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
OLD_PERIOD = OLD_QUOTA.with_name("cpu.cfs_period_us")


class RayFailed(RuntimeError):
    """Ray did not start on this node, or one of its processes exited."""


def usable_cpus(allocated: int | None) -> int:
    """CPUs that this process may use: those of the allocation, its CPU set and its container's quota."""
    limits = [allocated or math.inf, len(os.sched_getaffinity(0)), _quota()]
    return max(1, math.floor(min(limits)))


def _quota() -> float:
    """CPUs that the container may use; infinite without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int(OLD_QUOTA.read_text())
        return math.inf if quota_us <= 0 else quota_us / int(OLD_PERIOD.read_text())
    return math.inf


def node_labels(allocation: Allocation, host: str) -> dict[str, str]:
    """Labels of this node in Ray.

    >>> node_labels(Allocation(rank=2, nodes=4, component="1", rack="spine.leaf3"), "cpu7")
    {'roost.rank': '2', 'roost.host': 'cpu7', 'roost.component': '1', 'roost.rack': 'spine.leaf3'}
    """
    found = {"rank": str(allocation.rank), "host": host, "component": allocation.component, "rack": allocation.rack}
    return {f"roost.{name}": _label(value) for name, value in found.items() if _label(value)}


def _label(text: str) -> str:
    """The text as a valid Ray label: letters, digits, dots, dashes and underscores, at most 63."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")


def ray_options(
    allocation: Allocation,
    address: str | None,
    head: str | None,
    environ: Mapping[str, str],
    say: Say,
    folder: Path,
    ports: tuple[int, int] | None = None,
) -> RayOptions:
    """Start options of Ray on this node; raise ValueError if its accelerators cannot be counted."""
    found = installed_registry(environ).detect(environ)
    count = found[1].count if found is not None else 0
    if allocation.gpus is not None and allocation.gpus.text != str(count):
        say(f"{allocation.gpus}, but this node shows {count}: Ray is started with {count}")
    return RayOptions(
        address=address,
        folder=str(folder / "s"),
        cpus=usable_cpus(allocation.cpus),
        accelerators=count,
        resource=found[0].ray_resource if found is not None else "GPU",
        is_simulated=found is not None and found[0].type == AcceleratorType.SIMULATED,
        labels=node_labels(allocation, socket.gethostname()),
        head=head,
        ports=ports,
    )


def job_environ(environ: Mapping[str, str], allocation: Allocation) -> dict[str, str]:
    """Environment of Ray and of the command: token authentication, and this node's rank."""
    ranks = {RANK: str(allocation.rank), NODES: str(allocation.nodes)}
    kept = {name: value for name, value in environ.items() if name != "RAY_ADDRESS"}
    return {"RAY_AUTH_MODE": "token", **kept, **ranks}


class LocalRay:
    """Ray of this node. A reaper ends it and removes its folder if this process is killed."""

    def __init__(self) -> None:
        self.address = ""  # of Ray's control service
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: Reaper | None = None

    async def start(self, make_options: Callable[[Path], RayOptions], environ: Mapping[str, str], say: Say) -> None:
        """Start Ray; retry if the machine was too busy. Raise RayFailed if it does not start."""
        with Reaper.started(private_folder()) as self._reaper:
            options = make_options(self._reaper.folder.path)
            marked = {**environ, reaper.MARK: os.environ[reaper.MARK]}
            for tries_left in reversed(range(STARTS)):
                message = await self._start_once(options, marked)
                if "started" in message:
                    self.address = message["started"]
                    return
                if not (message.get("may_retry") and tries_left):
                    raise RayFailed(f"Ray did not start on this node: {message['failed']}")
                say(f"{message['failed']}; starting Ray again")

    async def _start_once(self, options: RayOptions, environ: Mapping[str, str]) -> dict[str, Any]:
        log = Path(options.folder).with_name("ray_node.log")
        with log.open("ab") as printed:
            self._process = await asyncio.create_subprocess_exec(
                *options.command(),
                env=dict(environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=printed,
                start_new_session=True,  # signals to this process group are not for Ray
            )
        message = await self._receive()
        return message or {"failed": f"its process exited; the end of its output:\n{last_lines(log, LINES_SHOWN)}"}

    async def _receive(self) -> dict[str, Any]:
        """The next message of the process; empty if it exited."""
        while self._process is not None and self._process.stdout is not None:
            line = await self._process.stdout.readline()
            if not line:
                break
            with contextlib.suppress(ValueError):  # Ray prints other lines
                return dict(json.loads(line))
        return {}

    async def ended(self) -> str:
        """Wait until Ray exits on its own; return the cause."""
        message = await self._receive()
        return str(message.get("ended", "Ray's parent process was ended"))

    async def stop(self) -> None:
        """End Ray and all its processes, and remove its folder."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_LIMIT)
        if self._reaper is not None:
            self._reaper.end()
            await asyncio.to_thread(self._reaper.wait, REAPER_LIMIT)


class Command:
    """The user's command. Its processes end with this one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._link: Link | None = None
        self._pid = 0
        self.has_ended = False

    async def run(self, environ: Mapping[str, str]) -> int:
        """Run the command to its end; return its exit code as a shell reports it. Raise OSError if it cannot start."""
        link, self._pid = await asyncio.to_thread(start_supervised, "command", self._words, environ, None)
        self._link = link
        return await asyncio.to_thread(self._wait, link)

    def _wait(self, link: Link) -> int:
        code: int | None = None
        while not link.is_closed:
            for message in link.receive(wait=1.0):
                code = message.get("ended", code)
                if "ending" in message:
                    link.close()
        self.has_ended = True
        if code is None:
            return 1  # the keeper was killed
        return 128 - code if code < 0 else code

    @property
    def is_running(self) -> bool:
        return self._link is not None and not self.has_ended

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL to processes that are left after the grace period."""
        if self._link is not None and self.is_running:
            self._link.tell(stop=grace)
