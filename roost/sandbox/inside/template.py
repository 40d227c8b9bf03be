"""The template of sandboxes: a process that has imported common modules, and is forked for each sandbox.

It only passes on descriptors and knows nothing else about its sandboxes. So the memory that they inherit holds modules,
and no data of other sandboxes or of the trainer.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from io import TextIOWrapper
from typing import NoReturn, cast

from roost.sandbox.inside.kernel import PR_SET_PDEATHSIG, Kernel
from roost.sandbox.inside.main import main

FORK, STATUS, NONE = b"fork", b"status ", "-"
LONGEST = 64  # bytes of a request or answer
DESCRIPTORS = 3  # of a sandbox: its input, its output, its connection
_CONNECTION = 3  # descriptor of the connection in a sandbox, after stdin, stdout and stderr
_HIGHEST_DESCRIPTOR = 1 << 20
_IMPORTED = (
    "bisect",
    "collections.abc",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "linecache",
    "math",
    "operator",
    "random",  # reseeds itself after a fork
    "re",
    "statistics",
    "string",
    "textwrap",
    "threading",
    "time",
    "typing",
    "unittest",
)


def serve(descriptor: int, owner: int) -> None:
    """Fork on request, and report exit statuses, until the owner is gone."""
    Kernel().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        return  # the owner died before this process was set to die with it
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the forks would copy the pages of these objects
    control = socket.socket(fileno=descriptor)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, LONGEST, DESCRIPTORS)
        if not request:
            return
        is_fork = request == FORK
        answer = _forked(control, descriptors) if is_fork else _status(int(request.removeprefix(STATUS)))
        control.send(answer.encode())


def _forked(control: socket.socket, descriptors: list[int]) -> str:
    """Fork a sandbox and return its PID; NONE if the machine cannot fork, which must not end the other sandboxes."""
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid == 0:
        control.detach()  # its descriptor is reused below
        _run_sandbox(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return str(pid) if pid > 0 else NONE


def _status(pid: int) -> str:
    """Exit status of a fork, reported once; NONE while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return str(os.waitstatus_to_exitcode(status)) if ended else NONE


def _run_sandbox(given: int, output: int, connection: int) -> NoReturn:
    leave = os._exit  # kept here, because the code can replace `os._exit`
    try:
        os.setsid()
        for descriptor, number in ((given, 0), (output, 1), (output, 2), (connection, _CONNECTION)):
            os.dup2(descriptor, number)
        os.closerange(_CONNECTION + 1, _HIGHEST_DESCRIPTOR)
        _open_streams()
        main(_CONNECTION)
    except BaseException:
        traceback.print_exc()
    finally:  # never return into the template's loop
        leave(1)


def _open_streams() -> None:
    """Open the standard streams as an interpreter does at start; the template's streams refer to other files."""
    sys.stdin = sys.__stdin__ = _stream(0, "r", "surrogateescape", None)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape", "\n")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace", "\n")  # type: ignore[misc]
    sys.stderr.reconfigure(line_buffering=True)


def _stream(descriptor: int, mode: str, errors: str, newline: str | None) -> TextIOWrapper:
    opened = open(descriptor, mode, encoding="utf-8", errors=errors, newline=newline, closefd=False)  # noqa: SIM115
    return cast(TextIOWrapper, opened)
