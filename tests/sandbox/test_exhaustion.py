"""Code that takes more than its share."""

import asyncio

import psutil
import pytest

from roost.sandbox.child import FLOOD_BYTES
from roost.sandbox.execution import Fault
from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import Sandbox
from tests.limits import HANG_S
from tests.sandbox.playground import PATIENT, executed, ran

HASTY = Limits(wall_s=5.0)
ENDLESS = {
    "Python": "while True: pass",
    "C": "sum(range(10**12))",
    "a regular expression": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "a large number": "10 ** 10 ** 9",
    "sleep": "import time; time.sleep(10**6)",
    "catching everything": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "ignoring signals": "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\nwhile True: pass",
    "stopping itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "waiting": "import threading; threading.Event().wait()",
}
DELETING = """
import ctypes, os
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
def deleted():  # a descriptor of a file without a name
    file = os.open("a", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.write(file, bytes(3 * 10**5))
    os.unlink("a")
    return file
def mapped(file):  # its first page only; the mmap of Python would keep a descriptor
    assert library.mmap(None, ctypes.c_size_t(4096), 1, 2, file, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
    os.close(file)
"""


def test_endless_code_is_ended():
    """All at the same time, as each takes its limit."""

    async def ended(code):
        async with await Sandbox.start(HASTY) as sandbox:
            execution = await sandbox.execute(f"print('begun')\n{code}")
            return execution.error, execution.output, await sandbox.execute("print('fresh', 'x' in dir())")

    async def run():
        return await asyncio.gather(*map(ended, ENDLESS.values()))

    for name, (error, output, after) in zip(ENDLESS, ran(run()), strict=True):
        assert error == Fault.TIMED_OUT, name
        assert output == (
            "begun\n\n[Ended: the code ran for more than 5 s. Variables and imports are gone; files are kept.]"
        ), name
        assert (after.output, after.error) == ("fresh False\n", None), name


def test_calls_do_not_stretch_the_time():
    async def slow(app, api, arguments):
        await asyncio.sleep(3600)

    (execution,) = executed("apis.a.b()", limits=Limits(wall_s=1.0), call=slow)
    assert execution.error == Fault.TIMED_OUT


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import threading\nlong = range(10**12)\n"
                     "for _ in range(2): threading.Thread(target=sum, args=(long,)).start()\n"
                     "sum(range(10**12))", id="over all threads"),
        pytest.param("while True: pass", id="in one"),
    ],
)  # fmt: skip
def test_cpu_time_is_bounded(code):
    (execution,) = executed(code, limits=Limits(wall_s=HANG_S, cpu_s=1))
    assert execution.error == Fault.CPU
    assert "1 s of CPU time" in execution.output


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("x = 'a' * 10**10", Fault.MEMORY, id="at once"),
        pytest.param("x = []\nwhile True: x.append(bytearray(10**6))", Fault.MEMORY, id="bit by bit"),
        pytest.param(
            "def f():\n  x = []\n  while True: x.append(bytearray(10**5))\nf()", Fault.MEMORY, id="in a frame"
        ),
        pytest.param("import mmap; mmap.mmap(-1, 10**10)", Fault.RAISED, id="as a map"),
    ],
)
def test_memory_is_bounded(code, error):
    execution, after = executed(code, "x = None\nprint('alive')", limits=Limits(wall_s=HANG_S, memory_mb=256))
    assert execution.error == error, execution.output
    assert after.output == "alive\n"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("line = 'a' * 10**6\nfor _ in range(1000): print(line)", id="print"),
        pytest.param("import sys\nfor _ in range(1000): sys.stderr.write('a' * 10**6)", id="stderr"),
        pytest.param("import os\nfor _ in range(1000): os.write(1, b'a' * 10**6)", id="the descriptor"),
        pytest.param("import threading\ndef f():\n  while True: print('a' * 10**4)\n"
                     "threading.Thread(target=f).start()\nimport time; time.sleep(3600)", id="a thread"),
    ],
)  # fmt: skip
def test_a_gigabyte_of_output_is_ended(code):
    before = psutil.Process().memory_info().rss
    (execution,) = executed(code)
    assert execution.error == Fault.FLOODED
    assert len(execution.output) < 10_200 and "characters omitted" in execution.output
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_a_file_is_bounded(tmp_path):
    code = "file = open('large', 'wb')\nwhile True: file.write(bytes(10**6))"
    (execution,) = executed(code, limits=Limits(wall_s=HANG_S, file_mb=8), folder=tmp_path)
    assert execution.error == Fault.RAISED and "File too large" in execution.output
    assert (tmp_path / "large").stat().st_size <= 8 << 20


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("for i in range(60): open(f'{i}', 'wb').write(bytes(10**5))", id="files"),
        pytest.param("import os\nfor i in range(1200): os.mkdir(f'{i}')", id="folders"),
        pytest.param("import os\nfor _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)", id="too deep to look"),
        pytest.param(f"{DELETING}kept = [deleted() for _ in range(20)]", id="deleted and open"),
        pytest.param(f"{DELETING}for _ in range(20): mapped(deleted())", id="deleted and mapped"),
        pytest.param(
            f"{DELETING}import threading, time\n"
            "def run():\n"
            "  library.syscall(436, 1000, 1000, 2)  # from here on its descriptors are its own\n"
            "  kept = [deleted() for _ in range(20)]\n"
            "  time.sleep(3600)\n"
            "threading.Thread(target=run).start()",
            id="deleted and open in a thread",
        ),
    ],
)
def test_many_files_are_bounded(code):
    (execution,) = executed(f"{code}\nimport time; time.sleep(3600)", limits=Limits(wall_s=HANG_S, folder_mb=4))
    assert execution.error == Fault.DISK, execution.output


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(f"{DELETING}for _ in range(20): os.close(deleted())", id="deleted and closed"),
        pytest.param(f"{DELETING}one = deleted()\nkept = [os.dup(one) for _ in range(20)]", id="open often"),
        pytest.param(
            f"{DELETING}one = deleted()\nmapped(os.dup(one))\nfor _ in range(20): mapped(os.dup(one))",
            id="mapped often, and open",
        ),
        pytest.param("import mmap; kept = mmap.mmap(-1, 8 << 20); kept[:] = bytes(8 << 20)", id="shared memory"),
    ],
)
def test_what_is_not_on_the_disk_does_not_count(code):
    (execution,) = executed(f"{code}\nimport time; time.sleep(1)", limits=Limits(wall_s=HANG_S, folder_mb=4))
    assert execution.error is None, execution.output


