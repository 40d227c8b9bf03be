"""Watching engines: a dead or hung one is noticed, and started again a limited number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from roost.engines.crew import Crew
from roost.engines.member import Member, Standing
from roost.engines.restarts import RestartLimit
from roost.spec.errors import counted

WATCHED = (Standing.READY, Standing.BEHIND, Standing.ASLEEP)


@dataclass(frozen=True, slots=True)
class Watchfulness:
    """How often engines are looked at, and what is made of silence."""

    every_s: float = 2.0
    missed: int = 3  # probes without an answer before an engine whose process is there counts as hung
    restarts: RestartLimit = field(default_factory=RestartLimit)


class Supervisor:
    """Looks after the members of a crew.

    `recover` starts a lost member again and brings it to the current version; it is not called for one that was lost
    asleep, whose device somebody else holds now: the next waking does it.
    """

    def __init__(
        self,
        crew: Crew,
        watchfulness: Watchfulness,
        recover: Callable[[Member], Awaitable[None]],
        report: Callable[[str], None],
    ) -> None:
        self._crew, self._how, self._recover, self._report = crew, watchfulness, recover, report
        self._silent: dict[str, int] = {}
        self._examined: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in crew.members}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def start(self) -> None:
        for member in self._crew.members.values():
            self._spawn(self._watch(member))

    async def stop(self) -> None:
        """Nobody is looked after any more; a change that breaks off from now on starts nobody again."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def examine(self, member: Member, patience: int = 1) -> bool:
        """Look at a member now; whether it is well. One whose process is gone, or that does not answer, is lost.

        One look at a time: many requests that fail with an engine lose it once.
        """
        async with self._examined[member.name]:
            if member.standing not in WATCHED:
                return False
            wrong = await self._whats_wrong(member, patience)
            if wrong and member.standing in WATCHED:  # nobody has begun to change it meanwhile
                await self._lose(member, wrong)
            return not wrong

    async def _whats_wrong(self, member: Member, patience: int) -> str:
        if not await member.owner.is_running():
            return "its process is gone"
        if not member.is_connected or await member.engine.alive():
            self._silent.pop(member.name, None)
            return ""
        self._silent[member.name] = self._silent.get(member.name, 0) + 1
        return "it does not answer" if self._silent[member.name] >= patience else ""

    def start_again_soon(self, member: Member) -> None:
        self._spawn(self.start_again(member))

    async def start_again(self, member: Member) -> None:
        """Recover a lost member, unless it has been lost too often."""
        now = asyncio.get_running_loop().time()
        if not self._how.restarts.allows(member.restarts, now):
            member.last_error = (
                f"lost {counted(len(member.restarts) + 1, 'time')} within {self._how.restarts.within_s:g} s, "
                f"the last time because {member.last_error}"
            )
            self._report(f"{member.name} is given up: {member.last_error}")
            await self._crew.settle([member], Standing.FAILED)
            await member.owner.stop()
            return
        member.restarts.append(now)
        try:
            await self._recover(member)
        except Exception as error:  # whatever keeps it from coming back, it is tried again and then given up
            member.last_error = str(error)
            self._report(f"{member.name} did not come back: {error}")
            await self.start_again(member)
            return
        if member.standing is not Standing.LOST:
            self._report(f"{member.name} is back, on version {member.version}")

    async def _lose(self, member: Member, why: str) -> None:
        was_asleep = member.standing is Standing.ASLEEP
        member.last_error = why
        self._silent.pop(member.name, None)
        await self._crew.settle([member], Standing.LOST)
        self._report(f"{member.name} is lost: {why}" + (", and is started when it is woken" if was_asleep else ""))
        if not was_asleep:
            self.start_again_soon(member)

    async def _watch(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._how.every_s)
            try:
                await self.examine(member, self._how.missed)
            except Exception as error:  # one look that fails must not end the watch
                self._report(f"{member.name} could not be looked at: {error}")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._is_stopped:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
