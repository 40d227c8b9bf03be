"""Robots as environments: one episode at a time each, within limits, and standing still when it is over."""

import asyncio
import threading

import numpy as np
import pytest

from roost.rollout.environments.driven_robot import DrivenRobots
from roost.rollout.environments.environment import make_environments
from roost.rollout.environments.robot import Limits, Reading, action_within
from roost.rollout.environments.simulator import HOME, SimulatedArm, tip_of
from roost.rollout.episode import Task
from tests.limits import HANG_S
from tests.rollout.script import ran, settled

REACH = Task("reach")
STILL = [0.0, 0.0, 0.0, 1.0]
BOUNDS = {"action_low": [-1, -1, -1, 0], "action_high": [1, 1, 1, 1]}
TARGET = "roost.rollout.environments.simulator.SimulatedArm"


class Driver(SimulatedArm):
    """A driver that writes down what it is asked for, and does what a test says."""

    def __init__(self, broken="", hang=None):
        super().__init__()
        self.calls, self.acted, self.configs, self.broken, self.hang = [], [], [], broken, hang
        self.threads = set()

    def connect(self, config):
        self.configs.append(config)
        self._note("connect")
        super().connect(config)

    def reset(self, task, seed):
        self._note("reset")
        super().reset(task, seed)

    def act(self, action, seconds):
        self.acted.append((action.tolist(), seconds))
        self._note("act")
        super().act(action, seconds)

    def stop(self):
        self.calls.append("stop")
        super().stop()

    def close(self):
        self._note("close")

    def _note(self, name):
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)
        if name == self.broken:
            self.broken = ""
            raise OSError("the cable is out")
        if self.hang is not None and name == "act":
            assert self.hang.wait(HANG_S), "the test never let it go on"


class Blind(Driver):
    """One that cannot foresee where its tip goes."""

    kept_within = None


def with_driver(driver, **keys):
    return DrivenRobots(
        lambda: driver, **{**BOUNDS, "hardware": [{"robot_ip": "10.0.0.1"}], "real_time": False, **keys}
    )


def arms(**keys):
    return DrivenRobots(SimulatedArm, **{**BOUNDS, "real_time": False, "robots": 1, **keys})


async def until(is_so, what):
    """Wait for what another thread does."""
    for _ in range(int(HANG_S * 100)):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {HANG_S:g} s")


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
        environments = arms(robots=2, max_steps=8)
        both = await asyncio.gather(reached(environments, 3), reached(environments, 3), reached(environments, 4))
        await environments.close()
        return both

    (one, score), (same, same_score), (other, _) = ran(run())
    assert all(np.array_equal(a.content["state"], b.content["state"]) for a, b in zip(one, same, strict=True))
    assert score == same_score == pytest.approx(sum(seen.reward for seen in one))
    assert not np.array_equal(one[0].content["state"], other[0].content["state"])
    assert one[-1].is_over and one[-1].is_truncated


def test_a_config_names_the_driver_and_what_was_declared_reaches_it_as_it_is():
    declared = {"robot_ip": "10.0.0.1", "node_rank": 0, "camera_serials": ["322142001230"], "note": "${not} a key: ???"}
    config = {"_target_": "roost.rollout.environments.driven_robot.DrivenRobots", "real_time": False, **BOUNDS}

    async def run():
        driver = {"_target_": TARGET, "tolerance_m": 9.0}
        environments = make_environments({**config, "driver": driver}, [declared])
        environment = await environments.open()
        first = await environment.reset(REACH, 0)
        moved = await environment.step([1.0, 1.0, -1.0, 0.0])
        await environments.close()
        return first, moved

    first, moved = ran(run())
    assert first.info["robot"] == declared
    assert first.content["images"]["322142001230"].shape == (16, 16, 3)
    assert not np.array_equal(first.content["images"]["322142001230"], moved.content["images"]["322142001230"])
    assert first.content["state"].shape == (3 + 3 + 1 + 3 + 3 + 3,)
    assert moved.is_over and not moved.is_truncated, "within 9 m of the target"


@pytest.mark.parametrize(
    ("grasp", "gripper", "is_over"),
    [
        pytest.param(False, 1.0, True, id="reaching"),
        pytest.param(True, 1.0, False, id="with an open gripper"),
        pytest.param(True, 0.0, True, id="with a closed gripper"),
    ],
)
def test_being_there_ends_the_episode(grasp, gripper, is_over):
    async def run():
        environments = DrivenRobots(
            {"_target_": TARGET, "grasp": grasp}, robots=1, rate_hz=1, real_time=False, **BOUNDS
        )
        environment = await environments.open()
        await environment.reset(Task("reach", {"target": tip_of(HOME) + 0.01}), 0)
        seen = await environment.step([0.0, 0.0, 0.0, gripper])
        await environments.close()
        return seen

    seen = ran(run())
    assert (seen.is_over, seen.reward >= 1) == (is_over, is_over)


