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

from roost.transport.failure import WaitedTooLong

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


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment until which a caller waits, and the seconds it asked for, which messages name.

    >>> Deadline.of(0).does_not_wait, Deadline.of(None).left()
    (True, None)
    """

    limit: float | None
    moment: float | None  # of this process's clock

    @classmethod
    def of(cls, timeout: float | Sequence[float | None] | None) -> Deadline:
        """From what a process asks for, or from what another node's daemon hands on: see `handed_on`."""
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
    def handed_on(self) -> tuple[float | None, float | None]:
        """For another machine, whose clock is another."""
        return self.limit, self.left()

    def __str__(self) -> str:
        return f"{self.limit or 0:g} s"


SLICE = 0.5  # seconds between looks at whether it is still worth waiting


class Pending(Generic[T]):
    """An operation under way; `wait()` it in a thread, `await` it in an event loop.

    `while_waiting` is called now and then in a thread that waits; what it raises ends the wait.
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
        """Its result; a `WaitedTooLong` if there is none in time, after which it can be waited for again."""
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
        # Whoever gives up waiting ends the wait, not the operation: it can be waited for again.
        return self._once(await asyncio.shield(asyncio.wrap_future(self._future)))

    def __await__(self) -> Generator[Any, None, T]:
        return self.async_wait().__await__()

    def _once(self, answer: Any) -> T:
        with self._finishing:
            if not self._result:
                self._result.append(self._finish(answer))
            return self._result[0]
