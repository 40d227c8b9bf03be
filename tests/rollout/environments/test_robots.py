"""Robots as environments: one episode at a time each, within limits, and standing still when it is over."""

import asyncio
import threading

import numpy as np
import pytest

from roost.cluster.hardware.robots.franka import FrankaConfig
from roost.rollout.environments.arm import HOME, ArmEnvironments, SimulatedArm, tip_of
from roost.rollout.environments.robot import Limits, Reading, command_within
from roost.rollout.environments.robots import RobotEnvironments
from roost.rollout.scenario import Task
from tests.rollout.script import ran, settled

REACH = Task("reach")
STILL = [0.0, 0.0, 0.0, 1.0]


class Driver(SimulatedArm):
    """A driver that writes down what it is asked for, and does what a test says."""

    def __init__(self, config, broken="", hang=None):
        super().__init__(config)
        self.calls, self.broken, self.hang = [], broken, hang
        self.threads = set()

    def connect(self):
        self._note("connect")

    def begin(self, task, seed):
        self._note("begin")
        super().begin(task, seed)

    def command(self, command):
        self._note("command")
        super().command(command)

    def stop(self):
        self.calls.append("stop")
        super().stop()

    def _note(self, name):
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)
        if name == self.broken:
            self.broken = ""
            raise OSError("the cable is out")
        if self.hang is not None and name == "command":
            self.hang.wait(10)


def with_driver(driver, **keys):
    return RobotEnvironments([{"robot_ip": "10.0.0.1"}], driver=lambda config: driver, real_time=False, **keys)


async def reached(environments, seed, steps=8):
    """The states of an episode that moves at random."""
    environment = await environments.open()
    try:
        random = np.random.default_rng(seed)
        seen = [await environment.reset(REACH, seed)]
        while not seen[-1].is_over and len(seen) <= steps:
            seen.append(await environment.step(random.uniform(-1, 1, 4)))
        return seen, await environment.score()
    finally:
        await environment.close()


def test_the_same_seed_gives_the_same_episode_on_any_robot():
    async def run():
        environments = ArmEnvironments(robots=2, max_steps=8)
        both = await asyncio.gather(reached(environments, 3), reached(environments, 3), reached(environments, 4))
        await environments.close()
        return both

    (one, score), (same, same_score), (other, _) = ran(run())
    assert all(np.array_equal(a.content["state"], b.content["state"]) for a, b in zip(one, same, strict=True))
    assert score == same_score == pytest.approx(sum(seen.reward for seen in one))
    assert not np.array_equal(one[0].content["state"], other[0].content["state"])
    assert one[-1].is_over and one[-1].goes_on


@pytest.mark.parametrize(
    "hardware",
    [
        pytest.param({"robot_ip": "10.0.0.1", "node_rank": 0, "camera_serials": ["322142001230"]}, id="a mapping"),
        pytest.param(FrankaConfig(node_rank=0, robot_ip="10.0.0.1", camera_serials=["322142001230"]), id="a config"),
    ],
)
def test_declared_robots_show_their_cameras(hardware):
    async def run():
        environments = ArmEnvironments([hardware])
        environment = await environments.open()
        first = await environment.reset(REACH, 0)
        moved = await environment.step([1.0, 1.0, -1.0, -1.0])
        await environments.close()
        return first, moved

    first, moved = ran(run())
    assert first.info["robot"]["robot_ip"] == "10.0.0.1"
    assert first.content["images"]["322142001230"].shape == (16, 16, 3)
    assert not np.array_equal(first.content["images"]["322142001230"], moved.content["images"]["322142001230"])
    assert first.content["state"].shape == (3 + 3 + 1 + 3 + 3 + 3,)


@pytest.mark.parametrize(
    ("grasp", "gripper", "is_over"),
    [
        pytest.param(False, 1.0, True, id="reaching"),
        pytest.param(True, 1.0, False, id="with an open gripper"),
        pytest.param(True, -1.0, True, id="with a closed gripper"),
    ],
)
def test_being_there_ends_the_episode(grasp, gripper, is_over):
    async def run():
        environments = ArmEnvironments(grasp=grasp, rate_hz=1)
        environment = await environments.open()
        await environment.reset(Task("reach", {"target": tip_of(HOME) + 0.01}), 0)
        seen = await environment.step([0.0, 0.0, 0.0, gripper])
        await environments.close()
        return seen

    seen = ran(run())
    assert (seen.is_over, seen.reward >= 1) == (is_over, is_over)


READING = Reading(HOME, np.zeros(3), 1.0, tip_of(HOME))
WALL = Limits(0.5, ((0.0, 0.62), (-1.0, 1.0), (0.0, 1.0)))


