"""Services of a node daemon for its workers: messages, channels, locks, ports and shared memory.

A request is served here if its mailbox, channel or device is on this node, and otherwise forwarded to the other node's
daemon through Ray.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roost.net.addresses import PortLeases
from roost.transport.context import Address, WaitedTooLong
from roost.transport.directory import ChannelEntry, GroupEntry
from roost.transport.mailboxes import NodeQueues, OrderedLock, OrderedLocks
from roost.transport.shared_memory import (
    NodeMemory,
    OutgoingBatch,
    Packet,
    SegmentPool,
    WirePacket,
    shared_memory_limit,
)
from roost.transport.waits import Deadline, within

LOOK_UP_LIMIT = 60.0  # seconds that a request waits for a group or channel to appear
UNBOUNDED = Deadline.of(None)
Answer = tuple[Any, list[Packet]]  # of a request: its value, and the packets it returns


class Exchange:
    """Serves the requests of one node's workers. `ask_node` calls other daemons, `look_up` the job's directory.

    `num_nodes` is the number of nodes of the job, if known.
    """

    def __init__(
        self,
        node: int,
        ask_node: Callable[..., Awaitable[tuple[Any, list[WirePacket]]]],
        look_up: Callable[..., Awaitable[Any]],
        last_failure: Callable[[Address], Awaitable[str]],
        num_nodes: int | None = None,
    ) -> None:
        self.node = node
        self._ask_node = ask_node
        self.memory = NodeMemory(shared_memory_limit())
        self.queues = NodeQueues(self.memory.release_packet)
        self.locks = DeviceLocks()
        self.ports = PortLeases()
        self._router = MessageRouter(node, self.queues, self.memory, self._forward, look_up, last_failure)
        self._channels = ChannelService(node, self.queues, self.memory, self._forward, look_up, num_nodes)
        self._leased: defaultdict[Address, list[int]] = defaultdict(list)
        self._tasks: defaultdict[Address, set[asyncio.Task[Any]]] = defaultdict(set)  # requests being served

    @property
    def pool(self) -> SegmentPool:
        return self.memory.pool

    async def serve(self, who: Address, op: str, args: tuple[Any, ...], packets: Sequence[Packet]) -> Answer:
        """Serve one request of a worker of this node, which holds the returned segments until it releases them."""
        lost = self.queues.lost(who)
        if lost is not None and op != "hello":
            raise lost  # its resources are already freed, and a lock would never be released
        self.memory.take_over(who, packets)
        with self._working_for(who):
            value, out = await self._dispatch(who, op, args, list(packets))
        is_alive = self.queues.lost(who) is None
        for packet in out:
            if not is_alive:
                self.memory.release_packet(packet)
            elif packet.segment is not None:
                self.memory.hand_over(who, packet.segment)
        if op in ("send", "put") and packets and packets[0].segment is not None and is_alive:
            value = self.memory.spare(who, packets[0].segment.size)
        return value, out

    async def serve_node(
        self, who: Address, op: str, args: tuple[Any, ...], wire: Sequence[WirePacket]
    ) -> tuple[Any, list[WirePacket]]:
        """Serve a request that another node's daemon forwards for one of its workers."""
        lost = self.queues.lost(who)
        if lost is not None:
            raise lost
        if op in ("put", "get", "channel"):
            self._channels.drop_stale_entry(args[1] if op == "channel" else args[0])
        with self._working_for(who):
            value, out = await self._dispatch(who, op, args, await self.memory.from_wire_packets(wire))
            return value, await self.memory.to_wire_packets(out)

    @contextmanager
    def _working_for(self, who: Address) -> Iterator[None]:
        """Context in which the current task is cancelled if the worker is lost."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests must be served in a task, so that they can be cancelled")
        self._tasks[who].add(task)
        try:
            yield
        finally:
            self._tasks[who].discard(task)
            if not self._tasks[who]:
                del self._tasks[who]

    async def _dispatch(self, who: Address, op: str, args: tuple[Any, ...], packets: list[Packet]) -> Answer:
        match op:
            case "hello":
                return None, []
            case "allocate":
                segment = await self.memory.allocate(*args)
                self.memory.hand_over(who, segment)
                return segment, []
            case "send":
                kind, to, timeout = args
                await self._router.send(who, kind, to, Deadline.of(timeout), packets[0])
                return None, []
            case "receive":
                kind, source, timeout = args
                return None, await self._router.receive(who, kind, source, Deadline.of(timeout))
            case "put":
                name, key, weight, timeout = args
                return await self._channels.put(who, name, key, weight, Deadline.of(timeout), packets[0])
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
                return await self._router.group(name, Deadline.of(limit[0] if limit else None)), []
        raise ValueError(f"unknown request {op}")

    async def _forward(
        self, node: int, who: Address, op: str, args: tuple[Any, ...], outgoing: OutgoingBatch | None = None
    ) -> Answer:
        value, back = await self._ask_node(node, who, op, args, outgoing or self.memory.outgoing())
        return value, await self.memory.from_wire_packets(back)

    async def _lock(self, who: Address, devices: Iterable[int], timeout: float | None) -> None:
        wanted = tuple(devices)

        def who_holds() -> str:
            holders = ", ".join(f"{device} by {holder}" for device, holder in self.locks.holders(wanted).items())
            names = ", ".join(map(str, sorted(wanted)))
            return (
                f"{who} did not get the lock of devices {names} within {timeout:g} s; held: {holders or 'none'}; "
                "raise the timeout, or release the lock earlier"
            )

        await within(self.locks.acquire(who, wanted), timeout, who_holds)

    def release(self, who: Address, numbers: Iterable[int]) -> None:
        """Release segments that a worker no longer uses."""
        self.memory.release(who, numbers)

    def lose(self, who: Address, why: str, will_restart: bool) -> None:
        """Handle the loss of a worker: end waits for it, and free what it held on this node."""
        self.queues.lose(who, why, will_restart)
        self._free(who)

    def forget(self, addresses: Iterable[Address]) -> None:
        """Remove workers that were stopped with their groups, and free what they held."""
        gone = tuple(addresses)
        self._router.forget_groups({who.group for who in gone})
        for who in gone:
            self.queues.forget(who)
            self._free(who)

    def _free(self, who: Address) -> None:
        for task in tuple(self._tasks.get(who, ())):
            task.cancel()
        self.locks.release_all(who)
        for port in self._leased.pop(who, ()):
            self.ports.release(port)
        self.memory.free(who)


class Full(asyncio.QueueFull):
    """Raised if a channel is full and the caller does not wait."""


class Empty(asyncio.QueueEmpty):
    """Raised if a channel is empty and the caller does not wait."""


def _stayed_full(name: str, deadline: Deadline) -> str:
    return f"channel {name} stayed full for {deadline}; raise the timeout, or check the workers that get"


class ChannelService:
    """Puts and gets for the workers of one node, and for other nodes' workers whose channels are here.

    Items that one worker puts under one key keep their order, as messages of a pair do.
    """

    def __init__(
        self,
        node: int,
        queues: NodeQueues,
        memory: NodeMemory,
        forward: Callable[..., Awaitable[Answer]],
        look_up: Callable[..., Awaitable[Any]],
        num_nodes: int | None,
    ) -> None:
        self._node, self._queues, self._memory, self._num_nodes = node, queues, memory, num_nodes
        self._forward, self._look_up = forward, look_up
        self._entries: dict[str, ChannelEntry] = {}
        self._arrivals, self._forwards = OrderedLocks(), OrderedLocks()

    async def put(
        self, who: Address, name: str, key: Hashable, weight: float, deadline: Deadline, packet: Packet
    ) -> Answer:
        wait = None
        try:
            with self._arrivals.take([(who, name, key)]) as turn:
                entry = await self._entry(name, deadline)
                await turn.wait_turn()  # after earlier requests, which look up the same names
                if entry.node == self._node:
                    wait = self._queues.put(name, key, who, weight, packet)
                else:
                    forward_turn = self._forwards.take([(who, name, key)])
        except BaseException:
            self._memory.release_packet(packet)
            raise
        if entry.node != self._node:
            return await self._put_remote(forward_turn, entry, who, (name, key, weight), deadline, packet)
        if wait is not None:
            self._memory.release_unless_delivered(packet, wait)
            if deadline.does_not_wait:
                wait.cancel()
                raise Full(f"channel {name} is full")
            await within(wait, deadline.left(), _stayed_full(name, deadline))
        return None, []

    async def _put_remote(
        self,
        turn: OrderedLock,
        entry: ChannelEntry,
        who: Address,
        args: tuple[Any, ...],
        deadline: Deadline,
        packet: Packet,
    ) -> Answer:
        try:
            with turn:
                if not await turn.wait_turn(deadline.left()):
                    if deadline.does_not_wait:
                        raise Full(f"channel {entry.name} is full, or still has to accept an earlier item of {who}")
                    raise WaitedTooLong(_stayed_full(entry.name, deadline))
                outgoing = self._memory.outgoing([packet])
                return await self._forward(entry.node, who, "put", (*args, deadline.forwarded), outgoing)
        finally:
            self._memory.release_packet(packet)

    async def get(self, who: Address, name: str, key: Hashable, target: float | None, deadline: Deadline) -> Answer:
        with self._arrivals.take([(who, name, key, "get")]) as turn:
            entry = await self._entry(name, deadline)
            await turn.wait_turn()
            future = self._queues.get(name, key, who, target) if entry.node == self._node else None
        if future is None:
            return await self._forward(entry.node, who, "get", (name, key, target, deadline.forwarded))
        if deadline.does_not_wait and not future.done():
            future.cancel()
            raise Empty(f"channel {name} is empty")
        stayed_empty = f"channel {name} stayed empty for {deadline}; raise the timeout, or check the workers that put"
        return None, await self._memory.wait_for(future, deadline.left(), stayed_empty)

    async def request(self, who: Address, what: str, name: str, *args: Any) -> Answer:
        match what:
            case "create":
                return await self._create(who, ChannelEntry(name, *args)), []
            case "renew":
                return await self._renew(ChannelEntry(*args[0]), ChannelEntry(*args[1])), []
        entry = await self._entry(name, UNBOUNDED)
        if entry.node != self._node:
            return await self._forward(entry.node, who, "channel", (what, name, *args))
        match what:
            case "connect":
                return entry, []
            case "size":
                return self._queues.size(name, *args), []
            case "full":
                return self._queues.is_full(name, *args), []
            case "sizes":
                return self._queues.sizes(name), []
            case "close":
                self._queues.close_channel(name)
                return None, []
        raise ValueError(f"unknown request {what}")

    def drop_stale_entry(self, name: str) -> None:
        """Drop a cached entry that places the channel on another node, because a request for it arrived here."""
        if name in self._entries and self._entries[name].node != self._node:
            del self._entries[name]

    async def _create(self, who: Address, wanted: ChannelEntry) -> ChannelEntry:
        if self._num_nodes is not None and not 0 <= wanted.node < self._num_nodes:
            nodes = f"0 to {self._num_nodes - 1}" if self._num_nodes > 1 else "only node 0"
            raise ValueError(f"channel {wanted.name} cannot be on node {wanted.node}: this job has {nodes}")
        known = ChannelEntry(*await self._look_up("add_channel", wanted))
        if known.node == self._node:
            return await self._renew(known, wanted)
        answer, _ = await self._forward(known.node, who, "channel", ("renew", wanted.name, known, wanted))
        return self._keep(ChannelEntry(*answer))

    async def _renew(self, known: ChannelEntry, wanted: ChannelEntry) -> ChannelEntry:
        """Return this node's channel; one that is closed and empty is replaced by the wanted one."""
        if self._queues.is_spent(known.name, known.serial):
            known = ChannelEntry(*await self._look_up("replace_channel", known, wanted))
        return self._keep(known)

    async def _entry(self, name: str, deadline: Deadline) -> ChannelEntry:
        entry = self._entries.get(name)
        if entry is None:
            return self._keep(ChannelEntry(*await self._look_up("channel", name, deadline.at_most(LOOK_UP_LIMIT))))
        return entry

    def _keep(self, entry: ChannelEntry) -> ChannelEntry:
        known = self._entries.get(entry.name)
        if known is not None and known.serial > entry.serial:
            return known
        self._entries[entry.name] = entry
        if entry.node == self._node:
            self._queues.open_channel(entry.name, entry.maxsize, entry.serial)
        return entry


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    who: Address
    devices: frozenset[int]
    future: asyncio.Future[None]


