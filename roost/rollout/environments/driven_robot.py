"""Robots as environments: a fixed control rate, time limits and safety limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from roost.procs.user_code import DaemonThread
from roost.rollout.environments.environment import Observation
from roost.rollout.environments.robot import Limits, Numbers, Reading, RobotDriver, action_within
from roost.rollout.episode import Task

LATE_SHARE = 0.1  # of a period: a step this late still counts as in time, as timers are not exact


class Pace:
    """Steps at a fixed rate. The first step starts the clock; later steps start at whole periods after it.

    A late step waits for the next period, so that no period has two commands; each period without a step is counted
    as missed.

    >>> pace = Pace(0.1)
    >>> [round(pace.next_at(now), 3) for now in (5.0, 5.04, 5.205, 5.33)], pace.missed
    ([5.0, 5.1, 5.205, 5.4], 1)
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._began_at: float | None = None
        self._period = 0  # of the last step
        self.missed = 0

    def next_at(self, now: float) -> float:
        """Return the start time of the step requested now."""
        if self._began_at is None:
            self._began_at = now
            return now
        passed = (now - self._began_at) / self._period_s - (self._period + 1)
        missed = max(math.ceil(passed - LATE_SHARE), 0)
        self.missed += missed
        self._period += 1 + missed
        return max(self._began_at + self._period * self._period_s, now)


T = TypeVar("T")
logger = logging.getLogger(__name__)


class RobotThread:
    """One robot, driven in its own thread. Every call has a time limit."""

    def __init__(self, driver: RobotDriver, config: Mapping[str, Any], limit_s: float) -> None:
        self.config = config
        self._driver, self._limit_s = driver, limit_s
        self._calls = DaemonThread("robot")
        self._stops = DaemonThread("robot's stop")  # separate, to stop the robot while a call hangs
        self._is_connected = False
        self._last: Future[Any] | None = None  # the last call, possibly still running

    async def validate(self) -> None:
        """Connect and observe: the robot responds, and every declared camera gives an image."""

        def work() -> Reading:
            self._connect()
            return self._driver.observe()

        reading = await self._call(work)
        blind = [serial for serial in self.config.get("camera_serials") or () if serial not in reading.images]
        if blind:
            raise ValueError(
                f"no image comes from {', '.join(blind)} of camera_serials; there are images from {[*reading.images]}"
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
        """Stop all motion, and once more after a call that is still running, e.g. of a cancelled episode.

        A robot that is not connected was never used, or was stopped when it failed.
        """
        if self._is_connected or self._is_busy():
            await self._stop_at_once()
        if self._is_busy():
            self._last = self._calls.submit(self._stop_quietly)

    async def end(self) -> None:
        """Stop the robot and close the connection."""
        try:
            await self.stop()
        finally:
            if self._is_connected:
                self._calls.submit(self._abandon)
            for thread in (self._calls, self._stops):
                thread.shutdown()

    async def _call(self, work: Callable[[], T]) -> T:
        """Call the driver in its thread. A call that fails or times out ends the connection."""
        if not await self._is_free():
            raise RuntimeError(f"the robot {dict(self.config)} still hangs in a call; check it, then start again")
        call: Future[T] = self._calls.submit(self._made, work)
        self._last = call
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(call)), self._limit_s)
        except TimeoutError:
            if call.done():  # the driver raised it, or it returned just in time
                return call.result()
        self._last = self._calls.submit(self._abandon)  # runs once the hanging call returns
        with contextlib.suppress(Exception):  # report the first error
            await self._stop_at_once()
        raise TimeoutError(f"the robot {dict(self.config)} did not answer for {self._limit_s:g} s")

    async def _is_free(self) -> bool:
        """Return True if no call is running; wait for one that an episode left behind."""
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
        """Stop and close; the next call reconnects."""
        self._stop_quietly()
        self._is_connected = False
        self._quietly("closed", self._driver.close)

    def _stop_quietly(self) -> None:
        self._quietly("stopped", self._driver.stop)

    def _quietly(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the driver failed before, or its episode is over: no caller to raise to
            logger.warning("the robot %s could not be %s: %s", dict(self.config), what, error)


UNCHECKED = "disable_validate"  # key of a robot's config: skip the check before the first episode


class DrivenRobots:
    """Declared robots as environments, each with its own driver.

    `driver` names a class by `_target_`, which is called with the mapping's other keys; the declared config of a robot
    goes to its `connect`. `action_low` and `action_high` are the bounds of each number of an action. If no robot is
    declared, `robots` is their number, e.g. in simulation.
    """

    def __init__(
        self,
        driver: Mapping[str, Any] | Callable[[], RobotDriver],
        action_low: Sequence[float],
        action_high: Sequence[float],
        hardware: Sequence[Mapping[str, Any]] = (),
        robots: int = 0,
        rate_hz: float = 10.0,
        real_time: bool = True,
        max_steps: int = 100,
        call_limit_s: float = 30.0,
        workspace: Sequence[Sequence[float]] = (),
    ) -> None:
        configs = [dict(each) for each in hardware] or [{} for _ in range(robots)]
        if not configs:
            raise ValueError(
                "no robot was declared; add it to cluster.node_groups[].hardware, and place this on its node"
            )
        if rate_hz <= 0 or max_steps < 1 or call_limit_s <= 0:
            raise ValueError(
                f"rate_hz is {rate_hz}, max_steps is {max_steps} and call_limit_s is {call_limit_s}; "
                "all must be above 0"
            )
        box = tuple((float(low), float(high)) for low, high in workspace)
        self.limits = Limits(tuple(map(float, action_low)), tuple(map(float, action_high)), box)
        self.period_s, self.real_time, self.max_steps = 1 / rate_hz, real_time, max_steps
        self._robots = [RobotThread(_made(driver), config, call_limit_s) for config in configs]
        self._free: asyncio.Queue[RobotThread] = asyncio.Queue()
        for robot in self._robots:
            self._free.put_nowait(robot)

    async def prepare(self) -> None:
        """Check all robots before the first episode, except those whose config disables it."""
        checked = [robot for robot in self._robots if not robot.config.get(UNCHECKED)]
        found = await asyncio.gather(*(robot.validate() for robot in checked), return_exceptions=True)
        wrong = [(robot, error) for robot, error in zip(checked, found, strict=True) if error is not None]
        if wrong:
            robot, error = wrong[0]
            raise RuntimeError(
                f"{len(wrong)} of {len(self._robots)} robots are not as declared: {dict(robot.config)}: "
                f"{type(error).__name__}: {error}; correct it, or skip this check by {UNCHECKED}: true in its config"
            ) from error

    async def open(self) -> DrivenRobot:
        return DrivenRobot(self, await self._free.get(), self._free.put_nowait)

    async def close(self) -> None:
        """Stop all robots, even if one fails to stop."""
        ended = await asyncio.gather(*(robot.end() for robot in self._robots), return_exceptions=True)
        failed = [error for error in ended if isinstance(error, Exception)]
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(self._robots)} robots could not be stopped", failed)


