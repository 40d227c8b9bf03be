"""Calls of an environment host that are cancelled, given up or left behind; in this process."""

import asyncio
from types import SimpleNamespace

import pytest

from roost.rollout.env_worker import EnvWorker
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task
from tests.rollout.script import ran, settled

HERE = "tests.rollout.test_env_worker"


class Hosting(EnvWorker):
    """One that was not launched."""

    _setup = SimpleNamespace(hardware=())


class World:
    """Writes down what it is asked for; a step takes until it is let go, and says so if it is cancelled."""

    def __init__(self, notes, may_end):
        self._notes, self._may_end = notes, may_end

    async def reset(self, task, seed=None):
        return Observation("begun")

    async def step(self, action):
        self._notes.append("step")
        try:
            await self._may_end.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self._notes.append("cancelled")
            raise
        return Observation("stepped")

    async def score(self):
        return 1.0

    async def close(self):
        self._notes.append("close")


class Worlds:
    def __init__(self, wrong=""):
        self.notes, self.may_end, self.may_open, self._wrong = [], asyncio.Event(), asyncio.Event(), wrong
        self.may_open.set()

    async def prepare(self):
        if self._wrong:
            raise OSError(self._wrong)

    async def open(self):
        await self.may_open.wait()
        return World(self.notes, self.may_end)

    async def close(self):
        self.notes.append("all closed")


def hosting(**keys):
    worker = Hosting({"_target_": f"{HERE}.Worlds", **keys}, idle_s=1000.0)
    return worker, worker._built()


@pytest.mark.parametrize("wrong", ["", "no robot answers"])
def test_what_environments_find_wrong_before_they_begin_is_told(wrong):
    async def run():
        return await hosting(wrong=wrong)[0].prepare()

    assert (wrong in ran(run())) if wrong else ran(run()) == ""


def test_an_environment_is_closed_after_the_step_that_a_cancelled_episode_left():
    async def run():
        worker, worlds = hosting()
        await worker.open_one("a")
        stepping = asyncio.create_task(worker.call("a", "step", 1))
        await settled()
        closed = await worker.call("a", "close")
        return worlds.notes, await stepping, closed, await worker.call("a", "score"), worker._used

    notes, stepped, closed, after, used = ran(run())
    assert notes == ["step", "cancelled", "close"]
    assert stepped == ("the episode was cancelled", None) and closed == ("", None)
    assert after == ("the environment's process is gone, or it was closed", None) and used == {}


@pytest.mark.parametrize("is_open", [False, True], ids=["while it waits", "as it comes"])
def test_an_environment_that_is_given_up_while_it_is_opened_is_not_kept(is_open):
    async def run():
        worker, worlds = hosting()
        worlds.may_open.clear()
        opening = asyncio.create_task(worker.open_one("a"))
        await settled()
        if is_open:
            worlds.may_open.set()
            while not worker._opening["a"].done():  # and open_one has not gone on yet
                await asyncio.sleep(0)
        await worker.give_up("a")
        await opening
        return worlds.notes, worker._open, worker._given_up

    assert ran(run()) == (["close"] if is_open else [], {}, set())


def test_what_is_open_when_the_run_is_over_is_closed_and_then_everything():
    async def run():
        worker, worlds = hosting()
        for key in ("a", "b"):
            await worker.open_one(key)
        stepping = asyncio.create_task(worker.call("a", "step", 1))
        await settled()
        await worker.finish()
        await stepping
        return worlds.notes

    notes = ran(run())
    assert sorted(notes[:-1]) == ["cancelled", "close", "close", "step"] and notes[-1] == "all closed"


def test_a_method_that_is_none_is_an_answer():
    async def run():
        worker, _ = hosting()
        await worker.open_one("a")
        return await worker.call("a", "jump", Task("")), await worker.call("a", "close")

    (error, _), closed = ran(run())
    assert "jump" in error and closed == ("", None)
