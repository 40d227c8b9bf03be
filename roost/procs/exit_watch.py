"""Watch processes of this machine for their exit, immediately if the kernel supports pidfds."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable

LOOK_EVERY = 0.25  # seconds between polls without pidfds


class ProcessWatch:
    """Calls back once for each watched process that has ended."""

    def __init__(self) -> None:
        self._fds: defaultdict[int, set[int]] = defaultdict(set)
        self._polling: dict[int, asyncio.Task[None]] = {}

    def watch(self, pid: int, ended: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(ended, pid)
            return
        except (AttributeError, OSError):  # not Linux, or an old kernel
            self._polling[pid] = loop.create_task(self._poll(pid, ended))
            return
        self._fds[pid].add(fd)
        loop.add_reader(fd, self._end, pid, fd, ended)

    def stop(self, pid: int) -> None:
        """Stop watching a process."""
        for fd in self._fds.pop(pid, ()):
            _drop(fd)
        task = self._polling.pop(pid, None)
        if task is not None:
            task.cancel()

    def _end(self, pid: int, fd: int, ended: Callable[[int], None]) -> None:
        self._fds[pid].discard(fd)
        if not self._fds[pid]:
            del self._fds[pid]
        _drop(fd)
        ended(pid)

    async def _poll(self, pid: int, ended: Callable[[int], None]) -> None:
        while is_alive(pid):
            await asyncio.sleep(LOOK_EVERY)
        self._polling.pop(pid, None)
        ended(pid)


def _drop(fd: int) -> None:
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
