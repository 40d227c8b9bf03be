"""Something that was begun and may not be done yet, for threads and for event loops alike."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from roost.runtime.failure import WaitedTooLong

T = TypeVar("T")
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
