"""What the driver knows of failures in its job, and what it raises for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import cloudpickle

from roost.runtime.address import Address
from roost.runtime.failure import Failure, FailureKind, WorkerFailed, in_order_of_cause
from roost.runtime.ray_errors import first_line

KEPT = 1_000  # failures that are remembered
GRACE = 3.0  # seconds: for the cause to be told after a consequence was seen, and for a wait to end by itself


class FailuresSeen:
    """Follows the failures that the job's directory records, in a thread of the driver.

    A failure that was raised from the call it belongs to is settled: the program knows of it, and other waits go on.
    One that nobody has waited for ends every other wait, because what these wait for may never come.
    """

    def __init__(self, lead: Any, raise_if_lost: Callable[[], None]) -> None:
        self._lead, self._raise_if_lost = lead, raise_if_lost
        self._failures: list[Failure] = []
        self._seen_at: dict[Failure, float] = {}
        self._settled: set[Failure] = set()
        self._settled_calls: deque[str] = deque(maxlen=100 * KEPT)
        # Until when the end of a worker belongs to an error that was raised already.
        self._told_until: dict[Address, float] = {}
        self._closed: dict[str, int] = {}  # when a group was closed: what is told of it after that is old
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
        """Failures that the program was not told of; a worker that comes back is none."""
        return in_order_of_cause(
            failure
            for failure in self._failures
            if failure not in self._settled
            and failure.call not in self._settled_calls
            and not failure.will_restart
            and self._seen_at[failure] > self._told_until.get(failure.address, 0.0)
        )

    def settle_group(self, group: str) -> None:
        """A group is closed: its failures are of no interest any more."""
        with self._changed:
            self._closed[group] = time.time_ns()
            self._failures = [failure for failure in self._failures if failure.address.group != group]

    def raise_if_lost(self) -> None:
        """Raise if Ray's control service or the driver's node daemon is lost, however often that was raised before.

        The daemon keeps the job's directory, without which no other failure is seen.
        """
        self._raise_if_lost()
        lost = self._daemon_lost
        if lost is not None and time.monotonic() - self._seen_at[lost] > GRACE:
            raise WorkerFailed([lost])

    def raise_if_failed(self, waiting_for: str = "") -> None:
        """End a wait that failures elsewhere may have made endless; it has had the time to end by itself."""
        self._raise_if_lost()
        now = time.monotonic()
        with self._changed:
            if not any(now - self._seen_at[failure] > GRACE for failure in self.unsettled):
                return
            error = self._settle(self.unsettled)
        if waiting_for:
            error.add_note(f"This ended the wait for {waiting_for}.")
        raise error

    def explain(self, failure: Failure, calls: Sequence[str]) -> WorkerFailed:
        """The error for a worker's own failure; if it followed from another's, with that one before it.

        Ranks that were called together fail together: what the others of these calls do is known with it.
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
        """The error for workers that are gone; their node's agent has more to tell of them than Ray.

        Others that were called with them and end now have ended in the same call.
        """
        with self._changed:
            self._told_until |= dict.fromkeys(called, time.monotonic() + GRACE)
            self._changed.wait_for(lambda: self._is_told_of(gone), GRACE)
            found = self._last_of(gone) or {_failure(address, FailureKind.DIED, ray_says) for address in gone}
            self._settled_calls.extend(calls)
            return self._settle({*found, *self.unsettled} or {_failure(Address("?", 0), FailureKind.DIED, ray_says)})

    def _is_told_of(self, gone: Sequence[Address]) -> bool:
        """Whether the end of one of them is known: a new one, or one after which there is no other."""
        ends = [failure for failure in self._last_of(gone) if failure.kind is not FailureKind.RAISED]
        return any(failure not in self._settled or not failure.will_restart for failure in ends)

    def _last_of(self, gone: Sequence[Address]) -> set[Failure]:
        """The last that is known of each."""
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