@pytest.mark.parametrize(
    ("action", "speeds", "gripper"),
    [
        pytest.param([9.0, -9.0, 0.0, 0.0], [0.5, -0.5, 0.0], 0.5, id="too fast"),
        pytest.param([0.0, 0.5, 0.0, 1.0], [0.0, 0.25, 0.0], 1.0, id="within everything"),
        pytest.param([0.0, 0.0, -1.0, -7.0], [0.0, 0.0, 0.0], 0.0, id="out of the workspace"),
    ],
)
def test_commands_stay_within_limits(action, speeds, gripper):
    command = command_within(action, READING, WALL, 0.2, tip_of)
    assert (command.speeds.tolist(), command.gripper) == (speeds, gripper)


@pytest.mark.parametrize(
    "action",
    [
        pytest.param([0.0, 0.0, 0.0], id="too few"),
        pytest.param([0.0, 0.0, float("nan"), 0.0], id="not a number"),
        pytest.param("left", id="text"),
    ],
)
def test_what_is_no_action_moves_nothing(action):
    with pytest.raises(ValueError):
        command_within(action, READING, WALL, 0.2, tip_of)


def test_a_robot_that_leaves_its_workspace_is_stopped():
    async def run():
        driver = Driver({})
        high = float(tip_of(HOME)[0]) + 1e-3
        environments = with_driver(
            driver, workspace=[[0.0, high], [-1, 1], [-1, 1]]
        )  # where the tip goes it cannot foresee
        environment = await environments.open()
        await environment.reset(REACH, 0)
        seen = await environment.step([0.0, 0.0, -1.0, 0.0])
        stopped = list(driver.calls)
        await environments.close()
        return seen, stopped

    seen, calls = ran(run())
    assert seen.is_over and not seen.goes_on and "out of its workspace" in seen.info["stopped"]
    assert calls == ["connect", "begin", "command", "stop"]


def test_a_robot_plays_one_episode_at_a_time_and_stands_still_between_them():
    async def run():
        driver = Driver({})
        environments = with_driver(driver)
        first = await environments.open()
        await first.reset(REACH, 0)
        await first.step([1.0, 0.0, 0.0, 0.0])
        waiting = asyncio.create_task(environments.open())
        await settled()
        waited = not waiting.done()
        await first.close()
        second = await waiting
        await second.reset(REACH, 1)
        await environments.close()
        return waited, driver

    waited, driver = ran(run())
    assert waited and len(driver.threads) == 1
    assert driver.calls == ["connect", "begin", "command", "stop", "begin", "stop"]


def test_a_robot_that_fails_is_stopped_and_connected_to_anew():
    async def run():
        driver = Driver({}, broken="command")
        environments = with_driver(driver)
        environment = await environments.open()
        await environment.reset(REACH, 0)
        with pytest.raises(OSError, match="the cable is out"):
            await environment.step(STILL)
        await environment.reset(REACH, 0)
        await environments.close()
        return driver.calls

    assert ran(run()) == ["connect", "begin", "command", "stop", "connect", "begin", "stop"]


def test_a_robot_that_hangs_is_stopped_and_not_used_until_it_comes_back():
    async def run():
        driver = Driver({}, hang=threading.Event())
        environments = with_driver(driver, call_limit_s=0.05)
        environment = await environments.open()
        await environment.reset(REACH, 0)
        with pytest.raises(TimeoutError, match="did not answer"):
            await environment.step(STILL)
        stopped = driver.calls[-1]
        with pytest.raises(RuntimeError, match="still hangs"):
            await environment.reset(REACH, 0)
        driver.hang.set()
        await environment.close()
        await environments.close()
        return stopped

    assert ran(run()) == "stop"


def test_a_robot_that_cannot_be_stopped_keeps_no_other_from_it():
    class Runaway(Driver):
        def stop(self):
            raise OSError("no answer")

    async def run():
        drivers = [Runaway({}), Driver({})]
        left = iter(drivers)
        environments = RobotEnvironments([{}, {}], driver=lambda config: next(left))
        with pytest.raises(ExceptionGroup, match="1 of 2 robots could not be stopped"):
            await environments.close()
        return drivers[1].calls

    assert ran(run()) == ["stop"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        pytest.param({"hardware": []}, "no robot was declared", id="no robot"),
        pytest.param({"hardware": [{}]}, "has no driver", id="no driver"),
        pytest.param({"hardware": [{}], "rate_hz": 0}, "above 0", id="no rate"),
        pytest.param({"hardware": [{}], "joint_speed": -1}, "joint_speed is -1", id="a speed below nothing"),
        pytest.param({"hardware": [{}], "workspace": [[1, 0]]}, "three pairs", id="a workspace that is none"),
    ],
)
def test_wrong_keys_are_told_at_once(keys, told):
    with pytest.raises(ValueError, match=told):
        RobotEnvironments(**keys)
