"""Threads for code that blocks: in order where that matters, and no reason for a process not to end."""

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roost.procs.user_code import DaemonThread, in_daemon_thread
from tests.limits import HANG_S
from tests.rollout.hanging import KINDS
from tests.rollout.script import ran

ROOT = Path(__file__).parents[2]


def raising(error):
    def call():
        raise error

    return call


def submitted(name, call):
    thread = DaemonThread(name)
    try:
        return thread.submit(call)
    finally:
        thread.shutdown()


BOTH = pytest.mark.parametrize("begin", [in_daemon_thread, submitted], ids=["a thread for it", "one for many"])


def test_calls_follow_one_another_in_one_thread():
    thread, may_begin, made = DaemonThread("tester"), threading.Event(), []
    outcomes = [thread.submit(may_begin.wait, HANG_S)]
    outcomes += [thread.submit(lambda n: made.append((n, threading.current_thread().name)), n) for n in range(3)]
    outcomes[2].cancel()
    thread.shutdown()
    assert not any(outcome.done() for outcome in (outcomes[0], outcomes[1], outcomes[3]))
    may_begin.set()
    concurrent.futures.wait(outcomes, HANG_S)
    assert made == [(0, "tester"), (2, "tester")]


def test_a_thread_that_is_shut_down_ends_after_what_was_submitted():
    thread, found = DaemonThread("tester"), []
    thread.submit(lambda: found.append(threading.current_thread()))
    last = thread.submit(lambda: "made")
    thread.shutdown()
    assert last.result(HANG_S) == "made"
    found[0].join(HANG_S)
    assert not found[0].is_alive(), f"it still runs after {HANG_S:g} s"
    with pytest.raises(RuntimeError, match="the tester was shut down"):
        thread.submit(print)


def test_a_call_with_a_thread_for_itself_is_made_though_nobody_waits_for_it():
    async def run():
        may_begin, is_made = threading.Event(), threading.Event()
        outcome = asyncio.wrap_future(in_daemon_thread("tester", lambda: may_begin.wait(HANG_S) and is_made.set()))
        outcome.cancel()
        may_begin.set()
        return await asyncio.to_thread(is_made.wait, HANG_S)

    assert ran(run()), f"it was not made within {HANG_S:g} s"


@BOTH
def test_what_a_call_raises_is_raised(begin):
    with pytest.raises(LookupError, match="mine"):
        begin("tester", raising(LookupError("mine"))).result(HANG_S)


@BOTH
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(asyncio.CancelledError("own"), id="cancelled"),  # as of an asyncio.run in the thread
        pytest.param(concurrent.futures.CancelledError("own"), id="a future of its own cancelled"),
        pytest.param(SystemExit("own"), id="exit"),
        pytest.param(KeyboardInterrupt("own"), id="interrupt"),
        pytest.param(StopIteration("own"), id="stop iteration"),
    ],
)
def test_what_would_mean_something_to_the_event_loop_is_told(begin, error):
    async def run():
        with pytest.raises(RuntimeError, match=rf"the tester raised {type(error).__name__}\(own\)"):
            await asyncio.wait_for(asyncio.wrap_future(begin("tester", raising(error))), HANG_S)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
def test_what_hangs_keeps_no_process_from_ending(kind):
    """See `hanging`: it prints once its code hangs, and again when all that is left to do is to end."""
    command = [sys.executable, "-m", "tests.rollout.hanging", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, errors = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, errors = process.communicate()
            raise AssertionError(f"it did not end within {HANG_S:g} s; it printed {printed!r}\n{errors}") from None
    assert (process.returncode, printed) == (0, "hangs\nends\n"), errors
