"""Watching real processes: told once when one ends, however it ends, and not told when nobody wants to know."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roost.procs import exit_watch as watch
from roost.procs.exit_watch import ProcessWatch, is_alive
from tests.limits import HANG_S


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def end(process, how):
    if how == "kill":
        process.send_signal(signal.SIGKILL)
    process.stdin.close()


def watched_descriptors():
    """Descriptors of this process that stand for processes."""
    paths = Path("/proc/self/fd").iterdir()
    return {path for path in paths if path.is_symlink() and "pidfd" in str(path.readlink())}


@pytest.fixture(params=["kernel", "polling"])
def way(request, monkeypatch):
    if request.param == "polling":  # as where the kernel cannot tell
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.setattr(watch, "LOOK_EVERY", 0.01)
    return request.param


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_an_ended_process_is_told_once(how, way):
    async def case():
        ended = asyncio.Queue()
        processes = ProcessWatch()
        first, second = sleeper(), sleeper()
        for process in (first, second):
            processes.watch(process.pid, ended.put_nowait)
        end(first, how)
        if way == "polling":
            first.wait()  # without the kernel's help a process is alive until its parent has looked
        assert await asyncio.wait_for(ended.get(), HANG_S) == first.pid
        end(second, how)
        second.wait()
        assert await asyncio.wait_for(ended.get(), HANG_S) == second.pid
        first.wait()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert ended.empty()

    asyncio.run(case())


def test_a_process_that_ended_before_is_told_too(way):
    async def case():
        process = sleeper()
        end(process, "exit")
        process.wait()
        ended = asyncio.Queue()
        ProcessWatch().watch(process.pid, ended.put_nowait)
        assert await asyncio.wait_for(ended.get(), HANG_S) == process.pid

    asyncio.run(case())


def test_who_watches_one_process_twice_is_told_by_both_once(way):
    async def case():
        ended = asyncio.Queue()
        processes = ProcessWatch()
        process = sleeper()
        for name in ("a", "b"):
            processes.watch(process.pid, lambda pid, name=name: ended.put_nowait(name))
        end(process, "kill")
        process.wait()
        assert {await asyncio.wait_for(ended.get(), HANG_S) for _ in range(2)} == {"a", "b"}
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert ended.empty()

    asyncio.run(case())


def test_a_process_nobody_watches_any_more_is_not_told(way):
    async def case():
        before = watched_descriptors()
        described = []
        processes = ProcessWatch()
        process, other = sleeper(), sleeper()
        processes.watch(process.pid, described.append)
        processes.stop(process.pid)
        processes.stop(process.pid)
        ended = asyncio.Queue()
        processes.watch(other.pid, ended.put_nowait)
        end(process, "kill")
        process.wait()
        end(other, "kill")
        other.wait()
        assert await asyncio.wait_for(ended.get(), HANG_S) == other.pid
        assert described == []
        assert watched_descriptors() <= before

    asyncio.run(case())


def test_is_alive():
    process = sleeper()
    assert is_alive(process.pid)
    end(process, "kill")
    process.wait()
    assert not is_alive(process.pid)
    assert is_alive(1), "a process of another user is alive too"
