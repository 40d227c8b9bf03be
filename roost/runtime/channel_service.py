"""Channels as a node's agent serves them: those that live on it, and the way to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from roost.runtime.address import Address
from roost.runtime.deadline import Deadline
from roost.runtime.directory import ChannelEntry
from roost.runtime.failure import WaitedTooLong
from roost.runtime.mail import LOOK_UP_LIMIT, Answer
from roost.runtime.node_memory import NodeMemory
from roost.runtime.parcel import Parcel
from roost.runtime.post_office import PostOffice
from roost.runtime.turns import Turn, Turns
from roost.runtime.waits import within

UNBOUNDED = Deadline.of(None)


class Full(asyncio.QueueFull):
    """A channel has no room, and the caller did not want to wait."""


class Empty(asyncio.QueueEmpty):
    """A channel has nothing, and the caller did not want to wait."""


class ChannelService:
    """Puts and gets for the workers of one node, and for those of others whose channels live here.

    What one worker puts under one key comes in the order in which it was put, as messages of a pair do.
    """

    def __init__(
        self,
        node: int,
        post: PostOffice,
        memory: NodeMemory,
        hand_on: Callable[..., Awaitable[Answer]],
        look_up: Callable[..., Awaitable[Any]],
        num_nodes: int | None,
    ) -> None:
        self._node, self._post, self._memory, self._num_nodes = node, post, memory, num_nodes
        self._hand_on, self._look_up = hand_on, look_up
        self._entries: dict[str, ChannelEntry] = {}
        self._coming, self._leaving = Turns(), Turns()

    async def put(
        self, who: Address, name: str, key: Hashable, weight: float, deadline: Deadline, parcel: Parcel
    ) -> Answer:
        wait = None
        try:
            with self._coming.take([(who, name, key)]) as turn:
                entry = await self._entry(name, deadline)
                await turn.has_come()  # those before it have asked for the same name
                if entry.node == self._node:
                    wait = self._post.put(name, key, who, weight, parcel)
                else:
                    leaving = self._leaving.take([(who, name, key)])
        except BaseException:
            self._memory.give_back(parcel)
            raise
        if entry.node != self._node:
            return await self._put_away(leaving, entry, who, (name, key, weight), deadline, parcel)
        if wait is not None:
            self._memory.give_back_unless_in(parcel, wait)
            if deadline.does_not_wait:
                wait.cancel()
                raise Full(f"channel {name} is full")
            await within(wait, deadline.left(), f"channel {name} stayed full for {deadline}".__str__)
        return None, []

    async def _put_away(
        self, turn: Turn, entry: ChannelEntry, who: Address, args: tuple[Any, ...], deadline: Deadline, parcel: Parcel
    ) -> Answer:
        try:
            with turn:
                if not await turn.has_come(deadline.left()):
                    if deadline.does_not_wait:
                        raise Full(f"channel {entry.name} is full, or has yet to take what {who} put before")
                    raise WaitedTooLong(f"channel {entry.name} stayed full for {deadline}")
                load = self._memory.consign([parcel])
                return await self._hand_on(entry.node, who, "put", (*args, deadline.handed_on), load)
        finally:
            self._memory.give_back(parcel)

    async def get(self, who: Address, name: str, key: Hashable, target: float | None, deadline: Deadline) -> Answer:
        with self._coming.take([(who, name, key, "get")]) as turn:
            entry = await self._entry(name, deadline)
            await turn.has_come()
            future = self._post.get(name, key, who, target) if entry.node == self._node else None
        if future is None:
            return await self._hand_on(entry.node, who, "get", (name, key, target, deadline.handed_on))
        if deadline.does_not_wait and not future.done():
            future.cancel()
            raise Empty(f"channel {name} is empty")
        late = f"channel {name} gave nothing for {deadline}".__str__
        return None, await self._memory.taken(future, deadline.left(), late)

    async def request(self, who: Address, what: str, name: str, *args: Any) -> Answer:
        match what:
            case "create":
                return await self._create(who, ChannelEntry(name, *args)), []
            case "renew":
                return await self._renew(ChannelEntry(*args[0]), ChannelEntry(*args[1])), []
        entry = await self._entry(name, UNBOUNDED)
        if entry.node != self._node:
            return await self._hand_on(entry.node, who, "channel", (what, name, *args))
        match what:
            case "connect":
                return entry, []
            case "size":
                return self._post.size(name, *args), []
            case "full":
                return self._post.is_full(name, *args), []
            case "sizes":
                return self._post.sizes(name), []
            case "close":
                self._post.close_channel(name)
                return None, []
        raise ValueError(f"unknown request {what}")

    def doubt(self, name: str) -> None:
        """Another node takes the channel to live here; if it is known to live elsewhere, one of the two is wrong."""
        if name in self._entries and self._entries[name].node != self._node:
            del self._entries[name]

    async def _create(self, who: Address, wanted: ChannelEntry) -> ChannelEntry:
        if self._num_nodes is not None and not 0 <= wanted.node < self._num_nodes:
            nodes = f"0 to {self._num_nodes - 1}" if self._num_nodes > 1 else "only node 0"
            raise ValueError(f"channel {wanted.name} cannot live on node {wanted.node}: this job has {nodes}")
        known = ChannelEntry(*await self._look_up("add_channel", wanted))
        if known.node == self._node:
            return await self._renew(known, wanted)
        answer, _ = await self._hand_on(known.node, who, "channel", ("renew", wanted.name, known, wanted))
        return self._keep(ChannelEntry(*answer))

    async def _renew(self, known: ChannelEntry, wanted: ChannelEntry) -> ChannelEntry:
        """A channel of this node as it is; one that is closed and empty makes way for the one that is wanted."""
        if self._post.is_spent(known.name, known.serial):
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
            self._post.open_channel(entry.name, entry.maxsize, entry.serial)
        return entry