def test_room_for_a_file_can_be_asked_for_within_its_limit():
    asking = "import os\nfile = os.open('a', os.O_RDWR | os.O_CREAT)\nos.posix_fallocate(file, 0, <size>)\n"
    codes = (asking.replace("<size>", size) + "print(os.fstat(file).st_size)" for size in ("5000", "10 ** 7"))
    few, many = executed(*codes, limits=Limits(wall_s=HANG_S, file_mb=4))
    assert few.output == "5000\n"
    assert many.error == Fault.RAISED and "File too large" in many.output


BOMBS = {
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(3600,)).start()",
    "small threads": "import threading, time\nthreading.stack_size(32768)\n"
    "while True: threading.Thread(target=time.sleep, args=(3600,)).start()",
    "processes": "import os\nwhile True: os.fork()",
}


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in BOMBS.items()])
def test_bombs_do_not_go_off(code):
    async def run():
        async with await Sandbox.start(Limits(wall_s=HANG_S, processes=8)) as sandbox:
            if not sandbox.isolation().namespace:
                pytest.skip("no user namespaces here: threads are bounded by their memory only")
            execution = await sandbox.execute(code)
            return execution, psutil.Process(sandbox.pid).num_threads(), psutil.Process(sandbox.pid).children()

    execution, threads, children = ran(run())
    assert execution.error == Fault.RAISED, execution.output
    assert threads <= 8 and not children


def test_threads_that_go_on_are_stopped_between_executions():
    async def run():
        async with await Sandbox.start() as sandbox:
            await sandbox.execute("import threading\ndef f():\n  while True: pass\nthreading.Thread(target=f).start()")
            process = psutil.Process(sandbox.pid)
            while process.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
            before = process.cpu_times()
            await asyncio.sleep(0.2)
            return before, process.cpu_times(), await sandbox.execute("print('alive')")

    before, later, after = ran(run())
    assert (before.user, before.system) == (later.user, later.system)
    assert after.output == "alive\n"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        pytest.param("import os; os._exit(0)", "exited with status 0", id="leaving"),
        pytest.param("import ctypes; ctypes.string_at(0)", "died of signal 11", id="a crash"),
        pytest.param("import os; os.abort()", "died of signal 6", id="an abort"),
        pytest.param("import sys; sys.setrecursionlimit(10**9)\ndef f(): return [*map(lambda _: f(), [1])]\nf()",
                     "died of signal 11", id="deep recursion in C"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "died of signal 9", id="suicide"),
    ],
)  # fmt: skip
def test_a_death_is_told_and_followed_by_a_new_process(code, sentence):
    execution, after = executed(f"print('before', flush=True)\n{code}", "print('fresh')")
    assert execution.error == Fault.DIED
    assert execution.output.startswith("before\n") and sentence in execution.output
    assert after.output == "fresh\n"


def test_the_folder_of_a_death_is_kept_for_the_next():
    _, after = executed("open('a', 'w').write('kept')\nimport os; os._exit(1)", "print(open('a').read())")
    assert after.output == "kept\n"


def test_others_go_on_while_one_floods():
    """The owner reads piece by piece, and does other things between them."""

    async def run():
        async with await Sandbox.start(PATIENT) as sandbox:
            flood = asyncio.create_task(sandbox.execute("while True: print('a' * 10**6)"))
            turns = 0
            while not flood.done():
                await asyncio.sleep(0)
                turns += 1
            return turns, flood.result().error

    turns, error = ran(run())
    assert error == Fault.FLOODED
    assert turns > FLOOD_BYTES >> 17
