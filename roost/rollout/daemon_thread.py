"""Code of others that blocks, in threads that keep no process from ending: a call that hangs is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from roost.runtime.contained import as_exception

T = TypeVar("T")


def begun(name: str, call: Callable[[], T]) -> Future[T]:
    """The outcome of a call that has a thread for itself. It is made also where nobody waits for it any more.

    >>> begun("adder", lambda: 1 + 1).result()
    2
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(name, call, outcome), name=name, daemon=True).start()
    return outcome


class DaemonThread:
    """Makes calls one after another, all in one thread. An executor's would be joined when the process ends.

    >>> thread = DaemonThread("adder")
    >>> thread.submit(sum, [1, 2]).result()
    3
    >>> thread.shutdown()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # until there is something to do
        self._is_over = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """The outcome of a call, which is made after all before it; one that is cancelled before that is not made."""
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
        """Nothing is submitted any more; the thread ends after what was, and is not waited for."""
        with self._lock:
            self._is_over = True
            self._calls.put(None)

    def _run(self) -> None:
        for make in iter(self._calls.get, None):
            make()
            del make  # and what it holds, before the next is waited for

    def _make(self, call: Callable[[], T], outcome: Future[T]) -> None:
        if outcome.set_running_or_notify_cancel():
            _settle(self._name, call, outcome)


def _settle(name: str, call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(as_exception(error, f"the {name}"))
