"""The engines of a component: started, given work and new weights, put to sleep, watched and stopped together."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from roost.engines.connect import connect
from roost.engines.continuation import Continuation
from roost.engines.crew import Crew
from roost.engines.delivery import Connect, Delivery
from roost.engines.errors import EngineError, EngineLost, NotOffered, UpdateFailed
from roost.engines.generation import Completion, Sampling
from roost.engines.member import Member, Standing
from roost.engines.owner import Owner
from roost.engines.protocol import Engine, InFlight
from roost.engines.spec import ServerSpec
from roost.engines.supervision import Supervisor, Watchfulness
from roost.engines.weights.release import Release
from roost.runtime.trace.spans import OpenSpan, SpanRecorder

RUNNING = (Standing.READY, Standing.BEHIND)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How a fleet treats requests and engines."""

    attempts: int = 4  # engines that may be lost under a request before it fails
    wait_s: float = 900.0  # that a request waits until an engine takes work
    continues_dropped: bool = True  # whether requests that an update drops go on from where they were
    watchfulness: Watchfulness = field(default_factory=Watchfulness)


class Fleet:
    """Engines behind one door.

    async with Fleet([LocalOwner(spec, logs) for spec in specs]) as fleet:
        completion = await fleet.generate(token_ids, Sampling(max_tokens=64), episode="7")
        await fleet.update(Release(1, sender, probe=probe))
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        settings: FleetSettings | None = None,
        folder: Path | str | None = None,
        recorder: SpanRecorder | None = None,
        report: Callable[[str], None] = print,
        connect: Connect | None = None,
    ) -> None:
        self.crew = Crew(owners)
        self.recorder = recorder or SpanRecorder()
        self.release: Release | None = None  # None: the weights that the engines were started with
        self._settings = settings or FleetSettings()
        self._own_folder = tempfile.TemporaryDirectory(prefix="roost-fleet-") if folder is None else None
        self._folder = Path(folder if self._own_folder is None else self._own_folder.name)  # type: ignore[arg-type]
        self._connect = connect or _connect
        self._sleep_level = 0
        self._sender_holds_release = False
        self._supervisor = Supervisor(self.crew, self._settings.watchfulness, self._recover, report)

    async def __aenter__(self) -> Fleet:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Starting and stopping ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all servers at once; returns when every one is ready."""
        await self.start_servers()
        self._supervisor.start()

    async def close(self) -> None:
        """End all servers."""
        await self._supervisor.stop()
        await self.stop_servers()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    async def start_servers(self, release: Release | None = None) -> None:
        """Start servers that are stopped, on the weights of a release if one is given."""
        async with self._changing(Standing.STOPPED, Standing.FAILED) as members:
            await self.crew.settle(members, Standing.STARTING)
            with self._span("start", members, release):
                await _all(self._start(member, release) for member in members)
            self._hold(release)
            await self.crew.settle(members, Standing.READY)

    async def stop_servers(self) -> None:
        """End servers, so that all they held is free; requests in flight are lost."""
        async with self._changing(*Standing) as members:
            await self.crew.settle(members, Standing.STOPPED)
            with self._span("stop", members):
                await asyncio.gather(*(member.disconnect() for member in members))
                await _all(member.owner.stop() for member in members)

    # Work ---------------------------------------------------------------------------------------------------------

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        """Complete a prompt on some engine: the episode's own while it takes work, otherwise the least busy one.

        When an engine is lost under the request, it is tried on another one. What an update dropped goes on from where
        it was, on whichever version is there then.
        """
        asked = Continuation(token_ids, sampling)
        lost = ""
        for _ in range(self._settings.attempts):
            try:
                while not asked.is_complete:
                    async with self.crew.seat(episode, self._settings.wait_s) as member:
                        asked.add(await self._generate_on(member, asked))
                    if not self._settings.continues_dropped:
                        break
                return asked.completion
            except _LostUnderRequest as error:
                lost = str(error)
        raise EngineLost(f"a request was lost with {self._settings.attempts} engines, the last time: {lost}")

    async def _generate_on(self, member: Member, asked: Continuation) -> Completion:
        try:
            return await member.engine.generate(asked.prompt, asked.sampling, adapter=member.adapter)
        except EngineLost as error:
            await self._supervisor.examine(member)
            raise _LostUnderRequest(str(error)) from error

    def end_episode(self, episode: str) -> None:
        """The episode needs its engine no more."""
        self.crew.router.forget(episode)

    @property
    def urls(self) -> dict[str, str]:
        """Where agents with an OpenAI client of their own find engines that take work."""
        return {member.name: f"{member.engine.url}/v1" for member in self.crew.standing(Standing.READY)}

    # Weights ------------------------------------------------------------------------------------------------------

    async def update(self, release: Release, in_flight: InFlight = InFlight.DRAIN) -> None:
        """Bring every engine to a release; sleeping ones are woken for it.

        An engine that no way brings there is started again on what it had, if that is still to be had. If none takes
        the release, UpdateFailed says so, and the fleet stays on the version it had.
        """
        async with self._changing(*RUNNING, Standing.ASLEEP) as members:
            self._check_hold(members, in_flight)
            self._sender_holds_release = False  # the learner has gone on to the new one
            await self.crew.settle([member for member in members if member.standing in RUNNING], Standing.UPDATING)
            with self._span("update", members, release):
                errors = await self._delivery(release, in_flight).bring(members)
            brought = [member for member in members if member.name not in errors]
            if brought:
                self._hold(release)
            await self.crew.settle(brought, Standing.READY)
            await self._after_failure([member for member in members if member.name in errors])
        if errors and not brought:
            raise UpdateFailed(self._no_engine_took(release, errors))

    def learning_begins(self) -> None:
        """From here on, the learner's own weights are no longer those of the release that the engines have."""
        self._sender_holds_release = False

    def _hold(self, release: Release | None) -> None:
        if release is not None:
            self.release = release
            self._sender_holds_release = release.sender is not None

    async def _after_failure(self, members: Collection[Member]) -> None:
        """What becomes of members that did not take a release: on with what they had, or started again."""
        for member in members:
            if await self._is_on(member, member.version):
                await self.crew.settle([member], Standing.READY if self._is_current(member) else Standing.BEHIND)
            else:
                await self.crew.settle([member], Standing.LOST)
                self._supervisor.start_again_soon(member)

    def _is_current(self, member: Member) -> bool:
        return member.version == (self.release.version if self.release is not None else 0)

    async def _is_on(self, member: Member, version: int) -> bool:
        """Whether a member that gave up an update still works, with the weights it had before."""
        try:
            return member.abilities.undoes_updates and await member.engine.version() == version
        except EngineError:
            return False

    def _no_engine_took(self, release: Release, errors: dict[str, EngineError]) -> str:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        version = self.release.version if self.release is not None else 0
        return f"version {release.version} was not taken, and the engines stay on version {version}: {reasons}"

    @staticmethod
    def _check_hold(members: Sequence[Member], in_flight: InFlight) -> None:
        if in_flight is InFlight.HOLD:
            blind = next((member.name for member in members if not member.abilities.tells_spans), None)
            if blind is not None:
                raise NotOffered(f"{blind} cannot say which tokens of a held request a version made; use drop or drain")

    # Sleep and wake -----------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1, in_flight: InFlight = InFlight.DRAIN) -> None:
        """Free the engines' device memory: level 1 keeps their weights in host memory, level 2 drops them."""
        async with self._changing(*RUNNING) as members:
            unable = next((member.name for member in members if not member.abilities.can_sleep), None)
            if unable is not None:
                raise NotOffered(f"{unable} cannot sleep; start its server with sleep mode, or stop it between phases")
            await self.crew.settle(members, Standing.UPDATING)
            with self._span("sleep", members, level=level):
                outcomes = await _outcomes(_put_to_sleep(member, level, in_flight) for member in members)
            await self._settle_each(members, outcomes, Standing.ASLEEP)
            self._sleep_level = level

    async def wake(self, release: Release | None = None) -> None:
        """Wake the engines, with the weights of a release if one is given; those lost asleep are started again."""
        if release is not None:
            await self.update(release)
        else:
            await self._wake_as_they_were()
        for member in self.crew.standing(Standing.LOST):
            await self._supervisor.start_again(member)

    async def _wake_as_they_were(self) -> None:
        if self._sleep_level > 1 and self.crew.standing(Standing.ASLEEP):
            raise ValueError("the engines dropped their weights when they went to sleep; wake them with a release")
        async with self._changing(Standing.ASLEEP) as members:
            with self._span("wake", members):
                outcomes = await _outcomes(member.engine.wake() for member in members)
            await self._settle_each(members, outcomes, Standing.READY)

    async def _settle_each(
        self, members: Sequence[Member], outcomes: Sequence[EngineError | None], standing: Standing
    ) -> None:
        """Those without an error stand so now; the others are lost."""
        for member, error in zip(members, outcomes, strict=True):
            member.last_error = "" if error is None else str(error)
            await self.crew.settle([member], standing if error is None else Standing.LOST)

    # Servers that come (back) -------------------------------------------------------------------------------------

    async def _start(self, member: Member, release: Release | None) -> None:
        """Start a server, on the release if there is one that it can be started on or brought to."""
        if release is None or release.adapter is not None:
            await self._start_plain(member)
        if release is not None:
            errors = await self._delivery(release, InFlight.DROP).bring([member])
            if errors:
                raise errors[member.name]

    async def _start_plain(self, member: Member) -> None:
        await member.disconnect()
        member.version = 0
        await member.connect(self._connect(member.spec, await member.owner.start()))

    async def _recover(self, member: Member) -> None:
        """Start a lost member again and bring it to the version that the others have, before it gets work."""
        async with member.changing:
            await member.disconnect()
            release = self.release
            if release is not None and not self._can_start_on(release):
                await self._start_plain(member)
                await self.crew.settle([member], Standing.BEHIND)
                return
            with self._span("recover", [member], release):
                await self._start(member, release)
            await self.crew.settle([member], Standing.READY)

    def _can_start_on(self, release: Release) -> bool:
        """Whether the release is still to be had, now that the learner may be changing its weights."""
        is_written = self._delivery(release, InFlight.DROP).folder.exists()
        return bool(release.checkpoint or release.adapter or is_written or self._sender_holds_release)

    def _delivery(self, release: Release, in_flight: InFlight) -> Delivery:
        return Delivery(release, self._folder / f"version-{release.version}", self._connect, in_flight)

    # Changes ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _changing(self, *standings: Standing) -> AsyncIterator[list[Member]]:
        """The members that stand so, while nobody else changes any of them."""
        async with AsyncExitStack() as stack:
            for member in self.crew.members.values():
                await stack.enter_async_context(member.changing)
            yield self.crew.standing(*standings)

    def _span(self, what: str, members: Sequence[Member], release: Release | None = None, **args: object) -> OpenSpan:
        told = {"engines": len(members), **args} | ({} if release is None else {"version": release.version})
        return self.recorder.timer(what, "work", True, **told)


class _LostUnderRequest(EngineLost):
    """The engine that had the request; another one may finish it."""


def _connect(spec: ServerSpec, url: str) -> Engine:
    return connect(spec.kind, url, sleeps=spec.sleeps, api_key=spec.api_key)


async def _put_to_sleep(member: Member, level: int, in_flight: InFlight) -> None:
    await member.engine.pause(in_flight)
    await member.engine.sleep(level)


async def _outcomes(actions: Iterable[Awaitable[None]]) -> list[EngineError | None]:
    """What each of them failed with, if it did; anything but an engine's error is raised."""
    answers = await asyncio.gather(*actions, return_exceptions=True)
    found: list[EngineError | None] = []
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
            raise answer
        found.append(answer)
    return found


async def _all(actions: Iterable[Awaitable[object]]) -> None:
    """Wait for all of them, also when one fails; then its error is raised."""
    for answer in await asyncio.gather(*actions, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
