"""Run blocking code in a thread, with calls back into the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from roost.procs.user_code import in_daemon_thread, retrieve_error
from roost.rollout.environments.environment import Environment, Observation

GRACE_S = 4.0  # for a thread to end after the bridge closed; a cancelled episode has 10 s in all

T = TypeVar("T")


class RolloutCancelled(Exception):
    """The episode was cancelled; its result is not used."""


class Bridge:
    """Lets a thread wait for coroutines of the event loop that created it. Closing it ends every wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waited_for: set[concurrent.futures.Future[Any]] = set()
        self._is_closed = False

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the event loop and return its result; called from the thread."""
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
        """Cancel all waits; called in the event loop."""
        with self._lock:
            self._is_closed = True
            left = list(self._waited_for)
        for future in left:
            future.cancel()


async def in_thread(call: Callable[[], T], at_end: Callable[[], None]) -> T:
    """Run a blocking call in a thread. `at_end` releases what the call may wait for, also on cancellation.

    Threads cannot be killed: one that continues after the grace period is abandoned.
    """
    outcome = asyncio.wrap_future(in_daemon_thread("agent", call))
    outcome.add_done_callback(retrieve_error)  # even if the caller is gone
    try:
        return await asyncio.shield(outcome)
    finally:
        at_end()
        await asyncio.wait([outcome], timeout=GRACE_S)


class BlockingEnvironment:
    """A started environment, for blocking code."""

    def __init__(self, bridge: Bridge, environment: Environment, first: Observation) -> None:
        self._bridge, self._environment = bridge, environment
        self.first = first
        self.seen = first  # the last observation

    def step(self, action: Any) -> Observation:
        """Take an action and return the observation."""
        self.seen = self._bridge.wait(lambda: self._environment.step(action))
        return self.seen


class StartedEnvironment:
    """A started environment, for asynchronous code."""

    def __init__(self, environment: Environment, first: Observation) -> None:
        self._environment = environment
        self.first = first

    async def step(self, action: Any) -> Observation:
        """Take an action and return the observation."""
        return await self._environment.step(action)
