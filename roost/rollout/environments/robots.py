"""Environments of robots: one robot plays one episode at a time, and stands still between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from roost.rollout.environments.environment import Observation
from roost.rollout.environments.robot import Command, Limits, Numbers, Reading, RobotDriver, command_within
from roost.rollout.scenario import Task

T = TypeVar("T")


@runtime_checkable
class DumpsModel(Protocol):
    def model_dump(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Judgement:
    """What a step was worth, and whether the task is done."""

    reward: float = 0.0
    is_over: bool = False


class RobotEnvironments:
    """Robots that were declared as hardware, as environments.

    Derive from it for a robot of your own: `driver_of` makes what drives one, `judge` says what a step was worth, and
    `tip_of` foresees where joints take the tool, if that is known. Or give `driver`, which is called with each config.
    """

    def __init__(
        self,
        hardware: Sequence[Mapping[str, Any] | DumpsModel] = (),
        driver: Callable[[Mapping[str, Any]], RobotDriver] | None = None,
        rate_hz: float = 10.0,
        real_time: bool = True,
        max_steps: int = 100,
        call_limit_s: float = 30.0,
        joint_speed: float = 1.0,
        workspace: Sequence[Sequence[float]] = (),
    ) -> None:
        if not hardware:
            raise ValueError(
                "no robot was declared; add it to cluster.node_groups[].hardware, and place this on its node"
            )
        if rate_hz <= 0 or max_steps < 1:
            raise ValueError(f"rate_hz is {rate_hz} and max_steps is {max_steps}; both must be above 0")
        self.limits = Limits(joint_speed, tuple((float(low), float(high)) for low, high in workspace))
        self.period_s, self.real_time, self.max_steps, self._call_limit_s = (
            1 / rate_hz,
            real_time,
            max_steps,
            call_limit_s,
        )
        self._make_driver = driver
        configs = [dict(each) if isinstance(each, Mapping) else each.model_dump() for each in hardware]
        self._robots = [_Robot(self.driver_of(config), config, call_limit_s) for config in configs]
        self._free: asyncio.Queue[_Robot] = asyncio.Queue()
        for robot in self._robots:
            self._free.put_nowait(robot)

    def driver_of(self, config: Mapping[str, Any]) -> RobotDriver:
        """What drives the robot with this config: `robot_ip`, `camera_serials` and whatever else its kind has."""
        if self._make_driver is None:
            raise ValueError(
                f"{type(self).__name__} has no driver; give `driver`, or write driver_of in a class of your own"
            )
        return self._make_driver(config)

    def judge(self, task: Task, before: Reading, after: Reading) -> Judgement:
        """What a step was worth. Nothing, unless a class of your own says so."""
        return Judgement()

    def tip_of(self, joints: Numbers) -> Numbers | None:
        """Where these joints have the tip; None where that is not known before it happens."""
        return None

    async def open(self) -> RobotEnvironment:
        return RobotEnvironment(self, await self._free.get(), self._free.put_nowait)

    async def close(self) -> None:
        """Stop all robots; one that does not let itself be stopped keeps none of the others from it."""
        ended = await asyncio.gather(*(robot.end() for robot in self._robots), return_exceptions=True)
        failed = [error for error in ended if isinstance(error, Exception)]
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(self._robots)} robots could not be stopped", failed)


class RobotEnvironment:
    """One robot, for one episode."""

    def __init__(self, robots: RobotEnvironments, robot: _Robot, release: Callable[[_Robot], None]) -> None:
        self._robots, self._robot, self._release = robots, robot, release
        self._task = Task("")
        self._reading: Reading | None = None
        self._steps, self._return = 0, 0.0
        self._next_at = 0.0  # when the next period of control begins

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        self._task, self._steps, self._return, self._reading = task, 0, 0.0, None
        self._reading = await self._robot.begin(task, seed)
        return Observation(shown(self._reading), info={"robot": dict(self._robot.config)})

    async def step(self, action: Any) -> Observation:
        before, robots = self._reading, self._robots
        if before is None:
            raise RuntimeError("the episode is over, or has not begun; reset it before the next step")
        command = command_within(action, before, robots.limits, robots.period_s, robots.tip_of)
        await self._keep_pace()
        after = await self._robot.act(command)
        self._steps += 1
        if not robots.limits.holds(after.tip) and robots.limits.holds(before.tip):
            return await self._stopped(after)
        judged = robots.judge(self._task, before, after)
        self._return += judged.reward
        truncated = self._steps >= robots.max_steps and not judged.is_over
        is_over = judged.is_over or truncated
        self._reading = None if is_over else after
        return Observation(shown(after), judged.reward, is_over, goes_on=truncated)

    async def score(self) -> float:
        """The sum of rewards so far."""
        return self._return

    async def close(self) -> None:
        """Stop the robot, whatever it does, and let the next episode have it."""
        self._reading = None
        try:
            await self._robot.stop()
        finally:
            self._release(self._robot)

    async def _stopped(self, after: Reading) -> Observation:
        """The tip left the workspace although it was not to: the robot is stopped, and the episode over."""
        await self._robot.stop()
        self._reading = None
        why = f"the tip is at {after.tip.round(3).tolist()}, out of its workspace {self._robots.limits.workspace}"
        return Observation(shown(after), 0.0, True, info={"stopped": why})

    async def _keep_pace(self) -> None:
        """Wait for the next period of control to begin, where time is real."""
        if self._robots.real_time:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(max(self._next_at - now, 0.0))
            self._next_at = max(self._next_at, now) + self._robots.period_s


class _Robot:
    """A driver and the thread in which its calls are made."""

    def __init__(self, driver: RobotDriver, config: Mapping[str, Any], call_limit_s: float) -> None:
        self.config = config
        self._driver, self._call_limit_s = driver, call_limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="robot")
        self._is_connected = False
        self._hanging: Future[Any] | None = None

    async def begin(self, task: Task, seed: int | None) -> Reading:
        def work() -> Reading:
            if not self._is_connected:
                self._driver.connect()
            self._driver.begin(task, seed)
            return self._driver.read()

        reading = await self._call(work)
        self._is_connected = True
        return reading

    async def act(self, command: Command) -> Reading:
        def work() -> Reading:
            self._driver.command(command)
            return self._driver.read()

        return await self._call(work)

    async def stop(self) -> None:
        """Not in the robot's thread: what hangs there is what has to be stopped."""
        await asyncio.to_thread(self._driver.stop)

    async def end(self) -> None:
        await self.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        """A call of the driver. A robot that fails, or takes too long, is stopped, and connected to anew next time."""
        if self._hanging is not None and not self._hanging.done():
            raise RuntimeError(f"the robot {dict(self.config)} still hangs in a call; look after it, then start again")
        call = self._thread.submit(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), self._call_limit_s)
        except Exception as error:
            self._is_connected = False
            await self.stop()
            if isinstance(error, TimeoutError) and not call.done():
                self._hanging = call  # two calls at a time are more than a driver is asked to bear
                raise TimeoutError(f"{dict(self.config)} did not answer for {self._call_limit_s:g} s") from None
            raise


def shown(reading: Reading) -> dict[str, Any]:
    """A reading as agents see it: all numbers in a row, and the images by their cameras' serials."""
    return {"state": reading.state, "images": dict(reading.images)}
