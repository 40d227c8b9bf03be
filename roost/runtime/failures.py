"""Failures of a job as the driver sees them, and the watch over starting workers."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from roost.runtime.ray_errors import first_line, lines_of
from roost.transport.context import Address, Failure, FailureKind, WorkerFailed, in_order_of_cause

KEPT = 1_000  # failures kept
GRACE = 3.0  # seconds for a root cause to arrive after its consequence, and for a wait to end by itself


class FailureWatch:
    """Follows the failures that the job's directory records, in a thread of the driver.

    A failure raised from its own call is settled: the program can handle it, and other waits continue. An unsettled
    failure ends every other wait, because the result they wait for may never come.
    """

    def __init__(self, lead: Any, raise_if_lost: Callable[[], None]) -> None:
        self._lead, self._raise_if_control_lost = lead, raise_if_lost
        self._failures: list[Failure] = []
        self._seen_at: dict[Failure, float] = {}
        self._settled: set[Failure] = set()
        self._settled_calls: deque[str] = deque(maxlen=100 * KEPT)
        # By worker: the time until which its death counts as part of an error that was already raised.
        self._reported_until: dict[Address, float] = {}
        self._closed: dict[str, int] = {}  # when a group was closed; its earlier failures are ignored
        self._expendable: dict[str, frozenset[FailureKind]] = {}  # by group: losses that the program handles
        self._changed = threading.Condition()
        self._daemon_lost: Failure | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._follow, name="roost-failures", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        count = 0
        while not self._is_stopped:
            try:
                count, new = ray.get(self._lead.ask.remote("directory", "failures_after", count))
                self._add(new)
            except ray.exceptions.RayError as error:
                if not self._is_stopped:
                    why = f"the node daemon of the driver's machine is lost: {first_line(error, 'no answer')}"
                    lost = _failure(Address("daemon", 0), FailureKind.NODE_LOST, why)
                    self._add([lost])
                    self._daemon_lost = lost
                return

    def _add(self, failures: Sequence[Failure]) -> None:
        with self._changed:
            new = [failure for failure in failures if failure.time_ns > self._closed.get(failure.address.group, 0)]
            self._failures = [*self._failures, *new][-KEPT:]
            self._seen_at |= dict.fromkeys(new, time.monotonic())
            if len(self._seen_at) > 2 * KEPT:  # a job may run for weeks
                kept = set(self._failures)
                self._seen_at = {failure: seen for failure, seen in self._seen_at.items() if failure in kept}
                self._settled &= kept
            self._changed.notify_all()

    def stop(self) -> None:
        self._is_stopped = True

    @property
    def all(self) -> tuple[Failure, ...]:
        return in_order_of_cause(self._failures)

    @property
    def unsettled(self) -> tuple[Failure, ...]:
        """Failures not raised to the program yet, except of workers that will restart."""
        return in_order_of_cause(
            failure
            for failure in self._failures
            if failure not in self._settled
            and failure.call not in self._settled_calls
            and not failure.will_restart
            and failure.kind not in self._expendable.get(failure.address.group, ())
            and self._seen_at[failure] > self._reported_until.get(failure.address, 0.0)
        )

    def settle_group(self, group: str) -> None:
        """Drop the failures of a closed group."""
        with self._changed:
            self._closed[group] = time.time_ns()
            self._failures = [failure for failure in self._failures if failure.address.group != group]

    def set_expendable(self, group: str, kinds: Collection[FailureKind]) -> None:
        """Let failures of these kinds in a group end only waits for the group itself."""
        with self._changed:
            self._expendable[group] = frozenset(kinds)

    def raise_if_lost(self) -> None:
        """Raise if Ray's control service or the driver's node daemon is lost, even if that was raised before.

        The daemon keeps the job's directory, and without it no other failure is seen.
        """
        self._raise_if_control_lost()
        lost = self._daemon_lost
        if lost is not None and time.monotonic() - self._seen_at[lost] > GRACE:
            raise WorkerFailed([lost])

    def raise_if_failed(self, waiting_for: str = "") -> None:
        """Raise unsettled failures older than the grace period, which could block a wait forever."""
        self._raise_if_control_lost()
        now = time.monotonic()
        with self._changed:
            if not any(now - self._seen_at[failure] > GRACE for failure in self.unsettled):
                return
            error = self._settle(self.unsettled)
        if waiting_for:
            error.add_note(f"This ended the wait for {waiting_for}.")
        raise error

    def explain(self, failure: Failure, calls: Sequence[str]) -> WorkerFailed:
        """Return the error for a failure raised by a worker, preceded by its root cause if it is a consequence.

        Ranks that were called together fail together: failures of the other ranks in `calls` are included.
        """
        with self._changed:
            self._settled_calls.extend(calls)
            found = {failure, *(known for known in self._failures if known.call in calls)}
            if failure.is_consequence:
                self._changed.wait_for(lambda: any(not known.is_consequence for known in self.unsettled), GRACE)
                found.update(self.unsettled)
            return self._settle(found)

    def explain_death(
        self, called: Sequence[Address], gone: Sequence[Address], calls: Sequence[str], ray_says: str
    ) -> WorkerFailed:
        """Return the error for workers that died, preferring their node daemon's report to Ray's.

        Workers of the same call that die within the grace period are covered by this error.
        """
        with self._changed:
            self._reported_until |= dict.fromkeys(called, time.monotonic() + GRACE)
            self._changed.wait_for(lambda: self._is_reported(gone), GRACE)
            found = self._last_of(gone) or {_failure(address, FailureKind.DIED, ray_says) for address in gone}
            self._settled_calls.extend(calls)
            return self._settle({*found, *self.unsettled} or {_failure(Address("?", 0), FailureKind.DIED, ray_says)})

    def _is_reported(self, gone: Sequence[Address]) -> bool:
        """Return True if a death of one of them is recorded that is either unsettled or final."""
        ends = [failure for failure in self._last_of(gone) if failure.kind is not FailureKind.RAISED]
        return any(failure not in self._settled or not failure.will_restart for failure in ends)

    def _last_of(self, gone: Sequence[Address]) -> set[Failure]:
        """The last recorded failure of each."""
        return set({failure.address: failure for failure in self._failures if failure.address in gone}.values())

    def _settle(self, failures: Any) -> WorkerFailed:
        error = WorkerFailed(failures)
        if error.first.cause is not None:
            with contextlib.suppress(Exception):  # its class may not be importable here
                error.__cause__ = cloudpickle.loads(error.first.cause)
        self._settled.update(error.failures)
        self._settled_calls.extend(failure.call for failure in error.failures if failure.call)
        return error


def _failure(address: Address, kind: FailureKind, ray_says: str) -> Failure:
    return Failure(address, kind, first_line(ray_says, "its process ended"), time.time_ns())


LOOK_EVERY = 1.0  # seconds
START_LIMIT = 300.0  # seconds for the next process to start and construct its worker

Lost = Callable[[Address, str], None]


class Starting:
    """Workers that have not started yet, and when the last one did.

    A machine starts a limited number of processes at a time, so the last of many may start late without a fault. The
    limit therefore counts from the last start of any worker.

    >>> starting = Starting()
    >>> starting.add({"a": Address("daemon", 0), "b": Address("daemon", 1)}, now=0.0)
    >>> starting.started("a", now=299.0).rank, starting.overdue(now=400.0)
    (0, [])
    >>> [who.rank for who in starting.overdue(now=600.0)]
    [1]
    """

    def __init__(self, limit_s: float = START_LIMIT) -> None:
        self.limit_s = limit_s
        self._who: dict[Any, tuple[Address, float]] = {}
        self._last_start_at = -math.inf

    @property
    def calls(self) -> list[Any]:
        """Calls without an answer yet."""
        return list(self._who)

    def add(self, who: Mapping[Any, Address], now: float) -> None:
        """Add workers by the calls that they will answer."""
        self._who.update({call: (address, now) for call, address in who.items()})

    def forget(self, group: str) -> None:
        self._who = {call: entry for call, entry in self._who.items() if entry[0].group != group}

    def end(self, call: Any) -> Address | None:
        """Stop waiting for a call and return its worker; None if the call is unknown."""
        return self._who.pop(call, (None, 0.0))[0]

    def started(self, call: Any, now: float) -> Address | None:
        """Like `end`, for a worker that has started."""
        self._last_start_at = max(self._last_start_at, now)
        return self.end(call)

    def overdue(self, now: float) -> list[Address]:
        """Remove and return workers for which no start has been seen within the limit."""
        late = [call for call, (_, since) in self._who.items() if now - max(since, self._last_start_at) > self.limit_s]
        return [self._who.pop(call)[0] for call in late]


class StartWatch:
    """Watches workers start, in one thread, and reports those that fail before they can report it themselves."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._starting = Starting()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def add(self, addresses: Sequence[Address], ready: Sequence[Any]) -> None:
        """Watch workers; `ready` are calls that return once each is constructed."""
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
                self._check(done)
            except ray.exceptions.RayError:  # Ray is down, and so are the workers
                return

    def _check(self, done: Sequence[Any]) -> None:
        for ref in done:
            why = _start_failure(ref)
            with self._changed:
                who = self._starting.end(ref) if why else self._starting.started(ref, time.monotonic())
            if who is not None and why:
                self._lost(who, why)
        with self._changed:
            late = self._starting.overdue(time.monotonic())
        for who in late:
            self._lost(
                who, f"its process did not become ready, and no other worker started for {self._starting.limit_s:g} s"
            )


def _start_failure(ref: Any) -> str:
    """Reason that a worker did not start; empty if it did, or if it has reported the failure itself."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError:
        return ""
    except ray.exceptions.RayError as error:
        lines = lines_of(error)
        return " ".join(lines[:1] + [line for line in lines[1:] if "error" in line.lower()][:2]) or "it never started"
    return ""
