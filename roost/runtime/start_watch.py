"""Workers that never come to life: their node's agent does not know them, so the driver watches over their start."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from roost.runtime.address import Address
from roost.runtime.ray_errors import lines_of

LOOK_EVERY = 1.0  # seconds
START_LIMIT = 300.0  # seconds for the next process to start and make its worker

Lost = Callable[[Address, str], None]


class Starting:
    """Who is still to come, and since when nobody has.

    A machine starts so many processes at a time, so that the last of many comes late without anything being wrong with
    it. As long as some come, the others are waited for; the time runs from when the last one came.

    >>> starting = Starting()
    >>> starting.add({"a": Address("agent", 0), "b": Address("agent", 1)}, now=0.0)
    >>> starting.come("a", now=299.0).rank, starting.overdue(now=400.0)
    (0, [])
    >>> [who.rank for who in starting.overdue(now=600.0)]
    [1]
    """

    def __init__(self, limit_s: float = START_LIMIT) -> None:
        self.limit_s = limit_s
        self._who: dict[Any, tuple[Address, float]] = {}
        self._last_came_at = -math.inf

    @property
    def calls(self) -> list[Any]:
        """Those that have not been answered."""
        return list(self._who)

    def add(self, who: Mapping[Any, Address], now: float) -> None:
        """Wait for these, by the calls that they will answer."""
        self._who.update({call: (address, now) for call, address in who.items()})

    def forget(self, group: str) -> None:
        self._who = {call: entry for call, entry in self._who.items() if entry[0].group != group}

    def end(self, call: Any) -> Address | None:
        """Whose call it is; it is not waited for any more. None if it was not."""
        return self._who.pop(call, (None, 0.0))[0]

    def come(self, call: Any, now: float) -> Address | None:
        """The same of one that has come."""
        self._last_came_at = max(self._last_came_at, now)
        return self.end(call)

    def overdue(self, now: float) -> list[Address]:
        """Those that are not waited for any longer: nobody has come since they were added, or for the limit."""
        late = [call for call, (_, since) in self._who.items() if now - max(since, self._last_came_at) > self.limit_s]
        return [self._who.pop(call)[0] for call in late]


class StartWatch:
    """Follows the start of every worker in one thread, and tells of those that fail before they can tell themselves."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._starting = Starting()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def add(self, addresses: Sequence[Address], ready: Sequence[Any]) -> None:
        """Watch workers; `ready` are calls that answer once each has been made."""
        with self._changed:
            self._starting.add(dict(zip(ready, addresses, strict=True)), time.monotonic())
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="roost-starts", daemon=True)
                self._thread.start()

    def forget(self, group: str) -> None:
        with self._changed:
            self._starting.forget(group)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._starting = Starting()
            self._changed.notify_all()

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._starting.calls or self._is_stopped)
                if self._is_stopped:
                    return
                refs = self._starting.calls
            try:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=LOOK_EVERY)
                self._look(done)
            except ray.exceptions.RayError:  # Ray is gone, and with it what was watched
                return

    def _look(self, done: Sequence[Any]) -> None:
        for ref in done:
            why = _why_not(ref)
            with self._changed:
                who = self._starting.end(ref) if why else self._starting.come(ref, time.monotonic())
            if who is not None and why:
                self._lost(who, why)
        with self._changed:
            late = self._starting.overdue(time.monotonic())
        for who in late:
            self._lost(who, f"its process was not ready, and no other had become so for {self._starting.limit_s:g} s")


def _why_not(ref: Any) -> str:
    """Why a worker did not come to life; empty where it did, or where it has told so itself."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError:
        return ""
    except ray.exceptions.RayError as error:
        lines = lines_of(error)
        return " ".join(lines[:1] + [line for line in lines[1:] if "error" in line.lower()][:2]) or "it never started"
    return ""
