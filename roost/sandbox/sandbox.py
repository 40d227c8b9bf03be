"""Sandbox: a process for model-generated code, with checks of its isolation and limits."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from roost.procs.user_code import within
from roost.sandbox.child import FLOOD_BYTES, Child, Malformed, ProcessLost
from roost.sandbox.execution import Execution, Fault, Printed
from roost.sandbox.limits import Limits, is_larger, remove

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_TIME_ZONES = ("/etc/localtime", "/usr/share/zoneinfo")


class TooWeak(RuntimeError):
    """This machine cannot isolate untrusted code."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation in force in a sandbox; limits of memory, CPU time and files always apply."""

    landlock: int  # version; 0 if not available
    seccomp: bool
    namespace: bool  # user namespace; without it threads are bounded by memory only

    @property
    def gaps(self) -> tuple[str, ...]:
        """Resources that code in the sandbox could still reach.

        >>> Isolation(landlock=0, seccomp=True, namespace=True).gaps
        ("the user's files",)
        """
        files = () if self.landlock else ("the user's files",)
        calls = () if self.seccomp else ("the network", "other processes")
        return files + calls

    def check(self) -> None:
        """Raise TooWeak if the isolation has gaps."""
        if self.gaps:
            raise TooWeak(
                f"a sandbox on this machine would not keep code from {', '.join(self.gaps)}: it needs Linux 5.13 with "
                f"Landlock (found version {self.landlock}) and seccomp (found: {'yes' if self.seccomp else 'no'}) on "
                "x86_64 or aarch64; if you trust the code, pass allows_weak=True"
            )


def libraries() -> list[str]:
    """Folders of installed packages, which code in a sandbox can import."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*site.getsitepackages(), *user]


def readable() -> list[str]:
    """Paths that code in a sandbox can read: standard library, packages, shared libraries and time zones."""
    paths = sysconfig.get_paths()
    interpreter = (f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", paths["stdlib"], paths["platstdlib"])
    return list(dict.fromkeys((*interpreter, *libraries(), *_SYSTEM_LIBRARIES, *_TIME_ZONES)))


_DELETED = b" (deleted)"


def deleted_files(pid: int, folder: Path, largest: int) -> Iterator[int]:
    """Disk bytes of deleted files that a process still holds, per descriptor and mapping; each file counts once.

    The size of a file that is mapped but not open needs privileges; without them the largest file size is assumed.

    >>> list(deleted_files(0, Path("/nowhere"), largest=1))
    []
    """
    seen: set[int] = set()
    for descriptor in _descriptors(pid):
        try:
            status = descriptor.stat()
        except OSError:
            continue  # closed meanwhile
        is_new = not status.st_nlink and status.st_ino not in seen
        if is_new:
            seen.add(status.st_ino)
        yield status.st_blocks * 512 if is_new else 0
    for area, inode in _deleted_maps(pid, folder):
        if inode not in seen:
            seen.add(inode)
            yield _mapped_bytes(area, largest)


def _descriptors(pid: int) -> Iterator[Path]:
    """Descriptors of all threads: each thread can have its own."""
    for thread in _listed(Path(f"/proc/{pid}/task")):
        yield from _listed(thread / "fd")


def _deleted_maps(pid: int, folder: Path) -> Iterator[tuple[Path, int]]:
    """Mappings of deleted files of the folder, with their inodes."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().split(b"\n")
    except OSError:
        return  # the process ended meanwhile
    prefix = os.fsencode(folder) + b"/"
    for line in lines:
        match line.split(maxsplit=5):
            case [area, _, _, _, inode, path] if path.startswith(prefix) and path.endswith(_DELETED):
                first, end = (int(address, 16) for address in area.split(b"-"))
                # The names in map_files have no leading zeros.
                yield Path(f"/proc/{pid}/map_files/{first:x}-{end:x}"), int(inode)


def _mapped_bytes(area: Path, largest: int) -> int:
    try:
        return area.stat().st_blocks * 512
    except PermissionError:
        return largest
    except OSError:
        return 0  # unmapped meanwhile


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # the process ended meanwhile, or is not accessible


Call = Callable[[str, str, dict[str, Any]], Awaitable[Any]]  # app, API and arguments; the code gets its exceptions

_STARTS_WITHIN_S = 60.0  # on a busy machine
_CHECK_EVERY_S = 0.2  # checks of the folder's size
_MB = 1 << 20
_REPORTED_FAULTS = frozenset({"raised", "memory", "exited"})  # faults that a process can report itself


