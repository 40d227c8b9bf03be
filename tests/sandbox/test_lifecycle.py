"""Many sandboxes, their ends, and the ends of their owners."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import Sandbox, run_once
from tests.limits import HANG_S
from tests.sandbox.playground import PATIENT, ran

ROOT = Path(__file__).parents[2]


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_fifty_at_a_time_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def one(number):
        async with await Sandbox.start(PATIENT) as sandbox:
            await sandbox.execute(f"x = {number}\nopen('x', 'w').write(str(x))")
            return (await sandbox.execute("print(x, open('x').read())")).output

    async def run():
        return await asyncio.gather(*map(one, range(50)))

    ran(one(0))  # so that what they are forked from is there
    before, children = descriptors(), psutil.Process().children(recursive=True)
    assert ran(run()) == [f"{number} {number}\n" for number in range(50)]
    assert set(psutil.Process().children(recursive=True)) <= set(children)
    assert not list(tmp_path.iterdir())
    assert descriptors() <= before


def test_programs_run_beside_one_another():
    async def run():
        programs = [run_once("print(int(input()) ** 2)", str(number), PATIENT) for number in range(20)]
        return [execution.output for execution in await asyncio.gather(*programs)]

    assert ran(run()) == [f"{number**2}\n" for number in range(20)]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')", id="deep"),
        pytest.param("import os; os.mkdir('a'); os.mkdir('a/b'); open('a/b/c', 'w'); os.mkdir('n', 0)", id="modes"),
        pytest.param("import os; os.symlink('/', 'root'); os.symlink('loop', 'loop')", id="links"),
        pytest.param("import os; open(os.fsdecode(b'\\xff\\n'), 'w')", id="odd names"),
    ],
)
def test_any_folder_is_removed(code, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run():
        async with await Sandbox.start(PATIENT) as sandbox:
            execution = await sandbox.execute(code)
            assert execution.error is None, execution.output
            assert list(tmp_path.iterdir())

    ran(run())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_given_stays(tmp_path):
    (tmp_path / "in").write_text("given")

    async def run():
        async with await Sandbox.start(folder=tmp_path) as sandbox:
            await sandbox.execute("open('out', 'w').write(open('in').read())")

    ran(run())
    assert (tmp_path / "out").read_text() == "given"


def test_a_cancelled_execution_ends_its_process():
    async def run():
        async with await Sandbox.start() as sandbox:
            process = psutil.Process(sandbox.pid)
            execution = asyncio.create_task(sandbox.execute("while True: pass"))
            await asyncio.sleep(0.1)
            execution.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await execution
            assert not process.is_running()
            return await sandbox.execute("print('fresh')")

    assert ran(run()).output == "fresh\n"


@pytest.fixture
def nothing_is_left(tmp_path, monkeypatch):
    """Of the sandboxes of a test: no folder, no process (a zombie neither), no descriptor."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ran(run_once("1", limits=PATIENT))  # so that what they are forked from is there
    before, children = descriptors(), psutil.Process().children(recursive=True)
    yield
    assert not list(tmp_path.iterdir())
    assert set(psutil.Process().children(recursive=True)) <= set(children)
    assert descriptors() <= before


async def cancelled(task, times):
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.usefixtures("nothing_is_left")
def test_cancelled_while_it_is_closed(times):
    async def run():
        sandbox = await Sandbox.start(PATIENT)
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)
        await cancelled(closing, times)

    ran(run())


@pytest.mark.usefixtures("nothing_is_left")
def test_cancelled_while_its_process_is_ended():
    async def run():
        async with await Sandbox.start(PATIENT) as sandbox:
            execution = asyncio.create_task(sandbox.execute("while True: pass"))
            await asyncio.sleep(0.05)
            await cancelled(execution, times=20)

    ran(run())


@pytest.mark.usefixtures("nothing_is_left")
def test_closed_while_its_process_is_ended():
    async def run():
        sandbox = await Sandbox.start(PATIENT)
        execution = asyncio.create_task(sandbox.execute("while True: open('a', 'a').write('a')"))
        await asyncio.sleep(0.05)
        execution.cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        await sandbox.close()
        left = Path(sandbox._folder).exists()
        await cancelled(execution, times=1)
        return left

    assert not ran(run())


