"""Waiting for the code of others: not for ever, whatever it makes of being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from roost.runtime.contained import as_exception, contained

GRACE_S = 10.0  # for what is cancelled to put its things in order

T = TypeVar("T")


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """The outcome of work that has so long. What goes on after it was cancelled is left behind, once its grace is over.

    Whatever the work raises is an Exception here, also where it called `sys.exit()`.

    >>> asyncio.run(within(1.0, asyncio.sleep(0, "done")))
    'done'
    """
    task = asyncio.ensure_future(contained(work))
    task.add_done_callback(look_at)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=GRACE_S)
    if not done:
        raise TimeoutError(f"it was not over after {limit_s:g} s")
    if task.cancelled():
        raise RuntimeError("it was cancelled from within")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise as_exception(error)
    return task.result()


def look_at(task: asyncio.Future[T]) -> None:
    """An error that comes too late for anybody is no reason for the event loop to complain."""
    if not task.cancelled():
        task.exception()
