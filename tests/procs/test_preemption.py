"""Signals during a run: which ones drop work, which ones wait for it, and which ones end the process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from roost.procs.signals import Preempted, Stoppable, first_signal
from tests.limits import HANG_S


@pytest.fixture(autouse=True)
def handlers():
    """A run that got a signal ignores more of them to its end; the tests after these must not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped_during(work_done, number, cancels=False):
    """Run droppable work that waits for an event, signal this process meanwhile, and return what came of it."""
    notes = []

    async def run():
        stoppable, begun, may_end = Stoppable(notes.append), asyncio.Event(), asyncio.Event()
        stoppable.is_starting = False

        async def work():
            begun.set()
            await may_end.wait()
            return work_done

        with first_signal(lambda each: stoppable.stop(asyncio.current_task(), each)):
            running = asyncio.create_task(stoppable.unless_preempted(work()))
            await begun.wait()
            os.kill(os.getpid(), number)
            while not stoppable.was_stopped:
                await asyncio.sleep(0)
            if cancels:
                running.cancel()
            may_end.set()
            try:
                return await running, stoppable.stopped_by
            except (Preempted, asyncio.CancelledError) as error:
                return type(error), stoppable.stopped_by

    return asyncio.run(run()), notes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempting_signals_drop_work_that_can_be_done_again(number):
    found, notes = stopped_during("done", number)
    assert found == (Preempted, number)
    assert number.name in notes[0]


def test_an_interrupt_lets_work_end():
    assert stopped_during("done", signal.SIGINT)[0] == ("done", signal.SIGINT)


def test_the_end_of_everything_is_no_preemption():
    assert stopped_during("done", signal.SIGTERM, cancels=True)[0] == (asyncio.CancelledError, signal.SIGTERM)


PROGRAM = """
import asyncio, os, signal, sys
from roost.procs import signals
signals.SAME_SIGNAL_S = 0.05
async def main():
    with signals.first_signal(lambda number: print(number.name, flush=True)):
        for number in map(int, sys.argv[1:]):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.3)
asyncio.run(main())
os.kill(os.getpid(), signal.SIGUSR1)
print("saved", flush=True)
"""
USR1, TERM = int(signal.SIGUSR1), int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("numbers", "printed", "code"),
    [
        pytest.param((USR1, USR1, TERM), "SIGUSR1\nsaved\n", 0, id="a scheduler that sends several"),
        pytest.param((TERM, USR1), "SIGTERM\nsaved\n", 0, id="USR1 after TERM"),
        pytest.param((TERM, TERM), "SIGTERM\n", -TERM, id="TERM twice"),
    ],
)
def test_what_a_second_signal_does(numbers, printed, code):
    words = [sys.executable, "-c", PROGRAM, *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert (done.stdout, done.returncode) == (printed, code), done.stderr