class DeviceLocks:
    """Locks of one node's devices.

    Several devices are acquired at once, so two workers cannot each hold half. The locks are reentrant: they are free
    when released as often as acquired.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[Address, int]] = {}  # device -> holder, acquisition count
        self._waiting: deque[_Waiter] = deque()

    def acquire(self, who: Address, devices: Iterable[int]) -> asyncio.Future[None]:
        waiter = _Waiter(who, frozenset(devices), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        if not waiter.future.done():
            waiter.future.add_done_callback(self._ended)
        return waiter.future

    def _ended(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._grant()  # others may have queued behind it for free devices

    def release(self, who: Address, devices: Iterable[int]) -> None:
        given = frozenset(devices)
        for device in sorted(given):
            holder, _ = self._holders.get(device, (None, 0))
            if holder != who:
                raise ValueError(f"{who} releases the lock of device {device}, held by {holder or 'nobody'}")
        for device in given:
            count = self._holders[device][1]
            if count > 1:
                self._holders[device] = (who, count - 1)
            else:
                del self._holders[device]
        self._grant()

    def release_all(self, who: Address) -> tuple[int, ...]:
        """Release all devices of a lost worker, and drop its waits."""
        freed = tuple(sorted(device for device, (holder, _) in self._holders.items() if holder == who))
        for device in freed:
            del self._holders[device]
        self._waiting = deque(waiter for waiter in self._waiting if waiter.who != who)
        self._grant()
        return freed

    def holders(self, devices: Iterable[int]) -> dict[int, Address]:
        """Holders of these devices, by device."""
        return {device: self._holders[device][0] for device in sorted(set(devices)) if device in self._holders}

    def _grant(self) -> None:
        """Grant waiting requests in order; a later one must not overtake on a device that another waits for."""
        claimed: set[int] = set()
        remaining: deque[_Waiter] = deque()
        for waiter in self._waiting:
            if waiter.future.done():
                continue  # cancelled
            is_own = all(self._holders.get(device, (waiter.who, 0))[0] == waiter.who for device in waiter.devices)
            holds_some = any(device in self._holders for device in waiter.devices)
            # A holder that acquires again must not queue behind workers that wait for it: that would deadlock.
            if is_own and (holds_some or not waiter.devices & claimed):
                for device in waiter.devices:
                    self._holders[device] = (waiter.who, self._holders.get(device, (waiter.who, 0))[1] + 1)
                waiter.future.set_result(None)
            else:
                claimed |= waiter.devices
                remaining.append(waiter)
        self._waiting = remaining


class MessageRouter:
    """Sends and receives for the workers of one node, and for workers of other nodes that send to them.

    Messages of a pair arrive in order: none overtakes another during a name lookup, and none is forwarded to another
    node before that has accepted the previous one.
    """

    def __init__(
        self,
        node: int,
        queues: NodeQueues,
        memory: NodeMemory,
        forward: Callable[..., Awaitable[Answer]],
        look_up: Callable[..., Awaitable[Any]],
        last_failure: Callable[[Address], Awaitable[str]],
    ) -> None:
        self._node, self._queues, self._memory = node, queues, memory
        self._forward, self._look_up, self._last_failure = forward, look_up, last_failure
        self._groups: dict[str, GroupEntry] = {}
        self._arrivals, self._forwards = OrderedLocks(), OrderedLocks()

    async def send(
        self, who: Address, kind: str, to: Sequence[Sequence[Any]], deadline: Deadline, packet: Packet
    ) -> None:
        receivers = [Address(*parts) for parts in to]
        try:
            with self._arrivals.take((who, receiver, kind) for receiver in receivers) as turn:
                by_node: defaultdict[int, list[Address]] = defaultdict(list)
                for receiver in receivers:
                    by_node[await self.node_of(receiver, deadline)].append(receiver)
                await turn.wait_turn()  # after earlier requests, which look up the same names
                local = by_node.pop(self._node, [])
                waits = self._deliver_local(who, kind, local, packet._replace(is_shared=len(to) > 1))
                outgoing = self._memory.outgoing([packet], len(by_node))
                forwarding = [
                    self._start_forwarding(who, kind, node, remote, deadline, outgoing)
                    for node, remote in by_node.items()
                ]
            for task in forwarding:  # one may fail while others still need the packet
                self._memory.share(packet)
                task.add_done_callback(lambda _: self._memory.release_packet(packet))
            await asyncio.gather(
                *forwarding,
                *(
                    within(wait, deadline.left(), f"{receiver} received nothing from {who} for {deadline}")
                    for receiver, wait in waits
                ),
            )
        finally:
            self._memory.release_packet(packet)  # each receiver on this node has its own share

    def _start_forwarding(
        self, who: Address, kind: str, node: int, to: list[Address], deadline: Deadline, outgoing: OutgoingBatch
    ) -> asyncio.Task[None]:
        turn = self._forwards.take((who, receiver, kind) for receiver in to)
        return turn.run_then_release(self._send_remote(turn, who, kind, node, to, deadline, outgoing))

    async def _send_remote(
        self,
        turn: OrderedLock,
        who: Address,
        kind: str,
        node: int,
        to: list[Address],
        deadline: Deadline,
        outgoing: OutgoingBatch,
    ) -> None:
        if not await turn.wait_turn(deadline.left()):
            raise WaitedTooLong(f"{', '.join(map(str, to))} received nothing from {who} for {deadline}")
        args = (kind, [tuple(receiver) for receiver in to], deadline.forwarded)
        await self._forward(node, who, "send", args, outgoing)

    def _deliver_local(
        self, who: Address, kind: str, to: Sequence[Address], packet: Packet
    ) -> list[tuple[Address, asyncio.Future[None]]]:
        lost = next((self._queues.lost(receiver) for receiver in to if self._queues.lost(receiver)), None)
        if lost is not None:
            raise lost
        waits = []
        for receiver in to:
            wait = self._queues.deliver(receiver, who, kind, packet)
            self._memory.share(packet)
            if wait is not None:
                self._memory.release_unless_delivered(packet, wait)
                waits.append((receiver, wait))
        return waits

    async def receive(self, who: Address, kind: str, source: Sequence[Any], deadline: Deadline) -> list[Packet]:
        sender = Address(*source)
        with self._arrivals.take([(who, sender, kind, "receive")]) as turn:
            await self.node_of(sender, deadline)  # a group that was never launched is an error, not a wait
            await turn.wait_turn()
            future = self._queues.collect(who, sender, kind)
        try:
            return await self._memory.wait_for(
                future, deadline.left(), f"nothing came from {sender} to {who} within {deadline}"
            )
        except WaitedTooLong as error:
            failed = await self._last_failure(sender)
            raise WaitedTooLong(f"{error}{f'; its last failure: {failed}' if failed else ''}") from None

    async def node_of(self, who: Address, deadline: Deadline) -> int:
        group = await self.group(who.group, deadline)
        if not 0 <= who.rank < len(group.nodes):
            raise LookupError(f"group {who.group} has ranks 0 to {len(group.nodes) - 1}, not {who.rank}")
        return group.nodes[who.rank]

    async def group(self, name: str, deadline: Deadline) -> GroupEntry:
        if name not in self._groups:
            found = await self._look_up("group", name, deadline.at_most(LOOK_UP_LIMIT))
            self._groups[name] = GroupEntry(*found)
        return self._groups[name]

    def forget_groups(self, names: Iterable[str]) -> None:
        for name in names:
            self._groups.pop(name, None)
