"""Watch an event loop from a thread, and report code that blocks it."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

LIMIT_S = 10.0  # that the loop may be blocked
EVERY_S = 0.5
ROOST = str(Path(__file__).parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
ADVICE = "await instead of blocking, or run it in a thread with asyncio.to_thread"


class LoopWatch:
    """Reports when a loop has not run for `limit_s` seconds, which code blocks it, and when it runs again.

    The wait until the next report grows threefold each time. `start` is called in the loop.
    """

    def __init__(self, report: Callable[[str], None], limit_s: float | None = None, every_s: float = EVERY_S) -> None:
        self._report, self._limit_s, self._every_s = report, LIMIT_S if limit_s is None else limit_s, every_s
        self._is_over = threading.Event()
        self._ran_at = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mark()
        watched = threading.get_ident()
        threading.Thread(target=self._watch, args=(watched,), name="roost-loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Call it in the loop."""
        self._is_over.set()
        if self._beat is not None:
            self._beat.cancel()

    def _mark(self) -> None:
        self._ran_at = time.monotonic()
        self._beat = self._loop.call_later(self._every_s, self._mark)

    def _watch(self, watched: int) -> None:
        next_limit, blocked_since = self._limit_s, 0.0
        looked_at = time.monotonic()
        while not self._is_over.wait(self._every_s):
            now, ran_at = time.monotonic(), self._ran_at
            # If the machine sleeps or is overloaded, this thread is delayed as well, and no code is to blame.
            was_delayed, looked_at = now - looked_at > self._every_s + self._limit_s / 2, now
            if blocked_since and ran_at > blocked_since:
                self._report(f"the event loop runs again after {ran_at - blocked_since:.0f} s")
                next_limit, blocked_since = self._limit_s, 0.0
            if now - ran_at < next_limit or was_delayed:
                continue
            frame = sys._current_frames().get(watched)
            if frame is None:
                return  # the thread of the loop is gone
            if is_idle(frame):
                continue  # the loop waits for events; the machine is too busy to run it
            blocked_since, next_limit = ran_at, 3 * next_limit
            self._report(f"the event loop has not run for {now - ran_at:.0f} s: {blocking(frame)} blocks it; {ADVICE}")


def is_idle(frame: FrameType) -> bool:
    """Return True if the loop is not running a callback or task."""
    stack = _stack(frame)
    return not any(_is_handle(one) or one.f_code.co_flags & inspect.CO_COROUTINE for one in stack)


def blocking(frame: FrameType) -> str:
    """Function, file and line of the blocking code: the user's own, if there is any, before libraries and Roost."""
    stack = _stack(frame)
    own = _outside(stack, (*LIBRARIES, ROOST))
    coroutines = [one for one in stack if one.f_code.co_flags & inspect.CO_COROUTINE]
    chosen = next(iter([*own, *_outside(coroutines, (ROOST,)), *coroutines, *stack]))
    waits = "" if chosen is stack[0] else f", in {stack[0].f_code.co_name}"
    return f"{chosen.f_code.co_qualname} ({chosen.f_code.co_filename}:{chosen.f_lineno}{waits})"


def _stack(frame: FrameType) -> list[FrameType]:
    """The frame and its callers, innermost first."""
    stack: list[FrameType] = []
    current: FrameType | None = frame
    while current is not None:
        stack.append(current)
        current = current.f_back
    return stack


def _is_handle(frame: FrameType) -> bool:
    """Return True for asyncio's frame in which the loop runs a callback."""
    return frame.f_code.co_filename.endswith(f"asyncio{os.sep}events.py") and frame.f_code.co_name == "_run"


def _outside(stack: Sequence[FrameType], folders: Sequence[str]) -> list[FrameType]:
    """Frames whose code is in none of the folders, without callers of the event loop."""
    found = []
    for one in stack:
        name = one.f_code.co_filename
        if _is_handle(one):
            break  # the remaining frames are callers of the loop
        if not name.startswith(tuple(f"{folder}/" for folder in folders)) and not name.startswith("<frozen"):
            found.append(one)
    return found
