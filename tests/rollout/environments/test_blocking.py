"""Environments of plain functions, which must not keep the event loop from others."""

import asyncio
import threading

import pytest

from roost.rollout.environments.environment import BlockingEnvironments, Observation, make_environments
from roost.rollout.episode import Task
from tests.limits import HANG_S
from tests.rollout.script import ran


class Slow:
    """One whose step blocks until it is let go."""

    def __init__(self, worlds):
        self._worlds = worlds

    def reset(self, task, seed=None):
        return self._noted("reset", Observation(seed))

    def step(self, action):
        self._worlds.is_stepping.set()
        assert self._worlds.may_end.wait(HANG_S), "the test never let it go on"
        if action == "break":
            raise ZeroDivisionError("it broke")
        return self._noted("step", Observation(action, 1.0))

    def score(self):
        return self._noted("score", 1)

    def close(self):
        self._noted("close", None)
        self._worlds.is_free.release()

    def _noted(self, what, given):
        self._worlds.notes.append((what, threading.current_thread().name.split("_")[0]))
        return given


class Slows:
    def __init__(self, places=1):
        self.notes, self.may_end, self.is_stepping = [], threading.Event(), threading.Event()
        self.is_free = threading.Semaphore(places)

    def open(self):
        assert self.is_free.acquire(timeout=HANG_S), "no place became free"
        return Slow(self)

    def close(self):
        self.notes.append(("all", ""))


async def until(is_so):
    for _ in range(int(HANG_S * 100)):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it did not happen within {HANG_S:g} s")


def test_others_go_on_while_one_blocks():
    async def run():
        worlds = Slows()
        environments = BlockingEnvironments(worlds)
        environment = await environments.open()
        seen = [await environment.reset(Task(""), 3)]
        stepping = asyncio.create_task(environment.step("go"))
        await until(worlds.is_stepping.is_set)  # this loop runs, though the step blocks
        worlds.may_end.set()
        seen.append(await stepping)
        score = await environment.score()
        await environment.close()
        await environments.prepare()
        await environments.close()
        return [each.content for each in seen], score, worlds.notes

    seen, score, notes = ran(run())
    assert (seen, score) == ([3, "go"], 1.0)
    assert notes == [*((what, "environment") for what in ("reset", "step", "score", "close")), ("all", "")]


def test_what_a_cancelled_episode_began_is_waited_for_before_it_is_closed():
    async def run():
        worlds = Slows()
        environment = await BlockingEnvironments(worlds).open()
        stepping = asyncio.create_task(environment.step("go"))
        await until(worlds.is_stepping.is_set)
        stepping.cancel()
        closing = asyncio.create_task(environment.close())
        await asyncio.sleep(0)
        before = list(worlds.notes)
        worlds.may_end.set()
        await closing
        return before, [what for what, _ in worlds.notes]

    assert ran(run()) == ([], ["step", "close"])


def test_one_that_comes_after_the_episode_gave_up_waiting_is_given_back():
    async def run():
        worlds = Slows()
        environments = BlockingEnvironments(worlds)
        first = await environments.open()
        waiting = asyncio.create_task(environments.open())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await first.close()
        again = await environments.open()
        await again.close()
        return waiting.cancelled()

    assert ran(run())


def test_what_it_raises_is_raised():
    async def run():
        worlds = Slows()
        worlds.may_end.set()
        environment = await BlockingEnvironments(worlds).open()
        with pytest.raises(ZeroDivisionError, match="it broke"):
            await environment.step("break")
        await environment.close()

    ran(run())


def test_a_config_may_name_a_class_of_plain_functions():
    made = make_environments({"_target_": "tests.rollout.environments.test_blocking.Slows", "places": 2})
    assert isinstance(made, BlockingEnvironments)
