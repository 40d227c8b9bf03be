"""What a robot is to its environment: something that is connected to, read, commanded and stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from roost.rollout.scenario import Task

Numbers = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Reading:
    """A robot as it is now."""

    joints: Numbers  # rad
    speeds: Numbers  # rad/s
    gripper: float  # 0 is closed, 1 is open
    tip: Numbers  # x, y, z of the tool in m, as the workspace is given
    images: Mapping[str, Image] = field(default_factory=dict)  # by the serial of the camera
    seen: Mapping[str, Numbers] = field(default_factory=dict)  # what else is known: a target, forces

    @property
    def state(self) -> npt.NDArray[np.float32]:
        """All numbers in a row: joints, speeds, gripper, tip, and what else is seen in the order of its names."""
        others = [self.seen[name] for name in sorted(self.seen)]
        return np.concatenate([self.joints, self.speeds, [self.gripper], self.tip, *others]).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Command:
    """What a robot is to do for one period of control."""

    speeds: Numbers  # of the joints, rad/s
    gripper: float  # towards 0, closed, or 1, open
    seconds: float


class RobotDriver(Protocol):
    """One robot. Its calls may block: they are made in a thread of the robot's own, one after another.

    class MyArm:
        def __init__(self, config): self._address = config["robot_ip"]
        def connect(self): self._arm = my_lab.connect(self._address)
        def begin(self, task, seed): self._arm.clear_faults(); self._arm.go_home()
        def read(self): return Reading(self._arm.q, self._arm.dq, self._arm.width / 0.08, self._arm.tool)
        def command(self, command): self._arm.servo(command.speeds, command.seconds, command.gripper)
        def stop(self): self._arm.halt()
    """

    def connect(self) -> None:
        """Open the connection; also after it was lost."""
        ...

    def begin(self, task: Task, seed: int | None) -> None:
        """Recover from a stop, and bring robot and scene to where the task begins."""
        ...

    def read(self) -> Reading:
        """The robot as it is now, with an image from each of its cameras."""
        ...

    def command(self, command: Command) -> None:
        """Do this for its period; returns when the period is over, or at once."""
        ...

    def stop(self) -> None:
        """Stand still at once. Called from any thread, at any time, also twice, and whatever else is under way."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a policy may not exceed, whatever it says.

    >>> Limits(joint_speed=0.5).speeds([2.0, -0.1]).tolist()
    [0.5, -0.05]
    """

    joint_speed: float = 1.0  # rad/s
    workspace: tuple[tuple[float, float], ...] = ()  # the least and the greatest x, y, z of the tip; none is no limit

    def __post_init__(self) -> None:
        if self.joint_speed <= 0:
            raise ValueError(f"joint_speed is {self.joint_speed}; it must be above 0 rad/s")
        if self.workspace and (len(self.workspace) != 3 or any(low >= high for low, high in self.workspace)):
            raise ValueError(f"workspace is {self.workspace}; write three pairs, the least and the greatest of x, y, z")

    def speeds(self, shares: Sequence[float] | Numbers) -> Numbers:
        """Joint speeds from shares of the greatest, -1 to 1."""
        return np.clip(np.asarray(shares, np.float64), -1.0, 1.0) * self.joint_speed

    def holds(self, tip: Numbers) -> bool:
        """Whether the tip is within the workspace."""
        return all(low <= at <= high for at, (low, high) in zip(tip, self.workspace, strict=False))


def command_within(
    action: Any,
    reading: Reading,
    limits: Limits,
    seconds: float,
    tip_of: Callable[[Numbers], Numbers | None],
) -> Command:
    """The command for an action: a number from -1 to 1 for each joint, and one for the gripper, -1 closes, 1 opens.

    Joints that would take the tip out of the workspace stand still; one that is outside already may come back.
    """
    joints = len(reading.joints)
    numbers = np.asarray(action, np.float64)
    if numbers.shape != (joints + 1,) or not np.isfinite(numbers).all():
        raise ValueError(
            f"the action is {action!r}; give {joints + 1} finite numbers, for {joints} joints and a gripper"
        )
    speeds = limits.speeds(numbers[:joints])
    ahead = tip_of(reading.joints + speeds * seconds)
    if ahead is not None and limits.holds(reading.tip) and not limits.holds(ahead):
        speeds = np.zeros(joints)
    return Command(speeds, float(np.clip((numbers[joints] + 1) / 2, 0.0, 1.0)), seconds)
