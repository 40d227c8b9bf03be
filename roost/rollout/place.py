"""A place to play in, of which there are so many: who plays may leave it before the end, when engines are done with."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, Token
from types import TracebackType


class Place:
    """Held from the beginning to the end, or until whoever plays in it says `leave_place()`, however deep within."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_held = False
        self._before: Token[Place | None]

    async def __aenter__(self) -> None:
        await self._places.acquire()
        self._is_held = True
        self._before = _MINE.set(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _MINE.reset(self._before)
        self.leave()

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.release()


_MINE: ContextVar[Place | None] = ContextVar("place", default=None)


def leave_place() -> None:
    """Somebody else may play from now on; what is left to do needs no engine."""
    place = _MINE.get()
    if place is not None:
        place.leave()
