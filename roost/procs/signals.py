"""Handling of SIGTERM and Ctrl-C during a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

REQUEUE_CODE = 75  # exit code of a run that was preempted and saved (EX_TEMPFAIL): start the same command again
SAME_SIGNAL_S = 2.0  # signals that follow the first in this time belong to it
AGAIN_S = 0.05  # enough for a finalizer to end


class SigtermInterrupts:
    """While this holds, the first SIGTERM raises KeyboardInterrupt, as Ctrl-C does; the next ends the process at once.

    An exception of its own would not arrive everywhere: Ray raises a new KeyboardInterrupt for one that ends a wait.
    Python drops an interrupt that arrives in a finalizer (`__del__`); it is sent again.
    """

    def __init__(self) -> None:
        self._came_at: float | None = None
        self._was_dropped = False

    @property
    def came(self) -> bool:
        """True if a SIGTERM was received."""
        return self._came_at is not None

    def __enter__(self) -> SigtermInterrupts:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._send_again
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook_before
        if not self.came:  # else a second signal of `timeout` may follow while Python ends
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is None or self._was_dropped:
            self._came_at, self._was_dropped = self._came_at or now, False
            raise KeyboardInterrupt
        if now - self._came_at >= SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _send_again(self, dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            self._hook_before(dropped)
            return
        self._was_dropped = True
        number, main = signal.SIGTERM if self.came else signal.SIGINT, threading.main_thread().ident
        if main is not None:
            # Later and from another thread: the finalizer that dropped it is still running here.
            timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, number))
            timer.daemon = True
            timer.start()


@contextlib.contextmanager
def preserve_sigterm() -> Iterator[None]:
    """`ray.init` inside leaves this program's SIGTERM handler, if it has one, in place.

    Ray would replace it in Python and once more in its native core, whose handler prints a crash report instead, and
    would reset the signal to its default when Ray is left. Crashes are still reported, by Python's faulthandler.
    """
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        yield
        return
    from ray._private import ray_constants, utils

    constants: Any = ray_constants
    replaced: Any = utils
    is_off, setter = constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, replaced.set_sigterm_handler
    constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, replaced.set_sigterm_handler = True, lambda _: None
    try:
        yield
    finally:
        constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, replaced.set_sigterm_handler = is_off, setter


@contextlib.contextmanager
def first_signal(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `stop` with the first SIGTERM or SIGINT; the next, whichever of the two it is, ends the process at once.

    `timeout` signals the process and then its group, which makes two at once: these count as one. If none came, the
    handlers from before are put back.
    """
    import asyncio  # not above: every command of `roost` imports this file

    loop, wanted = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in wanted}
    came: list[signal.Signals] = []

    def release() -> None:
        for number in wanted:
            loop.remove_signal_handler(number)

    def take(number: signal.Signals) -> None:
        came.append(number)
        if len(came) == 1:
            stop(number)
            loop.call_later(SAME_SIGNAL_S, release)

    for number in wanted:
        loop.add_signal_handler(number, take, number)
    try:
        yield
    finally:
        release()
        if not came:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)


class Stoppable:
    """Work that a signal stops: after the current step, or at once while it is starting."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.was_stopped = False
        self.is_starting = True
        self.ended_start: signal.Signals | None = None  # the signal that came during startup
        self._note = note

    def stop(self, task: asyncio.Task[Any] | None, number: signal.Signals) -> None:
        self.was_stopped = True
        if self.is_starting and task is not None:
            self.ended_start = number
            self._note("stopping: ending what was started")
            task.cancel()
        else:
            self._note("stopping after this step; once more to end at once")
