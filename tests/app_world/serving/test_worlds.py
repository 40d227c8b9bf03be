"""Worlds that are forgotten, begun twice, or closed before they have begun; and sandboxes that die."""

import asyncio
import os
import signal

import psutil
import pytest

from roost.app_world.serving.command_line import ServingLimits
from roost.app_world.serving.server import Refused, Worlds
from roost.sandbox.limits import Limits
from tests.app_world.serving.session import NOTE, solution
from tests.rollout.script import ran


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def with_worlds(test, clock=None, **limits):
    async def run():
        worlds = Worlds(ServingLimits(**limits), clock or Clock())
        try:
            return await test(worlds)
        finally:
            await worlds.close_all()

    return ran(run())


def test_worlds_that_nobody_uses_are_closed_with_their_sandboxes():
    clock = Clock()

    async def run(worlds):
        forgotten = await worlds.begin("forgotten", NOTE.id)
        await worlds.begin("used", NOTE.id)
        pid = forgotten.sandbox_pid
        clock.now = 60.0
        worlds.find("used", NOTE.id)
        clock.now = 100.0
        await worlds.close_idle()
        assert not psutil.pid_exists(pid)
        assert worlds.find("used", NOTE.id).sandbox_pid
        with pytest.raises(Refused, match="not used for 90 s"):
            worlds.find("forgotten", NOTE.id)

    with_worlds(run, clock, idle_s=90.0)


def test_a_world_at_work_is_not_idle():
    clock = Clock()

    async def run(worlds):
        world = await worlds.begin("busy", NOTE.id)
        working = asyncio.create_task(world.execute("import time; time.sleep(0.5); print('done')"))
        await asyncio.sleep(0)
        clock.now = 1000.0
        assert not world.is_idle()
        assert await working == "done\n"
        assert not world.is_idle()

    with_worlds(run, clock, idle_s=90.0)


@pytest.mark.parametrize("how", ["closed", "begun again", "all closed"])
def test_a_beginning_that_nobody_wants_any_more_leaves_nothing(how):
    async def run(worlds):
        beginning = asyncio.create_task(worlds.begin("mine", NOTE.id))
        await asyncio.sleep(0)
        if how == "closed":
            await worlds.close("mine")
        elif how == "all closed":
            await worlds.close_all()
        else:
            await worlds.begin("mine", NOTE.id)
        with pytest.raises(Refused, match="while it was starting"):
            await beginning
        assert len(worlds) == (how == "begun again")

    with_worlds(run, worlds=2)


def test_worlds_that_are_beginning_count():
    async def run(worlds):
        beginnings = [worlds.begin(episode, NOTE.id) for episode in "abc"]
        outcomes = await asyncio.gather(*beginnings, return_exceptions=True)
        assert [isinstance(outcome, Refused) for outcome in outcomes] == [False, False, True]

    with_worlds(run, worlds=2)


@pytest.mark.parametrize(
    ("code", "described"),
    [
        pytest.param("while True: pass", "the code ran for more than 3 s", id="too long"),
        pytest.param("import os; os._exit(3)", "the process exited with status 3", id="exits"),
        pytest.param("import ctypes; ctypes.string_at(0)", "died of signal 11", id="crashes"),
        pytest.param(None, "died of signal 9", id="killed between executions"),
    ],
)
def test_a_world_survives_its_sandbox(code, described):
    async def run(worlds):
        world = await worlds.begin("mine", NOTE.id)
        first, *rest = solution().splitlines()
        await world.execute(f"x = 1\n{first}")
        if code is None:
            os.kill(world.sandbox_pid, signal.SIGKILL)
        shown = await world.execute(code or "print(x)")
        assert described in shown
        assert "Variables and imports are gone" in shown
        assert shown.endswith("[What was done in the apps is kept.]")
        assert "NameError" in await world.execute("print(x)")
        await world.execute("\n".join(rest))
        assert world.evaluate().success

    with_worlds(run, sandbox=Limits(wall_s=3.0))


def test_a_world_that_is_closed_at_work_ends():
    async def run(worlds):
        world = await worlds.begin("mine", NOTE.id)
        working = asyncio.create_task(world.execute("while True: pass"))
        await asyncio.sleep(0.2)
        await worlds.close("mine")
        assert "Ended" in await working
        assert len(worlds) == 0

    with_worlds(run)
