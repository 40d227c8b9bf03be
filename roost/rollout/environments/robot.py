"""Interface between a robot and its environment: the driver protocol and safety limits."""

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
    """State of a robot, with the reward since the last reading."""

    state: Numbers | npt.NDArray[np.float32]  # flat, in an order that the driver defines
    images: Mapping[str, Image] = field(default_factory=dict)  # by camera serial
    reward: float = 0.0  # since the last reading
    is_over: bool = False  # the task is done, or can no longer be done
    tip: Numbers | None = None  # x, y, z of the tool in m, if there is a workspace limit


class RobotDriver(Protocol):
    """One robot, real or simulated. Calls may block: they run one after another in the robot's own thread.

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
        """Open the connection, also once more after `close`. `config` is the declared config of this robot."""
        ...

    def reset(self, task: Task, seed: int | None) -> None:
        """Recover from a stop, and move robot and scene to the start of the task."""
        ...

    def observe(self) -> Reading:
        """Return the current state with an image from each camera; valid once connected."""
        ...

    def act(self, action: Numbers, seconds: float) -> None:
        """Execute an action for one control period of `seconds`; return within the period."""
        ...

    def stop(self) -> None:
        """Stop all motion at once. Called from any thread, once `connect` has begun, possibly twice."""
        ...

    def close(self) -> None:
        """Close the connection in any state."""
        ...


@dataclass(frozen=True)
class Limits:
    """Safety limits of actions and of the workspace.

    >>> Limits((-0.5, 0.0), (0.5, 1.0)).clipped([2.0, 0.25]).tolist()
    [0.5, 0.25]
    """

    low: tuple[float, ...]  # bounds of each number of an action
    high: tuple[float, ...]
    workspace: tuple[tuple[float, float], ...] = ()  # bounds of x, y, z of the tip; empty: no limit

    def __post_init__(self) -> None:
        if not self.low or len(self.low) != len(self.high) or not all(map(float.__lt__, self.low, self.high)):
            raise ValueError(
                f"action_low is {list(self.low)} and action_high is {list(self.high)}; "
                "give for each number of an action a low and a high above it"
            )
        if self.workspace and (len(self.workspace) != 3 or any(low >= high for low, high in self.workspace)):
            raise ValueError(f"workspace is {self.workspace}; write three pairs, the lowest and highest x, y and z")

    def clipped(self, action: Any) -> Numbers:
        """Clip an action to the limits. Raise ValueError if it has the wrong shape or is not finite."""
        numbers = np.asarray(action, np.float64)
        if numbers.shape != (len(self.low),) or not np.isfinite(numbers).all():
            raise ValueError(
                f"the action is {action!r}; give {len(self.low)} finite numbers, one for each of action_low"
            )
        return np.clip(numbers, self.low, self.high)

    def holds(self, tip: Numbers | None) -> bool:
        """Return True if the tip is within the workspace, or unknown."""
        if tip is None or not self.workspace:
            return True
        return all(low <= at <= high for at, (low, high) in zip(tip, self.workspace, strict=True))


@runtime_checkable
class PredictsTip(Protocol):
    """A driver that can predict where an action would move its tip."""

    def kept_within(self, action: Numbers, seconds: float, limits: Limits) -> Numbers:
        """Return the action, or one that keeps the tip within the workspace."""
        ...


def action_within(action: Numbers, driver: RobotDriver, seconds: float, limits: Limits) -> Numbers:
    """Return the action to send to the driver, always clipped to the limits."""
    if limits.workspace and isinstance(driver, PredictsTip):
        action = driver.kept_within(limits.clipped(action), seconds, limits)
    return limits.clipped(action)