class Sandbox:
    """A process for the code of one episode. Definitions stay for the next piece of code, as in a notebook.

    If code runs too long or crashes, its process is gone: the output says so, and the next execution starts a new
    process in the same folder. Between executions the process is stopped, with all its threads.

    >>> async def example():
    ...     async with await Sandbox.start() as sandbox:
    ...         await sandbox.execute("x = 6")
    ...         return (await sandbox.execute("print(x * 7)")).output
    >>> asyncio.run(example())
    '42\\n'
    """

    def __init__(self, limits: Limits, call: Call | None, folder: Path, allows_weak: bool, is_own: bool) -> None:
        self._limits, self._call, self._folder = limits, call, folder
        self._allows_weak, self._owns_folder = allows_weak, is_own
        self._child: Child | None = None
        self._isolation: Isolation | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def start(
        cls,
        limits: Limits | None = None,
        call: Call | None = None,
        folder: Path | None = None,
        *,
        allows_weak: bool = False,
        stdin: str | None = None,
    ) -> Sandbox:
        """Start a sandbox. A given `folder` is used and kept; otherwise a temporary one is removed on close.

        With `stdin`, the code is run like a program: it reads this input, and ends when its threads have ended.
        """
        path = tempfile.mkdtemp(prefix="roost-sandbox-") if folder is None else folder
        sandbox = cls(limits or Limits(), call, Path(path).resolve(), allows_weak, folder is None)
        try:
            await sandbox._launch(stdin)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def isolation(self) -> Isolation:
        """Isolation in force, as reported by the process."""
        if self._isolation is None:
            raise RuntimeError("the sandbox was not started; use `await Sandbox.start()`")
        return self._isolation

    @property
    def pid(self) -> int | None:
        """PID of the process; None if there is none until the next execution."""
        return None if self._child is None else self._child.pid

    async def execute(self, code: str) -> Execution:
        """Run a piece of code; returns whatever the code does. Concurrent calls run one after the other."""
        async with self._turn:
            self._check_open()
            child = self._child or await self._launch(None)
            printed, began = Printed(self._limits.output_chars), time.monotonic()
            is_alive = False
            try:
                child.resume(printed)
                fault, sentence = await self._outcome(child, code)
                is_alive = fault is None or not fault.is_fatal
            finally:
                if not is_alive:  # also when the caller was cancelled
                    await self._end(child)
            return Execution(printed.text() + sentence, fault, time.monotonic() - began)

    async def close(self) -> None:
        """End the process and remove its folder, even under cancellation. May be called again."""
        self._is_closed = True
        try:
            if self._child is not None:
                await self._end(self._child)
        finally:
            if self._owns_folder:
                self._owns_folder = False
                await _uncancelled(asyncio.get_running_loop().run_in_executor(None, remove, self._folder))

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the sandbox is closed; start another one")

    async def _end(self, child: Child) -> None:
        """End the process. It stays registered until then, so that its folder is not removed earlier."""
        try:
            await child.end()
        finally:
            self._child = None

    async def _launch(self, stdin: str | None) -> Child:
        """Start a new process. The sandbox may be closed while it starts."""
        printed = Printed(self._limits.output_chars)
        with _input(stdin) as given:
            self._child = child = await Child.start(given, printed)
        try:
            self._check_open()
            await child.send(self._request(child.parent, waits_for_threads=stdin is not None))
            in_force = await within(_STARTS_WITHIN_S, child.receive())
            self._isolation = Isolation(**in_force["in_force"])
            if not self._allows_weak:
                self._isolation.check()
            self._check_open()
        except ProcessLost:
            await self._end(child)
            self._check_open()
            raise RuntimeError(f"a sandbox with {self._limits} did not start: {printed.text()}") from None
        except BaseException:
            await self._end(child)
            raise
        child.pause()
        return child

    def _request(self, parent: int, waits_for_threads: bool) -> dict[str, Any]:
        """Settings sent to the process."""
        limits = self._limits
        return {
            "parent": parent,
            "folder": os.fspath(self._folder),
            "readable": readable(),
            "libraries": libraries(),
            "has_apis": self._call is not None,
            "waits_for_threads": waits_for_threads,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mb * _MB,
            "file_bytes": limits.file_mb * _MB,
            "processes": limits.processes,
            "open_files": limits.open_files,
        }

    async def _outcome(self, child: Child, code: str) -> tuple[Fault | None, str]:
        """Run the code and return its fault, with a sentence for the agent if the fault is fatal."""
        watch = asyncio.create_task(self._watch(child))
        try:
            fault = await within(self._limits.wall_s, self._converse(child, code))
            child.pause()
            fault = child.fault or fault
            status = None
        except TimeoutError:
            fault, status = child.fault or Fault.TIMED_OUT, None
        except Malformed:
            fault, status = child.fault or Fault.BROKEN, None
        except ProcessLost:
            status = await child.death()
            fault = child.fault or _fault_of(status)
        finally:
            watch.cancel()
        return fault, _sentence(fault, status, self._limits) if fault is not None and fault.is_fatal else ""

    async def _converse(self, child: Child, code: str) -> Fault | None:
        """Run the code and answer its API calls until the process reports the end.

        Each execution has a new receipt, so that threads left by an earlier one cannot report the end of this one.
        """
        receipt = secrets.token_hex(16)
        await child.send({"code": code, "receipt": receipt})
        while True:
            match await child.receive():
                case {"app": str(app), "api": str(api), "arguments": dict(arguments)} if self._call is not None:
                    await child.send(await _answer(self._call, app, api, arguments))
                case {"receipt": number, "outcome": None} if number == receipt:
                    return None
                case {"receipt": number, "outcome": str(word)} if number == receipt and word in _REPORTED_FAULTS:
                    return Fault(word)
                case _:
                    raise Malformed("a message has an unknown kind or no receipt")

    async def _watch(self, child: Child) -> None:
        """Kill a process that fills the disk."""
        limits, folder = self._limits, self._folder
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            deleted = deleted_files(child.pid, folder, limits.file_mb * _MB)
            if await asyncio.to_thread(is_larger, folder, limits.folder_mb * _MB, deleted):
                child.kill(Fault.DISK)


