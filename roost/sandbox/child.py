"""Start sandboxed processes: fresh interpreters, or forks of a template process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from roost.sandbox.execution import Fault, Printed
from roost.sandbox.inside.frames import LARGEST, LENGTH, packed
from roost.sandbox.inside.template import FORK, LONGEST, NONE, STATUS

_PACKAGES_FROM = str(Path(__file__).parents[2])
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "MALLOC_ARENA_MAX": "2"} | dict.fromkeys(_ONE_THREAD, "1")


def start_interpreter(
    program: str, arguments: Sequence[int], stdin: IO[bytes] | int, output: IO[bytes] | int, connection: socket.socket
) -> subprocess.Popen[bytes]:
    """Run a program of this package, with `sys.argv[2:]` as arguments and the connection among its descriptors."""
    begin = f"import sys; sys.path.insert(0, sys.argv[1]); {program}"
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", begin, _PACKAGES_FROM, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=output,
        cwd="/",
        env=_ENVIRONMENT,
        pass_fds=[connection.fileno()],
        start_new_session=True,
    )


_ANSWERS_WITHIN_S = 30.0  # a template does little else
# One template per thread: when a thread ends, the kernel kills the processes that it started, so sandboxes end too.
_THREAD_LOCAL = threading.local()


class TemplateLost(Exception):
    """The template no longer answers."""


class Template:
    """A process that forks sandboxes. They end with it."""

    def __init__(self) -> None:
        self._control, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            program = "from roost.sandbox.inside.template import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
            arguments = (its_end.fileno(), os.getpid())
            process = start_interpreter(program, arguments, subprocess.DEVNULL, subprocess.DEVNULL, its_end)
        self._control.settimeout(_ANSWERS_WITHIN_S)
        self.pid, self.owner = process.pid, os.getpid()
        self._end = weakref.finalize(self, _stop_template, process, self._control, self.owner)

    def fork(self, stdin: IO[bytes] | int, output: IO[bytes], connection: socket.socket) -> Forked:
        """Fork a new sandbox."""
        given = stdin if isinstance(stdin, int) else stdin.fileno()
        reply = self._answer(FORK, [given, output.fileno(), connection.fileno()])
        if reply == NONE:
            raise BlockingIOError(errno.EAGAIN, "cannot fork: the process limit is reached")
        pid = int(reply)
        try:
            return Forked(self, pid, os.pidfd_open(pid))
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            while self.status_of(pid) is None:
                time.sleep(0.001)
            raise

    def status_of(self, pid: int) -> int | None:
        """Exit status of a fork, as in `subprocess`; None while it runs."""
        try:
            reply = self._answer(STATUS + str(pid).encode())
        except TemplateLost:
            return -signal.SIGKILL  # the kernel kills a dead template's forks
        return None if reply == NONE else int(reply)

    def _answer(self, request: bytes, descriptors: Sequence[int] = ()) -> str:
        try:
            socket.send_fds(self._control, [request], descriptors)
            reply = self._control.recv(LONGEST)
            if not reply:
                raise ConnectionResetError("the template exited")
        except BaseException as error:  # a late answer must not be read as the answer to the next request
            self._end()
            if isinstance(error, OSError):
                raise TemplateLost from error
            raise
        return reply.decode()


class Forked:
    """A process forked by a template, with the interface of `subprocess.Popen`."""

    def __init__(self, template: Template, pid: int, handle: int) -> None:
        self._template, self.pid, self._handle = template, pid, handle
        self.returncode: int | None = None

    @property
    def parent(self) -> int:
        return self._template.pid

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Exit status; None while it runs."""
        if self.returncode is None and _has_exited(self._handle, 0):
            self.returncode = self._template.status_of(self.pid)
            if self.returncode is not None:
                os.close(self._handle)
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            _has_exited(self._handle, 1_000)


def forked(stdin: IO[bytes] | int, output: IO[bytes], connection: socket.socket) -> Forked | None:
    """Fork this thread's template, starting it if needed; None if the platform cannot fork."""
    if not _has_pidfds():
        return None
    template: Template | None = getattr(_THREAD_LOCAL, "template", None)
    if template is not None and template.owner == os.getpid():  # a fork of this process needs its own template
        with contextlib.suppress(TemplateLost):
            return template.fork(stdin, output, connection)
    _THREAD_LOCAL.template = template = Template()
    with contextlib.suppress(TemplateLost):
        return template.fork(stdin, output, connection)
    return None