@pytest.mark.usefixtures("nothing_is_left")
def test_cancelled_before_its_folder_is_removed():
    async def run():
        free = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(free.wait, HANG_S))  # whoever removes has to wait for that
        sandbox = await Sandbox.start(PATIENT)
        closing = asyncio.create_task(sandbox.close())
        while sandbox.pid is not None:
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        free.set()
        await busy
        await cancelled(closing, times=0)

    ran(run())


@pytest.mark.usefixtures("nothing_is_left")
def test_a_loop_that_ends_meanwhile():
    """It cancels everything, and waits for what comes of that."""

    async def busy(sandbox):
        async with sandbox:
            await sandbox.execute("while True: pass")

    async def run():
        one, other = await Sandbox.start(PATIENT), await Sandbox.start(PATIENT)
        tasks = [asyncio.create_task(one.close()), asyncio.create_task(busy(other))]
        await asyncio.sleep(0)
        return tasks

    ran(run())


@pytest.mark.parametrize("turns", range(1, 5))  # so few that no process can have answered
@pytest.mark.usefixtures("nothing_is_left")
def test_closed_while_it_starts_again(turns):
    async def run():
        sandbox = await Sandbox.start(PATIENT)
        await sandbox.execute("import os; os._exit(1)")
        execution = asyncio.create_task(sandbox.execute("while True: pass"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await sandbox.close()
        with pytest.raises(RuntimeError, match="the sandbox is closed"):
            await execution
        return sandbox.pid

    assert ran(run()) is None


OWNER = """
import asyncio, psutil, sys
from roost.sandbox.sandbox import Sandbox
async def main():
    busy, idle = await Sandbox.start(), await Sandbox.start()
    template = psutil.Process(busy.pid).ppid()
    print(busy.pid, idle.pid, template, flush=True)
    await busy.execute("while True: pass")
asyncio.run(main())
"""


def test_a_killed_owner_leaves_none(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment)
    sandboxes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert all(sandbox.is_running() for sandbox in sandboxes)
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=HANG_S)
    _, left = psutil.wait_procs(sandboxes, timeout=HANG_S)
    assert not left


# A process under a filter that answers some calls as a kernel does that has none of them.
OLD_KERNEL = """
import asyncio, struct, sys
from roost.sandbox.inside.kernel import PR_SET_NO_NEW_PRIVS, Kernel
from roost.sandbox.sandbox import Sandbox
lacking, weak = eval(sys.argv[1]), sys.argv[2] == "weak"
steps = [(0x20, 0, 0, 0)] + [s for n in lacking for s in ((0x15, 0, 1, n), (0x06, 0, 0, 0x50026))]
program = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (0x06, 0, 0, 0x7FFF0000)])
Kernel().prctl(PR_SET_NO_NEW_PRIVS, 1)
Kernel().filter_calls(program)
async def main():
    async with await Sandbox.start(allows_weak=weak) as sandbox:
        print(sandbox.isolation(), (await sandbox.execute("print('runs')")).output)
asyncio.run(main())
"""
LANDLOCK = (444, 445, 446)
UNSHARE = {"x86_64": 272, "aarch64": 97}.get(os.uname().machine, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="filters are Linux's")
@pytest.mark.parametrize(
    ("lacking", "allowed", "described"),
    [
        pytest.param(LANDLOCK, "strict", "would not keep code from the user's files", id="no Landlock"),
        pytest.param(LANDLOCK, "weak", "landlock=0, seccomp=True, namespace=True) runs", id="no Landlock, allowed"),
        pytest.param((UNSHARE,), "strict", "seccomp=True, namespace=False) runs", id="no namespaces"),
        pytest.param((), "strict", "seccomp=True, namespace=True) runs", id="all there is"),
    ],
)
def test_what_a_kernel_lacks_is_found_out(lacking, allowed, described, tmp_path):
    command = [sys.executable, "-c", OLD_KERNEL, repr(lacking), allowed]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert described in ended.stdout + ended.stderr
    assert not list(tmp_path.iterdir())


def test_limits_too_small_to_start_with_are_told():
    with pytest.raises(RuntimeError, match="did not start"):
        ran(Sandbox.start(Limits(open_files=3)))
