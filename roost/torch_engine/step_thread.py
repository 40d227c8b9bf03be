"""A thread that takes steps while there is something to do, and runs what others ask for between them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class StepThread:
    """Calls `step` until it returns False, and again after every action. An action never runs during a step."""

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        ended: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: BaseException | None = None
        self._step = step
        self._ended = ended  # called once, on the thread, with what it died of if it did
        self._clock = clock
        self._step_began: float | None = None
        self._actions: deque[Callable[[], None]] = deque()
        self._waiting: set[Future[object]] = set()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def step_seconds(self) -> float | None:
        """How long the current step has run; None between steps."""
        began = self._step_began  # read once: the step may end meanwhile
        return None if began is None else self._clock() - began

    def post(self, action: Callable[[], None]) -> None:
        """Run this before the next step, without waiting for it."""
        with self._changed:
            self._check_open()
            self._actions.append(action)
            self._changed.notify()

    def call(self, action: Callable[[], T]) -> T:
        """Run this before the next step; returns what it returns and raises what it raises."""
        if threading.current_thread() is self._thread:
            return action()
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.post(answer)
        return self.wait(future)

    def wait(self, future: Future[T]) -> T:
        """The result of something that the thread does, or the error if the thread ends before it."""
        with self._changed:
            if not future.done():
                self._check_open()
                self._waiting.add(future)  # type: ignore[arg-type]
        try:
            return future.result()
        finally:
            with self._changed:
                self._waiting.discard(future)

    def stop(self) -> None:
        """End the thread after the current step; returns when it has ended."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            has_more = False
            while self._wait_for_work(has_more):
                while self._actions:
                    self._actions.popleft()()
                self._step_began = self._clock()
                has_more = self._step()
                self._step_began = None
        except BaseException as error:  # whatever it was, those who wait must hear of it
            self.failure = error
        with self._changed:
            self._is_open = False
            left, self._waiting = self._waiting, set()
        self._ended(self.failure)
        for future in left:
            if not future.done():
                future.set_exception(self._closed())

    def _wait_for_work(self, has_more: bool) -> bool:
        with self._changed:
            while self._is_open and not self._actions and not has_more:
                self._changed.wait()
            return self._is_open

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._closed()

    def _closed(self) -> RuntimeError:
        if self.failure is None:
            return RuntimeError("the engine is closed")
        return RuntimeError(f"the engine died of {type(self.failure).__name__}: {self.failure}")
