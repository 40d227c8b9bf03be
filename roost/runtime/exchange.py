"""What a node's agent does for the workers of its node: messages, channels, locks, ports and shared memory.

A request is served here where its mailbox, channel or device is on this node, and handed to the other node's agent
through Ray where it is not.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from roost.runtime.address import Address
from roost.runtime.channel_service import ChannelService
from roost.runtime.deadline import Deadline
from roost.runtime.device_locks import DeviceLocks
from roost.runtime.freight import Consignment, Freight
from roost.runtime.mail import Answer, Mail
from roost.runtime.node_memory import NodeMemory
from roost.runtime.parcel import Parcel
from roost.runtime.ports import PortLeases
from roost.runtime.post_office import PostOffice
from roost.runtime.segments import SegmentPool, shared_memory_limit
from roost.runtime.waits import within


class Exchange:
    """Serves the requests of one node's workers. `ask_node` reaches the other agents, `look_up` the job's directory.

    `num_nodes` is how many nodes the job has, where that is known.
    """

    def __init__(
        self,
        node: int,
        ask_node: Callable[..., Awaitable[tuple[Any, list[Freight]]]],
        look_up: Callable[..., Awaitable[Any]],
        last_failure: Callable[[Address], Awaitable[str]],
        num_nodes: int | None = None,
    ) -> None:
        self.node = node
        self._ask_node = ask_node
        self.memory = NodeMemory(shared_memory_limit())
        self.post = PostOffice(self.memory.give_back)
        self.locks = DeviceLocks()
        self.ports = PortLeases()
        self._mail = Mail(node, self.post, self.memory, self._hand_on, look_up, last_failure)
        self._channels = ChannelService(node, self.post, self.memory, self._hand_on, look_up, num_nodes)
        self._leased: defaultdict[Address, list[int]] = defaultdict(list)
        self._at_work: defaultdict[Address, set[asyncio.Task[Any]]] = defaultdict(set)

    @property
    def pool(self) -> SegmentPool:
        return self.memory.pool

    async def serve(self, who: Address, op: str, args: tuple[Any, ...], parcels: Sequence[Parcel]) -> Answer:
        """Serve one request of a worker of this node. What it is given is in its hands until it releases it."""
        lost = self.post.lost(who)
        if lost is not None and op != "hello":
            raise lost  # its last words: what it held is free already, and a lock would never be given back
        self.memory.take_over(who, parcels)
        with self._working_for(who):
            value, out = await self._dispatch(who, op, args, list(parcels))
        is_there = self.post.lost(who) is None
        for parcel in out:
            if not is_there:
                self.memory.give_back(parcel)
            elif parcel.segment is not None:
                self.memory.hand_over(who, parcel.segment)
        if op in ("send", "put") and parcels and parcels[0].segment is not None and is_there:
            value = self.memory.spare(who, parcels[0].segment.size)
        return value, out

    async def serve_node(
        self, who: Address, op: str, args: tuple[Any, ...], freight: Sequence[Freight]
    ) -> tuple[Any, list[Freight]]:
        """Serve a request that another node's agent hands on for one of its workers."""
        lost = self.post.lost(who)
        if lost is not None:
            raise lost
        if op in ("put", "get", "channel"):
            self._channels.doubt(args[1] if op == "channel" else args[0])
        with self._working_for(who):
            value, out = await self._dispatch(who, op, args, await self.memory.unload_all(freight))
            return value, await self.memory.load_all(out)

    @contextmanager
    def _working_for(self, who: Address) -> Iterator[None]:
        """Let what is done for a worker end when it is lost."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is served in a task, or it could not be ended")
        self._at_work[who].add(task)
        try:
            yield
        finally:
            self._at_work[who].discard(task)
            if not self._at_work[who]:
                del self._at_work[who]

    async def _dispatch(self, who: Address, op: str, args: tuple[Any, ...], parcels: list[Parcel]) -> Answer:
        match op:
            case "hello":
                return None, []
            case "allocate":
                segment = await self.memory.allocate(*args)
                self.memory.hand_over(who, segment)
                return segment, []
            case "send":
                kind, to, timeout = args
                await self._mail.send(who, kind, to, Deadline.of(timeout), parcels[0])
                return None, []
            case "receive":
                kind, source, timeout = args
                return None, await self._mail.receive(who, kind, source, Deadline.of(timeout))
            case "put":
                name, key, weight, timeout = args
                return await self._channels.put(who, name, key, weight, Deadline.of(timeout), parcels[0])
            case "get":
                name, key, target, timeout = args
                return await self._channels.get(who, name, key, target, Deadline.of(timeout))
            case "channel":
                return await self._channels.request(who, *args)
            case "lock":
                await self._lock(who, *args)
                return None, []
            case "unlock":
                self.locks.release(who, *args)
                return None, []
            case "port":
                port = self.ports.lease()
                self._leased[who].append(port)
                return port, []
            case "group":
                name, *limit = args
                return await self._mail.group(name, Deadline.of(limit[0] if limit else None)), []
        raise ValueError(f"unknown request {op}")

    async def _hand_on(
        self, node: int, who: Address, op: str, args: tuple[Any, ...], load: Consignment | None = None
    ) -> Answer:
        value, back = await self._ask_node(node, who, op, args, load or self.memory.consign())
        return value, await self.memory.unload_all(back)

    async def _lock(self, who: Address, devices: Iterable[int], timeout: float | None) -> None:
        wanted = tuple(devices)

        def who_holds() -> str:
            holders = ", ".join(f"{device} by {holder}" for device, holder in self.locks.holders(wanted).items())
            return f"{who} waited {timeout:g} s for the lock of devices held: {holders or 'none'}"

        await within(self.locks.acquire(who, wanted), timeout, who_holds)

    def release(self, who: Address, numbers: Iterable[int]) -> None:
        """A worker has dropped what it was given in these segments."""
        self.memory.release(who, numbers)

    def lose(self, who: Address, why: str, returns: bool) -> None:
        """A worker of the job is gone: end the waits for it, and free what it held on this node."""
        self.post.lose(who, why, returns)
        self._free(who)

    def forget(self, addresses: Iterable[Address]) -> None:
        """These workers were ended on purpose, with their groups: free what they held, and know them no longer."""
        gone = tuple(addresses)
        self._mail.forget_groups({who.group for who in gone})
        for who in gone:
            self.post.forget(who)
            self._free(who)

    def _free(self, who: Address) -> None:
        for task in tuple(self._at_work.get(who, ())):
            task.cancel()
        self.locks.release_all(who)
        for port in self._leased.pop(who, ()):
            self.ports.release(port)
        self.memory.free(who)
