"""A simulated arm to reach with: three joints, a gripper, cameras, and the interface of a real robot."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roost.rollout.environments.robot import Command, Image, Numbers, Reading, RobotDriver
from roost.rollout.environments.robots import DumpsModel, Judgement, RobotEnvironments
from roost.rollout.scenario import Task

UPPER_M, LOWER_M, SHOULDER_M = 0.4, 0.4, 0.2  # the links, and the height of the shoulder
JOINT_LOW = np.array([-2.6, -0.3, 0.1])  # yaw, shoulder from the horizontal, elbow's bend
JOINT_HIGH = np.array([2.6, 1.6, 2.6])
HOME = np.array([0.0, 0.8, 1.4])
LAG_S = 0.05  # in which a joint comes near to the speed it is told
GRIPPER_PER_S = 4.0
SUBSTEPS = 10
PIXELS = 16
VIEW_M = 1.0  # what a camera sees to either side


class SimulatedArm:
    """An arm that follows the speeds it is told with a lag. The same seed and commands give the same readings.

    >>> arm = SimulatedArm({"camera_serials": ["top"]})
    >>> arm.begin(Task("reach"), seed=3)
    >>> reading = arm.read()
    >>> reading.tip.round(2).tolist(), reading.images["top"].shape
    ([0.61, 0.0, 0.26], (16, 16, 3))
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._serials = tuple(config.get("camera_serials") or ())
        self._joints, self._speeds, self._gripper = HOME.copy(), np.zeros(3), 1.0
        self._target = tip_of(HOME)

    def connect(self) -> None:
        """There is nothing to connect to."""

    def begin(self, task: Task, seed: int | None) -> None:
        """Go home; `target` in the task's data is where to reach, or it is drawn where the arm can."""
        random = np.random.default_rng(seed)
        target = task.data.get("target")
        drawn = random.uniform(JOINT_LOW * 0.5 + HOME * 0.5, JOINT_HIGH * 0.5 + HOME * 0.5)
        self._target = tip_of(drawn) if target is None else np.asarray(target, np.float64)
        self._joints, self._speeds, self._gripper = HOME.copy(), np.zeros(3), 1.0

    def read(self) -> Reading:
        images = {serial: self._image(serial) for serial in self._serials}
        tip = tip_of(self._joints)
        seen = {"target": self._target.copy(), "way": self._target - tip}
        return Reading(self._joints.copy(), self._speeds.copy(), self._gripper, tip, images, seen)

    def command(self, command: Command) -> None:
        passed = command.seconds / SUBSTEPS
        kept = np.exp(-passed / LAG_S)
        for _ in range(SUBSTEPS):
            self._speeds = command.speeds + (self._speeds - command.speeds) * kept
            moved = self._joints + self._speeds * passed
            self._joints = np.clip(moved, JOINT_LOW, JOINT_HIGH)
            self._speeds = np.where(moved == self._joints, self._speeds, 0.0)  # a joint at its end stands still
        most = GRIPPER_PER_S * command.seconds
        self._gripper += float(np.clip(command.gripper - self._gripper, -most, most))

    def stop(self) -> None:
        self._speeds = np.zeros(3)

    def _image(self, serial: str) -> Image:
        """Target, elbow and tip in red, green and blue, seen from a side that follows from the serial."""
        angle = zlib.crc32(serial.encode()) / 2**32 * 2 * np.pi
        sideways = np.array([-np.sin(angle), np.cos(angle), 0.0])
        image = np.zeros((PIXELS, PIXELS, 3), np.uint8)
        for channel, point in enumerate((self._target, elbow_of(self._joints), tip_of(self._joints))):
            across, up = point @ sideways / VIEW_M, (point[2] - SHOULDER_M) / VIEW_M
            row, column = np.clip([(1 - up) / 2 * PIXELS, (1 + across) / 2 * PIXELS], 0, PIXELS - 1).astype(int)
            image[row, column, channel] = 255
        return image


def elbow_of(joints: Numbers) -> Numbers:
    """Where the elbow is."""
    yaw, lift, _ = joints
    at: Numbers = _along(yaw, lift) * UPPER_M + np.array([0.0, 0.0, SHOULDER_M])
    return at


def tip_of(joints: Numbers) -> Numbers:
    """Where the tip is.

    >>> tip_of(np.array([0.0, 0.0, 0.0])).tolist()
    [0.8, 0.0, 0.2]
    """
    yaw, lift, bend = joints
    return elbow_of(joints) + _along(yaw, lift - bend) * LOWER_M


def _along(yaw: float, lift: float) -> Numbers:
    return np.array([np.cos(yaw) * np.cos(lift), np.sin(yaw) * np.cos(lift), np.sin(lift)])


class ArmEnvironments(RobotEnvironments):
    """Reaching with simulated arms: one for each robot that was declared, or `robots` of them.

    A step is worth what it brought the tip nearer to the target, in m; to be within `tolerance_m` of it is worth 1 more
    and ends the episode. With `grasp`, the gripper must also be closed there.
    """

    def __init__(
        self,
        hardware: Sequence[Mapping[str, Any] | DumpsModel] = (),
        robots: int = 1,
        tolerance_m: float = 0.05,
        grasp: bool = False,
        real_time: bool = False,
        **keys: Any,
    ) -> None:
        self._tolerance_m, self._grasp = tolerance_m, grasp
        super().__init__(hardware or [{}] * robots, real_time=real_time, **keys)

    def driver_of(self, config: Mapping[str, Any]) -> RobotDriver:
        return SimulatedArm(config)

    def judge(self, task: Task, before: Reading, after: Reading) -> Judgement:
        left = _distance(after)
        is_there = left <= self._tolerance_m and (not self._grasp or after.gripper < 0.5)
        return Judgement(_distance(before) - left + float(is_there), is_there)

    def tip_of(self, joints: Numbers) -> Numbers:
        return tip_of(np.clip(joints, JOINT_LOW, JOINT_HIGH))


def _distance(reading: Reading) -> float:
    return float(np.linalg.norm(reading.tip - reading.seen["target"]))
