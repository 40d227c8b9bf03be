"""Mailboxes and channels of a node as in-memory queues, without transport."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from roost.transport.context import Address, PeerLost
from roost.transport.shared_memory import Packet

T = TypeVar("T")


class OrderedLocks:
    """FIFO locks by key: locks that share a key are granted in the order they were taken."""

    def __init__(self) -> None:
        self._last: dict[Hashable, asyncio.Future[None]] = {}  # last lock taken for each key

    def __len__(self) -> int:
        return len(self._last)

    def take(self, keys: Iterable[Hashable]) -> OrderedLock:
        return OrderedLock(self._last, set(keys))


class OrderedLock:
    """A place in the queues of several keys. Ending before its turn does not let later ones pass early."""

    def __init__(self, last: dict[Hashable, asyncio.Future[None]], keys: set[Hashable]) -> None:
        self._last, self._keys = last, keys
        self._before = {last[key] for key in keys if key in last}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_ended = False
        last.update(dict.fromkeys(keys, self._ended))

    async def wait_turn(self, timeout: float | None = None) -> bool:
        """Wait until all earlier ones have ended; return False on timeout."""
        waiting = {before for before in self._before if not before.done()}
        if waiting and (timeout is None or timeout > 0):
            _, waiting = await asyncio.wait(waiting, timeout=timeout)
        return not waiting

    def run_then_release(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work as a task, and release the lock when it ends."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self.end())
        return task

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._pass_on()

    def _pass_on(self) -> None:
        waiting = next((before for before in self._before if not before.done()), None)
        if waiting is not None:
            waiting.add_done_callback(lambda _: self._pass_on())
            return
        self._before = set()
        self._ended.set_result(None)
        for key in self._keys:
            if self._last.get(key) is self._ended:
                del self._last[key]

    def __enter__(self) -> OrderedLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


ROUNDING = 1e-9  # of the target: ten items of weight 0.1 make up 1


class Item(NamedTuple, Generic[T]):
    """An item of a queue, with its weight in a batch."""

    value: T
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class _Getter(Generic[T]):
    target: float | None  # None: one item
    future: asyncio.Future[list[T]]
    taken: list[Item[T]] = field(default_factory=list)
    weight: float = 0.0  # sum over `taken`

    def take(self, item: Item[T]) -> None:
        self.taken.append(item)
        self.weight += item.weight

    def has_enough(self) -> bool:
        return self.target is None or self.weight >= self.target - ROUNDING * abs(self.target)

    def has_room_for(self, item: Item[T]) -> bool:
        if self.target is None or not self.taken:
            return True
        return self.weight + item.weight <= self.target + ROUNDING * abs(self.target)


class ItemQueue(Generic[T]):
    """FIFO queue of items, with FIFO waiters.

    A waiter for a batch keeps its items while it waits for more; if it is cancelled, they return to the front.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self._items: deque[Item[T]] = deque()
        self._getters: deque[_Getter[T]] = deque()
        self._putters: deque[tuple[Item[T], asyncio.Future[None]]] = deque()
        self._closed: Exception | None = None

    def count(self) -> int:
        """Number of items; those that a cancelled waiter had taken are back."""
        if self._getters and self._getters[0].future.done():
            self._serve()  # it was just cancelled, and its items count again
        return len(self._items)

    @property
    def is_full(self) -> bool:
        return 0 < self.maxsize <= len(self._items)

    @property
    def is_idle(self) -> bool:
        """Return True if it is empty and has no waiters."""
        waits = [getter.future for getter in self._getters] + [future for _, future in self._putters]
        return not self.count() and all(wait.done() for wait in waits)

    def put(self, item: Item[T]) -> asyncio.Future[None] | None:
        """Add an item; if the queue is full, return a future that is done once it is added."""
        if not item.weight >= 0:
            raise ValueError(f"an item's weight is {item.weight}; it must be 0 or more")
        if self._closed is not None:
            raise copy.copy(self._closed)  # a copy, because a reraised error accumulates frames
        if self.is_full or self._putters:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._putters.append((item, future))
            self._serve()
            if not future.done():
                future.add_done_callback(self._putter_ended)
            return future
        self._items.append(item)
        self._serve()
        return None

    def get(self, target: float | None = None) -> asyncio.Future[list[T]]:
        """Future of one item, or of a batch with a weight as close to the target as possible without exceeding it.

        An item heavier than the target comes alone: a batch is never empty.
        """
        future: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
        self._getters.append(_Getter(target, future))
        self._serve()
        if not future.done():
            future.add_done_callback(self._getter_ended)
        return future

    def _getter_ended(self, future: asyncio.Future[list[T]]) -> None:
        if future.cancelled():
            self._serve()  # its items go to later waiters
            self._getters = deque(getter for getter in self._getters if not getter.future.done())

    def _putter_ended(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._putters = deque(putter for putter in self._putters if putter[1] is not future)

    def close(self, reason: Exception) -> None:
        """Refuse further items; waiters get what is left, or else the reason."""
        self._closed = reason
        self.fail_putters(reason)
        self._serve()

    def fail_getters(self, reason: Exception) -> None:
        """Fail every wait for an item; items of incomplete batches return to the queue."""
        for getter in self._getters:
            self._items.extendleft(reversed(getter.taken))
            getter.taken = []
            _fail(getter.future, reason)
        self._getters.clear()

    def fail_putters(self, reason: Exception) -> None:
        """Fail every wait for room."""
        for _, future in self._putters:
            _fail(future, reason)
        self._putters.clear()

    def clear(self) -> list[T]:
        """Remove and return all items."""
        items = [item.value for item in self._items]
        self._items.clear()
        return items

    def _serve(self) -> None:
        while True:
            self._admit()
            getter = self._next_getter()
            if getter is None or not self._fill(getter):
                return

    def _next_getter(self) -> _Getter[T] | None:
        while self._getters and self._getters[0].future.done():  # cancelled
            gone = self._getters.popleft()
            self._items.extendleft(reversed(gone.taken))
        return self._getters[0] if self._getters else None

    def _fill(self, getter: _Getter[T]) -> bool:
        """Give the first waiter the available items; return True if it is done."""
        while self._items:
            if not getter.has_room_for(self._items[0]):
                return self._finish(getter)
            getter.take(self._items.popleft())
            self._admit()
            if getter.has_enough():
                return self._finish(getter)
        if self._closed is not None:
            if getter.taken:
                return self._finish(getter)
            self._getters.popleft()
            _fail(getter.future, self._closed)
            return True
        return False

    def _finish(self, getter: _Getter[T]) -> bool:
        self._getters.popleft()
        getter.future.set_result([item.value for item in getter.taken])
        return True

    def _admit(self) -> None:
        while self._putters and not self.is_full:
            item, future = self._putters.popleft()
            if not future.done():
                self._items.append(item)
                future.set_result(None)


def _fail(future: asyncio.Future[Any], reason: Exception) -> None:
    if not future.done():
        future.set_exception(copy.copy(reason))


MAILBOX_SIZE = 64  # queued messages per pair, beyond which the sender waits
Pair = tuple[Address, Address, str]  # receiver, sender, kind of message


class ChannelClosed(Exception):
    """Raised by a closed channel."""


@dataclass(slots=True)
class _ChannelQueue:
    """Queue of one channel key, with its users: if all partners are lost, waiters must fail."""

    items: ItemQueue[Packet]
    producers: set[Address] = field(default_factory=set)
    consumers: set[Address] = field(default_factory=set)


@dataclass(slots=True)
class _Channel:
    maxsize: int
    serial: int
    queues: dict[Hashable, _ChannelQueue] = field(default_factory=dict)
    closed: ChannelClosed | None = None


class NodeQueues:
    """Mailboxes of one node's workers, and channels on the node.

    `drop` is called for every message that will not be received.
    """

    def __init__(self, drop: Callable[[Packet], None]) -> None:
        self._drop = drop
        self._mailboxes: dict[Pair, ItemQueue[Packet]] = {}
        self._channels: dict[str, _Channel] = {}
        self._lost: dict[Address, PeerLost] = {}
        self._restarting: set[Address] = set()  # lost workers that will restart
        self._getting: defaultdict[Address, set[asyncio.Future[Any]]] = defaultdict(set)  # waits at channels

    # Mailboxes ----------------------------------------------------------------------------------------------------

    def deliver(self, to: Address, sender: Address, kind: str, packet: Packet) -> asyncio.Future[None] | None:
        """Put a message into a mailbox; if it is full, return a future that is done once it is added."""
        if to in self._lost:
            raise copy.copy(self._lost[to])
        wait = self._mailbox((to, sender, kind)).put(Item(packet))
        self._tidy((to, sender, kind), wait)
        return wait

    def collect(self, to: Address, sender: Address, kind: str) -> asyncio.Future[list[Packet]]:
        """Future of the next message of a sender."""
        wait = self._mailbox((to, sender, kind)).get()
        self._tidy((to, sender, kind), wait)
        return wait

    def _mailbox(self, pair: Pair) -> ItemQueue[Packet]:
        if pair not in self._mailboxes:
            self._mailboxes[pair] = ItemQueue(MAILBOX_SIZE)
            if pair[1] in self._lost:
                self._mailboxes[pair].close(self._lost[pair[1]])
        return self._mailboxes[pair]

    def _tidy(self, pair: Pair, wait: asyncio.Future[Any] | None = None) -> None:
        """Remove an idle mailbox, now or when the wait has ended."""
        if wait is not None and not wait.done():
            wait.add_done_callback(lambda _: self._tidy(pair))
        elif pair in self._mailboxes and self._mailboxes[pair].is_idle:
            del self._mailboxes[pair]

    def _drop_mailboxes(self, who: Address, reason: PeerLost) -> None:
        for pair in [pair for pair in self._mailboxes if who in pair[:2]]:
            self._drop_mailbox(pair, reason)

    def _drop_mailbox(self, pair: Pair, reason: PeerLost) -> None:
        mailbox = self._mailboxes.pop(pair)
        mailbox.fail_getters(reason)
        mailbox.fail_putters(reason)
        self._drop_all(mailbox)

    def _drop_all(self, queue: ItemQueue[Packet]) -> None:
        for packet in queue.clear():
            self._drop(packet)

    # Channels -----------------------------------------------------------------------------------------------------

    def open_channel(self, name: str, maxsize: int, serial: int = 0) -> None:
        """Create a channel, or replace a closed and empty one by one with a higher serial."""
        existing = self._channels.get(name)
        if existing is None or existing.serial < serial:
            self._channels[name] = _Channel(maxsize, serial)

    def close_channel(self, name: str) -> None:
        """Close a channel: its items can still be taken, and waits for more end."""
        channel = self._channels[name]
        channel.closed = ChannelClosed(f"channel {name} is closed")
        for queue in channel.queues.values():
            queue.items.close(channel.closed)

    def is_spent(self, name: str, serial: int) -> bool:
        """Return True if the channel is closed and empty."""
        channel = self._channels.get(name)
        if channel is None or channel.serial != serial or channel.closed is None:
            return False
        return not any(queue.items.count() for queue in channel.queues.values())

    def put(
        self, name: str, key: Hashable, sender: Address, weight: float, packet: Packet
    ) -> asyncio.Future[None] | None:
        queue = self._queue(name, key)
        queue.producers.add(sender)
        if queue.items.is_full:
            self._refuse_if_all_lost(queue.consumers)
        return queue.items.put(Item(packet, weight))

    def get(self, name: str, key: Hashable, receiver: Address, target: float | None) -> asyncio.Future[list[Packet]]:
        queue = self._queue(name, key)
        queue.consumers.add(receiver)
        if not queue.items.count():
            self._refuse_if_all_lost(queue.producers)
        future = queue.items.get(target)
        if not future.done() and self._are_all_lost(queue.producers):  # the remaining items do not fill a batch
            queue.items.fail_getters(self._lost[min(queue.producers)])
        if not future.done():
            self._getting[receiver].add(future)
            future.add_done_callback(lambda future: self._get_ended(receiver, future))
        return future

    def _get_ended(self, receiver: Address, future: asyncio.Future[Any]) -> None:
        self._getting[receiver].discard(future)
        if not self._getting[receiver]:
            del self._getting[receiver]

    def size(self, name: str, key: Hashable) -> int:
        queue = self._channels[name].queues.get(key)
        return queue.items.count() if queue is not None else 0

    def is_full(self, name: str, key: Hashable) -> bool:
        queue = self._channels[name].queues.get(key)
        return queue is not None and queue.items.is_full

    def sizes(self, name: str) -> dict[Hashable, int]:
        return {key: queue.items.count() for key, queue in self._channels[name].queues.items()}

    def _queue(self, name: str, key: Hashable) -> _ChannelQueue:
        channel = self._channels[name]
        if key not in channel.queues:
            queue = channel.queues[key] = _ChannelQueue(ItemQueue(channel.maxsize))
            if channel.closed is not None:
                queue.items.close(channel.closed)
        return channel.queues[key]

    def _refuse_if_all_lost(self, partners: set[Address]) -> None:
        if self._are_all_lost(partners):
            raise copy.copy(self._lost[min(partners)])

    def _are_all_lost(self, partners: set[Address]) -> bool:
        return bool(partners) and partners <= self._lost.keys() - self._restarting

    # Lost and restarted workers -----------------------------------------------------------------------------------

    def lose(self, who: Address, why: str, will_restart: bool) -> None:
        """Handle the loss of a worker: end waits for it and its own waits.

        Messages it has sent can still be received. Waits at a channel fail once all its producers, or all its
        consumers, are lost and will not restart.
        """
        error = self._lost[who] = PeerLost(f"{who} is gone: {why}")
        for pair in list(self._mailboxes):
            if pair[0] == who:
                self._drop_mailbox(pair, error)
            elif pair[1] == who:
                self._mailboxes[pair].close(error)
                self._tidy(pair)
        self._end_gets(who)
        if will_restart:
            self._restarting.add(who)
            return
        self._restarting.discard(who)
        for queue in self._queues():
            if who in queue.producers and self._are_all_lost(queue.producers):
                queue.items.fail_getters(error)
            if who in queue.consumers and self._are_all_lost(queue.consumers):
                queue.items.fail_putters(error)

    def restarted(self, who: Address) -> None:
        """Handle the restart of a worker: its mailboxes start empty, so that old and new messages do not mix."""
        error = self._lost.pop(who, None)
        self._restarting.discard(who)
        self._drop_mailboxes(who, error or PeerLost(f"{who} has restarted"))

    def forget(self, who: Address) -> None:
        """Remove a worker that was stopped on purpose: channels forget it, and its mailboxes are dropped.

        Only waits for its messages, or for it to receive one, fail.
        """
        self._lost.pop(who, None)
        self._restarting.discard(who)
        self._end_gets(who)
        self._drop_mailboxes(who, PeerLost(f"{who} is gone: its group was closed"))
        for queue in self._queues():
            queue.producers.discard(who)
            queue.consumers.discard(who)

    def _end_gets(self, who: Address) -> None:
        for future in self._getting.pop(who, set()):
            future.cancel()  # before it receives an item

    def _queues(self) -> list[_ChannelQueue]:
        return [queue for channel in self._channels.values() for queue in channel.queues.values()]

    def lost(self, who: Address) -> PeerLost | None:
        error = self._lost.get(who)
        return copy.copy(error) if error is not None else None
