"""Environments of robots: a driver that a config names plays one episode at a time, and stands still between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roost.rollout.environments.environment import Observation
from roost.rollout.environments.robot import Limits, Reading, RobotDriver
from roost.rollout.environments.robot_pace import Pace
from roost.rollout.environments.robot_thread import RobotThread
from roost.rollout.scenario import Task

logger = logging.getLogger(__name__)
UNCHECKED = "disable_validate"  # of a robot's config: it is not looked for before its first episode


class DrivenRobots:
    """Robots that were declared as hardware, as environments, each with a driver of its own.

    `driver` names a class by `_target_`, which is called with the mapping's other keys; what was declared of a robot
    goes to its `connect`. `action_low` and `action_high` declare the least and the greatest of each number of an
    action. Where no robot is declared, `robots` says how many there are, as of a simulation.
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
        """Look for all robots before anything is begun, but for those whose config says not to."""
        checked = [robot for robot in self._robots if not robot.config.get(UNCHECKED)]
        found = await asyncio.gather(*(robot.validate() for robot in checked), return_exceptions=True)
        wrong = [(robot, error) for robot, error in zip(checked, found, strict=True) if error is not None]
        if wrong:
            robot, error = wrong[0]
            raise RuntimeError(
                f"{len(wrong)} of {len(self._robots)} robots are not as declared: {dict(robot.config)}: "
                f"{type(error).__name__}: {error}; look after it, or write {UNCHECKED}: true in its config to begin "
                "without looking"
            ) from error

    async def open(self) -> DrivenRobot:
        return DrivenRobot(self, await self._free.get(), self._free.put_nowait)

    async def close(self) -> None:
        """Stop all robots; one that does not let itself be stopped keeps none of the others from it."""
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
        self._last = None  # unless all goes well
        await self._keep_pace()
        after = await self._robot.act(clipped, robots.period_s, robots.limits)
        self._steps += 1
        info: dict[str, Any] = {"missed": self._pace.missed}
        is_out = robots.limits.holds(before.tip) and not robots.limits.holds(after.tip)
        if is_out:
            await self._robot.stop()
            info["stopped"] = f"the tip is at {after.tip}, out of its workspace {robots.limits.workspace}"
        reward = 0.0 if is_out else float(after.reward)
        self._return += reward
        is_over = after.is_over or is_out
        goes_on = self._steps >= robots.max_steps and not is_over
        self._last = None if is_over or goes_on else after
        return Observation(shown(after), reward, is_over or goes_on, info, goes_on)

    async def score(self) -> float:
        """The sum of rewards so far."""
        return self._return

    async def close(self) -> None:
        """Stop the robot, whatever it does, and let the next episode have it."""
        self._last = None
        if self._pace.missed:
            rate = 1 / self._robots.period_s
            logger.warning("%d periods at %g Hz were missed in %d steps", self._pace.missed, rate, self._steps)
        try:
            await self._robot.stop()
        finally:
            self._release(self._robot)

    async def _keep_pace(self) -> None:
        """Wait for the next period of control to begin, where time is real."""
        if self._robots.real_time:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._pace.next_at(now) - now)


def shown(reading: Reading) -> dict[str, Any]:
    """A reading as agents see it: all numbers in a row, and the images by their cameras' serials."""
    return {"state": reading.state, "images": dict(reading.images)}


def _made(driver: Mapping[str, Any] | Callable[[], RobotDriver]) -> RobotDriver:
    if not isinstance(driver, Mapping):
        return driver()
    from hydra.utils import instantiate

    made: RobotDriver = instantiate(dict(driver), _convert_="all")
    return made
