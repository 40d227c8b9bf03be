"""Handling of SIGTERM, SIGUSR1 and Ctrl-C during a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

REQUEUE_CODE = 75  # exit code of a run that was preempted and saved (EX_TEMPFAIL): start the same command again
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)  # sent by a scheduler that preempts the job and requeues it
SAME_SIGNAL_S = 2.0  # signals within this time of the first count as one with it
RESEND_S = 0.05  # enough for a finalizer to end


class SigtermInterrupts:
    """Context in which the first SIGTERM or SIGUSR1 raises KeyboardInterrupt, as Ctrl-C does.

    The next SIGTERM ends the process at once, the next SIGUSR1 does nothing.
    KeyboardInterrupt, not a class of Roost's, because Ray raises a new KeyboardInterrupt if one interrupts a wait.
    Python drops an interrupt that arrives in a finalizer (`__del__`), so the signal is then sent again.
    """

    def __init__(self) -> None:
        self._came_at: float | None = None
        self.came: signal.Signals | None = None  # the first signal that was received
        self._was_dropped = False

    def __enter__(self) -> SigtermInterrupts:
        self._before = {number: signal.signal(number, self._interrupt) for number in PREEMPTING}
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._send_again
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook_before
        if self.came is None:  # else keep them: `timeout` may send a second signal while Python exits
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is None or self._was_dropped:
            self._came_at, self._was_dropped = self._came_at or now, False
            self.came = self.came or signal.Signals(number)
            raise KeyboardInterrupt
        if number != signal.SIGUSR1 and now - self._came_at >= SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _send_again(self, dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            self._hook_before(dropped)
            return
        self._was_dropped = True
        number, main = self.came or signal.SIGINT, threading.main_thread().ident
        if main is not None:
            # Later and from another thread, because the finalizer is still running in this one.
            timer = threading.Timer(RESEND_S, signal.pthread_kill, (main, number))
            timer.daemon = True
            timer.start()


@contextlib.contextmanager
def preserve_sigterm() -> Iterator[None]:
    """Context in which `ray.init` keeps this program's SIGTERM handler, if it has one.

    Ray would replace it in Python, and again in its native core with a handler that prints a crash report, and would
    reset it to the default in `ray.shutdown`. Crashes are still reported, by Python's faulthandler.
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
    """Call `stop` with the first SIGTERM, SIGUSR1 or SIGINT; the next SIGTERM or SIGINT ends the process at once.

    `timeout` signals the process and then its group, so signals that follow the first at once count as one with it. A
    scheduler that sent SIGUSR1 may send it again, and SIGTERM later; neither ends the process. If no signal came, the
    previous handlers are restored.
    """
    import asyncio  # not above: every command of `roost` imports this file

    loop, wanted = asyncio.get_running_loop(), (*PREEMPTING, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in wanted}
    came: list[signal.Signals] = []

    def release() -> None:
        kept = (signal.SIGUSR1, *(PREEMPTING if came[:1] == [signal.SIGUSR1] else ()))
        for number in wanted:
            if number not in kept:
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
        for number in wanted:
            loop.remove_signal_handler(number)
        if came:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a late one must not end the process
        else:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)


class Preempted(Exception):
    """Work was dropped because the job is preempted; it is done again after a resume."""


class Stoppable:
    """A run that a signal stops: after the current step, or at once while it is starting.

    A preempting signal also drops work that changes no weights, such as a rollout, because time is short.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.stopped_by: signal.Signals | None = None
        self.is_starting = True
        self.ended_start: signal.Signals | None = None  # the signal that came during startup
        self._note = note
        self._droppable: asyncio.Task[Any] | None = None

    @property
    def was_stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def _is_preempted(self) -> bool:
        return self.stopped_by in PREEMPTING

    def stop(self, task: asyncio.Task[Any] | None, number: signal.Signals) -> None:
        self.stopped_by = number
        if self.is_starting and task is not None:
            self.ended_start = number
            self._note("stopping during startup")
            task.cancel()
        elif self._is_preempted:
            self._note(f"{number.name}: saving a checkpoint after the current optimizer step, then exiting")
            if self._droppable is not None:
                self._droppable.cancel()
        else:
            self._note("stopping after this step; press Ctrl-C again to end at once")

    async def unless_preempted(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of work that may be dropped and done again later; raise Preempted if a preempting signal comes."""
        import asyncio

        self._droppable = asyncio.create_task(work)
        if self._is_preempted:
            self._droppable.cancel()
        try:
            result: T = await self._droppable
            return result
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._is_preempted or (current is not None and current.cancelling()):
                raise  # the whole task is cancelled, not just this work
            raise Preempted from None
        finally:
            self._droppable = None
