"""Episodes over real HTTP and in real sandboxes, on servers in this process and in processes of their own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from roost.app_world.evaluate import evaluate
from roost.app_world.proxy import Apis
from roost.app_world.serving.client import AppWorldEnvironments, SupervisedProcess
from roost.app_world.serving.command_line import ServingLimits
from roost.app_world.serving.connection import ServerLost, ServerRefused
from roost.app_world.serving.runner import OracleAgent, RandomAgent
from roost.app_world.serving.server import serving
from roost.app_world.serving.tasks import to_task
from roost.app_world.tasks.task_set import TaskSet, make_task
from roost.rollout.episode import Task
from tests.app_world.serving.session import NOBODY, NOTE, TASK, all_played, opened, played, solution
from tests.limits import HANG_S
from tests.rollout.script import others_running, ran

KINDS = {1: 11, 2: 9, 3: 8}


def one_of_each_kind(difficulty):
    """The first variants of as many scenarios as there are kinds, which take turns."""
    ids = TaskSet("train", difficulty, 3 * KINDS[difficulty]).ids[::3]
    tasks = [make_task(task_id) for task_id in ids]
    assert len({task.kind for task in tasks}) == KINDS[difficulty]
    return [to_task(task) for task in tasks]


# The easier ones go the same way through the servers; tests of the tasks themselves have all.
@pytest.mark.parametrize("difficulty", [*(pytest.param(easy, marks=pytest.mark.long) for easy in (1, 2)), 3])
def test_the_oracle_solves_everything_and_chance_nothing(difficulty):
    async def run():
        async with opened() as environments:
            tasks = one_of_each_kind(difficulty)
            return [await all_played(environments, tasks, agent) for agent in (OracleAgent, RandomAgent)]

    solved, by_chance = ran(run())
    assert solved == [1.0] * KINDS[difficulty]
    assert sum(by_chance) <= 1


def test_episodes_of_one_task_do_not_disturb_each_other():
    async def one(environments, number):
        environment = await environments.open()
        try:
            await environment.reset(TASK)
            await environment.step(f"mine = {number}\nif mine % 2: apis.notes.create(title='not wanted')")
            seen = await environment.step(f"print(mine)\n{solution()}")
            return seen.content, seen.is_over, await environment.score()
        finally:
            await environment.close()

    async def run():
        async with opened(worlds=16) as environments:
            return await asyncio.gather(*(one(environments, number) for number in range(16)))

    assert ran(run()) == [(f"{number}\n", True, float(number % 2 == 0)) for number in range(16)]


def test_what_is_shown_at_first():
    async def first(**keys):
        async with opened(**keys) as environments:
            environment = await environments.open()
            try:
                return await environment.reset(TASK)
            finally:
                await environment.close()

    shown = ran(first())
    name = NOTE.initial["profile"]["name"]
    assert shown.content.startswith(f"{NOTE.instruction}\n\nYou act for {name} (email ")
    assert not shown.is_over
    assert ran(first(shows_supervisor=False)).content == NOTE.instruction


@pytest.mark.parametrize(
    ("code", "share"),
    [
        pytest.param("", 0.0, id="nothing"),
        pytest.param("apis.supervisor.complete_task()", 0.0, id="only says that it is done"),
        pytest.param(solution().splitlines()[0], 0.75, id="does not say that it is done"),
        pytest.param(solution(), 1.0, id="all of it"),
    ],
)
def test_a_part_of_the_tests_is_worth_a_part(code, share):
    async def run(**keys):
        async with opened(**keys) as environments:
            environment = await environments.open()
            await environment.reset(TASK)
            await environment.step(code)
            try:
                return await environment.score()
            finally:
                await environment.close()

    world = NOTE.open_world()
    exec(code, {"apis": Apis(world.call)})
    assert ran(run(partial=True)) == evaluate(NOTE, world).share == share
    assert ran(run()) == float(share == 1.0)


def test_halves_of_characters_in_code_are_no_reason_to_fail():
    async def run():
        async with opened() as environments:
            environment = await environments.open()
            await environment.reset(TASK)
            seen = await environment.step("print('a\ud800b', 'ü')")
            await environment.close()
            return seen.content

    assert ran(run()) == "a?b ü\n"


def test_an_episode_waits_for_a_place():
    async def run():
        async with opened(worlds=1) as environments:
            first = await environments.open()
            second = asyncio.create_task(environments.open())
            await asyncio.sleep(0.05)
            assert not second.done()
            await first.close()
            await first.close()  # which changes nothing
            await (await second).close()

    ran(run())


def test_a_server_that_others_filled_is_asked_again():
    async def run():
        async with serving(ServingLimits(worlds=1)) as url, opened(urls=[url]) as ours, opened(urls=[url]) as theirs:
            first = await theirs.open()
            await first.reset(TASK)
            waiting = asyncio.create_task(played(ours, TASK))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await first.close()
            return await waiting

    assert ran(run()) == 1.0


def test_a_cancelled_episode_leaves_no_world():
    async def run():
        async with opened(worlds=1) as environments:
            for pause in (0.0, 0.01, 0.05):  # while it begins, or later
                playing = asyncio.create_task(played(environments, TASK))
                await asyncio.sleep(pause)
                playing.cancel()
                await asyncio.wait([playing])
            assert await played(environments, TASK) == 1.0
        assert not others_running()

    ran(run())


@pytest.mark.parametrize(
    ("task", "raised", "reported"),
    [
        pytest.param(Task("a", {"task_id": NOBODY}), ServerRefused, "404: there is no task", id="no such task"),
        pytest.param(Task("a"), KeyError, "task_id", id="no id"),
    ],
)
def test_a_task_that_is_not_there_is_told(task, raised, reported):
    async def run():
        async with opened() as environments:
            with pytest.raises(raised, match=reported):
                await played(environments, task)

    ran(run())


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        pytest.param({"servers": -1}, "servers is -1", id="fewer than none"),
        pytest.param({"urls": []}, "there is no server; give urls", id="no address"),
        pytest.param({"urls": ["http://a"], "appworld_python": "python"}, "both given; leave out one", id="two kinds"),
        pytest.param(
            {"appworld_python": "python", "appworld_root": "/nowhere"}, "data is not in /nowhere", id="no data"
        ),
        pytest.param({"worlds": 0}, "worlds is 0", id="no worlds"),
        pytest.param({"limits": {"wall_s": 0}}, "wall_s is 0", id="no time"),
    ],
)
def test_wrong_keys_are_told(keys, reported):
    with pytest.raises(ValueError, match=reported):
        AppWorldEnvironments(**keys)


def test_an_address_where_nobody_is():
    async def run():
        async with opened(urls=["http://127.0.0.1:9"]) as environments:
            with pytest.raises(ServerLost, match=r"the server at http://127.0.0.1:9 did not answer /"):
                await environments.open()

    ran(run())


def test_a_lost_server_does_not_draw_all_episodes():
    """One that is gone is always the emptiest."""

    async def run():
        async with serving() as stays:
            leaves = serving()
            async with opened(urls=[await leaves.__aenter__(), stays]) as environments:
                await (await environments.open()).close()
                await leaves.__aexit__(None, None, None)
                with pytest.raises(ServerLost):  # nobody knew yet
                    await played(environments, TASK)
                return [await played(environments, TASK) for _ in range(3)]

    assert ran(run()) == [1.0] * 3


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_killed_server_fails_its_episodes_and_is_started_again(own_folder):
    async def run():
        async with opened(servers=1, worlds=4) as environments:
            (server,) = environments._pool._servers
            one, other = [await environments.open() for _ in range(2)]
            await one.reset(TASK)
            sandbox = int((await one.step("import os; print(os.getpid())")).content)
            first = server.backend.pid
            os.kill(first, signal.SIGKILL)
            for environment in (one, other):
                with pytest.raises(ServerLost, match=r"did not answer .*; the episode's world is lost"):
                    await environment.reset(TASK)
                await environment.close()
            assert await asyncio.gather(*(played(environments, TASK) for _ in range(3))) == [1.0] * 3
            assert server.backend.pid != first
            second = server.backend.pid
        assert not any(map(psutil.pid_exists, (first, second, sandbox)))
        assert not list(own_folder.iterdir())

    ran(run())


def test_a_process_may_be_stopped_again(tmp_path):
    async def run():
        process = await SupervisedProcess.start("sleeper", ["sleep", "600"], dict(os.environ), tmp_path / "log")
        await process.stop()
        await process.stop()
        assert not process.is_alive and not psutil.pid_exists(process.pid)

    ran(run())


def test_a_server_that_dies_between_episodes_is_started_again():
    async def run():
        async with opened(servers=1) as environments:
            (server,) = environments._pool._servers
            await (await environments.open()).close()
            os.kill(server.backend.pid, signal.SIGKILL)
            while server.backend.is_running:
                await asyncio.sleep(0.01)
            return await played(environments, TASK)

    assert ran(run()) == 1.0


@pytest.mark.parametrize("pause", [0.0, 0.02, 0.2])
def test_environments_that_are_closed_while_they_begin_leave_nothing(pause, own_folder):
    async def run():
        async with opened(servers=2) as environments:
            opening = [asyncio.create_task(environments.open()) for _ in range(3)]
            await asyncio.sleep(pause)
            opening[0].cancel()
        outcomes = await asyncio.gather(*opening, return_exceptions=True)
        assert all(isinstance(each, ServerLost | asyncio.CancelledError) for each in outcomes)
        assert not list(own_folder.iterdir())

    ran(run())


FORGETFUL = """
import asyncio, tempfile
from pathlib import Path
from tests.app_world.serving.session import TASK, AppWorldEnvironments

async def main():
    environments = AppWorldEnvironments()
    await (await environments.open()).reset(TASK)
    (server,) = environments._pool._servers
    print(server.backend.pid, flush=True)

asyncio.run(main())
"""


def test_servers_end_with_a_process_that_closes_nothing(tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", FORGETFUL], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(int(ended.stdout))], timeout=HANG_S)
    assert not psutil.pid_exists(int(ended.stdout))
    assert not list(tmp_path.iterdir())


def test_limits_reach_the_server_and_a_sandbox_that_does_not_start_says_why():
    async def run():
        async with opened(servers=1, limits={"open_files": 1}) as environments:
            with pytest.raises(ServerRefused, match=r"500: RuntimeError: a sandbox with .*open_files=1\) did not"):
                await played(environments, TASK)

    ran(run())
