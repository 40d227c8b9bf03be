"""A robot's driver and the thread in which it is called: what hangs or fails is stopped, closed and connected anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from roost.procs.user_code import DaemonThread
from roost.rollout.environments.robot import Limits, Numbers, Reading, RobotDriver, action_within
from roost.rollout.scenario import Task

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RobotThread:
    """One robot. Whatever it is asked for has a limit."""

    def __init__(self, driver: RobotDriver, config: Mapping[str, Any], limit_s: float) -> None:
        self.config = config
        self._driver, self._limit_s = driver, limit_s
        self._calls = DaemonThread("robot")
        self._stops = DaemonThread("robot's stop")  # what hangs is what has to be stopped
        self._is_connected = False
        self._last: Future[Any] | None = None  # the last call, which may still be under way

    async def validate(self) -> None:
        """Connect and look: the robot answers, and each camera that was declared shows something."""

        def work() -> Reading:
            self._connect()
            return self._driver.observe()

        reading = await self._call(work)
        blind = [serial for serial in self.config.get("camera_serials") or () if serial not in reading.images]
        if blind:
            raise ValueError(
                f"no image comes from {', '.join(blind)} of camera_serials; from {[*reading.images]} it does"
            )

    async def begin(self, task: Task, seed: int | None) -> Reading:
        def work() -> Reading:
            self._connect()
            self._driver.reset(task, seed)
            return self._driver.observe()

        return await self._call(work)

    async def act(self, action: Numbers, seconds: float, limits: Limits) -> Reading:
        def work() -> Reading:
            self._driver.act(action_within(action, self._driver, seconds, limits), seconds)
            return self._driver.observe()

        return await self._call(work)

    async def stop(self) -> None:
        """Stand still. A call that is still under way, as of an episode that was cancelled, may move it once more.

        One that is not connected was never begun with, or was stopped when it failed.
        """
        if self._is_connected or self._is_busy():
            await self._stop_at_once()
        if self._is_busy():
            self._last = self._calls.submit(self._stop_quietly)

    async def end(self) -> None:
        """Stop it, and give the connection back."""
        try:
            await self.stop()
        finally:
            if self._is_connected:
                self._calls.submit(self._abandon)
            for thread in (self._calls, self._stops):
                thread.shutdown()

    async def _call(self, work: Callable[[], T]) -> T:
        """What a call of the driver gives. One that fails, or takes too long, is the last of its connection."""
        if not await self._is_free():
            raise RuntimeError(f"the robot {dict(self.config)} still hangs in a call; look after it, then start again")
        call: Future[T] = self._calls.submit(self._made, work)
        self._last = call
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(call)), self._limit_s)
        except TimeoutError:
            if call.done():  # the driver's own, or just in time
                return call.result()
        self._last = self._calls.submit(self._abandon)  # once it comes back
        with contextlib.suppress(Exception):  # what went wrong first is what is told
            await self._stop_at_once()
        raise TimeoutError(f"the robot {dict(self.config)} did not answer for {self._limit_s:g} s")

    async def _is_free(self) -> bool:
        """Whether nothing is under way any more; a call that an episode left behind is waited for."""
        if self._is_busy():
            await asyncio.wait([asyncio.wrap_future(self._calls.submit(lambda: None))], timeout=self._limit_s)
        return not self._is_busy()

    def _is_busy(self) -> bool:
        return self._last is not None and not self._last.done()

    async def _stop_at_once(self) -> None:
        stopping = self._stops.submit(self._driver.stop)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(stopping)), self._limit_s)
        except TimeoutError:
            if stopping.done():
                return stopping.result()
            raise TimeoutError(f"the robot {dict(self.config)} did not stop within {self._limit_s:g} s") from None

    # In the robot's thread ----------------------------------------------------------------------------------------

    def _made(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException:
            self._abandon()
            raise

    def _connect(self) -> None:
        if not self._is_connected:
            self._driver.connect(self.config)
            self._is_connected = True

    def _abandon(self) -> None:
        """The next call begins with another connection."""
        self._stop_quietly()
        self._is_connected = False
        self._quietly("closed", self._driver.close)

    def _stop_quietly(self) -> None:
        self._quietly("stopped", self._driver.stop)

    def _quietly(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of a driver that failed before, or whose episode is over: nobody waits for it
            logger.warning("the robot %s could not be %s: %s", dict(self.config), what, error)
