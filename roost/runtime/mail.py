"""Messages from worker to worker, on this node or another."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from roost.runtime.address import Address
from roost.runtime.deadline import Deadline
from roost.runtime.directory import GroupEntry
from roost.runtime.failure import WaitedTooLong
from roost.runtime.freight import Consignment
from roost.runtime.node_memory import NodeMemory
from roost.runtime.parcel import Parcel
from roost.runtime.post_office import PostOffice
from roost.runtime.turns import Turn, Turns
from roost.runtime.waits import within

LOOK_UP_LIMIT = 60.0  # seconds that a request waits for a group or channel to come into being
Answer = tuple[Any, list[Parcel]]


class Mail:
    """Sends and receives for the workers of one node, and for those of others who write to them.

    Messages of a pair arrive in the order they were sent: none overtakes another while it waits for a name, and none
    is handed to another node before that has accepted the one before it.
    """

    def __init__(
        self,
        node: int,
        post: PostOffice,
        memory: NodeMemory,
        hand_on: Callable[..., Awaitable[Answer]],
        look_up: Callable[..., Awaitable[Any]],
        last_failure: Callable[[Address], Awaitable[str]],
    ) -> None:
        self._node, self._post, self._memory = node, post, memory
        self._hand_on, self._look_up, self._last_failure = hand_on, look_up, last_failure
        self._groups: dict[str, GroupEntry] = {}
        self._coming, self._leaving = Turns(), Turns()

    async def send(
        self, who: Address, kind: str, to: Sequence[Sequence[Any]], deadline: Deadline, parcel: Parcel
    ) -> None:
        receivers = [Address(*parts) for parts in to]
        try:
            with self._coming.take((who, receiver, kind) for receiver in receivers) as turn:
                by_node: defaultdict[int, list[Address]] = defaultdict(list)
                for receiver in receivers:
                    by_node[await self.node_of(receiver, deadline)].append(receiver)
                await turn.has_come()  # those before it have asked for the same names
                here = by_node.pop(self._node, [])
                waits = self._deliver_here(who, kind, here, parcel._replace(is_shared=len(to) > 1))
                load = self._memory.consign([parcel], len(by_node))
                handing_on = [self._start(who, kind, node, away, deadline, load) for node, away in by_node.items()]
            for task in handing_on:  # one may fail while the others still need the parcel
                self._memory.share(parcel)
                task.add_done_callback(lambda _: self._memory.give_back(parcel))
            await asyncio.gather(
                *handing_on,
                *(
                    within(wait, deadline.left(), f"{receiver} took nothing of {who} for {deadline}".__str__)
                    for receiver, wait in waits
                ),
            )
        finally:
            self._memory.give_back(parcel)  # each receiver of this node has a share of its own

    def _start(
        self, who: Address, kind: str, node: int, to: list[Address], deadline: Deadline, load: Consignment
    ) -> asyncio.Task[None]:
        turn = self._leaving.take((who, receiver, kind) for receiver in to)
        return turn.spend_on(self._send_away(turn, who, kind, node, to, deadline, load))

    async def _send_away(
        self, turn: Turn, who: Address, kind: str, node: int, to: list[Address], deadline: Deadline, load: Consignment
    ) -> None:
        if not await turn.has_come(deadline.left()):
            raise WaitedTooLong(f"{', '.join(map(str, to))} took nothing of {who} for {deadline}")
        args = (kind, [tuple(receiver) for receiver in to], deadline.handed_on)
        await self._hand_on(node, who, "send", args, load)

    def _deliver_here(
        self, who: Address, kind: str, to: Sequence[Address], parcel: Parcel
    ) -> list[tuple[Address, asyncio.Future[None]]]:
        lost = next((self._post.lost(receiver) for receiver in to if self._post.lost(receiver)), None)
        if lost is not None:
            raise lost
        waits = []
        for receiver in to:
            wait = self._post.deliver(receiver, who, kind, parcel)
            self._memory.share(parcel)
            if wait is not None:
                self._memory.give_back_unless_in(parcel, wait)
                waits.append((receiver, wait))
        return waits

    async def receive(self, who: Address, kind: str, source: Sequence[Any], deadline: Deadline) -> list[Parcel]:
        sender = Address(*source)
        with self._coming.take([(who, sender, kind, "receive")]) as turn:
            await self.node_of(sender, deadline)  # a group that was never launched is an error, not a wait
            await turn.has_come()
            future = self._post.collect(who, sender, kind)
        try:
            return await self._memory.taken(
                future, deadline.left(), f"nothing came from {sender} to {who} within {deadline}".__str__
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
