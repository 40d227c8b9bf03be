"""Groups of workers: made, launched, called and closed together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from roost.config.errors import did_you_mean
from roost.runtime.address import DRIVER
from roost.runtime.failures_seen import FailuresSeen
from roost.runtime.result import GroupResult
from roost.runtime.worker import Worker, public_methods

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
