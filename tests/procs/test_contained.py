"""User code that calls sys.exit() or raises KeyboardInterrupt: the event loop goes on; Ctrl-C still ends it."""

import asyncio
import gc
import signal
import subprocess
import sys
import warnings

import pytest

from roost.procs.user_code import ExitRaised, call, call_async, contain_tasks
from tests.limits import HANG_S

EXITS = pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)


@pytest.fixture
def ignoring_ctrl_c():
    """Ctrl-C is handled by somebody who does not raise, as in a run: what is raised is then user code's own."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    yield
    signal.signal(signal.SIGINT, before)


def ran(work):
    """Result of the work in a loop with contained tasks, and whether the loop still ran afterwards."""

    async def main():
        contain_tasks(asyncio.get_running_loop())
        async with asyncio.timeout(HANG_S):
            outcome = await asyncio.gather(asyncio.create_task(work()), return_exceptions=True)
            await asyncio.sleep(0)
            return outcome[0]

    # Not asyncio.run: its handler of Ctrl-C raises, so a KeyboardInterrupt would be taken for one.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@EXITS
def test_a_task_that_exits_fails_alone(error, ignoring_ctrl_c):
    async def work():
        async def leave():
            raise error

        return await call_async(leave)

    found = ran(work)
    assert isinstance(found, ExitRaised) and type(error).__name__ in str(found)
    assert found.__cause__ is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_task_that_user_code_started_fails_alone(error, ignoring_ctrl_c):
    async def work():
        async def leave():
            await asyncio.sleep(0)
            raise error

        await asyncio.gather(leave(), asyncio.sleep(0))

    assert isinstance(ran(work), ExitRaised)


@EXITS
def test_plain_functions_fail_alike(error, ignoring_ctrl_c):
    def leave():
        raise error

    with pytest.raises(ExitRaised, match=type(error).__name__):
        call(leave)

    async def work():
        return await call_async(leave)

    assert isinstance(ran(work), ExitRaised)


def test_a_task_that_is_cancelled_before_it_began_is_no_coroutine_that_was_forgotten():
    async def work():
        task = asyncio.create_task(asyncio.sleep(0, "slept"))
        assert "sleep" in repr(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled(), await asyncio.create_task(asyncio.sleep(0, "slept"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ran(work) == (True, "slept")
        gc.collect()


SPINNING = """
import asyncio
from roost.procs.user_code import call_async, contain_tasks

async def scenario():
    print("spinning", flush=True)
    while True:
        pass

async def main():
    contain_tasks(asyncio.get_running_loop())
    await asyncio.gather(asyncio.create_task(call_async(scenario)), return_exceptions=True)
    print("it was taken for a failure of the scenario", flush=True)

loop = asyncio.new_event_loop()  # not asyncio.run, whose handler would only cancel the first time
loop.run_until_complete(main())
"""


def test_ctrl_c_ends_a_program_whose_user_code_never_returns():
    process = subprocess.Popen(
        [sys.executable, "-c", SPINNING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "spinning\n"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert "taken for a failure" not in rest
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
