"""The template of sandboxes as their owner sees it: started when it is first needed, asked for forks, ended."""

from __future__ import annotations

import contextlib
import errno
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
from typing import IO

from roost.sandbox.inside.template import FORK, LONGEST, NONE, STATUS
from roost.sandbox.interpreter import start_interpreter

_ANSWERS_WITHIN_S = 30.0  # it has next to nothing to do
# Of each thread its own: the kernel ends what a thread started when the thread ends, so sandboxes go with their owner.
_OF_THREAD = threading.local()


class TemplateGone(Exception):
    """The template does not answer any more."""


class Template:
    """A process that forks sandboxes. When it is gone they are, too."""

    def __init__(self) -> None:
        self._control, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            program = "from roost.sandbox.inside.template import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
            arguments = (its_end.fileno(), os.getpid())
            process = start_interpreter(program, arguments, subprocess.DEVNULL, subprocess.DEVNULL, its_end)
        self._control.settimeout(_ANSWERS_WITHIN_S)
        self.pid, self.owner = process.pid, os.getpid()
        self._end = weakref.finalize(self, _ended, process, self._control, self.owner)

    def fork(self, stdin: IO[bytes] | int, output: IO[bytes], connection: socket.socket) -> Forked:
        """A new sandbox."""
        given = stdin if isinstance(stdin, int) else stdin.fileno()
        told = self._answer(FORK, [given, output.fileno(), connection.fileno()])
        if told == NONE:
            raise BlockingIOError(errno.EAGAIN, "no process could be forked: the machine allows no more")
        pid = int(told)
        try:
            return Forked(self, pid, os.pidfd_open(pid))
        except OSError:  # there are too many open files
            os.kill(pid, signal.SIGKILL)
            while self.status_of(pid) is None:
                time.sleep(0.001)
            raise

    def status_of(self, pid: int) -> int | None:
        """How one of its forks ended, as `subprocess` numbers it; None where it has not."""
        try:
            told = self._answer(STATUS + str(pid).encode())
        except TemplateGone:
            return -signal.SIGKILL  # as the kernel does to what the template leaves behind
        return None if told == NONE else int(told)

    def _answer(self, request: bytes, descriptors: Sequence[int] = ()) -> str:
        try:
            socket.send_fds(self._control, [request], descriptors)
            told = self._control.recv(LONGEST)
            if not told:
                raise ConnectionResetError("it ended")
        except BaseException as error:  # an answer that comes late must not be taken for that to the next request
            self._end()
            if isinstance(error, OSError):
                raise TemplateGone from error
            raise
        return told.decode()


class Forked:
    """A process that a template forked, with what `subprocess.Popen` has for its own."""

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
        """How it ended; None where it has not."""
        if self.returncode is None and _is_over(self._handle, 0):
            self.returncode = self._template.status_of(self.pid)
            if self.returncode is not None:
                os.close(self._handle)
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            _is_over(self._handle, 1_000)


def forked(stdin: IO[bytes] | int, output: IO[bytes], connection: socket.socket) -> Forked | None:
    """A fork of this thread's template, which is started if it is not there; None where processes cannot be forked."""
    if not _can_be_held():
        return None
    template: Template | None = getattr(_OF_THREAD, "template", None)
    if template is not None and template.owner == os.getpid():  # a fork of this process has its own
        with contextlib.suppress(TemplateGone):
            return template.fork(stdin, output, connection)
    _OF_THREAD.template = template = Template()
    with contextlib.suppress(TemplateGone):
        return template.fork(stdin, output, connection)
    return None


def _can_be_held() -> bool:
    """Whether there are handles of processes that are not this one's own."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM)
    return True


def _is_over(handle: int, timeout_ms: int) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(timeout_ms))


def _ended(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    """End a template with all its sandboxes."""
    control.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
