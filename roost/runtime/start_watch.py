"""Workers that never come to life: their node's agent does not know them, so the driver watches over their start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from roost.runtime.address import Address
from roost.runtime.ray_errors import lines_of

LOOK_EVERY = 1.0  # seconds
START_LIMIT = 300.0  # seconds for a process to start and make its worker

Lost = Callable[[Address, str], None]


class StartWatch:
    """Follows the start of every worker in one thread, and tells of those that fail before they can tell themselves."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._starting: dict[Any, tuple[Address, float]] = {}
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def add(self, addresses: Sequence[Address], ready: Sequence[Any]) -> None:
        """Watch workers; `ready` are calls that answer once each has been made."""
        with self._changed:
            now = time.monotonic()
            self._starting.update({ref: (who, now) for ref, who in zip(ready, addresses, strict=True)})
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="roost-starts", daemon=True)
                self._thread.start()

    def forget(self, group: str) -> None:
        with self._changed:
            self._starting = {ref: entry for ref, entry in self._starting.items() if entry[0].group != group}

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._starting = {}
            self._changed.notify_all()

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._starting or self._is_stopped)
                if self._is_stopped:
                    return
                refs = list(self._starting)
            try:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=LOOK_EVERY)
                self._look(done)
            except ray.exceptions.RayError:  # Ray is gone, and with it what was watched
                return

    def _look(self, done: Sequence[Any]) -> None:
        for ref in done:
            with self._changed:
                who, _ = self._starting.pop(ref, (None, 0.0))
            if who is not None:
                why = _why_not(ref)
                if why:
                    self._lost(who, why)
        now = time.monotonic()
        with self._changed:
            late = [(ref, who) for ref, (who, since) in self._starting.items() if now - since > START_LIMIT]
            for ref, _ in late:
                del self._starting[ref]
        for _, who in late:
            self._lost(who, f"its process was not ready within {START_LIMIT:g} s")


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
