"""Deadlines, bounded waits, and results that may still be pending."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from roost.transport.context import WaitedTooLong

T = TypeVar("T")


async def within(future: asyncio.Future[T], timeout: float | None, otherwise: str | Callable[[], str]) -> T:
    """Result of a future; raise WaitedTooLong after the timeout. The future is cancelled with the waiting task."""
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout)
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise WaitedTooLong(otherwise if isinstance(otherwise, str) else otherwise())
    return future.result()


def has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of a caller, and the timeout it requested, which messages name.

    >>> Deadline.of(0).does_not_wait, Deadline.of(None).left()
    (True, None)
    """

    limit: float | None
    moment: float | None  # on this process's monotonic clock

    @classmethod
    def of(cls, timeout: float | Sequence[float | None] | None) -> Deadline:
        """From a caller's timeout, or from another daemon's `forwarded`."""
        limit, left = timeout if isinstance(timeout, Sequence) else (timeout, timeout)
        return cls(limit, None if left is None else time.monotonic() + left)

    def left(self) -> float | None:
        return None if self.moment is None else max(0.0, self.moment - time.monotonic())

    def at_most(self, seconds: float) -> float:
        left = self.left()
        return seconds if left is None else min(seconds, left)

    @property
    def does_not_wait(self) -> bool:
        return self.limit is not None and self.limit <= 0

    @property
    def forwarded(self) -> tuple[float | None, float | None]:
        """Limit and remaining seconds, for another machine with its own clock."""
        return self.limit, self.left()

    def __str__(self) -> str:
        return f"{self.limit or 0:g} s"


SLICE = 0.5  # seconds between calls of `while_waiting`


class Pending(Generic[T]):
    """A pending operation; call `wait()` in a thread, or `await` it in an event loop.

    `while_waiting` is called periodically during `wait()`; an exception from it ends the wait.
    """

    def __init__(
        self, future: Future[Any], finish: Callable[[Any], T], while_waiting: Callable[[], None] | None = None
    ) -> None:
        self._future, self._finish, self._while_waiting = future, finish, while_waiting
        self._result: list[T] = []
        self._finishing = threading.Lock()

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Return the result; raise `WaitedTooLong` on timeout, after which `wait` may be called again."""
        started = time.monotonic()
        while self._while_waiting is not None and not self._future.done():
            left = math.inf if timeout is None else timeout - (time.monotonic() - started)
            if left <= SLICE:
                break
            if not wait([self._future], SLICE).done:
                self._while_waiting()
        try:
            answer = self._future.result(None if timeout is None else max(0.0, started + timeout - time.monotonic()))
        except TimeoutError as error:
            if self._future.done():
                raise
            raise WaitedTooLong(f"not done within {timeout:g} s") from error
        return self._once(answer)

    async def async_wait(self) -> T:
        # Shielded, so that cancelling the wait does not cancel the operation.
        return self._once(await asyncio.shield(asyncio.wrap_future(self._future)))

    def __await__(self) -> Generator[Any, None, T]:
        return self.async_wait().__await__()

    def _once(self, answer: Any) -> T:
        with self._finishing:
            if not self._result:
                self._result.append(self._finish(answer))
            return self._result[0]
