"""Exceptions of user code that would end the process: inside an event loop they become ordinary errors.

asyncio stops the whole loop when a task raises SystemExit or KeyboardInterrupt, whoever awaits that task. Scenarios,
agents, environments and rewards share one loop with the run, so neither may leave a task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class ExitRaised(RuntimeError):
    """User code raised SystemExit, KeyboardInterrupt or another exception that is not an Exception."""


def as_exception(error: BaseException, who: str = "the code") -> Exception:
    """The error as an ordinary exception, which ends neither an event loop nor a process.

    StopIteration and CancelledError are converted as well: a future refuses the first, and the second would look as if
    the awaiting task had been cancelled.

    >>> as_exception(SystemExit(3))
    ExitRaised('the code raised SystemExit(3)')
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | concurrent.futures.CancelledError):
        return error
    converted = ExitRaised(f"{who} raised {type(error).__name__}({error})").with_traceback(error.__traceback__)
    converted.__cause__ = error
    return converted


class Contained(Coroutine[Any, Any, T]):
    """A coroutine that runs as the one it wraps, but raises ExitRaised for what is neither an Exception nor cancelled.

    A wrapper of its own kind rather than an `async def`: throwing into it before its first step reaches the wrapped
    coroutine, which then does not complain that it was never awaited.
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
        return self  # it has all that a generator has

    def __iter__(self) -> Contained[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # its frame, code and name, by which asyncio and debuggers show a task


def contained(work: Awaitable[T]) -> Awaitable[T]:
    """Work to be awaited; a coroutine is wrapped, a future or task is left as it is."""
    return Contained(work) if asyncio.iscoroutine(work) and not isinstance(work, Contained) else work


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call user code that is not asynchronous; whatever it raises is an Exception."""
    try:
        return function(*arguments)
    except Exception:
        raise
    except BaseException as error:
        if is_from_signal(error):
            raise
        raise as_exception(error) from error


async def called(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Call user code and await what it gives; whatever it raises, in the call or later, is an Exception.

    >>> async def leave(code):
    ...     raise SystemExit(code)
    >>> asyncio.run(called(leave, 2))
    Traceback (most recent call last):
        ...
    roost.runtime.contained.ExitRaised: the code raised SystemExit(2)
    """

    async def work() -> T:
        return await function(*arguments)

    return await Contained(work())


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on no new task of the loop ends it, not even one that user code starts itself."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_contained_task)


def _contained_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(contained(work), loop=loop, **options)  # type: ignore[arg-type]


def is_from_signal(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt may come from Ctrl-C rather than from the code that raised it.

    Signals are handled in the main thread, and only these two handlers raise: Python's own, and that of `asyncio.run`.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    of_runner = isinstance(handler, functools.partial) and isinstance(
        getattr(handler.func, "__self__", None), asyncio.Runner
    )
    return handler is signal.default_int_handler or of_runner
