"""`Worker`, the base class of users' workers, and `WorkerGroup`, the running workers of a component."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray

from roost.config.findings import did_you_mean
from roost.runtime.failures import FailureWatch
from roost.runtime.result import GroupResult
from roost.transport import batches
from roost.transport.channel import Channel
from roost.transport.context import DRIVER, Address, ProcessSetup, current_context

if TYPE_CHECKING:
    from roost.placement.component_plan import ComponentPlan
    from roost.placement.strategies import PlacementStrategy

Method = TypeVar("Method", bound=Callable[..., Any])


class Worker:
    """Base class for a process of a component. Subclass it and launch a group.

    class Greeter(Worker):
        def __init__(self, greeting):
            super().__init__()
            self.greeting = greeting

        def greet(self):
            return f"{self.greeting} from {self._rank} of {self._world_size}"

    group = Greeter.create_group("hello").launch(cluster, name="greeter", placement_strategy=strategy)
    group.greet().wait()
    """

    _setup: ProcessSetup

    def __init__(self) -> None:
        if not hasattr(self, "_setup"):
            name = type(self).__name__
            raise RuntimeError(
                f"{name} cannot be instantiated directly; write {name}.create_group(...).launch(cluster, name=...), "
                "which creates one in each process"
            )

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupSpec:
        """Describe a group of workers, each constructed with these arguments; call `launch` on the result."""
        return GroupSpec(cls, args, kwargs)

    # Rank and placement -------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self._setup.address.rank

    @property
    def _world_size(self) -> int:
        return self._setup.world_size

    @property
    def _group_name(self) -> str:
        return self._setup.address.group

    @property
    def _local_rank(self) -> int:
        return int(self._setup.env["LOCAL_RANK"])

    @property
    def _local_world_size(self) -> int:
        return int(self._setup.env["LOCAL_WORLD_SIZE"])

    @property
    def _node_local_rank(self) -> int:
        return self._setup.placement.local_rank

    @property
    def _cluster_node_rank(self) -> int:
        return self._setup.placement.cluster_node_rank

    @property
    def worker_address(self) -> Address:
        return self._setup.address

    @property
    def worker_info(self) -> ProcessSetup:
        """Setup of this worker: placement, environment, devices and hardware."""
        return self._setup

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators of this worker, by the vendor's ids."""
        return self._setup.physical_ids

    @property
    def has_accelerator(self) -> bool:
        return bool(self._setup.physical_ids)

    @property
    def accelerator_type(self) -> str:
        return self._setup.accelerator_type

    @property
    def hardware_type(self) -> str:
        return self._setup.hardware_type

    @property
    def hardware_infos(self) -> tuple[Mapping[str, Any], ...]:
        """Configs of this worker's declared devices, such as a robot's address and cameras."""
        return self._setup.hardware

    # Communication ------------------------------------------------------------------------------------------------

    def send(
        self,
        obj: Any,
        dst_group_name: str,
        dst_rank: int,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send an object to a worker; return when its node has it. With `async_op`, return a handle to wait on.

        Tensors and arrays, at any depth in containers, go through shared memory on one machine.
        """
        to = Address(dst_group_name, dst_rank)
        pending = self._transfer.send(obj, [to], batches.MESSAGE, timeout)
        return pending if async_op else self._waited(f"send {to}", pending.wait)

    def recv(self, src_group_name: str, src_rank: int, async_op: bool = False, timeout: float | None = None) -> Any:
        """Receive the next object sent by a worker; its tensors may be modified in place."""
        source = Address(src_group_name, src_rank)
        pending = self._transfer.receive(source, batches.MESSAGE, timeout)
        return pending if async_op else self._waited(f"recv {source}", pending.wait)

    def broadcast(
        self,
        obj: Any = None,
        groups: batches.Groups = (),
        src: Address | tuple[str, int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Broadcast one worker's object to workers of several groups. All of them call it with the same groups.

        `groups` are pairs of a group's name and a rank, a list of ranks, or None for all. The source is the first
        worker named unless `src` is given; `obj` of the others is ignored. Every caller gets the object.
        """
        pending = self._transfer.broadcast(obj, groups, Address(*src) if src is not None else None, timeout)
        return pending if async_op else self._waited("broadcast", pending.wait)

    def send_to(self, group_name: str, batch: Any, batch_size: int | None = None, tag: str = "") -> None:
        """Send this worker's share of a batch to the workers of a group, which call `recv_from` to get their rows.

        The batch is split over this group's workers in rank order. `batch_size` is the total number of rows; by
        default every sender has as many rows as this one.
        """
        rows = batches.batch_size_of(batch)
        total = batch_size if batch_size is not None else rows * self._world_size
        receivers = len(self._transfer.group(group_name).nodes)
        pieces = batches.send_plan(total, self._world_size, receivers, self._rank)
        parts = batches.split(batch, pieces)
        sent = [
            self._transfer.send(part, [Address(group_name, piece.peer)], f"batch {tag}", None)
            for piece, part in zip(pieces, parts, strict=True)
        ]
        self._waited(f"send_to {group_name}", lambda: [pending.wait() for pending in sent])

    def recv_from(self, group_name: str, batch_size: int, tag: str = "", timeout: float | None = None) -> Any:
        """Receive this worker's rows of a batch of `batch_size` rows that a group sends with `send_to`."""
        senders = len(self._transfer.group(group_name).nodes)
        pieces = batches.receive_plan(batch_size, senders, self._world_size, self._rank)
        coming = [self._transfer.receive(Address(group_name, piece.peer), f"batch {tag}", timeout) for piece in pieces]
        parts = self._waited(f"recv_from {group_name}", lambda: [pending.wait() for pending in coming])
        return batches.merge(parts)

    def create_channel(self, name: str, maxsize: int = 0, node_rank: int = 0) -> Channel:
        return Channel.create(name, maxsize, node_rank)

    def connect_channel(self, name: str) -> Channel:
        return Channel.connect(name)

    # Devices and ports --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def device_lock(self, timeout: float | None = None) -> Iterator[None]:
        """Lock this worker's accelerators against other workers that take the lock. Released if the worker dies."""
        link = current_context().link
        devices = self._setup.devices
        limit = batches.transfer_limit(timeout)
        self._waited("device lock", lambda: link.ask("lock", devices, limit))
        try:
            yield
        finally:
            link.ask("unlock", devices)

    def acquire_free_port(self) -> int:
        """Reserve a port of this node for the lifetime of this worker."""
        port: int = current_context().link.ask("port")
        return port

    # Timing and logs ----------------------------------------------------------------------------------------------

    def worker_timer(self, tag: str | None = None, trace: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Time a block: add its duration to the tag's total and record a span in the trace."""
        name = tag or sys._getframe(1).f_code.co_name
        return current_context().recorder.timer(name, trace=trace)

    @staticmethod
    def timer(tag: str | None = None, trace: bool = True) -> Callable[[Method], Method]:
        """Decorator that times every call of a method, sync or async."""

        def decorate(method: Method) -> Method:
            name = tag or method.__name__
            if inspect.iscoroutinefunction(method):

                @functools.wraps(method)
                async def timed_async(*args: Any, **kwargs: Any) -> Any:
                    with current_context().recorder.timer(name, trace=trace):
                        return await method(*args, **kwargs)

                return timed_async  # type: ignore[return-value]

            @functools.wraps(method)
            def timed(*args: Any, **kwargs: Any) -> Any:
                with current_context().recorder.timer(name, trace=trace):
                    return method(*args, **kwargs)

            return timed  # type: ignore[return-value]

        return decorate

    def pop_execution_time(self, tag: str) -> float:
        return current_context().recorder.pop_time(tag)

    def pop_execution_times(self) -> dict[str, float]:
        return current_context().recorder.pop_times()

    def log_info(self, text: str) -> None:
        self._log(logging.INFO, text)

    def log_warning(self, text: str) -> None:
        self._log(logging.WARNING, text)

    def log_error(self, text: str) -> None:
        self._log(logging.ERROR, text)

    def log_debug(self, text: str) -> None:
        self._log(logging.DEBUG, text)

    def log_on_first_rank(self, text: str) -> None:
        if self._rank == 0:
            self.log_info(text)

    def log_on_last_rank(self, text: str) -> None:
        if self._rank == self._world_size - 1:
            self.log_info(text)

    def _log(self, level: int, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {logging.getLevelName(level):7} {text}", flush=True)

    @property
    def _transfer(self) -> batches.Transfer:
        return batches.Transfer(current_context())

    def _waited(self, what: str, wait: Callable[[], Any]) -> Any:
        with current_context().recorder.span(what, "wait"):
            return wait()


def public_methods(cls: type[Worker]) -> Sequence[str]:
    """Public methods of a worker class, which its group exposes."""
    return [
        name
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and callable(member) and name not in ("create_group", "timer")
    ]


LARGE = 100_000  # bytes above which an argument goes into the object store once instead of to every rank


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Launch options of a group, except its placement."""

    max_concurrency: int | None = None  # concurrent calls of a worker, in threads; default one, in the main thread
    # If True, a worker sees only its own accelerators. None: as planned; True with a placement strategy.
    isolate_accelerator: bool | None = None
    restarts: int = 0  # restarts of a worker that died, at the same placement
    env: Mapping[str, str] = field(default_factory=dict)
    cpus_per_process: float = 0.0  # reserved with the accelerators
    host_memory_gb_per_process: float = 0.0


class Launcher(Protocol):
    """Protocol for launching groups, implemented by `Cluster`."""

    def _launch(
        self, spec: GroupSpec, strategy: PlacementStrategy | ComponentPlan | None, name: str, options: LaunchOptions
    ) -> WorkerGroup: ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Worker class and constructor arguments of a group that is not launched yet."""

    cls: type[Worker]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def launch(
        self,
        cluster: Launcher,
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
        """Start a worker for each process of the placement strategy or of the plan's component.

        By default there is one per accelerator, or one on node 0 if there are none. All start concurrently, and this
        returns before they are ready; a constructor's exception is raised by the first call that is waited on.
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
        failures: FailureWatch,
        close: Callable[[WorkerGroup], None],
        kept: Any = None,
    ) -> None:
        self.name = name
        self.worker_class = cls
        self.hosts = list(hosts)
        self._failures = failures
        self._close = close
        self._kept = kept  # keeps the pickled class and arguments alive for restarts
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
        """Select ranks to call a method on; results come in the order given."""
        chosen = [rank for part in ranks for rank in ([part] if isinstance(part, int) else part)]
        beyond = [rank for rank in chosen if not 0 <= rank < self.world_size]
        if beyond or not chosen:
            wrong = f"has no rank {beyond[0]}" if beyond else "was asked for no rank"
            raise ValueError(f"{self.name} {wrong}; it has 0 to {self.world_size - 1}")
        return RankSelection(self, chosen)

    def wait_ready(self, timeout: float | None = None) -> WorkerGroup:
        """Wait until every worker is constructed; raise the first constructor failure."""
        refs = [host._roost_ready.remote() for host in self.hosts]
        GroupResult(refs, range(self.world_size), self.name, "__init__", self._failures).wait(timeout)
        return self

    def mark_closed(self) -> None:
        """Mark the group as closed, because its cluster is stopping the workers."""
        self._is_closed = True

    def close(self) -> None:
        """Stop the workers and release the resources that only this group holds."""
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
    """Selected ranks of a group."""

    def __init__(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    def __getattr__(self, method: str) -> Callable[..., GroupResult]:
        if method.startswith("_") or method not in public_methods(self._group.worker_class):
            raise AttributeError(f"{self._group.worker_class.__name__} has no public method {method}")
        return functools.partial(self._group._call, method, self._ranks)


def check_methods(cls: type[Worker]) -> None:
    """Raise ValueError if a worker's public method would shadow an attribute of WorkerGroup."""
    own = {*dir(WorkerGroup), "name", "hosts", "worker_class"}
    hidden = next((method for method in public_methods(cls) if method in own), None)
    if hidden is not None:
        raise ValueError(f"{cls.__name__}.{hidden} would hide the group's own {hidden}; rename the method")


def check_name(name: str, used_names: Collection[str]) -> None:
    """Raise ValueError if a name is invalid or in use; it is part of workers' addresses and of log paths."""
    if not name or any(part in name for part in (":", "/", "\0")) or name in (".", "..") or name == DRIVER.group:
        raise ValueError(f"a group cannot be called {name!r}; use letters, digits, '.', '_' and '-'")
    if name in used_names:
        raise ValueError(f"there is a group {name} already; give this one another name, or close that one first")


def shared(value: Any) -> Any:
    """Put a large argument of a call on several ranks into the object store once; return others unchanged."""
    size = getattr(value, "nbytes", None)
    if size is None and isinstance(value, bytes | bytearray | str):
        size = len(value)
    return ray.put(value) if isinstance(size, int) and size > LARGE else value
