"""Code that blocks an event loop is named while it does, and the loop's return is told."""

import asyncio
import re
import threading
from pathlib import Path

from roost.procs.loop_watch import LoopWatch
from tests.limits import HANG_S


class Reports:
    """Reports, for threads that wait for them."""

    def __init__(self):
        self.texts = []
        self._came = threading.Condition()

    def __call__(self, text):
        with self._came:
            self.texts.append(text)
            self._came.notify_all()

    def wait(self, count):
        with self._came:
            return self._came.wait_for(lambda: len(self.texts) >= count, HANG_S)


class Scenario:
    async def run_episode(self, reports, count):
        await asyncio.sleep(0)
        return self._score(reports, count)

    def _score(self, reports, count):
        return reports.wait(count)  # blocks the loop until it was reported


def test_the_code_that_blocks_is_named_and_the_return_is_told():
    reports = Reports()

    async def main():
        watch = LoopWatch(reports, limit_s=0.2, every_s=0.01)
        watch.start()
        assert await asyncio.create_task(Scenario().run_episode(reports, 2)), "it is reported again while it goes on"
        await asyncio.to_thread(reports.wait, 3)
        watch.stop()

    asyncio.run(main())
    first, second, last = reports.texts[:3]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# blocks the loop" in text)
    assert f"Reports.wait ({__file__}:" in first or f"Scenario._score ({__file__}:{line}" in first
    assert re.match(r"the event loop has not run for \d+ s: ", first) and "asyncio.to_thread" in first
    assert "has not run" in second and re.match(r"the event loop runs again after \d+ s", last)


def test_a_loop_that_waits_is_not_blocked_and_a_watch_that_is_stopped_says_nothing():
    reports = Reports()

    async def main():
        watch = LoopWatch(reports, limit_s=5.0, every_s=0.01)
        watch.start()
        await asyncio.sleep(0.1)
        watch.stop()

    asyncio.run(main())
    assert reports.texts == []


def test_code_of_roost_and_libraries_is_named_where_there_is_no_other():
    frames = {}

    async def main():
        import queue

        done = queue.Queue()

        watch = LoopWatch(lambda text: (frames.setdefault("text", text), done.put(None)), limit_s=0.1, every_s=0.01)
        watch.start()
        asyncio.get_running_loop().call_soon(done.get, True, HANG_S)  # a library's function, with nobody's frame
        await asyncio.sleep(0.3)
        watch.stop()

    asyncio.run(main())
    assert re.search(r"Queue\.get|Condition\.wait", frames["text"])
