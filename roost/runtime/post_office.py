"""Where messages between workers wait: mailboxes for pairs of workers and named channels. It knows no transport."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from roost.runtime.address import Address
from roost.runtime.failure import PeerLost
from roost.runtime.parcel import Parcel
from roost.runtime.queues import Item, ItemQueue

MAILBOX_SIZE = 64  # messages of a pair that may wait; a sender that is further ahead waits
Pair = tuple[Address, Address, str]  # receiver, sender, kind of message


class ChannelClosed(Exception):
    """Nothing more will come through a channel."""


@dataclass(slots=True)
class _ChannelQueue:
    """One key of a channel, and who has used it: if all of them are lost, those who wait for them must know."""

    items: ItemQueue[Parcel]
    producers: set[Address] = field(default_factory=set)
    consumers: set[Address] = field(default_factory=set)


@dataclass(slots=True)
class _Channel:
    maxsize: int
    serial: int
    queues: dict[Hashable, _ChannelQueue] = field(default_factory=dict)
    closed: ChannelClosed | None = None


class PostOffice:
    """The mailboxes of one node's workers, and the channels that live on the node.

    `drop` is told of every message that nobody will receive any more.
    """

    def __init__(self, drop: Callable[[Parcel], None]) -> None:
        self._drop = drop
        self._mailboxes: dict[Pair, ItemQueue[Parcel]] = {}
        self._channels: dict[str, _Channel] = {}
        self._lost: dict[Address, PeerLost] = {}
        self._returning: set[Address] = set()  # of the lost, those whose processes are started again
        self._getting: defaultdict[Address, set[asyncio.Future[Any]]] = defaultdict(set)  # waits at channels

    # Mailboxes ----------------------------------------------------------------------------------------------------

    def deliver(self, to: Address, sender: Address, kind: str, parcel: Parcel) -> asyncio.Future[None] | None:
        """Put a message into a mailbox; where that is full, the future is done once it is in."""
        if to in self._lost:
            raise copy.copy(self._lost[to])
        wait = self._mailbox((to, sender, kind)).put(Item(parcel))
        self._tidy((to, sender, kind), wait)
        return wait

    def collect(self, to: Address, sender: Address, kind: str) -> asyncio.Future[list[Parcel]]:
        """The next message of a sender."""
        wait = self._mailbox((to, sender, kind)).get()
        self._tidy((to, sender, kind), wait)
        return wait

    def _mailbox(self, pair: Pair) -> ItemQueue[Parcel]:
        if pair not in self._mailboxes:
            self._mailboxes[pair] = ItemQueue(MAILBOX_SIZE)
            if pair[1] in self._lost:
                self._mailboxes[pair].close(self._lost[pair[1]])
        return self._mailboxes[pair]

    def _tidy(self, pair: Pair, wait: asyncio.Future[Any] | None = None) -> None:
        """Keep no mailbox that has nothing in it, now or when a wait at it has ended."""
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

    def _drop_all(self, queue: ItemQueue[Parcel]) -> None:
        for parcel in queue.clear():
            self._drop(parcel)

    # Channels -----------------------------------------------------------------------------------------------------

    def open_channel(self, name: str, maxsize: int, serial: int = 0) -> None:
        """Have a channel. One of a higher serial number follows one that was closed and empty."""
        there = self._channels.get(name)
        if there is None or there.serial < serial:
            self._channels[name] = _Channel(maxsize, serial)

    def close_channel(self, name: str) -> None:
        """Let what is in the channel be taken, and end every wait for more."""
        channel = self._channels[name]
        channel.closed = ChannelClosed(f"channel {name} is closed")
        for queue in channel.queues.values():
            queue.items.close(channel.closed)

    def is_spent(self, name: str, serial: int) -> bool:
        """Whether the channel is closed and nothing is left in it."""
        channel = self._channels.get(name)
        if channel is None or channel.serial != serial or channel.closed is None:
            return False
        return not any(len(queue.items) for queue in channel.queues.values())

    def put(
        self, name: str, key: Hashable, sender: Address, weight: float, parcel: Parcel
    ) -> asyncio.Future[None] | None:
        queue = self._queue(name, key)
        queue.producers.add(sender)
        if queue.items.is_full:
            self._refuse_if_all_lost(queue.consumers)
        return queue.items.put(Item(parcel, weight))

    def get(self, name: str, key: Hashable, receiver: Address, target: float | None) -> asyncio.Future[list[Parcel]]:
        queue = self._queue(name, key)
        queue.consumers.add(receiver)
        if not len(queue.items):
            self._refuse_if_all_lost(queue.producers)
        future = queue.items.get(target)
        if not future.done():
            self._getting[receiver].add(future)
            future.add_done_callback(lambda future: self._got(receiver, future))
        return future

    def _got(self, receiver: Address, future: asyncio.Future[Any]) -> None:
        self._getting[receiver].discard(future)
        if not self._getting[receiver]:
            del self._getting[receiver]

    def size(self, name: str, key: Hashable) -> int:
        queue = self._channels[name].queues.get(key)
        return len(queue.items) if queue is not None else 0

    def is_full(self, name: str, key: Hashable) -> bool:
        queue = self._channels[name].queues.get(key)
        return queue is not None and queue.items.is_full

    def sizes(self, name: str) -> dict[Hashable, int]:
        return {key: len(queue.items) for key, queue in self._channels[name].queues.items()}

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
        return bool(partners) and partners <= self._lost.keys() - self._returning

    # Who is gone, and who is back ---------------------------------------------------------------------------------

    def lose(self, who: Address, why: str, returns: bool) -> None:
        """A worker is gone: end what waits for it, and give up what waits for nobody but it.

        What it has sent can still be received. A channel goes on as long as one who fills it, or one who empties it,
        lives or is started again.
        """
        error = self._lost[who] = PeerLost(f"{who} is gone: {why}")
        for pair in list(self._mailboxes):
            if pair[0] == who:
                self._drop_mailbox(pair, error)
            elif pair[1] == who:
                self._mailboxes[pair].close(error)
                self._tidy(pair)
        self._end_gets(who)
        if returns:
            self._returning.add(who)
            return
        self._returning.discard(who)
        for queue in self._queues():
            if who in queue.producers and self._are_all_lost(queue.producers):
                queue.items.fail_getters(error)
            if who in queue.consumers and self._are_all_lost(queue.consumers):
                queue.items.fail_putters(error)

    def find_again(self, who: Address) -> None:
        """A worker has come back: its mailboxes start empty, so that old messages do not meet new ones."""
        error = self._lost.pop(who, None)
        self._returning.discard(who)
        self._drop_mailboxes(who, error or PeerLost(f"{who} has started again"))

    def forget(self, who: Address) -> None:
        """A worker was ended on purpose: channels go on as if it had never used them, and no mail of it is kept.

        Only who waits for its message, or for it to take one, has nothing to wait for any more.
        """
        self._lost.pop(who, None)
        self._returning.discard(who)
        self._end_gets(who)
        self._drop_mailboxes(who, PeerLost(f"{who} is gone: its group was closed"))
        for queue in self._queues():
            queue.producers.discard(who)
            queue.consumers.discard(who)

    def _end_gets(self, who: Address) -> None:
        for future in self._getting.pop(who, set()):
            future.cancel()  # now, before it is given something

    def _queues(self) -> list[_ChannelQueue]:
        return [queue for channel in self._channels.values() for queue in channel.queues.values()]

    def lost(self, who: Address) -> PeerLost | None:
        error = self._lost.get(who)
        return copy.copy(error) if error is not None else None
