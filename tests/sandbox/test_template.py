"""The process that sandboxes are forked from: it comes and goes unseen, and they share nothing by it."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from roost.sandbox import child, child as template
from roost.sandbox.execution import Fault
from roost.sandbox.inside import template as inside_template
from roost.sandbox.sandbox import Sandbox, run_once
from tests.limits import HANG_S
from tests.sandbox.playground import PATIENT, executed, ran

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each sandbox is a fresh interpreter")


def template_of(sandbox):
    parent = psutil.Process(sandbox.pid).parent()
    assert parent.pid != os.getpid()
    return parent


def test_sandboxes_have_one_template_which_is_our_child():
    async def run():
        async with await Sandbox.start() as one, await Sandbox.start() as other:
            return template_of(one), template_of(other)

    one, other = ran(run())
    assert one == other and one.ppid() == os.getpid()
    assert one.num_threads() == 1


def test_the_template_is_told_nothing_of_its_owner(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "the key to everything")

    async def run():
        async with await Sandbox.start() as sandbox:
            return template_of(sandbox).environ()

    variables = ran(in_new_thread(run))
    assert "SECRET_KEY" not in variables and "HOME" not in variables and "PATH" in variables


async def in_new_thread(work):
    """Result of work in a thread, which has a template of its own."""
    return await asyncio.to_thread(lambda: asyncio.run(work()))


def test_when_the_template_dies_its_sandboxes_do_and_the_next_has_another():
    async def run():
        async with await Sandbox.start(PATIENT) as sandbox:
            first = template_of(sandbox)
            busy = asyncio.create_task(sandbox.execute("print('begun', flush=True)\nwhile True: pass"))
            await asyncio.sleep(0.2)
            first.kill()
            ended = await busy
            after = await sandbox.execute("print('fresh')")
            return first, template_of(sandbox), ended, after

    first, second, ended, after = ran(run())
    assert ended.error == Fault.DIED and "signal 9" in ended.output
    assert (after.output, after.error) == ("fresh\n", None)
    assert first != second and not first.is_running()


def test_a_template_that_dies_between_two_sandboxes_is_replaced():
    async def run():
        async with await Sandbox.start() as sandbox:
            first = template_of(sandbox)
        first.kill()
        return first, await run_once("print(1)", limits=PATIENT)

    first, execution = ran(run())
    assert execution.output == "1\n" and not first.is_running()


SPOILING = """
import builtins, json, os, random, string, sys, unittest
json.load = builtins.print = None
os.environ["SPOILT"] = "1"; sys.path.append("/spoilt"); string.spoilt = 1; random.seed(1); os.umask(0o777)
sys.modules["spoilt"] = sys; sys.setrecursionlimit(77); os.chdir("/")
unittest.TestCase.assertEqual = lambda *a: None
"""
LOOKING = """
import builtins, json, os, random, string, sys, unittest
assert json.load is not None and print is not None
assert "SPOILT" not in os.environ and "/spoilt" not in sys.path and not hasattr(string, "spoilt")
assert "spoilt" not in sys.modules and sys.getrecursionlimit() > 77 and os.umask(0o22) != 0o777
assert os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
try: unittest.TestCase().assertEqual(1, 2)
except AssertionError: print("clean", os.getcwd())
"""


def test_what_one_sandbox_spoils_another_does_not_see():
    async def run():
        async with await Sandbox.start() as before, await Sandbox.start() as spoilt:
            spoiling = await spoilt.execute(SPOILING)
            looks = [await before.execute(LOOKING)]
            async with await Sandbox.start() as after:
                looks.append(await after.execute(LOOKING))
            return spoiling, looks

    spoiling, looks = ran(run())
    assert spoiling.error is None, spoiling.output
    assert [look.output.split()[:1] for look in looks] == [["clean"]] * 2, looks
    assert len({look.output for look in looks}) == 2  # folders of their own


SEARCHING = """
import gc, os, sys
seen, frame = [], sys._getframe()
while frame: seen.append(str(dict(frame.f_locals))); frame = frame.f_back
for kept in gc.get_objects():
    if type(kept) in (list, tuple, dict): seen.append(repr(kept))
