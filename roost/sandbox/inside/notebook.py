"""Run pieces of code one after another in one module, like cells of a notebook."""

from __future__ import annotations

import builtins
import contextlib
import linecache
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

_HERE = os.path.dirname(__file__)  # noqa: PTH120 (pathlib takes long to import)


class Notebook:
    """A `__main__` module that code runs in. Definitions stay for the next piece."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._module = ModuleType("__main__")
        self._module.__dict__.update(names)
        sys.modules["__main__"] = self._module
        for name in ("exit", "quit"):
            setattr(builtins, name, _exit)

    def run(self, code: str, number: int, waits_for_threads: bool) -> str | None:
        """Run a piece of code and return its fault, if any. Tracebacks are printed as by the interpreter."""
        name = f"<execution {number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            try:
                exec(compile(code, name, "exec"), self._module.__dict__)
                if waits_for_threads:
                    _join_threads()
            finally:
                sys.settrace(None)
                sys.setprofile(None)
        except SystemExit:
            outcome: str | None = "exited"
        except MemoryError as error:
            _show(error)
            outcome = "memory"
        except BaseException as error:
            _show(error)
            outcome = "raised"
        else:
            outcome = None
        _flush()
        return outcome


def _show(error: BaseException) -> None:
    """Print the traceback without the frames of this package."""
    _flush()
    traceback.clear_frames(error.__traceback__)  # their variables may fill the memory
    shown = traceback.TracebackException(type(error), error, error.__traceback__)
    pending, seen = [shown], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        part.stack = traceback.StackSummary.from_list(
            [frame for frame in part.stack if not frame.filename.startswith(_HERE)]
        )
        pending += [linked for linked in (part.__cause__, part.__context__) if linked is not None]
    with contextlib.suppress(OSError):  # the code may have closed it
        os.write(2, "".join(shown.format()).encode(errors="backslashreplace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # the code closed or replaced it


def _join_threads() -> None:
    """Join threads, as an interpreter does at exit."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _exit(code: object = None) -> NoReturn:
    raise SystemExit(code)
