"""What the driver knows of failures in its job, and what it raises for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from roost.runtime.address import Address
from roost.runtime.failure import Failure, FailureKind, WorkerFailed, in_order_of_cause

GRACE = 3.0  # seconds: for the cause to be told after a consequence was seen, and for a wait to end by itself


class FailuresSeen:
    """Follows the failures that the job's directory records, in a thread of the driver.

    A failure that was raised from the call it belongs to is settled: the program knows of it, and other waits go on.
    One that nobody has waited for ends every other wait, because what these wait for may never come.
    """

    def __init__(self, lead: Any) -> None:
        self._lead = lead
        self._failures: list[Failure] = []
        self._seen_at: dict[Failure, float] = {}
        self._settled: set[Failure] = set()
        self._settled_calls: set[str] = set()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._follow, name="roost-failures", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        count = 0
        while not self._is_stopped:
            try:
                count, new = ray.get(self._lead.ask.remote("directory", "failures_after", count))
                self._add(new)
            except Exception as error:
                if not self._is_stopped:
                    self._add([_failure(Address("agent", 0), FailureKind.NODE_LOST, str(error))])
                return

    def _add(self, failures: Sequence[Failure]) -> None:
        with self._changed:
            self._failures += failures
            self._seen_at |= dict.fromkeys(failures, time.monotonic())
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
            if failure not in self._settled and failure.call not in self._settled_calls and not failure.will_restart
        )

    def settle_group(self, group: str) -> None:
        """A group is closed: its failures are of no interest any more."""
        with self._changed:
            self._settled.update(failure for failure in self._failures if failure.address.group == group)

    def raise_if_failed(self) -> None:
        """End a wait that failures elsewhere may have made endless; it has had the time to end by itself."""
        now = time.monotonic()
        with self._changed:
            if any(now - self._seen_at[failure] > GRACE for failure in self.unsettled):
                raise self._settle(self.unsettled)

    def explain(self, failure: Failure, calls: Sequence[str]) -> WorkerFailed:
        """The error for a worker's own failure; if it followed from another's, with that one before it.

        Ranks that were called together fail together: what the others of these calls do is known with it.
        """
        with self._changed:
            self._settled_calls.update(calls)
            found = {failure, *(known for known in self._failures if known.call in calls)}
            if failure.is_consequence:
                self._changed.wait_for(lambda: any(not known.is_consequence for known in self.unsettled), GRACE)
                found.update(self.unsettled)
            return self._settle(found)

    def explain_death(self, gone: Sequence[Address], calls: Sequence[str], ray_says: str) -> WorkerFailed:
        """The error for workers that are gone; their node's agent has more to tell of them than Ray."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_told_of(gone), GRACE)
            found = self._last_of(gone) or {_failure(address, FailureKind.DIED, ray_says) for address in gone}
            self._settled_calls.update(calls)
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
        self._settled.update(error.failures)
        self._settled_calls.update(failure.call for failure in error.failures if failure.call)
        return error


def _failure(address: Address, kind: FailureKind, ray_says: str) -> Failure:
    lines = [line.strip() for line in ray_says.splitlines() if line.strip()]
    return Failure(address, kind, lines[0] if lines else "its process ended", time.time_ns())
