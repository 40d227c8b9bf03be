"""The members of a fleet and how each stands; requests wait here until one of them takes work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from roost.engines.errors import EngineLost, EnginesBehind
from roost.engines.member import Member, Standing
from roost.engines.owner import Owner
from roost.engines.routing import Router

T = TypeVar("T")


class Crew:
    """Members by name."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        names = [owner.spec.name for owner in owners]
        if not names:
            raise ValueError("a fleet needs at least one engine")
        if len(set(names)) != len(names):
            raise ValueError(f"the engines of a fleet need different names, not {names}")
        self.members = {owner.spec.name: Member(owner) for owner in owners}
        self.router = Router()
        self._changed = asyncio.Condition()
        self._is_closed = False

    def standing(self, *standings: Standing) -> list[Member]:
        """The members that stand so."""
        return [member for member in self.members.values() if member.standing in standings]

    async def settle(self, members: Collection[Member], standing: Standing) -> None:
        """Note how members stand now, and let those who wait look again."""
        async with self._changed:
            for member in members:
                member.standing = standing
                if standing is Standing.READY:
                    member.last_error = ""
            self._changed.notify_all()

    async def close(self) -> None:
        """No member takes work any more, and those who wait for one are told so."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @asynccontextmanager
    async def seat(self, episode: str | None, wait_s: float) -> AsyncIterator[Member]:
        """A member that takes work, for the time of a request; waits until there is one."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(self._can_settle_the_wait)
            except TimeoutError:
                raise EngineLost(f"no engine took work for {wait_s:g} s: {self.describe()}") from None
            if self._is_closed:
                raise EngineLost("the fleet is closed")
            ready = {member.name: member.in_flight for member in self.standing(Standing.READY)}
            chosen = self.router.choose(ready, episode)
            if chosen is None:
                raise EngineLost(f"every engine has failed: {self.describe()}")
            member = self.members[chosen]
            member.work.begin()
        try:
            yield member
        finally:
            member.work.end()

    async def serve(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that must be done before the next update; EngineLost once no member is left for it."""
        working = asyncio.ensure_future(work)
        unserved = asyncio.ensure_future(self._until_unserved())
        try:
            await asyncio.wait([working, unserved], return_when=asyncio.FIRST_COMPLETED)
            self._raise_unserved(is_over=_has_succeeded(working))
            if not working.done():
                unserved.result()  # the error
            return await working
        finally:
            working.cancel()
            unserved.cancel()
            await asyncio.gather(working, unserved, return_exceptions=True)

    async def _until_unserved(self) -> None:
        """Raise EngineLost once no member will take work before the next update."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._all_stand(Standing.FAILED, Standing.BEHIND))
            self._raise_unserved()

    def _raise_unserved(self, is_over: bool = False) -> None:
        """Raise where no member is left for work before the next update; work that `is_over` needs one after it."""
        if self._all_stand(Standing.FAILED):
            raise EngineLost(f"every engine has failed: {self.describe()}")
        if not is_over and self._all_stand(Standing.FAILED, Standing.BEHIND):
            raise EnginesBehind(f"no engine has the current weights, and none can get them: {self.describe()}")

    def describe(self) -> str:
        return "; ".join(
            f"{member.name} is {member.standing}{f' ({member.last_error})' if member.last_error else ''}"
            for member in self.members.values()
        )

    def _can_settle_the_wait(self) -> bool:
        return self._is_closed or self._all_stand(Standing.FAILED) or bool(self.standing(Standing.READY))

    def _all_stand(self, *standings: Standing) -> bool:
        return len(self.standing(*standings)) == len(self.members)


def _has_succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
