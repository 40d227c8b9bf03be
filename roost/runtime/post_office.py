"""Where messages between workers wait: mailboxes for pairs of workers and named channels. It knows no transport."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from typing import Any

from roost.runtime.address import Address
from roost.runtime.failure import PeerLost
from roost.runtime.parcel import Parcel
from roost.runtime.queues import Item, ItemQueue

MAILBOX_SIZE = 64  # messages of a pair that may wait; a sender that is further ahead waits


class ChannelClosed(Exception):
    """Nothing more will come through a channel."""


@dataclass(slots=True)
class _ChannelQueue:
    """One key of a channel, and who has used it: if one of them is lost, those who wait for it must know."""

    items: ItemQueue[Parcel]
    producers: set[Address] = field(default_factory=set)
    consumers: set[Address] = field(default_factory=set)


@dataclass(slots=True)
class _Channel:
    maxsize: int
    queues: dict[Hashable, _ChannelQueue] = field(default_factory=dict)
    closed: ChannelClosed | None = None


class PostOffice:
    """The mailboxes of one node's workers, and the channels that live on the node.

    `drop` is told of every message that nobody will receive any more.
    """

    def __init__(self, drop: Callable[[Parcel], None]) -> None:
        self._drop = drop
        self._mailboxes: dict[tuple[Address, Address, str], ItemQueue[Parcel]] = {}
        self._channels: dict[str, _Channel] = {}
        self._lost: dict[Address, PeerLost] = {}
        self._returning: set[Address] = set()  # of the lost, those whose processes are started again
        self._getting: defaultdict[Address, set[asyncio.Future[Any]]] = defaultdict(set)  # waits at channels

    def deliver(self, to: Address, sender: Address, kind: str, parcel: Parcel) -> asyncio.Future[None] | None:
        """Put a message into a mailbox; where that is full, the future is done once it is in."""
        self._refuse_if_lost({to}, self._lost)
        return self._mailbox(to, sender, kind).put(Item(parcel))

    def collect(self, to: Address, sender: Address, kind: str) -> asyncio.Future[list[Parcel]]:
        """The next message of a sender."""
        return self._mailbox(to, sender, kind).get()

    def _mailbox(self, to: Address, sender: Address, kind: str) -> ItemQueue[Parcel]:
        key = (to, sender, kind)
        if key not in self._mailboxes:
            self._mailboxes[key] = ItemQueue(MAILBOX_SIZE)
            if sender in self._lost:
                self._mailboxes[key].close(self._lost[sender])
        return self._mailboxes[key]

    def open_channel(self, name: str, maxsize: int) -> None:
        self._channels.setdefault(name, _Channel(maxsize))

    def close_channel(self, name: str) -> None:
        """Let what is in the channel be taken, and end every wait for more."""
        channel = self._channels[name]
        channel.closed = ChannelClosed(f"channel {name} is closed")
        for queue in channel.queues.values():
            queue.items.close(channel.closed)

    def put(
        self, name: str, key: Hashable, sender: Address, weight: float, parcel: Parcel
    ) -> asyncio.Future[None] | None:
        queue = self._queue(name, key)
        queue.producers.add(sender)
        if queue.items.is_full:
            self._refuse_if_lost(queue.consumers, self._lost.keys() - self._returning)
        return queue.items.put(Item(parcel, weight))

    def get(self, name: str, key: Hashable, receiver: Address, target: float | None) -> asyncio.Future[list[Parcel]]:
        queue = self._queue(name, key)
        queue.consumers.add(receiver)
        if not len(queue.items):
            self._refuse_if_lost(queue.producers, self._lost.keys() - self._returning)
        future = queue.items.get(target)
        if not future.done():
            self._getting[receiver].add(future)
            future.add_done_callback(self._getting[receiver].discard)
        return future

    def size(self, name: str, key: Hashable) -> int:
        return len(self._queue(name, key).items)

    def is_full(self, name: str, key: Hashable) -> bool:
        return self._queue(name, key).items.is_full

    def sizes(self, name: str) -> dict[Hashable, int]:
        return {key: len(queue.items) for key, queue in self._channels[name].queues.items()}

    def _queue(self, name: str, key: Hashable) -> _ChannelQueue:
        channel = self._channels[name]
        if key not in channel.queues:
            queue = channel.queues[key] = _ChannelQueue(ItemQueue(channel.maxsize))
            if channel.closed is not None:
                queue.items.close(channel.closed)
        return channel.queues[key]

    def _refuse_if_lost(self, partners: set[Address], gone: Container[Address]) -> None:
        lost = sorted(partner for partner in partners if partner in gone)
        if lost:
            raise copy.copy(self._lost[lost[0]])

    def lose(self, who: Address, why: str, returns: bool) -> None:
        """A worker is gone: end what waits for it, and give up what waits for nobody but it.

        What it has sent can still be received. Where its process returns, channels go on: others may fill them, and
        it may itself.
        """
        error = self._lost[who] = PeerLost(f"{who} is gone: {why}")
        for (to, sender, _), mailbox in self._mailboxes.items():
            if to == who:
                mailbox.fail_waiters(error)
                self._drop_all(mailbox)
            elif sender == who:
                mailbox.close(error)
        for future in self._getting.pop(who, set()):
            future.cancel()  # now, before it is given something
        if returns:
            self._returning.add(who)
            return
        self._returning.discard(who)
        for channel in self._channels.values():
            for queue in channel.queues.values():
                if (who in queue.producers and not len(queue.items)) or (
                    who in queue.consumers and queue.items.is_full
                ):
                    queue.items.fail_waiters(error)

    def find_again(self, who: Address) -> None:
        """A worker has come back: its mailboxes start empty, so that old messages do not meet new ones."""
        self._lost.pop(who, None)
        self._returning.discard(who)
        for key in [key for key in self._mailboxes if who in key[:2]]:
            self._drop_all(self._mailboxes.pop(key))

    def _drop_all(self, mailbox: ItemQueue[Parcel]) -> None:
        for parcel in mailbox.clear():
            self._drop(parcel)

    def lost(self, who: Address) -> PeerLost | None:
        error = self._lost.get(who)
        return copy.copy(error) if error is not None else None
