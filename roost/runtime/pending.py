"""Something that was begun and may not be done yet, for threads and for event loops alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from roost.runtime.failure import WaitedTooLong

T = TypeVar("T")


class Pending(Generic[T]):
    """An operation under way; `wait()` it in a thread, `await` it in an event loop."""

    def __init__(self, future: Future[Any], finish: Callable[[Any], T]) -> None:
        self._future, self._finish = future, finish
        self._result: list[T] = []
        self._finishing = threading.Lock()

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Its result; a `WaitedTooLong` if there is none in time, after which it can be waited for again."""
        try:
            answer = self._future.result(timeout)
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
