"""The shared memory of a node, in its agent: who has what of it in hand, and who waits for some."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from roost.runtime.address import Address
from roost.runtime.freight import BIG, Consignment, Freight, load, unload
from roost.runtime.parcel import Parcel
from roost.runtime.segments import NoRoom, SegmentPool, SegmentRef
from roost.runtime.waits import has_result, within

ROOM_LIMIT = 600.0  # seconds that a message waits for others to drop what they received


class NodeMemory:
    """Counts the users of each segment, so that what a worker holds is free when it is gone."""

    def __init__(self, limit: int) -> None:
        self.pool = SegmentPool(limit)
        self._held: defaultdict[Address, Counter[int]] = defaultdict(Counter)  # segments that a worker has in hand
        self._wanting_room: list[asyncio.Future[None]] = []

    async def allocate(self, nbytes: int) -> SegmentRef:
        """A segment; where all is in use, wait until some is given back."""
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

    def spare(self, who: Address, size: int) -> SegmentRef | None:
        """A segment for the next message, which will often be as large: so the sender need not ask for one first."""
        if not self.pool.has_plenty_for(size):
            return None
        try:
            segment = self.pool.allocate(size)
        except NoRoom:
            return None
        self.hand_over(who, segment)
        return segment

    def hand_over(self, who: Address, segment: SegmentRef) -> None:
        self._held[who][segment.number] += 1

    def take_over(self, who: Address, parcels: Iterable[Parcel]) -> None:
        """What a worker sends is in its hands no longer."""
        numbers = Counter(parcel.segment.number for parcel in parcels if parcel.segment is not None)
        if not numbers <= self._held.get(who, Counter()):
            raise ValueError(f"{who} sends what lies in shared memory that it does not hold")
        self._held[who].subtract(numbers)
        self._forget_none(who)

    def release(self, who: Address, numbers: Iterable[int]) -> None:
        """A worker has dropped what it was given in these segments."""
        held = self._held[who]
        for number in numbers:
            if held[number] > 0:  # else it was freed with a worker that is gone
                held[number] -= 1
                self.pool.release(number)
        self._forget_none(who)
        self._tell_of_room()

    def free(self, who: Address) -> None:
        """Release all that a worker held."""
        for number, count in self._held.pop(who, Counter()).items():
            for _ in range(count):
                self.pool.release(number)
        self._tell_of_room()

    def share(self, parcel: Parcel) -> None:
        """One more has the parcel, and will give it back."""
        if parcel.segment is not None:
            self.pool.share(parcel.segment.number, 1)

    def give_back(self, parcel: Parcel) -> None:
        if parcel.segment is not None:
            self.pool.release(parcel.segment.number)
            self._tell_of_room()

    def consign(self, parcels: Sequence[Parcel] = (), num_nodes: int = 1) -> Consignment:
        """Parcels for other nodes; they must be kept until it has been sent."""
        return Consignment(parcels, self._load, num_nodes)

    async def load_all(self, parcels: Sequence[Parcel]) -> list[Freight]:
        """Parcels for another node, given back."""
        try:
            return await self.consign(parcels).freight()
        finally:
            for parcel in parcels:
                self.give_back(parcel)

    async def taken(
        self, future: asyncio.Future[list[Parcel]], timeout: float | None, otherwise: Callable[[], str]
    ) -> list[Parcel]:
        """Parcels that are waited for, in time."""
        try:
            return await within(future, timeout, otherwise)
        except asyncio.CancelledError:
            if has_result(future):  # they came at the moment in which the one who waited for them was lost
                for parcel in future.result():
                    self.give_back(parcel)
            raise

    def give_back_unless_in(self, parcel: Parcel, wait: asyncio.Future[None]) -> None:
        """Who waits to put a parcel somewhere may give up."""
        wait.add_done_callback(lambda wait: None if has_result(wait) else self.give_back(parcel))

    async def unload_all(self, freight: Sequence[Freight]) -> list[Parcel]:
        parcels: list[Parcel] = []
        try:
            for piece in freight:
                parcels.append(await unload(piece, self.allocate, self.give_back))
        except BaseException:
            for parcel in parcels:
                self.give_back(parcel)
            raise
        return parcels

    def _load(self, parcel: Parcel) -> asyncio.Future[Freight]:
        loop = asyncio.get_running_loop()
        if sum(length for _, length in parcel.places) < BIG:
            loaded: asyncio.Future[Freight] = loop.create_future()
            loaded.set_result(load(parcel))
            return loaded
        self.share(parcel)  # the thread may still be reading when nobody waits for it any more
        loading = loop.run_in_executor(None, load, parcel)
        loading.add_done_callback(lambda _: self.give_back(parcel))
        return loading

    def _forget_none(self, who: Address) -> None:
        self._held[who] = +self._held[who]
        if not self._held[who]:
            del self._held[who]

    def _tell_of_room(self) -> None:
        waiters, self._wanting_room = self._wanting_room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