WALL = Limits((-0.5, -0.5, -0.5, 0.0), (0.5, 0.5, 0.5, 1.0), ((0.0, 0.62), (-1.0, 1.0), (0.0, 1.0)))


@pytest.mark.parametrize(
    ("action", "done"),
    [
        pytest.param([9.0, -9.0, 0.0, 0.0], [0.5, -0.5, 0.0, 0.0], id="too fast"),
        pytest.param([0.0, 0.25, 0.0, 1.0], [0.0, 0.25, 0.0, 1.0], id="within everything"),
        pytest.param([0.0, 0.0, -1.0, -7.0], [0.0, 0.0, 0.0, 0.0], id="out of the workspace"),
    ],
)
def test_actions_stay_within_limits(action, done):
    assert action_within(np.array(action), SimulatedArm(), 0.2, WALL).tolist() == done


def test_what_a_driver_foresees_does_not_pass_the_limits():
    class Eager(SimulatedArm):
        def kept_within(self, action, seconds, limits):
            return action * 100

    assert action_within(np.array([0.1, 0.0, 0.0, 1.0]), Eager(), 0.2, WALL).tolist() == [0.5, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "action",
    [
        pytest.param([0.0, 0.0, 0.0], id="too few"),
        pytest.param([0.0, 0.0, float("nan"), 0.0], id="not a number"),
        pytest.param("left", id="text"),
    ],
)
def test_what_is_no_action_moves_nothing(action):
    async def run():
        driver = Driver()
        environments = with_driver(driver)
        environment = await environments.open()
        await environment.reset(REACH, 0)
        with pytest.raises(ValueError):
            await environment.step(action)
        await environment.step([5.0, 0.0, 0.0, 5.0])
        await environments.close()
        return driver

    driver = ran(run())
    assert driver.acted == [([1.0, 0.0, 0.0, 1.0], 0.1)]


def test_a_robot_that_leaves_its_workspace_is_stopped():
    async def run():
        driver = Blind()
        high = float(tip_of(HOME)[0]) + 1e-3
        environments = with_driver(driver, workspace=[[0.0, high], [-1, 1], [-1, 1]])
        environment = await environments.open()
        await environment.reset(REACH, 0)
        seen = await environment.step([0.0, 0.0, -1.0, 0.0])
        stopped = list(driver.calls)
        await environments.close()
        return seen, stopped

    seen, calls = ran(run())
    assert seen.is_over and not seen.is_truncated and "outside its workspace" in seen.info["stopped"]
    assert calls == ["connect", "reset", "act", "stop"] and seen.reward == 0


def test_a_robot_plays_one_episode_at_a_time_and_stands_still_between_them():
    async def run():
        driver = Driver()
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
        played = list(driver.calls)
        await environments.close()
        await until(lambda: driver.calls[-1] == "close", "the end of the connection")
        return waited, played, driver

    waited, played, driver = ran(run())
    assert waited and len(driver.threads) == 1
    assert played == ["connect", "reset", "act", "stop", "reset"]
    assert driver.calls[5] == "stop" and driver.configs == [{"robot_ip": "10.0.0.1"}]


@pytest.mark.parametrize("broken", ["act", "reset", "connect"])
def test_a_robot_that_fails_is_stopped_closed_and_connected_to_anew(broken):
    async def run():
        driver = Driver(broken)
        environments = with_driver(driver)
        environment = await environments.open()
        with pytest.raises(OSError, match="the cable is out"):
            await environment.reset(REACH, 0)
            await environment.step(STILL)
        with pytest.raises(RuntimeError, match="reset it before"):
            await environment.step(STILL)
        failed = list(driver.calls)
        await environment.reset(REACH, 0)
        again = driver.calls[len(failed) :]
        await environments.close()
        return failed, again

    failed, again = ran(run())
    assert failed[failed.index(broken) :] == [broken, "stop", "close"]
    assert again == ["connect", "reset"]


