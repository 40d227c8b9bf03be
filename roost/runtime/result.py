"""Results of a call on a group, one per rank, that may still be pending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import ray

from roost.runtime.failures import FailureWatch
from roost.runtime.host import CallFailed
from roost.runtime.ray_errors import PROCESS_LOST
from roost.transport.context import Address, WaitedTooLong

SLICE = 0.5  # seconds between checks for failures elsewhere in the job
Reduction = Literal["max", "min", "mean"]
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda times: sum(times) / len(times),
}


class GroupResult:
    """Results of one method on several workers. Call `wait()`, or `await` it in an event loop.

    A worker's failure is raised as `WorkerFailed`, root cause first. A failure elsewhere in the job also ends a wait.
    """

    def __init__(
        self, refs: Sequence[Any], ranks: Sequence[int], group: str, method: str, failures: FailureWatch
    ) -> None:
        self._refs = list(refs)
        self.ranks = tuple(ranks)
        self._group, self._method, self._failures = group, method, failures
        self._answers: list[tuple[int, Any]] | None = None

    def __repr__(self) -> str:
        return f"<{self._group}.{self._method} on {len(self.ranks)} ranks, {'done' if self.done() else 'not done'}>"

    def done(self) -> bool:
        """Return True if every rank has answered or failed."""
        if self._answers is not None:
            return True
        ready, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        return len(ready) == len(self._refs)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for the results; return them in rank order."""
        if self._answers is None:
            self._answers = self._collect(timeout)
        return [value for _, value in self._answers]

    async def async_wait(self) -> list[Any]:
        """Like `wait`, for an event loop."""
        if self._answers is None:
            waiting = [asyncio.ensure_future(ref_future(ref)) for ref in self._refs]
            try:
                while True:
                    done, _ = await asyncio.wait(waiting, timeout=SLICE, return_when=asyncio.FIRST_EXCEPTION)
                    errors = [error for future in done if (error := future.exception()) is not None]
                    if errors:
                        explained = await asyncio.to_thread(self._explained, errors[0])
                        raise explained from explained.__cause__
                    if len(done) == len(waiting):
                        break
                    self._failures.raise_if_failed(self._what)
            finally:
                for future in waiting:
                    future.cancel()
            self._answers = [future.result() for future in waiting]
        return [value for _, value in self._answers]

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.async_wait().__await__()

    def durations(self) -> list[float]:
        """Seconds the method took on each rank, in rank order."""
        self.wait()
        return [nanoseconds / 1e9 for nanoseconds, _ in self._answers or ()]

    def consume_durations(self, reduction: Reduction = "max", return_per_rank: bool = False) -> Any:
        """Seconds by method, reduced over ranks; the slowest rank's by default."""
        times = self.durations()
        found = {self._method: REDUCTIONS[reduction](times)}
        return (found, dict(zip(self.ranks, times, strict=True))) if return_per_rank else found

    def consume_duration(self, reduction: Reduction = "max") -> float:
        return REDUCTIONS[reduction](self.durations())

    @property
    def _addresses(self) -> list[Address]:
        return [Address(self._group, rank) for rank in self.ranks]

    @property
    def _what(self) -> str:
        return f"{self._group}.{self._method}"

    @property
    def _calls(self) -> list[str]:
        """Ray's task ids of the calls, which failures carry as `call`."""
        return [ref.task_id().hex() for ref in self._refs]

    def _collect(self, timeout: float | None) -> list[tuple[int, Any]]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE if end is None else min(SLICE, end - time.monotonic())
            try:
                answers: list[tuple[int, Any]] = ray.get(self._refs, timeout=max(left, 0))
                return answers
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayError as error:
                explained = self._explained(error)
                raise explained from explained.__cause__
            if end is not None and time.monotonic() >= end:
                raise WaitedTooLong(self._unanswered(timeout or 0))
            self._failures.raise_if_failed(self._what)

    def _unanswered(self, timeout: float) -> str:
        ready, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        late = [rank for ref, rank in zip(self._refs, self.ranks, strict=True) if ref not in ready]
        return f"{self._group}.{self._method} did not answer within {timeout:g} s on ranks {late}"

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise in place of one from Ray: the root cause with its details."""
        reply = getattr(error, "cause", None)
        if isinstance(reply, CallFailed):
            return self._failures.explain(reply.failure, self._calls)
        if isinstance(error, PROCESS_LOST):
            return self._failures.explain_death(self._addresses, self._dead(), self._calls, str(error))
        return error

    def _dead(self) -> list[Address]:
        """Ranks whose process is lost, by the error of their own call."""
        gone = []
        for ref, address in zip(self._refs, self._addresses, strict=True):
            ready, _ = ray.wait([ref], timeout=0)
            try:
                if ready:
                    ray.get(ref)
            except PROCESS_LOST:
                gone.append(address)
            except ray.exceptions.RayError:
                pass
        return gone


async def ref_future(ref: Any) -> tuple[int, Any]:
    answer: tuple[int, Any] = await ref
    return answer
