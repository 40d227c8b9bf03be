"""Supervision of engines: detect dead or hung ones, and restart them a limited number of times."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from roost.config.findings import counted
from roost.engines.members import EngineState, FleetMembers, Member, RestartLimit
from roost.engines.protocol import Engine, EngineError

WATCHED = (EngineState.READY, EngineState.BEHIND, EngineState.ASLEEP)
COMING = (EngineState.LOST, EngineState.STARTING)
GONE = (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class Watchfulness:
    """Intervals and limits of supervision."""

    every_s: float = 2.0
    missed: int = 3  # failed health checks before an engine with a live process counts as hung
    restarts: RestartLimit = field(default_factory=RestartLimit)
    # Seconds after which a slow start, update, sleep or wake is reported; the last one repeats.
    waits_s: tuple[float, ...] = (10.0, 20.0, 30.0, 60.0)


class Supervisor:
    """Watches the members of a fleet and restarts lost ones.

    `recover` restarts a lost member and syncs it to the current version. It is not called for one that was lost while
    asleep, because the learner holds its device; the next wake restarts it.
    """

    def __init__(
        self,
        pool: FleetMembers,
        watchfulness: Watchfulness,
        recover: Callable[[Member], Awaitable[None]],
        report: Callable[[str], None],
    ) -> None:
        self._pool, self._how, self._recover, self._report = pool, watchfulness, recover, report
        self._silent: dict[str, int] = {}
        self._killed: dict[str, Engine] = {}  # clients of servers that were killed during a change
        self._examined: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[asyncio.Task[None], Member] = {}
        self._is_stopped = False

    def start(self) -> None:
        for member in self._pool.members.values():
            self.watch(member)

    def watch(self, member: Member) -> None:
        self._spawn(member, self._watch(member))

    async def forget(self, member: Member) -> None:
        """Stop watching a member that has left, and cancel a restart of it."""
        for records in (self._silent, self._killed, self._examined):
            records.pop(member.name, None)
        tasks = [task for task, watched in self._tasks.items() if watched is member]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Stop watching; members lost from now on are not restarted."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def examine(self, member: Member, patience: int = 1) -> bool:
        """Check a member now and return True if it is healthy; a dead or unresponsive one is marked lost.

        Checks of a member run one at a time, so that many failed requests mark it lost once.
        """
        async with self._examined[member.name]:
            if not self._pool.has(member):
                return False  # it has left
            if member.changing.locked():
                return await self._examine_changing(member)
            if member.state not in WATCHED:
                return False
            wrong = await self._whats_wrong(member, patience)
            if wrong:
                await self.lose(member, wrong)
            return not wrong

    async def _examine_changing(self, member: Member) -> bool:
        """Check a member during a change.

        The server of a dead or hung one is killed, so that calls waiting for it fail, including those of a learner that
        sends weights, and the change continues. One without a client is being started, which has its own time limit.
        """
        engine = member.client
        if engine is None or self._killed.get(member.name) is engine:
            return False
        wrong = await self._whats_wrong(member, self._how.missed, is_changing=True)
        if wrong and member.client is engine:
            self._killed[member.name] = engine
            self._silent.pop(member.name, None)
            self._report(f"{member.name} is lost: {wrong}; its server is killed, as an update was under way")
            await member.owner.stop()
        return not wrong

    async def _whats_wrong(self, member: Member, patience: int, is_changing: bool = False) -> str:
        if not await member.owner.is_running():
            return "its process is gone"
        if member.client is None or await member.client.alive(is_changing):
            self._silent.pop(member.name, None)
            return ""
        self._silent[member.name] = self._silent.get(member.name, 0) + 1
        return "it does not answer" if self._silent[member.name] >= patience else ""

    def start_again_soon(self, member: Member) -> None:
        if self._pool.has(member):  # else it has left during the change that failed
            self._spawn(member, self.start_again(member))

    async def start_again(self, member: Member) -> None:
        """Recover a lost member, unless it has been lost too often."""
        now = asyncio.get_running_loop().time()
        if not self._how.restarts.allows(member.restarts, now):
            member.last_error = (
                f"lost {counted(len(member.restarts) + 1, 'time')} within {self._how.restarts.within_s:g} s, "
                f"the last time because {member.last_error}"
            )
            self._report(f"{member.name} is abandoned: {member.last_error}")
            await self._pool.set_state([member], EngineState.FAILED)
            try:
                await member.owner.stop()
            except EngineError as error:
                self._report(f"{member.name} could not be stopped: {error}")
            return
        member.restarts.append(now)
        try:
            await self._recover(member)
        except Exception as error:  # retried after any error, up to the restart limit
            member.last_error = str(error)
            self._report(f"{member.name} did not come back: {error}")
            await self.start_again(member)
            return
        if member.state is EngineState.BEHIND:
            self._report(f"{member.name} is running again; it gets requests after the next weight sync")
        elif member.state is not EngineState.LOST:
            self._report(f"{member.name} is back, on version {member.version}")

    async def lose(self, member: Member, why: str) -> None:
        """Mark a member as lost, and restart it unless it was asleep.

        One that is already lost or being changed is left alone.
        """
        if member.state not in WATCHED:
            return
        was_asleep = member.state is EngineState.ASLEEP
        member.last_error = why
        self._silent.pop(member.name, None)
        await self._pool.set_state([member], EngineState.LOST)
        self._report(f"{member.name} is lost: {why}" + ("; it is started on wake" if was_asleep else ""))
        if not was_asleep:
            self.start_again_soon(member)

    @asynccontextmanager
    async def reporting_waits(self, what: str) -> AsyncIterator[None]:
        """Context that reports which members a slow change waits for; `what` describes the change."""
        task = asyncio.create_task(self._report_waits(what))
        try:
            yield
        finally:
            task.cancel()

    async def _report_waits(self, what: str) -> None:
        waited = 0.0
        for pause in itertools.chain(self._how.waits_s, itertools.repeat(self._how.waits_s[-1])):
            await asyncio.sleep(pause)
            waited += pause
            names = ", ".join(map(self._described, self._waited_for()))
            self._report(f"waiting for {names} to {what}, {waited:g} s so far")

    def _waited_for(self) -> list[Member]:
        """Members that delay a change: those that do not answer, else those being started, else all."""
        locked = [member for member in self._pool.members.values() if member.changing.locked()]
        changing = [member for member in locked if member.state not in GONE] or locked
        silent = [member for member in changing if member.name in self._silent]
        return silent or [member for member in changing if member.state in COMING] or changing

    def _described(self, member: Member) -> str:
        if member.name in self._silent:
            return f"{member.name} (it does not answer)"
        return f"{member.name} (being started)" if member.state in COMING else member.name

    async def _watch(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._how.every_s)
            try:
                await self.examine(member, self._how.missed)
            except Exception as error:  # a failed check must not end the watch
                self._report(f"{member.name} health check failed: {error}")

    def _spawn(self, member: Member, work: Coroutine[None, None, None]) -> None:
        if self._is_stopped:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[task] = member
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
