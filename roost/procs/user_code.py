"""Run user code: contain what it raises, bound its time, keep its threads from blocking exit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ExitRaised(RuntimeError):
    """User code raised SystemExit, KeyboardInterrupt or another exception that is not an Exception."""


def as_exception(error: BaseException, who: str = "the code") -> Exception:
    """Convert an error to an ordinary Exception, which ends neither an event loop nor a process.

    StopIteration and CancelledError are converted as well: a future refuses the first, and the second would look like a
    cancellation of the awaiting task.

    >>> as_exception(SystemExit(3))
    ExitRaised('the code raised SystemExit(3)')
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | concurrent.futures.CancelledError):
        return error
    converted = ExitRaised(f"{who} raised {type(error).__name__}({error})").with_traceback(error.__traceback__)
    converted.__cause__ = error
    return converted


class Contained(Coroutine[Any, Any, T]):
    """Wraps a coroutine and raises ExitRaised for anything that is neither an Exception nor a cancellation.

    A class, not an `async def`, so that an exception thrown into it before its first step reaches the wrapped
    coroutine, which would otherwise warn that it was never awaited.
    """

    __slots__ = ("__weakref__", "inner")

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self.inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self.inner.send(value)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            if is_from_signal(error):
                raise
            raise as_exception(error) from error

    def throw(self, *thrown: Any) -> Any:
        try:
            return self.inner.throw(*thrown)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            if error is thrown[0] or is_from_signal(error):
                raise
            raise as_exception(error) from error

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # it implements the generator protocol

    def __iter__(self) -> Contained[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # frame, code and name, which asyncio and debuggers show


def contained(work: Awaitable[T]) -> Awaitable[T]:
    """Wrap a coroutine in `Contained`; return a future or task unchanged."""
    return Contained(work) if asyncio.iscoroutine(work) and not isinstance(work, Contained) else work


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call synchronous user code; anything it raises becomes an Exception."""
    try:
        return function(*arguments)
    except Exception:
        raise
    except BaseException as error:
        if is_from_signal(error):
            raise
        raise as_exception(error) from error


async def call_async(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Call async user code and await it; anything it raises, in the call or later, becomes an Exception.

    >>> async def leave(code):
    ...     raise SystemExit(code)
    >>> asyncio.run(call_async(leave, 2))
    Traceback (most recent call last):
        ...
    roost.procs.user_code.ExitRaised: the code raised SystemExit(2)
    """

    async def work() -> T:
        return await function(*arguments)

    return await Contained(work())


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Prevent new tasks of the loop, including those of user code, from ending it."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_contained_task)


def _contained_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(contained(work), loop=loop, **options)  # type: ignore[arg-type]


def is_from_signal(error: BaseException) -> bool:
    """Return True if a KeyboardInterrupt may come from Ctrl-C rather than from the code that raised it.

    Signals are handled in the main thread, and only these two handlers raise: Python's own, and that of `asyncio.run`.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    is_runner = isinstance(handler, functools.partial) and isinstance(
        getattr(handler.func, "__self__", None), asyncio.Runner
    )
    return handler is signal.default_int_handler or is_runner


GRACE_S = 10.0  # for cancelled work to clean up


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """Await work with a time limit. Work that still runs after cancellation and the grace period is abandoned.

    Anything it raises becomes an Exception, including `sys.exit()`.

    >>> asyncio.run(within(1.0, asyncio.sleep(0, "done")))
    'done'
    """
    task = asyncio.ensure_future(contained(work))
    task.add_done_callback(retrieve_error)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=GRACE_S)
    if not done:
        raise TimeoutError(f"timed out after {limit_s:g} s")
    if task.cancelled():
        raise RuntimeError("the work cancelled itself")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise as_exception(error)
    return task.result()


def retrieve_error(task: asyncio.Future[T]) -> None:
    """Retrieve a late error, so that the event loop does not log it."""
    if not task.cancelled():
        task.exception()


def in_daemon_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Run a call in its own daemon thread; return a future. It runs even if no one waits for the result.

    >>> in_daemon_thread("adder", lambda: 1 + 1).result()
    2
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(name, call, outcome), name=name, daemon=True).start()
    return outcome


class DaemonThread:
    """Runs calls in order in one daemon thread, which, unlike an executor's, is not joined at exit.

    >>> thread = DaemonThread("adder")
    >>> thread.submit(sum, [1, 2]).result()
    3
    >>> thread.shutdown()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # started with the first call
        self._is_over = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue a call and return its future; a call cancelled before its start is skipped."""
        outcome: Future[T] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError(f"the thread of the {self._name} was shut down; submit calls before that")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.put(partial(self._make, partial(call, *arguments), outcome))
        return outcome

    def shutdown(self) -> None:
        """Accept no more calls; the thread ends after the queued ones, without being joined."""
        with self._lock:
            self._is_over = True
            self._calls.put(None)

    def _run(self) -> None:
        for make in iter(self._calls.get, None):
            make()
            del make  # free what it refers to before waiting for the next

    def _make(self, call: Callable[[], T], outcome: Future[T]) -> None:
        if outcome.set_running_or_notify_cancel():
            _settle(self._name, call, outcome)


def _settle(name: str, call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(as_exception(error, f"the {name}"))
