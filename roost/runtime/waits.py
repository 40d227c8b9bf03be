"""Bounded waits in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from roost.runtime.failure import WaitedTooLong

T = TypeVar("T")


async def within(future: asyncio.Future[T], timeout: float | None, otherwise: Callable[[], str]) -> T:
    """A future's result; an error if it takes too long, or where the one who waits is gone."""
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout)
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise WaitedTooLong(otherwise())
    return future.result()


def has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
