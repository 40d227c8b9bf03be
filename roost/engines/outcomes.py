"""Several things done at once with engines: what each failed with, and nothing left running when one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable

from roost.engines.errors import EngineError


async def outcome_of(action: Awaitable[object]) -> EngineError | None:
    """What it failed with, if it did."""
    try:
        await action
    except EngineError as error:
        return error
    return None


async def outcomes_of(actions: Iterable[Awaitable[object]]) -> list[EngineError | None]:
    """What each of them failed with, if it did; anything but an engine's error is raised when all have ended."""
    # Awaited by the tasks themselves: a coroutine inside another that is cancelled before it runs is never awaited.
    answers = await asyncio.gather(*actions, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
            raise answer
    return [answer if isinstance(answer, EngineError) else None for answer in answers]


async def wait_for_all(actions: Iterable[Awaitable[object]]) -> None:
    """Wait for all of them, also when one fails; then its error is raised."""
    raise_first(await outcomes_of(actions))


def raise_first(outcomes: Iterable[EngineError | None]) -> None:
    for error in outcomes:
        if error is not None:
            raise error
