"""A simulated arm with three joints, a gripper and cameras, behind the driver interface of a real robot."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from roost.rollout.environments.robot import Image, Limits, Numbers, Reading
from roost.rollout.episode import Task

UPPER_M, LOWER_M, SHOULDER_M = 0.4, 0.4, 0.2  # the links, and the height of the shoulder
JOINT_LOW = np.array([-2.6, -0.3, 0.1])  # rad: yaw, shoulder above the horizontal, bend of the elbow
JOINT_HIGH = np.array([2.6, 1.6, 2.6])
HOME = np.array([0.0, 0.8, 1.4])
LAG_S = 0.05  # time constant of a joint's speed
GRIPPER_PER_S = 4.0
SUBSTEPS = 10
PIXELS = 16
VIEW_M = 1.0  # field of view of a camera to either side


class SimulatedArm:
    """Driver of a simulated arm that follows commanded speeds with a lag and must reach a point.

    An action has the speed of each joint in rad/s, and the gripper position, 0 closed and 1 open. The reward is the
    distance gained towards the target in m, plus 1 within `tolerance_m` of it, which ends the episode. With `grasp`,
    the gripper must also be closed there. Equal seeds and actions give equal readings.

    >>> arm = SimulatedArm()
    >>> arm.connect({"camera_serials": ["top"]})
    >>> arm.reset(Task("reach"), seed=3)
    >>> reading = arm.observe()
    >>> reading.tip.round(2).tolist(), reading.images["top"].shape
    ([0.61, 0.0, 0.26], (16, 16, 3))
    """

    def __init__(self, tolerance_m: float = 0.05, grasp: bool = False) -> None:
        self._tolerance_m, self._grasp = tolerance_m, grasp
        self._serials: tuple[str, ...] = ()
        self._joints, self._speeds, self._gripper = HOME.copy(), np.zeros(3), 1.0
        self._target = tip_of(HOME)
        self._left = 0.0  # m to the target at the last reading

    def connect(self, config: Mapping[str, Any]) -> None:
        """Store the camera serials; there is nothing else to connect to."""
        self._serials = tuple(config.get("camera_serials") or ())

    def reset(self, task: Task, seed: int | None) -> None:
        """Go home; the target is `target` of the task's data, or a random reachable point."""
        random = np.random.default_rng(seed)
        target = task.data.get("target")
        joints = random.uniform(JOINT_LOW * 0.5 + HOME * 0.5, JOINT_HIGH * 0.5 + HOME * 0.5)
        self._target = tip_of(joints) if target is None else np.asarray(target, np.float64)
        self._joints, self._speeds, self._gripper = HOME.copy(), np.zeros(3), 1.0
        self._left = self._distance()

    def observe(self) -> Reading:
        """Return joints, speeds, gripper, tip, target, and the vector from tip to target."""
        tip, before = tip_of(self._joints), self._left
        self._left = self._distance()
        is_there = self._left <= self._tolerance_m and (not self._grasp or self._gripper < 0.5)
        parts = [self._joints, self._speeds, np.array([self._gripper]), tip, self._target, self._target - tip]
        images = {serial: self._image(serial) for serial in self._serials}
        state = np.concatenate(parts).astype(np.float32)
        return Reading(state, images, before - self._left + is_there, is_there, tip)

    def act(self, action: Numbers, seconds: float) -> None:
        """Advance the simulation; time passes only here."""
        wanted, passed = action[:3], seconds / SUBSTEPS
        kept = np.exp(-passed / LAG_S)
        for _ in range(SUBSTEPS):
            self._speeds = wanted + (self._speeds - wanted) * kept
            moved = self._joints + self._speeds * passed
            self._joints = np.clip(moved, JOINT_LOW, JOINT_HIGH)
            self._speeds = np.where(moved == self._joints, self._speeds, 0.0)  # a joint at its limit stops
        most = GRIPPER_PER_S * seconds
        self._gripper += float(np.clip(action[3] - self._gripper, -most, most))

    def kept_within(self, action: Numbers, seconds: float, limits: Limits) -> Numbers:
        """Zero joint speeds that would move the tip out of the workspace; from outside it may move back."""
        ahead = tip_of(np.clip(self._joints + action[:3] * seconds, JOINT_LOW, JOINT_HIGH))
        if limits.holds(tip_of(self._joints)) and not limits.holds(ahead):
            return np.array([0.0, 0.0, 0.0, action[3]])
        return action

    def stop(self) -> None:
        self._speeds = np.zeros(3)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _distance(self) -> float:
        return float(np.linalg.norm(tip_of(self._joints) - self._target))

    def _image(self, serial: str) -> Image:
        """Target, elbow and tip in red, green and blue, from a direction derived from the serial."""
        angle = zlib.crc32(serial.encode()) / 2**32 * 2 * np.pi
        sideways = np.array([-np.sin(angle), np.cos(angle), 0.0])
        image = np.zeros((PIXELS, PIXELS, 3), np.uint8)
        for channel, point in enumerate((self._target, elbow_of(self._joints), tip_of(self._joints))):
            across, up = point @ sideways / VIEW_M, (point[2] - SHOULDER_M) / VIEW_M
            row, column = np.clip([(1 - up) / 2 * PIXELS, (1 + across) / 2 * PIXELS], 0, PIXELS - 1).astype(int)
            image[row, column, channel] = 255
        return image


def elbow_of(joints: Numbers) -> Numbers:
    """Position of the elbow."""
    yaw, lift, _ = joints
    at: Numbers = _along(yaw, lift) * UPPER_M + np.array([0.0, 0.0, SHOULDER_M])
    return at


def tip_of(joints: Numbers) -> Numbers:
    """Position of the tip.

    >>> tip_of(np.array([0.0, 0.0, 0.0])).tolist()
    [0.8, 0.0, 0.2]
    """
    yaw, lift, bend = joints
    return elbow_of(joints) + _along(yaw, lift - bend) * LOWER_M


def _along(yaw: float, lift: float) -> Numbers:
    return np.array([np.cos(yaw) * np.cos(lift), np.sin(yaw) * np.cos(lift), np.sin(lift)])