def test_a_robot_that_hangs_is_stopped_and_not_used_until_it_comes_back():
    async def run():
        driver = Driver(hang=threading.Event())
        environments = with_driver(driver, call_limit_s=1.0)
        environment = await environments.open()
        await environment.reset(REACH, 0)
        with pytest.raises(TimeoutError, match="did not answer"):
            await environment.step(STILL)
        hung = list(driver.calls)
        with pytest.raises(RuntimeError, match="still hangs"):
            await environment.reset(REACH, 0)
        driver.hang.set()
        await until(lambda: "close" in driver.calls, "the end of the connection")
        await environment.reset(REACH, 0)
        await environments.close()
        return hung, driver.calls

    hung, calls = ran(run())
    assert hung == ["connect", "reset", "act", "stop"]
    assert calls[4:8] == ["stop", "close", "connect", "reset"]


def test_what_an_episode_left_under_way_when_it_was_cancelled_is_stopped_after_it():
    async def run():
        driver = Driver(hang=threading.Event())
        environments = with_driver(driver)
        environment = await environments.open()
        await environment.reset(REACH, 0)
        step = asyncio.create_task(environment.step(STILL))
        await until(lambda: driver.calls[-1] == "act", "the step")
        step.cancel()
        await environment.close()
        following = await environments.open()
        begun = asyncio.create_task(following.reset(REACH, 1))
        driver.hang.set()
        await begun
        played = list(driver.calls)
        await environments.close()
        return played

    assert ran(run()) == ["connect", "reset", "act", "stop", "stop", "reset"]


def test_a_robot_that_cannot_be_stopped_keeps_no_other_from_it():
    class Runaway(Driver):
        def stop(self):
            raise OSError("no answer")

    async def run():
        drivers = [Runaway(), Driver(), Runaway()]
        left = iter(drivers)
        environments = DrivenRobots(lambda: next(left), robots=3, **BOUNDS)
        for _ in range(2):  # the third is never begun with, and has nothing to stop
            await (await environments.open()).reset(REACH, 0)
        with pytest.raises(ExceptionGroup, match="1 of 3 robots could not be stopped"):
            await environments.close()
        return drivers[1].calls

    assert ran(run())[:3] == ["connect", "reset", "stop"]


class Cameras(Driver):
    """One whose cameras are not those that were declared."""

    def observe(self):
        return Reading(np.zeros(1), {"another": np.zeros((1, 1, 3), np.uint8)})


@pytest.mark.parametrize(
    ("driver", "declared", "described"),
    [
        pytest.param(lambda: Driver(), {"camera_serials": ["a", "b"]}, None, id="as declared"),
        pytest.param(lambda: Driver("connect"), {}, "OSError: the cable is out", id="one that does not answer"),
        pytest.param(Cameras, {"camera_serials": ["a"]}, "no image comes from a of camera_serials", id="no camera"),
        pytest.param(lambda: Driver("connect"), {"disable_validate": True}, None, id="one that is not looked for"),
    ],
)
def test_robots_are_looked_for_before_anything_begins_unless_they_are_not_to_be(driver, declared, described):
    async def run():
        made = driver()
        environments = with_driver(made, hardware=[declared])
        try:
            await environments.prepare()
            return made.calls, ""
        except RuntimeError as error:
            return made.calls, str(error)
        finally:
            await environments.close()

    calls, found = ran(run())
    if described is not None:
        assert described in found and "disable_validate: true" in found
    else:
        assert found == "" and ("connect" in calls) == ("disable_validate" not in declared)


def test_in_real_time_a_period_that_is_missed_is_told():
    async def run():
        environments = with_driver(Driver(), real_time=True, rate_hz=20)
        environment = await environments.open()
        await environment.reset(REACH, 0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = await environment.step(STILL)
        await asyncio.sleep(0.12)  # more than two periods, however slow the machine is
        late = await environment.step(STILL)
        took = loop.time() - began
        await environments.close()
        return first, late, took

    first, late, took = ran(run())
    assert first.info["missed"] == 0 and late.info["missed"] >= 2
    assert took >= 0.15 - 1e-3, "the second step is at the third period or later"


@pytest.mark.parametrize(
    ("keys", "described"),
    [
        pytest.param({"robots": 0}, "no robot was declared", id="no robot"),
        pytest.param({"rate_hz": 0}, "above 0", id="no rate"),
        pytest.param({"call_limit_s": 0}, "above 0", id="no limit"),
        pytest.param({"action_low": [], "action_high": []}, "action_low is", id="no limits"),
        pytest.param({"action_high": [1, 1, 1]}, "a high above it", id="fewer of one"),
        pytest.param({"action_low": [1, 1, 1, 1]}, "a high above it", id="nothing between them"),
        pytest.param({"workspace": [[1, 0]]}, "three pairs", id="a workspace that is none"),
    ],
)
def test_wrong_keys_are_told_at_once(keys, described):
    with pytest.raises(ValueError, match=described):
        arms(**keys)
