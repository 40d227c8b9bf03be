"""Turns: what must not overtake each other goes one after the other, and all else goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterable
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """Hands out turns. Those with a key in common come in the order they were taken."""

    def __init__(self) -> None:
        self._last: dict[Hashable, asyncio.Future[None]] = {}  # of each key the turn that was taken last

    def __len__(self) -> int:
        return len(self._last)

    def take(self, keys: Iterable[Hashable]) -> Turn:
        return Turn(self._last, set(keys))


class Turn:
    """A place in one or several rows. Whoever leaves without its turn having come does not let others pass early."""

    def __init__(self, last: dict[Hashable, asyncio.Future[None]], keys: set[Hashable]) -> None:
        self._last, self._keys = last, keys
        self._before = {last[key] for key in keys if key in last}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_left = False
        last.update(dict.fromkeys(keys, self._ended))

    async def has_come(self, timeout: float | None = None) -> bool:
        """Wait until all before it are through; whether they were in time."""
        waiting = {before for before in self._before if not before.done()}
        if waiting and (timeout is None or timeout > 0):
            _, waiting = await asyncio.wait(waiting, timeout=timeout)
        return not waiting

    def spend_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something, and end the turn when it is done, however it ends."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self.end())
        return task

    def end(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._pass_on()

    def _pass_on(self) -> None:
        waiting = next((before for before in self._before if not before.done()), None)
        if waiting is not None:
            waiting.add_done_callback(lambda _: self._pass_on())
            return
        self._before = set()
        self._ended.set_result(None)
        for key in self._keys:
            if self._last.get(key) is self._ended:
                del self._last[key]

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
