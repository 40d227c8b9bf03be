"""Groups of workers: made, launched, called and closed together."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ray

from roost.config.errors import did_you_mean
from roost.runtime.failures import FailuresSeen
from roost.runtime.host import CallFailed
from roost.runtime.ray_errors import PROCESS_LOST
from roost.runtime.worker import Worker, public_methods
from roost.transport.failure import DRIVER, Address, WaitedTooLong

if TYPE_CHECKING:
    from roost.placement.component_plan import ComponentPlan
    from roost.placement.strategy import PlacementStrategy
    from roost.runtime.cluster import Cluster

LARGE = 100_000  # bytes of an argument that is put into the object store once instead of being sent to every rank


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a group is launched, beside where."""

    max_concurrency: int | None = None  # calls that a worker runs at a time, in threads; one, in the main thread
    # Whether a worker sees only its own accelerators; left out, what a plan says, and with a strategy that it does.
    isolate_accelerator: bool | None = None
    restarts: int = 0  # how often a worker that died is started again on its place
    env: Mapping[str, str] = field(default_factory=dict)
    cpus_per_process: float = 0.0  # reserved with the accelerators
    host_memory_gb_per_process: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Workers to be made of a class with arguments, not launched yet."""

    cls: type[Worker]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | ComponentPlan | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_accelerator: bool | None = None,
        isolate_gpu: bool | None = None,
        restarts: int = 0,
        env: Mapping[str, str] | None = None,
        cpus_per_process: float = 0.0,
        host_memory_gb_per_process: float = 0.0,
    ) -> WorkerGroup:
        """Start a worker for each process that the strategy places, or that a component of a plan has.

        Left out, there is one on every accelerator, or one on node 0 where there are none. All start at once, and this
        returns before they are ready; a constructor that fails is reported by the first call that is waited for.
        """
        options = LaunchOptions(
            max_concurrency,
            isolate_accelerator if isolate_gpu is None else isolate_gpu,
            restarts,
            dict(env or {}),
            cpus_per_process,
            host_memory_gb_per_process,
        )
        return cluster._launch(self, placement_strategy, name or self.cls.__name__, options)


class WorkerGroup:
    """The running workers of a component. Every public method of their class is a method of the group.

    A call returns at once with a `GroupResult`; `execute_on(0, 2).method(...)` calls some ranks only.
    """

    def __init__(
        self,
        name: str,
        cls: type[Worker],
        hosts: Sequence[Any],
        failures: FailuresSeen,
        close: Callable[[WorkerGroup], None],
        kept: Any = None,
    ) -> None:
        self.name = name
        self.worker_class = cls
        self.hosts = list(hosts)
        self._failures = failures
        self._close = close
        self._kept = kept  # what the workers are made of, in case one is made again
        self._is_closed = False
        for method in public_methods(cls):
            setattr(self, method, functools.partial(self._call, method, range(len(self.hosts))))

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.hosts)} {self.worker_class.__name__}>"

    def __getattr__(self, method: str) -> Callable[..., GroupResult]:
        known = public_methods(self.__dict__.get("worker_class", Worker))
        hint = did_you_mean(method, known) or f"it has {', '.join(known)}"
        raise AttributeError(f"{self.__dict__.get('name', 'the group')} has no method {method}; {hint}")

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def execute_on(self, *ranks: int | Sequence[int]) -> RankSelection:
        """Some of the ranks, to call a method on; results come in the order named."""
        chosen = [rank for part in ranks for rank in ([part] if isinstance(part, int) else part)]
        beyond = [rank for rank in chosen if not 0 <= rank < self.world_size]
        if beyond or not chosen:
            wrong = f"has no rank {beyond[0]}" if beyond else "was asked for no rank"
            raise ValueError(f"{self.name} {wrong}; it has 0 to {self.world_size - 1}")
        return RankSelection(self, chosen)

    def wait_ready(self, timeout: float | None = None) -> WorkerGroup:
        """Wait until every worker has been made; the first constructor that failed is raised."""
        refs = [host._roost_ready.remote() for host in self.hosts]
        GroupResult(refs, range(self.world_size), self.name, "__init__", self._failures).wait(timeout)
        return self

    def mark_closed(self) -> None:
        """The workers are being ended with their cluster."""
        self._is_closed = True

    def close(self) -> None:
        """End the workers, and give back what the group held alone."""
        if not self._is_closed:
            self._is_closed = True
            self._close(self)

    def _call(self, method: str, ranks: Sequence[int], /, *args: Any, **kwargs: Any) -> GroupResult:
        if self._is_closed:
            raise RuntimeError(f"{self.name} is closed; launch it again to call {method}")
        if len(ranks) > 1:
            args = tuple(map(shared, args))
            kwargs = {name: shared(value) for name, value in kwargs.items()}
        refs = [getattr(self.hosts[rank], method).remote(*args, **kwargs) for rank in ranks]
        return GroupResult(refs, ranks, self.name, method, self._failures)


class RankSelection:
    """Some ranks of a group."""

    def __init__(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    def __getattr__(self, method: str) -> Callable[..., GroupResult]:
        if method.startswith("_") or method not in public_methods(self._group.worker_class):
            raise AttributeError(f"{self._group.worker_class.__name__} has no public method {method}")
        return functools.partial(self._group._call, method, self._ranks)


def check_methods(cls: type[Worker]) -> None:
    """A group has methods of its own, which those of its workers must not hide."""
    own = {*dir(WorkerGroup), "name", "hosts", "worker_class"}
    hidden = next((method for method in public_methods(cls) if method in own), None)
    if hidden is not None:
        raise ValueError(f"{cls.__name__}.{hidden} would hide what a group itself calls {hidden}; rename it")


def check_name(name: str, taken: Collection[str]) -> None:
    """A group's name is part of its workers' addresses and of the path of their logs."""
    if not name or any(part in name for part in (":", "/", "\0")) or name in (".", "..") or name == DRIVER.group:
        raise ValueError(f"a group cannot be called {name!r}; use letters, digits, '.', '_' and '-'")
    if name in taken:
        raise ValueError(f"there is a group {name} already; give this one another name, or close that one first")


def shared(value: Any) -> Any:
    """A large argument of a call on several ranks, put into the object store once."""
    size = getattr(value, "nbytes", None)
    if size is None and isinstance(value, bytes | bytearray | str):
        size = len(value)
    return ray.put(value) if isinstance(size, int) and size > LARGE else value


SLICE = 0.5  # seconds between looks at whether the job has failed elsewhere
Reduction = Literal["max", "min", "mean"]
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda times: sum(times) / len(times),
}


class GroupResult:
    """The results of one method on several workers. Wait for them in a thread, or await them in an event loop.

    A failure of a worker is raised as `WorkerFailed`, with the first cause first, whoever had it: a wait does not go on
    when the job has failed elsewhere.
    """

    def __init__(
        self, refs: Sequence[Any], ranks: Sequence[int], group: str, method: str, failures: FailuresSeen
    ) -> None:
        self._refs = list(refs)
        self.ranks = tuple(ranks)
        self._group, self._method, self._failures = group, method, failures
        self._answers: list[tuple[int, Any]] | None = None

    def __repr__(self) -> str:
        return f"<{self._group}.{self._method} on {len(self.ranks)} ranks, {'done' if self.done() else 'not done'}>"

    def done(self) -> bool:
        """Whether every rank has answered, or failed."""
        if self._answers is not None:
            return True
        ready, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        return len(ready) == len(self._refs)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The results in rank order."""
        if self._answers is None:
            self._answers = self._collect(timeout)
        return [value for _, value in self._answers]

    async def async_wait(self) -> list[Any]:
        """The results in rank order, for an event loop."""
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
        """The seconds that the method took on each rank, in rank order."""
        self.wait()
        return [nanoseconds / 1e9 for nanoseconds, _ in self._answers or ()]

    def consume_durations(self, reduction: Reduction = "max", return_per_rank: bool = False) -> Any:
        """The time the method took, of the slowest rank unless another reduction is wanted."""
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
        """What Ray calls the calls on the ranks, as their failures name them."""
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
        """The error to raise for one that Ray gave: the first cause, with all that is known of it."""
        told = getattr(error, "cause", None)
        if isinstance(told, CallFailed):
            return self._failures.explain(told.failure, self._calls)
        if isinstance(error, PROCESS_LOST):
            return self._failures.explain_death(self._addresses, self._dead(), self._calls, str(error))
        return error

    def _dead(self) -> list[Address]:
        """Which of the ranks are gone: those whose own answer is this kind of error."""
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