class DrivenRobot:
    """One robot, for one episode."""

    def __init__(self, robots: DrivenRobots, robot: RobotThread, release: Callable[[RobotThread], None]) -> None:
        self._robots, self._robot, self._release = robots, robot, release
        self._last: Reading | None = None
        self._steps, self._return = 0, 0.0
        self._pace = Pace(robots.period_s)

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        self._steps, self._return, self._last, self._pace = 0, 0.0, None, Pace(self._robots.period_s)
        self._last = await self._robot.begin(task, seed)
        return Observation(shown(self._last), info={"robot": dict(self._robot.config)})

    async def step(self, action: Any) -> Observation:
        before, robots = self._last, self._robots
        if before is None:
            raise RuntimeError("the episode is over, or has not begun; reset it before the next step")
        clipped = robots.limits.clipped(action)
        self._last = None  # until the step has succeeded
        await self._keep_pace()
        after = await self._robot.act(clipped, robots.period_s, robots.limits)
        self._steps += 1
        info: dict[str, Any] = {"missed": self._pace.missed}
        is_out = robots.limits.holds(before.tip) and not robots.limits.holds(after.tip)
        if is_out:
            await self._robot.stop()
            info["stopped"] = f"the tip is at {after.tip}, outside its workspace {robots.limits.workspace}"
        reward = 0.0 if is_out else float(after.reward)
        self._return += reward
        is_over = after.is_over or is_out
        is_truncated = self._steps >= robots.max_steps and not is_over
        self._last = None if is_over or is_truncated else after
        return Observation(shown(after), reward, is_over or is_truncated, info, is_truncated)

    async def score(self) -> float:
        """Sum of rewards so far."""
        return self._return

    async def close(self) -> None:
        """Stop the robot, and release it for the next episode."""
        self._last = None
        if self._pace.missed:
            rate = 1 / self._robots.period_s
            logger.warning("%d periods at %g Hz were missed in %d steps", self._pace.missed, rate, self._steps)
        try:
            await self._robot.stop()
        finally:
            self._release(self._robot)

    async def _keep_pace(self) -> None:
        """Wait for the next control period, if running in real time."""
        if self._robots.real_time:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._pace.next_at(now) - now)


def shown(reading: Reading) -> dict[str, Any]:
    """Content of an observation: the flat state, and images by camera serial."""
    return {"state": reading.state, "images": dict(reading.images)}


def _made(driver: Mapping[str, Any] | Callable[[], RobotDriver]) -> RobotDriver:
    if not isinstance(driver, Mapping):
        return driver()
    from hydra.utils import instantiate

    built: RobotDriver = instantiate(dict(driver), _convert_="all")
    return built
