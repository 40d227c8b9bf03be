"""Code that blocks, beside an event loop: it runs in a thread, and waits there for what the loop does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from roost.procs.user_code import begun, look_at
from roost.rollout.environments.environment import Environment, Observation

GRACE_S = 4.0  # for a thread to end once nothing that it waits for will come; episodes have less than 10 s in all

T = TypeVar("T")


class RolloutCancelled(Exception):
    """The episode was cancelled: nobody waits for what comes of it."""


class Bridge:
    """The way from a thread into the event loop that made the bridge. Closing it ends every wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waited_for: set[concurrent.futures.Future[Any]] = set()
        self._is_closed = False

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the work comes to; called from the thread."""
        with self._lock:
            if self._is_closed:
                raise RolloutCancelled("the episode is over")
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._waited_for.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RolloutCancelled("the episode is over") from None
        finally:
            with self._lock:
                self._waited_for.discard(future)

    def close(self) -> None:
        """Called in the event loop."""
        with self._lock:
            self._is_closed = True
            left = list(self._waited_for)
        for future in left:
            future.cancel()


async def in_thread(call: Callable[[], T], at_end: Callable[[], None]) -> T:
    """What a blocking call comes to. `at_end` lets go of what it may wait for, also when this is cancelled.

    A thread that goes on all the same is left behind once its grace is over: threads cannot be ended.
    """
    outcome = asyncio.wrap_future(begun("agent", call))
    outcome.add_done_callback(look_at)  # as nobody may be there any more
    try:
        return await asyncio.shield(outcome)
    finally:
        at_end()
        await asyncio.wait([outcome], timeout=GRACE_S)


class BlockingEnvironment:
    """An environment that has begun, for code that blocks."""

    def __init__(self, bridge: Bridge, environment: Environment, first: Observation) -> None:
        self._bridge, self._environment = bridge, environment
        self.first = first
        self.seen = first  # last

    def step(self, action: Any) -> Observation:
        """Do something, and see what comes of it."""
        self.seen = self._bridge.wait(lambda: self._environment.step(action))
        return self.seen


class StartedEnvironment:
    """An environment that has begun, for asynchronous code."""

    def __init__(self, environment: Environment, first: Observation) -> None:
        self._environment = environment
        self.first = first

    async def step(self, action: Any) -> Observation:
        """Do something, and see what comes of it."""
        return await self._environment.step(action)