memory = " ".join(seen)
print(*(word[::-1] in memory for word in <words>), os.getcwd() in memory)
"""


def test_nothing_of_a_sibling_is_in_memory():
    """Neither its folder, nor its code: the template never had them. A sandbox finds what is its own."""
    secret = "known to one sandbox only"

    async def run():
        async with await Sandbox.start() as sibling:
            folder = (await sibling.execute(f"x = {secret!r}\nimport os; print(os.getcwd())")).output.strip()
            words = [secret[::-1], folder[::-1]]  # so that the search does not find itself
            async with await Sandbox.start() as sandbox:
                return await sandbox.execute(SEARCHING.replace("<words>", repr(words)))

    assert ran(run()).output == "False False True\n"


def test_randomness_is_not_shared():
    sources = "random.random(), uuid.uuid4(), os.urandom(8).hex(), tempfile.mktemp()"
    code = f"import os, random, tempfile, uuid; print({sources})"
    first, second = [executed(code)[0].output.split() for _ in range(2)]
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_a_sandbox_leads_a_session_of_its_own():
    (execution,) = executed("import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))")
    assert execution.output == "True\n"


def test_nothing_is_left_in_the_template():
    async def many():
        async def one(number):
            async with await Sandbox.start(PATIENT) as sandbox:
                return await sandbox.execute("import os; os._exit(3)" if number % 2 else "1")

        async with await Sandbox.start() as first:
            origin = template_of(first)
            before = origin.num_fds()
            await asyncio.gather(*map(one, range(12)))
            return origin.children(), first.pid, before, origin.num_fds()

    children, first, before, after = ran(many())
    assert [process.pid for process in children] == [first]  # zombies are children, too
    assert after == before


def test_a_cancelled_start_leaves_no_process():
    async def run():
        async with await Sandbox.start() as first:
            origin = template_of(first)
            starts = [asyncio.create_task(Sandbox.start()) for _ in range(8)]
            for turns, start in enumerate(starts):
                for _ in range(turns):
                    await asyncio.sleep(0)
                start.cancel()
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, Sandbox):
                    await outcome.close()
            return [process.pid for process in origin.children()], first.pid

    children, first = ran(run())
    assert children == [first]


def test_the_template_of_a_thread_goes_with_it_and_leaves_others_alone():
    async def run():
        async with await Sandbox.start() as ours:
            found = []

            async def theirs():
                async with await Sandbox.start() as sandbox:
                    found.append(template_of(sandbox))

            thread = threading.Thread(target=lambda: asyncio.run(theirs()))
            thread.start()
            await asyncio.to_thread(thread.join)
            return found[0], template_of(ours), await ours.execute("print('alive')")

    theirs, ours, execution = ran(run())
    _, alive = psutil.wait_procs([theirs], timeout=HANG_S)
    assert not alive and theirs != ours
    assert execution.output == "alive\n"


FORKING_OWNER = """
import asyncio, os
from roost.sandbox.sandbox import Sandbox
async def main(): # and in a fork of this process
    async with await Sandbox.start() as sandbox:
        for number in range(20):
            printed = (await sandbox.execute(f"print({number}, {os.getpid()})")).output
            assert printed == f"{number} {os.getpid()}\\n", printed
asyncio.run(main())
pid = os.fork()
asyncio.run(main())
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    print("both")
"""


def test_a_fork_of_the_owner_has_a_template_of_its_own(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKING_OWNER]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert ended.stdout == "both\n", ended.stderr


def test_a_template_that_does_not_answer_is_replaced():
    async def work():
        async with await Sandbox.start() as sandbox:
            stopped = template_of(sandbox)
        stopped.send_signal(signal.SIGSTOP)
        template._THREAD_LOCAL.template._control.settimeout(0.1)  # nobody has to wait for it here
        return stopped, (await run_once("print(1)", limits=PATIENT)).output

    stopped, output = ran(in_new_thread(work))
    assert output == "1\n" and not stopped.is_running()


def test_no_room_for_one_more_is_no_end_of_others(monkeypatch):
    def no_room():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_room)
    ours, theirs = os.pipe()
    assert inside_template._forked(None, [ours, theirs]) == inside_template.NONE
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)  # it keeps nothing of what did not come to be


def test_that_there_is_no_room_is_told(monkeypatch):
    async def run():
        async with await Sandbox.start() as sandbox:
            with monkeypatch.context() as patch:
                patch.setattr(template.Template, "_answer", lambda *_: inside_template.NONE)
                with pytest.raises(BlockingIOError, match="cannot fork: the process limit"):
                    await Sandbox.start()
            return await sandbox.execute("print('alive')")

    assert ran(run()).output == "alive\n"


def test_where_nothing_can_be_forked_a_fresh_interpreter_does(monkeypatch):
    monkeypatch.setattr(child, "forked", lambda *_: None)

    async def run():
        async with await Sandbox.start() as sandbox:
            return psutil.Process(sandbox.pid).ppid(), await sandbox.execute("print('runs')"), sandbox.isolation()

    parent, execution, isolation = ran(run())
    assert parent == os.getpid() and execution.output == "runs\n" and not isolation.gaps