async def run_once(code: str, stdin: str = "", limits: Limits | None = None, *, allows_weak: bool = False) -> Execution:
    """Run a program in a temporary process; many can run concurrently.

    The process itself reports whether it ended without a fault: judge a program by its output.

    >>> asyncio.run(run_once("print(int(input()) + 1)", "41")).output
    '42\\n'
    """
    async with await Sandbox.start(limits, stdin=stdin, allows_weak=allows_weak) as sandbox:
        return await sandbox.execute(code)


async def _answer(call: Call, app: str, api: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an API call; errors go to the code that made it."""
    try:
        return {"value": await call(app, api, arguments)}
    except Exception as error:
        return {"error": str(error)}


async def _uncancelled(work: asyncio.Future[None]) -> None:
    """Wait for work that must complete; a cancellation is raised afterwards."""
    cancelled = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    work.result()
    if cancelled is not None:
        raise cancelled


def _input(stdin: str | None) -> IO[bytes]:
    """Return a file with the input; a pipe would need a writer that waits for the reader."""
    if stdin is None:
        return Path(os.devnull).open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the caller)
    file.write(stdin.encode(errors="replace"))
    file.seek(0)
    return file


def _fault_of(status: int | None) -> Fault:
    if status is None:
        return Fault.BROKEN
    return Fault.CPU if status == -signal.SIGXCPU else Fault.DIED


def _sentence(fault: Fault, status: int | None, limits: Limits) -> str:
    """Message for the agent about a process that is gone."""
    reasons = {
        Fault.TIMED_OUT: f"the code ran for more than {limits.wall_s:g} s",
        Fault.CPU: f"the code used more than {limits.cpu_s} s of CPU time",
        Fault.FLOODED: f"the code printed more than {FLOOD_BYTES // _MB} MB",
        Fault.DISK: f"the files took more than {limits.folder_mb} MB, were too many, or could not be counted",
        Fault.BROKEN: "the code interfered with the connection of its process",
        Fault.DIED: f"the process {_death(status)}",
    }
    return f"\n[Ended: {reasons[fault]}. Variables and imports are gone; files are kept.]"


def _death(status: int | None) -> str:
    """Describe the exit status.

    >>> _death(3), _death(-11)
    ('exited with status 3', 'died of signal 11 (Segmentation fault)')
    """
    if status is not None and status < 0:
        return f"died of signal {-status} ({signal.strsignal(-status)})"
    return f"exited with status {status}"
