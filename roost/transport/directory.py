"""The job's directory of groups, channels, failures and notes, kept by the lead node daemon."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from roost.transport.context import Failure

KEPT_FAILURES = 1_000
KEPT_NOTES = 100
T = TypeVar("T")


class GroupEntry(NamedTuple):
    """A group with the node and the accelerators' vendor ids of each rank."""

    name: str
    nodes: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...] = ()


class ChannelEntry(NamedTuple):
    """A channel and its node."""

    name: str
    node: int
    maxsize: int
    serial: int = 0  # counts successive channels of this name


class Directory:
    """Groups, channels, failures and notes of a job; lookups can wait for a name to appear."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupEntry] = {}
        self._channels: dict[str, ChannelEntry] = {}
        self.failures: deque[Failure] = deque(maxlen=KEPT_FAILURES)
        self._num_failures = 0
        self.notes: deque[str] = deque(maxlen=KEPT_NOTES)
        self._num_notes = 0
        self._changed = asyncio.Condition()

    async def add_group(self, entry: GroupEntry) -> None:
        if entry.name in self._groups:
            raise ValueError(f"there is a group {entry.name} already; give this one another name")
        self._groups[entry.name] = entry
        await self._notify()

    async def remove_group(self, name: str) -> None:
        self._groups.pop(name, None)

    def groups(self) -> tuple[GroupEntry, ...]:
        return tuple(self._groups.values())

    async def add_channel(self, entry: ChannelEntry) -> ChannelEntry:
        """Register a channel; return the existing one of this name, if any."""
        known = self._channels.setdefault(entry.name, entry)
        await self._notify()
        return known

    async def replace_channel(self, spent: ChannelEntry, entry: ChannelEntry) -> ChannelEntry:
        """Replace a closed and empty channel; return the new one, or the one of a faster caller."""
        if self._channels.get(entry.name) == spent:
            self._channels[entry.name] = entry._replace(serial=spent.serial + 1)
            await self._notify()
        return self._channels[entry.name]

    async def group(self, name: str, timeout: float) -> GroupEntry:
        return await self._wait_for(lambda: self._groups.get(name), timeout, f"no group is called {name}")

    async def channel(self, name: str, timeout: float) -> ChannelEntry:
        return await self._wait_for(lambda: self._channels.get(name), timeout, f"no channel is called {name}")

    async def add_failure(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._num_failures += 1
        await self._notify()

    async def failures_after(self, count: int) -> tuple[int, list[Failure]]:
        """Wait until there are more than `count` failures; return the total and the new ones."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_failures > count)
        new = min(self._num_failures - count, len(self.failures))
        return self._num_failures, list(self.failures)[-new:]

    async def add_note(self, text: str) -> None:
        self.notes.append(text)
        self._num_notes += 1
        await self._notify()

    async def notes_after(self, count: int) -> tuple[int, list[str]]:
        """Wait until there are more than `count` notes of workers; return the total and the new ones."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_notes > count)
        new = min(self._num_notes - count, len(self.notes))
        return self._num_notes, list(self.notes)[-new:]

    async def _wait_for(self, look: Callable[[], T | None], timeout: float, otherwise: str) -> T:
        async with self._changed:
            try:
                # Not asyncio.wait_for, which in Python 3.11 runs a task: with a timeout of 0 it would never check.
                async with asyncio.timeout(timeout):
                    while (found := look()) is None:
                        await self._changed.wait()
                    return found
            except TimeoutError:
                raise LookupError(f"{otherwise} (waited {timeout:g} s)") from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
