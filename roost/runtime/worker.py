"""The class that users derive their workers from."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from roost.transport import current
from roost.transport.channel import Channel
from roost.transport.current import ProcessSetup
from roost.transport.failure import Address
from roost.transport.transfer import MESSAGE, Groups, Transfer, transfer_limit

if TYPE_CHECKING:
    from roost.runtime.group import GroupSpec

Method = TypeVar("Method", bound=Callable[..., Any])


class Worker:
    """A process of a component. Derive from it, and launch a group of it.

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
                f"{name} is not made by calling it; write {name}.create_group(...).launch(cluster, name=...), "
                "which makes one in each process"
            )

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupSpec:
        """A group of workers of this class, to be launched; each is made with these arguments."""
        from roost.runtime.group import GroupSpec

        return GroupSpec(cls, args, kwargs)

    # Who and where it is ------------------------------------------------------------------------------------------

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
        """Everything it was started with: placement, environment, devices and hardware."""
        return self._setup

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators it holds, as the vendor calls them."""
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
        """The configs of the declared devices it holds, such as a robot's address and cameras."""
        return self._setup.hardware

    # Talking to others --------------------------------------------------------------------------------------------

    def send(
        self,
        obj: Any,
        dst_group_name: str,
        dst_rank: int,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send an object to a worker; returns when its node has it. With `async_op`, at once: wait for it or await it.

        Tensors and arrays, however deep in containers, go through shared memory on one machine.
        """
        to = Address(dst_group_name, dst_rank)
        pending = self._transfer.send(obj, [to], MESSAGE, timeout)
        return pending if async_op else self._waited(f"send {to}", pending.wait)

    def recv(self, src_group_name: str, src_rank: int, async_op: bool = False, timeout: float | None = None) -> Any:
        """The next object that a worker sent to this one; tensors in it are this worker's to change."""
        source = Address(src_group_name, src_rank)
        pending = self._transfer.receive(source, MESSAGE, timeout)
        return pending if async_op else self._waited(f"recv {source}", pending.wait)

    def broadcast(
        self,
        obj: Any = None,
        groups: Groups = (),
        src: Address | tuple[str, int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Give one worker's object to several groups' workers. All of them call it with the same groups.

        `groups` are pairs of a group's name and a rank, a list of ranks, or None for all. The source is the first
        worker named, unless `src` says otherwise; the others' `obj` is ignored. Everyone gets the object.
        """
        pending = self._transfer.broadcast(obj, groups, Address(*src) if src is not None else None, timeout)
        return pending if async_op else self._waited("broadcast", pending.wait)

    def send_to(self, group_name: str, batch: Any, batch_size: int | None = None, tag: str = "") -> None:
        """Send this worker's share of a batch to all of a group, each member its rows; they call `recv_from`.

        The batch is spread over this group's workers in rank order. `batch_size` counts the rows of all of them; left
        out, each has as many as this one.
        """
        from roost.transport import batches

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
        """This worker's rows of a batch of so many rows that a group sends with `send_to`."""
        from roost.transport import batches

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
        """Hold this worker's accelerators alone, of all workers that share them and ask. Freed if the worker dies."""
        link = current.get().link
        devices = self._setup.devices
        limit = transfer_limit(timeout)
        self._waited("device lock", lambda: link.ask("lock", devices, limit))
        try:
            yield
        finally:
            link.ask("unlock", devices)

    def acquire_free_port(self) -> int:
        """A port of this node that is this worker's until it ends."""
        port: int = current.get().link.ask("port")
        return port

    # Timing and logs ----------------------------------------------------------------------------------------------

    def worker_timer(self, tag: str | None = None, trace: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Time what is done inside: it adds up under the tag, and is a span of the trace."""
        name = tag or sys._getframe(1).f_code.co_name
        return current.get().recorder.timer(name, trace=trace)

    @staticmethod
    def timer(tag: str | None = None, trace: bool = True) -> Callable[[Method], Method]:
        """Time every call of a method, asynchronous ones included."""

        def decorate(method: Method) -> Method:
            name = tag or method.__name__
            if inspect.iscoroutinefunction(method):

                @functools.wraps(method)
                async def timed_async(*args: Any, **kwargs: Any) -> Any:
                    with current.get().recorder.timer(name, trace=trace):
                        return await method(*args, **kwargs)

                return timed_async  # type: ignore[return-value]

            @functools.wraps(method)
            def timed(*args: Any, **kwargs: Any) -> Any:
                with current.get().recorder.timer(name, trace=trace):
                    return method(*args, **kwargs)

            return timed  # type: ignore[return-value]

        return decorate

    def pop_execution_time(self, tag: str) -> float:
        return current.get().recorder.pop_time(tag)

    def pop_execution_times(self) -> dict[str, float]:
        return current.get().recorder.pop_times()

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
        import time

        print(f"{time.strftime('%H:%M:%S')} {logging.getLevelName(level):7} {text}", flush=True)

    @property
    def _transfer(self) -> Transfer:
        return Transfer(current.get())

    def _waited(self, what: str, wait: Callable[[], Any]) -> Any:
        with current.get().recorder.span(what, "wait"):
            return wait()


def public_methods(cls: type[Worker]) -> Sequence[str]:
    """The methods that a group of the class has: every public one."""
    return [
        name
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and callable(member) and name not in ("create_group", "timer")
    ]