def _has_pidfds() -> bool:
    """Return True if pidfds are available: forks of the template are not children of this process."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM)
    return True


def _has_exited(handle: int, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def _stop_template(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    """Stop a template with all its sandboxes."""
    control.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


FLOOD_BYTES = 32 << 20  # the process is killed beyond this much output
_DIES_WITHIN_S = 1.0

Process = Forked | subprocess.Popen[bytes]


class ProcessLost(Exception):
    """The process closed its end of the connection, most likely by dying."""


class Malformed(Exception):
    """The process sent an invalid message."""


class Child:
    """A sandboxed process. Its messages are not trusted, and its output is bounded."""

    def __init__(self, process: Process, output: int, printed: Printed) -> None:
        self._process, self._output, self._printed = process, output, printed
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.fault: Fault | None = None  # why its owner killed it

    @classmethod
    async def start(cls, stdin: IO[bytes] | int, printed: Printed) -> Child:
        """Start a process; it waits for its confinement settings."""
        outer, inner = socket.socketpair()
        output, its_output = os.pipe()
        with inner, open(its_output, "wb") as its_end:  # noqa: PTH123 (a descriptor)
            try:
                process = forked(stdin, its_end, inner) or _interpreter(stdin, its_end, inner)
            except BaseException:
                outer.close()
                os.close(output)
                raise
        os.set_blocking(output, False)
        child = cls(process, output, printed)
        try:
            child._reader, child._writer = await asyncio.open_unix_connection(sock=outer)
        except BaseException:  # cancelled, most likely
            process.kill()
            process.wait()
            outer.close()
            os.close(output)
            raise
        asyncio.get_running_loop().add_reader(output, child._read)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def parent(self) -> int:
        """PID of the process whose end ends this one."""
        return self._process.parent if isinstance(self._process, Forked) else os.getpid()

    async def send(self, message: Any) -> None:
        """Send a message; blocks while the process does not read."""
        self._writer.write(packed(message))
        with contextlib.suppress(ConnectionError):  # the next `receive` reports it
            await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next message: JSON of bounded size, not validated further."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > LARGEST:
                raise Malformed(f"a message of {length} bytes is too large; the limit is {LARGEST}")
            return json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ProcessLost from error
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a message is not JSON: {error}") from error

    def resume(self, printed: Printed) -> None:
        """Resume the process; its output goes to `printed` from now on."""
        self._printed = printed
        self._process.send_signal(signal.SIGCONT)

    def pause(self) -> None:
        """Stop the process with all its threads, and read its pending output."""
        self._process.send_signal(signal.SIGSTOP)
        while self.fault is None and self._read():
            pass

    def kill(self, fault: Fault) -> None:
        """Kill the process; the first fault counts."""
        self.fault = self.fault or fault
        self._process.kill()

    async def death(self) -> int | None:
        """Exit status of a process that seems to be dying; None if it does not exit."""
        patience = _DIES_WITHIN_S
        while self._process.poll() is None and patience > 0:
            await asyncio.sleep(0.005)
            patience -= 0.005
        return self._process.returncode

    async def end(self) -> None:
        """Kill the process and release its resources. A cancellation is raised afterwards."""
        self._process.kill()
        while self._read():
            pass
        self._stop_reading()
        self._writer.close()
        pause_s, cancelled = 0.0005, None
        while self._process.poll() is None:
            try:
                await asyncio.sleep(pause_s)
            except asyncio.CancelledError as error:
                cancelled = error
            pause_s = min(pause_s * 2, 0.05)
        if cancelled is not None:
            raise cancelled

    def _read(self) -> bool:
        """Read a chunk of output; return False if there was none."""
        if self._output < 0:
            return False
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        self._printed.add(data)
        if not data or self._printed.size > FLOOD_BYTES:
            self._stop_reading()
            if data:
                self.kill(Fault.FLOODED)
        return bool(data)

    def _stop_reading(self) -> None:
        if self._output >= 0:
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            self._output = -1


def _interpreter(stdin: IO[bytes] | int, output: IO[bytes], connection: socket.socket) -> subprocess.Popen[bytes]:
    program = "from roost.sandbox.inside.main import main; main(int(sys.argv[2]))"
    return start_interpreter(program, [connection.fileno()], stdin, output, connection)
