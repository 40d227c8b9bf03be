"""What a robot is to its environment: a driver that is connected, reset, observed, told what to do, stopped, closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from roost.rollout.episode import Task

Numbers = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Reading:
    """A robot as it is now, and what came of what it did."""

    state: Numbers | npt.NDArray[np.float32]  # all numbers in a row, in an order of the driver's own
    images: Mapping[str, Image] = field(default_factory=dict)  # by the serial of the camera
    reward: float = 0.0  # of what was done since the reading before
    is_over: bool = False  # the task is done, or cannot be done any more
    tip: Numbers | None = None  # x, y, z of the tool in m, where there is a workspace to keep it in


class RobotDriver(Protocol):
    """One robot, real or simulated. Calls may block: they are made in a thread of its own, one after another.

    class MyArm:
        def __init__(self, stiffness=200.0): self._stiffness = stiffness  # the keys beside `_target_`
        def connect(self, config): self._arm = my_lab.connect(config["robot_ip"], self._stiffness)
        def reset(self, task, seed): self._arm.clear_faults(); self._arm.go_home()
        def observe(self): return Reading(self._arm.joints(), self._arm.frames(), reward=self._arm.is_holding())
        def act(self, action, seconds): self._arm.servo(action, seconds)
        def stop(self): self._arm.halt()
        def close(self): self._arm.disconnect()
    """

    def connect(self, config: Mapping[str, Any]) -> None:
        """Open the connection, also again after it was closed. `config` is what was declared of this robot."""
        ...

    def reset(self, task: Task, seed: int | None) -> None:
        """Recover from a stop, and bring robot and scene to where the task begins."""
        ...

    def observe(self) -> Reading:
        """The robot as it is now, with an image from each of its cameras; from when it is connected."""
        ...

    def act(self, action: Numbers, seconds: float) -> None:
        """Do this for a period of control, `seconds` long: begin with it, and return within the period."""
        ...

    def stop(self) -> None:
        """Stand still at once, whatever it does. Called from any thread, from when `connect` began, also twice."""
        ...

    def close(self) -> None:
        """Give the connection back, however it stands with it."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a policy may not exceed, whatever it says.

    >>> Limits((-0.5, 0.0), (0.5, 1.0)).clipped([2.0, 0.25]).tolist()
    [0.5, 0.25]
    """

    low: tuple[float, ...]  # the least and the greatest of each number of an action
    high: tuple[float, ...]
    workspace: tuple[tuple[float, float], ...] = ()  # the least and the greatest x, y, z of the tip; none is no limit

    def __post_init__(self) -> None:
        if not self.low or len(self.low) != len(self.high) or not all(map(float.__lt__, self.low, self.high)):
            raise ValueError(
                f"action_low is {list(self.low)} and action_high is {list(self.high)}; "
                "declare for each number of an action the least, and a greatest above it"
            )
        if self.workspace and (len(self.workspace) != 3 or any(low >= high for low, high in self.workspace)):
            raise ValueError(f"workspace is {self.workspace}; write three pairs, the least and the greatest of x, y, z")

    def clipped(self, action: Any) -> Numbers:
        """The action with each number within its limits; what is no action at all is refused."""
        numbers = np.asarray(action, np.float64)
        if numbers.shape != (len(self.low),) or not np.isfinite(numbers).all():
            raise ValueError(f"the action is {action!r}; give {len(self.low)} finite numbers, as limits are declared")
        return np.clip(numbers, self.low, self.high)

    def holds(self, tip: Numbers | None) -> bool:
        """Whether the tip, where it is known, is within the workspace."""
        if tip is None or not self.workspace:
            return True
        return all(low <= at <= high for at, (low, high) in zip(tip, self.workspace, strict=True))


@runtime_checkable
class Foresees(Protocol):
    """A driver may know before it acts where its tip would go."""

    def kept_within(self, action: Numbers, seconds: float, limits: Limits) -> Numbers:
        """The action, or another one that does not take the tip out of the workspace."""
        ...


def action_within(action: Numbers, driver: RobotDriver, seconds: float, limits: Limits) -> Numbers:
    """What reaches a driver of what a policy said: whatever the driver foresees, it is within the limits."""
    if limits.workspace and isinstance(driver, Foresees):
        action = driver.kept_within(limits.clipped(action), seconds, limits)
    return limits.clipped(action)
