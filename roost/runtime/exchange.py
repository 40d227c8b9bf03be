"""What a node's agent does for the workers of its node: messages, channels, locks, ports and shared memory.

A request is served here where its mailbox, channel or device is on this node, and handed to the other node's agent
through Ray where it is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from roost.runtime.address import Address
from roost.runtime.device_locks import DeviceLocks
from roost.runtime.directory import ChannelEntry, GroupEntry
from roost.runtime.failure import WaitedTooLong
from roost.runtime.freight import Freight, load, unload
from roost.runtime.parcel import Parcel
from roost.runtime.ports import PortLeases
from roost.runtime.post_office import PostOffice
from roost.runtime.segments import NoRoom, SegmentPool, SegmentRef, shared_memory_limit

T = TypeVar("T")
Answer = tuple[Any, list[Parcel]]
ROOM_LIMIT = 600.0  # seconds that a message waits for others to drop what they received
LOOK_UP_LIMIT = 60.0  # seconds that a message waits for a group or channel to come into being


class Full(asyncio.QueueFull):
    """A channel has no room, and the caller did not want to wait."""


class Empty(asyncio.QueueEmpty):
    """A channel has nothing, and the caller did not want to wait."""


class Exchange:
    """Serves the requests of one node's workers. `ask_node` reaches the other agents, `look_up` the job's directory."""

    def __init__(
        self,
        node: int,
        ask_node: Callable[..., Awaitable[tuple[Any, list[Freight]]]],
        look_up: Callable[..., Awaitable[Any]],
        last_failure: Callable[[Address], Awaitable[str]],
    ) -> None:
        self.node = node
        self._ask_node, self._look_up, self._last_failure = ask_node, look_up, last_failure
        self.post = PostOffice(self._give_back)
        self.pool = SegmentPool(shared_memory_limit())
        self.locks = DeviceLocks()
        self.ports = PortLeases()
        self._groups: dict[str, GroupEntry] = {}
        self._channels: dict[str, ChannelEntry] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._leased: defaultdict[Address, list[int]] = defaultdict(list)
        self._held: defaultdict[Address, Counter[int]] = defaultdict(Counter)  # segments that a worker has in hand
        self._at_work: defaultdict[Address, set[asyncio.Task[Any]]] = defaultdict(set)
        self._wanting_room: list[asyncio.Future[None]] = []

    async def serve(self, who: Address, op: str, args: tuple[Any, ...], parcels: Sequence[Parcel]) -> Answer:
        """Serve one request of a worker of this node. What it is given is in its hands until it releases it."""
        lost = self.post.lost(who)
        if lost is not None and op != "hello":
            raise lost  # its last words: what it held is free already, and a lock would never be given back
        task = asyncio.current_task()
        if task is not None:
            self._at_work[who].add(task)
        for parcel in parcels:
            if parcel.segment is not None:
                self._held[who][parcel.segment.number] -= 1
        try:
            value, out = await self._dispatch(who, op, args, list(parcels))
        finally:
            if task is not None:
                self._at_work[who].discard(task)
        for parcel in out:
            self._hand_over(who, parcel)
        if op in ("send", "put") and parcels and parcels[0].segment is not None:
            value = self._spare(who, parcels[0].segment.size)
        return value, out

    def _spare(self, who: Address, size: int) -> SegmentRef | None:
        """A segment for the next message, which will often be as large: so the sender need not ask for one first."""
        if self.post.lost(who) is not None or not self.pool.has_plenty_for(size):
            return None
        try:
            segment = self.pool.allocate(size)
        except NoRoom:
            return None
        self._held[who][segment.number] += 1
        return segment

    async def serve_node(
        self, who: Address, op: str, args: tuple[Any, ...], freight: Sequence[Freight]
    ) -> tuple[Any, list[Freight]]:
        """Serve a request that another node's agent hands on for one of its workers."""
        lost = self.post.lost(who)
        if lost is not None:
            raise lost
        task = asyncio.current_task()
        if task is not None:
            self._at_work[who].add(task)
        try:
            value, out = await self._dispatch(who, op, args, await self._unload(freight))
            return value, [load(parcel, self._give_back) for parcel in out]
        finally:
            if task is not None:
                self._at_work[who].discard(task)

    async def _dispatch(self, who: Address, op: str, args: tuple[Any, ...], parcels: list[Parcel]) -> Answer:
        match op:
            case "hello":
                return None, []
            case "allocate":
                segment = await self.allocate(*args)
                self._held[who][segment.number] += 1
                return segment, []
            case "send":
                kind, to, timeout = args
                await self._send(who, kind, to, timeout, parcels[0])
                return None, []
            case "receive":
                return None, await self._receive(who, *args)
            case "put":
                name, key, weight, timeout = args
                return await self._put(who, name, key, weight, timeout, parcels)
            case "get":
                return await self._get(who, *args)
            case "channel":
                return await self._channel_request(who, *args)
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
                return await self._group(*args), []
        raise ValueError(f"unknown request {op}")

    # Messages -----------------------------------------------------------------------------------------------------

    async def _send(
        self, who: Address, kind: str, to: Sequence[Sequence[Any]], timeout: float | None, parcel: Parcel
    ) -> None:
        try:
            by_node: defaultdict[int, list[Address]] = defaultdict(list)
            for receiver in (Address(*parts) for parts in to):
                by_node[await self._node_of(receiver)].append(receiver)
            here = by_node.pop(self.node, [])
            shared = parcel._replace(is_shared=len(to) > 1)
            waits = self._deliver_here(who, kind, here, shared)
            await asyncio.gather(
                *(
                    self._forward(node, who, "send", (kind, [tuple(to) for to in away], timeout), [parcel], keep=True)
                    for node, away in by_node.items()
                ),
                *(
                    within(wait, timeout, f"{receiver} took nothing of {who} for {timeout or 0:g} s".__str__)
                    for receiver, wait in waits
                ),
            )
        finally:
            self._give_back(parcel)  # each receiver of this node has a share of its own

    def _deliver_here(
        self, who: Address, kind: str, to: Sequence[Address], parcel: Parcel
    ) -> list[tuple[Address, asyncio.Future[None]]]:
        lost = next((self.post.lost(receiver) for receiver in to if self.post.lost(receiver)), None)
        if lost is not None:
            raise lost
        waits = []
        for receiver in to:
            wait = self.post.deliver(receiver, who, kind, parcel)
            if parcel.segment is not None:
                self.pool.share(parcel.segment.number, 1)
            if wait is not None:
                self._give_back_unless_in(parcel, wait)
                waits.append((receiver, wait))
        return waits

    def _give_back_unless_in(self, parcel: Parcel, wait: asyncio.Future[None]) -> None:
        wait.add_done_callback(lambda wait: None if has_result(wait) else self._give_back(parcel))

    async def _receive(self, who: Address, kind: str, source: Sequence[Any], timeout: float | None) -> list[Parcel]:
        sender = Address(*source)
        await self._node_of(sender)  # a group that was never launched is an error, not a wait
        future = self.post.collect(who, sender, kind)
        try:
            return await self._taken(
                future, timeout, lambda: f"nothing came from {sender} to {who} within {timeout:g} s"
            )
        except WaitedTooLong as error:
            failed = await self._last_failure(sender)
            raise WaitedTooLong(f"{error}{f'; its last failure: {failed}' if failed else ''}") from None

    async def _taken(
        self, future: asyncio.Future[list[Parcel]], timeout: float | None, otherwise: Callable[[], str]
    ) -> list[Parcel]:
        try:
            return await within(future, timeout, otherwise)
        except asyncio.CancelledError:
            if has_result(future):  # it came at the moment in which the one who waited for it was lost
                for parcel in future.result():
                    self._give_back(parcel)
            raise

    async def _node_of(self, who: Address) -> int:
        group = await self._group(who.group)
        if not 0 <= who.rank < len(group.nodes):
            raise LookupError(f"group {who.group} has ranks 0 to {len(group.nodes) - 1}, not {who.rank}")
        return group.nodes[who.rank]

    async def _group(self, name: str, timeout: float = LOOK_UP_LIMIT) -> GroupEntry:
        if name not in self._groups:
            # All who ask meanwhile wait for one answer, and go on in the order they came.
            if name not in self._asked:
                self._asked[name] = asyncio.ensure_future(self._look_up("group", name, timeout))
                self._asked[name].add_done_callback(lambda _: self._asked.pop(name, None))
            self._groups[name] = GroupEntry(*await asyncio.shield(self._asked[name]))
        return self._groups[name]

    def forget_group(self, name: str) -> None:
        self._groups.pop(name, None)

    # Channels -----------------------------------------------------------------------------------------------------

    async def _channel(self, name: str) -> ChannelEntry:
        if name not in self._channels:
            self._channels[name] = ChannelEntry(*await self._look_up("channel", name, LOOK_UP_LIMIT))
        entry = self._channels[name]
        if entry.node == self.node:
            self.post.open_channel(name, entry.maxsize)
        return entry

    async def _put(
        self, who: Address, name: str, key: Hashable, weight: float, timeout: float | None, parcels: list[Parcel]
    ) -> Answer:
        try:
            entry = await self._channel(name)
            is_here = entry.node == self.node
            wait = self.post.put(name, key, who, weight, parcels[0]) if is_here else None
        except BaseException:
            self._give_back(parcels[0])
            raise
        if not is_here:
            return await self._forward(entry.node, who, "put", (name, key, weight, timeout), parcels)
        if wait is not None:
            self._give_back_unless_in(parcels[0], wait)
            if timeout == 0:
                wait.cancel()
                raise Full(f"channel {name} is full")
            await within(wait, timeout, lambda: f"channel {name} stayed full for {timeout:g} s")
        return None, []

    async def _get(self, who: Address, name: str, key: Hashable, target: float | None, timeout: float | None) -> Answer:
        entry = await self._channel(name)
        if entry.node != self.node:
            return await self._forward(entry.node, who, "get", (name, key, target, timeout), [])
        future = self.post.get(name, key, who, target)
        if timeout == 0 and not future.done():
            future.cancel()
            raise Empty(f"channel {name} is empty")
        return None, await self._taken(future, timeout, lambda: f"channel {name} gave nothing for {timeout:g} s")

    async def _channel_request(self, who: Address, what: str, name: str, *args: Any) -> Answer:
        if what == "create":
            entry = ChannelEntry(*await self._look_up("add_channel", ChannelEntry(name, *args)))
            self._channels[name] = entry
            return entry, []
        entry = await self._channel(name)
        if entry.node != self.node:
            return await self._forward(entry.node, who, "channel", (what, name, *args), [])
        match what:
            case "connect":
                return entry, []
            case "size":
                return self.post.size(name, *args), []
            case "full":
                return self.post.is_full(name, *args), []
            case "sizes":
                return self.post.sizes(name), []
            case "close":
                self.post.close_channel(name)
                return None, []
        raise ValueError(f"unknown request {what}")

    # Locks, memory, and who is gone -------------------------------------------------------------------------------

    async def _lock(self, who: Address, devices: Iterable[int], timeout: float | None) -> None:
        wanted = tuple(devices)

        def who_holds() -> str:
            holders = ", ".join(f"{device} by {holder}" for device, holder in self.locks.holders(wanted).items())
            return f"{who} waited {timeout:g} s for the lock of devices held: {holders or 'none'}"

        await within(self.locks.acquire(who, wanted), timeout, who_holds)

    async def allocate(self, nbytes: int) -> SegmentRef:
        """Shared memory; where all is in use, wait until some is given back."""
        while True:
            try:
                return self.pool.allocate(nbytes)
            except NoRoom as error:
                late = f"no room in shared memory for {ROOM_LIMIT:g} s: {error}"
                if not self.pool.can_ever_hold(nbytes):
                    raise
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._wanting_room.append(waiter)
                await within(waiter, ROOM_LIMIT, late.__str__)

    def release(self, who: Address, numbers: Iterable[int]) -> None:
        """A worker has dropped what it was given in these segments."""
        held = self._held[who]
        for number in numbers:
            if held[number] > 0:  # else it was freed with a worker that is gone
                held[number] -= 1
                self.pool.release(number)
        self._tell_of_room()

    def _hand_over(self, who: Address, parcel: Parcel) -> None:
        if parcel.segment is None:
            return
        if self.post.lost(who) is not None:
            self._give_back(parcel)
        else:
            self._held[who][parcel.segment.number] += 1

    def _give_back(self, parcel: Parcel) -> None:
        if parcel.segment is not None:
            self.pool.release(parcel.segment.number)
            self._tell_of_room()

    def _tell_of_room(self) -> None:
        waiters, self._wanting_room = self._wanting_room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def lose(self, who: Address, why: str, returns: bool) -> None:
        """A worker of the job is gone: end the waits for it, and free what it held on this node."""
        self.post.lose(who, why, returns)
        for task in self._at_work.pop(who, ()):
            task.cancel()
        self.locks.release_all(who)
        for port in self._leased.pop(who, ()):
            self.ports.release(port)
        for number, count in self._held.pop(who, Counter()).items():
            for _ in range(count):
                self.pool.release(number)
        self._tell_of_room()

    async def _forward(
        self, node: int, who: Address, op: str, args: tuple[Any, ...], parcels: Sequence[Parcel], keep: bool = False
    ) -> Answer:
        freight = [load(parcel, (lambda _: None) if keep else self._give_back) for parcel in parcels]
        value, back = await self._ask_node(node, who, op, args, freight)
        return value, await self._unload(back)

    async def _unload(self, freight: Sequence[Freight]) -> list[Parcel]:
        parcels: list[Parcel] = []
        try:
            for piece in freight:
                parcels.append(await unload(piece, self.allocate, self._give_back))
        except BaseException:
            for parcel in parcels:
                self._give_back(parcel)
            raise
        return parcels


async def within(future: asyncio.Future[T], timeout: float | None, otherwise: Callable[[], str]) -> T:
    """A future's result; an error if it takes too long, or where the one who waits is gone."""
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout)
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise WaitedTooLong(otherwise())
    return future.result()


def has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
