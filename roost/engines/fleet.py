"""`Fleet`: all engines of a job behind one interface for generation, weight sync, sleep and wake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from roost.engines.command import TRAITS, ServerSpec
from roost.engines.connect import connect
from roost.engines.http_calls import all_of
from roost.engines.members import EngineState, FleetMembers, Member
from roost.engines.protocol import (
    Capabilities,
    Completion,
    Continuation,
    Engine,
    EngineError,
    EngineLoad,
    EngineLost,
    InFlight,
    NotOffered,
    Sampling,
    UpdateFailed,
)
from roost.engines.server_process import Owner
from roost.engines.supervision import Supervisor, Watchfulness
from roost.engines.weights.sync import (
    Connect,
    CurrentWeights,
    Offload,
    WeightCheck,
    WeightSync,
    WrongWeights,
    outcome_of,
    outcomes_of,
    raise_first,
    wait_for_all,
)
from roost.engines.weights.update import WeightUpdate
from roost.procs.files import ScratchFolder
from roost.trace.spans import OpenSpan, SpanRecorder


def check_version(current: WeightUpdate | None, update: WeightUpdate) -> None:
    """Raise ValueError if the version is not higher; only the current update itself may be repeated."""
    if current is not None and current is not update and update.version <= current.version:
        raise ValueError(
            f"the engines are on version {current.version}; a new policy needs a higher one than {update.version}"
        )


def check_base(members: Sequence[Member], update: WeightUpdate, sleep_level: int) -> None:
    """Raise NotOffered if sleeping engines dropped the base weights that an adapter needs."""
    asleep = [member.name for member in members if member.state is EngineState.ASLEEP]
    if update.adapter is not None and asleep and sleep_level > 1:
        raise NotOffered(
            f"{', '.join(asleep)}: the base weights were dropped at sleep level 2, and an adapter does not restore "
            "them; let engines that take adapters sleep at level 1"
        )


def check_hold(members: Sequence[Member], update: WeightUpdate, in_flight: InFlight) -> None:
    """Raise NotOffered if requests cannot be held: versions of tokens must be known, and the old cache not reused."""
    if in_flight is not InFlight.HOLD:
        return
    if update.adapter is not None:
        raise NotOffered("held requests would continue with their old adapter; use drop or drain")
    for member in members:
        if not member.capabilities.reports_versions:
            raise NotOffered(
                f"{member.name} does not report the version of each token of a held request; use drop or drain"
            )
        if not TRAITS[member.spec.kind].can_hold:
            raise NotOffered(f"{member.name} cannot clear its prefix cache while requests are held; use drop or drain")


T = TypeVar("T")
RUNNING = (EngineState.READY, EngineState.BEHIND)
UNKNOWN = -1  # version of an engine whose weights are unknown
LEAVE_LIMIT_S = 2.0  # for the last answers of an engine that leaves; other requests go to another engine


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings for retries, waits and supervision of a fleet."""

    attempts: int = 4  # engines that a request may lose before it fails
    wait_s: float = 900.0  # longest wait of a request for a ready engine
    continues_dropped: bool = True  # continue requests that an update dropped
    watchfulness: Watchfulness = field(default_factory=Watchfulness)


class Fleet:
    """All engines of a job behind one interface.

    async with Fleet([LocalOwner(spec, logs) for spec in specs]) as fleet:
        completion = await fleet.generate(token_ids, Sampling(max_tokens=64), episode="7")
        await fleet.update(WeightUpdate(1, probe, sender))
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
        self.pool = FleetMembers(owners)
        self.recorder = recorder or SpanRecorder()
        self.report = report
        self._settings = settings or FleetSettings()
        self._scratch = ScratchFolder("fleet", folder)
        self._connect = connect or _connect
        self._current = CurrentWeights(self._scratch.path, self._connect, report)
        self._sleep_level = 0
        self._has_devices = True  # False: the learner has them, and no server may be started
        self.weights = WeightCheck(self.pool, report)
        self._supervisor = Supervisor(self.pool, self._settings.watchfulness, self._recover, report)

    async def __aenter__(self) -> Fleet:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def current_update(self) -> WeightUpdate | None:
        """Weight update that the engines have; None: the weights they were started with."""
        return self._current.update

    # Starting and stopping ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all servers concurrently; return when every one is ready."""
        await self.start_servers()
        self._supervisor.start()

    async def close(self) -> None:
        """Stop all servers; waiting requests fail."""
        await self.pool.close()
        await self._supervisor.stop()
        try:
            await self.stop_servers()
        except EngineError as error:  # a server that does not stop must not fail the run
            self.report(f"not every engine was stopped: {error}")
        finally:
            self._scratch.remove()

    async def start_servers(self, update: WeightUpdate | None = None, offload: Offload | None = None) -> None:
        """Start stopped servers, with the weights of a weight update if one is given.

        `offload` is called when the update is on disk, before any server starts, so that the learner can free memory.
        """
        async with self._changing("start", EngineState.STOPPED, EngineState.FAILED) as members:
            self._has_devices = True
            await self.pool.set_state(members, EngineState.STARTING)
            sync = self._current.sync(update, InFlight.DROP) if update is not None else None
            with self._span("start", members, update):
                unwritten = None if sync is None else await outcome_of(sync.write_for(members))
                if offload is not None and unwritten is None:
                    await offload()
                starts = [] if unwritten else [self._start(member, update, sync) for member in members]
                outcomes = [unwritten] * len(members) if unwritten else await outcomes_of(starts)
            if update is not None and sync is not None and None in outcomes:
                self._current.set(update, sync.folder)
            for member, error in zip(members, outcomes, strict=True):
                if error is not None:
                    member.last_error = str(error)
                    await member.owner.stop()
                await self.pool.set_state([member], EngineState.READY if error is None else EngineState.STOPPED)
        raise_first(outcomes)

    async def stop_servers(self, names: Collection[str] | None = None) -> None:
        """Stop all servers or those named, which frees all their memory; requests in flight are lost."""
        async with self._changing("stop", *EngineState, with_joining=True) as everyone:
            members = _named(everyone, names)
            self._has_devices = False
            await self.pool.set_state(members, EngineState.STOPPED)
            with self._span("stop", members):
                await asyncio.gather(*(member.disconnect() for member in members))
                await wait_for_all(member.owner.stop() for member in members)

    # Joining and leaving ------------------------------------------------------------------------------------------

    async def add(self, owner: Owner) -> EngineState:
        """Start one more engine beside the others; return its state once it runs.

        It gets requests once it has the current policy version. If the learner has moved on from that version, this is
        after the next weight sync (`BEHIND`). If the learner has the devices, it is started when the engines get them.
        """
        member = self.pool.add(owner)
        member.baseline = max(each.baseline for each in self.pool.members.values())  # the same model and engine
        self._supervisor.watch(member)
        if not self._has_devices:
            is_woken = bool(self.pool.in_state(EngineState.ASLEEP))  # else `start_servers` starts it with the others
            await self.pool.set_state([member], EngineState.LOST if is_woken else EngineState.STOPPED)
            return member.state
        try:
            await self._join(member)
        except BaseException:
            if self.pool.has(member):
                del self.pool.members[member.name]
                await self.pool.set_state([member], EngineState.LEAVING)  # wakes requests that waited for it
            await self._supervisor.forget(member)
            await member.disconnect()
            await outcome_of(member.owner.stop())
            raise
        return member.state

    async def _join(self, member: Member) -> None:
        """Start a new member, and sync it when no other change is under way."""
        member.is_joining = True
        try:
            async with member.changing:
                await self.pool.set_state([member], EngineState.STARTING)
                with self._span("join", [member]):
                    await self._start_plain(member)
                await self.pool.set_state([member], EngineState.BEHIND)
        finally:
            member.is_joining = False
        async with self._changing(f"let {member.name} join", EngineState.BEHIND) as behind:
            if member in behind:
                await self._catch_up(member)
        if not self.pool.has(member):
            raise EngineLost(f"{member.name} was removed while it was joining")

    async def _catch_up(self, member: Member) -> None:
        """Sync a running member to the current update; it stays BEHIND if the update is no longer available."""
        current = self._current
        sync = current.sync_again() if current.is_available else None
        if current.update is None:
            await self.pool.set_state([member], EngineState.READY)  # the others have their initial weights too
        elif sync is not None:
            was_sent = current.sender_holds_it
            await self.pool.set_state([member], EngineState.UPDATING)
            with self._span("update", [member], self.current_update):
                errors = await sync.load_on([member])
            if errors and member.name not in sync.kept_old_weights:
                if not was_sent or current.sender_holds_it:
                    raise errors[member.name]
                member.version, member.probe = UNKNOWN, None  # the learner began its next step while it sent
            await self.pool.set_state([member], EngineState.BEHIND if errors else EngineState.READY)

    async def remove(self, names: Collection[str], in_flight: InFlight | None = InFlight.DROP) -> None:
        """Remove engines from the fleet and stop their servers. At least one engine must stay.

        Their requests are finished first (drain), or continue on other engines with the tokens they have (drop).
        `in_flight` None: the nodes of these engines are lost, so the engines are not called.
        """
        if in_flight is InFlight.HOLD:
            raise NotOffered("requests cannot be held by an engine that leaves; use drop or drain")
        leaving = await self.pool.remove(names, are_gone=in_flight is None)
        with self._span("leave", leaving):
            await wait_for_all(self._leave(member, in_flight) for member in leaving)

    async def _leave(self, member: Member, in_flight: InFlight | None) -> None:
        """Stop the server of a member that is no longer in the pool, after its requests have ended."""
        await self._supervisor.forget(member)
        if in_flight is None:
            await member.disconnect()  # its requests fail and are retried on other engines
            return
        async with member.changing:
            if member.client is not None:
                await outcome_of(member.client.pause(in_flight))
                await member.idle(LEAVE_LIMIT_S)  # its last answers are on their way
            await member.disconnect()
            await member.owner.stop()

    # Work ---------------------------------------------------------------------------------------------------------

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        """Complete a prompt on an engine: the episode's own while it is ready, otherwise the least busy one.

        If the engine is lost, the request is retried on another one. A request that an update dropped is continued
        with the tokens it has, on the policy version that is current then.
        """
        [completions] = await self.generate_n(token_ids, sampling, 1, episode)
        return completions

    async def generate_n(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, episode: str | None = None
    ) -> list[Completion]:
        """Complete a prompt `n` times, in one request if the engine takes it; completion i has the seed `seed + i`."""
        if isinstance(token_ids, str):
            raise TypeError("a prompt is token ids, not text; use the model's tokenizer, or an OpenAI client")
        completions = await self._generated(token_ids, sampling, n, episode)
        return await all_of([self._whole(token_ids, sampling.nth(i), completions[i], episode) for i in range(n)])

    async def _whole(
        self, token_ids: Sequence[int], sampling: Sampling, begun: Completion, episode: str | None
    ) -> Completion:
        """Continue a completion that an update dropped, until it is complete."""
        request = Continuation(token_ids, sampling)
        request.add(begun)
        while self._settings.continues_dropped and not request.is_complete:
            [piece] = await self._generated(request.prompt, request.sampling, 1, episode)
            request.add(piece)
        return request.completion

    async def _generated(
        self, prompt: Sequence[int], sampling: Sampling, n: int, episode: str | None
    ) -> Sequence[Completion]:
        """Completions of one engine; if it is lost, the request is retried on another one."""
        lost, attempts = "", 0
        while attempts < self._settings.attempts:
            async with self.pool.ready_member(episode, self._settings.wait_s, n) as member:
                try:
                    if n == 1:
                        return [await member.engine.generate(prompt, sampling, adapter=member.adapter)]
                    return await member.engine.generate_n(prompt, sampling, n, adapter=member.adapter)
                except EngineLost as error:
                    await self._supervisor.examine(member)
                    lost = str(error)
                    attempts += self.pool.has(member)  # an engine that was removed did not fail
        raise EngineLost(f"a request failed on {self._settings.attempts} engines; last error: {lost}")

    async def loads(self) -> list[EngineLoad]:
        """Loads of the ready engines that report theirs."""
        ready = self.pool.in_state(EngineState.READY)
        found = await asyncio.gather(*(member.engine.load() for member in ready), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, EngineError):
                raise one
        return [one for one in found if isinstance(one, EngineLoad)]

    async def serve(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that needs engines, and that ends before the next update; raise EngineLost once none is left."""
        return await self.pool.serve(work)

    @property
    def status(self) -> dict[str, str]:
        """State, policy version and last error of each engine."""
        return {
            member.name: f"{member.state}, version {member.version}"
            + (f", {member.last_error}" if member.last_error else "")
            for member in self.pool.members.values()
        }

    def end_episode(self, episode: str) -> None:
        """Forget which engine served the episode."""
        self.pool.router.forget(episode)

    @property
    def urls(self) -> dict[str, str]:
        """OpenAI base URLs of ready engines, for agents; the key is `spec.api_key` of each."""
        return {member.name: f"{member.engine.url}/v1" for member in self.pool.in_state(EngineState.READY)}

    # Weights ------------------------------------------------------------------------------------------------------

    async def update(
        self, update: WeightUpdate, in_flight: InFlight = InFlight.DRAIN, offload: Offload | None = None
    ) -> None:
        """Sync every engine to a weight update; sleeping ones are woken for it.

        `offload` is called when the engines have the weights, before those that slept restore their KV caches.

        An engine that cannot load it by any weight route is restarted on its old weights, if they are still available.
        If no engine loads the update, UpdateFailed is raised, and the fleet stays on its version.
        """
        loading = f"load version {update.version}"
        async with self._changing(loading, *RUNNING, EngineState.ASLEEP) as members:
            check_version(self.current_update, update)
            check_hold(members, update, in_flight)
            check_base(members, update, self._sleep_level)
            if not members:
                self._hold_for_the_lost(update)
                if offload is not None:
                    await offload()
                return
            self._current.learner_moves_on()  # the learner already has the new weights
            sync = self._current.sync(update, in_flight, offload)
            await self.pool.set_state([member for member in members if member.state in RUNNING], EngineState.UPDATING)
            with self._span("update", members, update):
                errors = await sync.load_on(members)
            brought = [member for member in members if member.name not in errors]
            if brought:
                self._current.set(update, sync.folder)
            await self._set_states_after(members, errors, sync.kept_old_weights)
        if errors and not brought:
            raise UpdateFailed(self._no_engine_loaded(update, errors))

    def learning_begins(self) -> None:
        """Record that the learner's weights will differ from the engines' version from now on."""
        self._current.learner_moves_on()

    def _hold_for_the_lost(self, update: WeightUpdate) -> None:
        if not self.pool.in_state(EngineState.LOST):
            raise UpdateFailed(f"no engine runs that could load version {update.version}: {self.pool.describe()}")
        self._current.set(update, self._current.sync(update, InFlight.DROP).folder)

    async def _set_states_after(
        self, members: Sequence[Member], errors: Mapping[str, EngineError], whole: Collection[str]
    ) -> None:
        """Mark members that loaded the update as ready; the others keep their old weights or are restarted."""
        for member in members:
            if member.name not in errors or (member.name in whole and self._current.is_on(member)):
                await self.pool.set_state([member], EngineState.READY)
            elif member.name in whole:
                await self.pool.set_state([member], EngineState.BEHIND)
            else:
                await self.pool.set_state([member], EngineState.LOST)
                self._supervisor.start_again_soon(member)

    def _no_engine_loaded(self, update: WeightUpdate, errors: dict[str, EngineError]) -> str:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        stay = f"the engines stay on version {self._current.version}"
        return f"no engine loaded version {update.version}, and {stay}: {reasons}"

    # Sleep and wake -----------------------------------------------------------------------------------------------

    async def sleep(
        self, level: int = 1, in_flight: InFlight = InFlight.DRAIN, names: Collection[str] | None = None
    ) -> None:
        """Free the device memory of all engines or those named: level 1 keeps weights on the host, level 2 drops them.

        An engine that fails to sleep is stopped: when this returns, the devices are free.
        """
        if level not in (1, 2):
            raise ValueError(f"engines sleep at level 1 or 2, not {level}")
        if in_flight is InFlight.HOLD:
            raise NotOffered("requests cannot be held while an engine sleeps; use drop or drain")
        async with self._changing("go to sleep", *RUNNING, with_joining=True) as everyone:
            members = _named(everyone, names)
            unable = next((member.name for member in members if not member.capabilities.can_sleep), None)
            if unable is not None:
                raise NotOffered(f"{unable} cannot sleep; start its server with sleep mode, or stop it between phases")
            self._has_devices = False
            await self.pool.set_state(members, EngineState.UPDATING)
            with self._span("sleep", members, level=level):
                outcomes = await outcomes_of(_put_to_sleep(member, level, in_flight) for member in members)
                awake = [member for member, error in zip(members, outcomes, strict=True) if error is not None]
                awake += _named(self.pool.in_state(EngineState.LOST), names)  # a hung one still holds its memory
                await wait_for_all(member.owner.stop() for member in awake)
            await self._set_each_state(members, outcomes, EngineState.ASLEEP)
            self._sleep_level = level

    async def wake(
        self,
        update: WeightUpdate | None = None,
        in_flight: InFlight = InFlight.DRAIN,
        offload: Offload | None = None,
    ) -> None:
        """Wake the engines, with the weights of a weight update if one is given; those lost while asleep are restarted.

        `in_flight` applies to engines that were not asleep, `offload` is that of `update`.
        """
        self._has_devices = True
        if update is not None:
            with self._span("wake", self.pool.in_state(EngineState.ASLEEP), update):
                await self.update(update, in_flight, offload)
        else:
            await self._wake_as_they_were()
        for member in self.pool.in_state(EngineState.LOST):
            await self._supervisor.start_again(member)

    async def _wake_as_they_were(self) -> None:
        if self._sleep_level > 1 and self.pool.in_state(EngineState.ASLEEP):
            raise NotOffered("the engines dropped their weights to sleep; wake them with a weight update")
        async with self._changing("wake up", EngineState.ASLEEP) as members:
            with self._span("wake", members):
                outcomes = await outcomes_of(member.engine.wake() for member in members)
            await self._set_each_state(members, outcomes, EngineState.READY)
            await self.pool.set_state([member for member in members if self._is_behind(member)], EngineState.BEHIND)

    def _is_behind(self, member: Member) -> bool:
        return member.state is EngineState.READY and not self._current.is_on(member)

    async def _set_each_state(
        self, members: Sequence[Member], outcomes: Sequence[EngineError | None], state: EngineState
    ) -> None:
        """Set the state of members without an error; mark the others as lost."""
        for member, error in zip(members, outcomes, strict=True):
            member.last_error = "" if error is None else str(error)
            await self.pool.set_state([member], state if error is None else EngineState.LOST)

    # Starting and recovering one server ---------------------------------------------------------------------------

    async def _start(self, member: Member, update: WeightUpdate | None, sync: WeightSync | None) -> None:
        """Start a server, with the update if there is one."""
        await member.disconnect()
        member.capabilities = Capabilities(frozenset())  # those of the old server; the new one is queried again
        if update is None or sync is None or update.adapter is not None:
            await self._start_plain(member)
        if sync is not None:
            for error in (await sync.load_on([member])).values():
                raise error

    async def _start_plain(self, member: Member) -> None:
        member.version, member.probe = 0, self.weights.first_probe
        await member.connect(self._connect(member.spec, await member.owner.start()))

    async def replace_wrong(self, wrong: Sequence[WrongWeights]) -> None:
        """Restart engines that do not have the weights of their version."""
        for one in wrong:
            if one.name in self.pool.members:
                why = f"its weights are not those of its version: {one.why}"
                await self._supervisor.lose(self.pool.members[one.name], why)

    async def _recover(self, member: Member) -> None:
        """Restart a lost member and sync it to the version of the others before it gets work.

        While the learner has the devices it stays lost; waking or starting the engines recovers it.
        """
        async with member.changing:
            if member.state is not EngineState.LOST or not self._has_devices:
                return
            update = self.current_update
            with self._span("recover", [member], update):
                was_sent = self._current.sender_holds_it
                if self._current.is_available:
                    try:
                        await self._start(member, update, self._current.sync_again())
                    except EngineError:
                        if not was_sent or self._current.sender_holds_it:
                            raise
                    else:
                        await self.pool.set_state([member], EngineState.READY)
                        return
                # The learner no longer has these weights: it began its next step before or while it sent them.
                await member.disconnect()
                await self._start_plain(member)
                await self.pool.set_state([member], EngineState.BEHIND)

    # Changes ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _changing(
        self, what: str, *states: EngineState, with_joining: bool = False
    ) -> AsyncIterator[list[Member]]:
        """Lock all members and yield those in the given states; `what` describes the change to waiting callers.

        Members may join and leave while this waits for a lock. Those that join are locked too once they have started;
        `with_joining` waits for that, for changes that take their devices. If the change is cancelled or raises,
        members that are half changed are marked lost and restarted.
        """
        async with self._supervisor.reporting_waits(what), AsyncExitStack() as stack:
            locked: set[Member] = set()
            while left := [
                member
                for member in self.pool.members.values()
                if member not in locked and (with_joining or not member.is_joining)
            ]:
                await stack.enter_async_context(left[0].changing)
                locked.add(left[0])
            try:
                yield [member for member in self.pool.in_state(*states) if member in locked]
            except BaseException:
                half_changed = self.pool.in_state(EngineState.UPDATING, EngineState.STARTING)
                broken = [member for member in half_changed if member in locked]
                await self.pool.set_state(broken, EngineState.LOST)
                for member in broken:
                    member.last_error = f"the attempt to {what} was interrupted"
                    self._supervisor.start_again_soon(member)
                raise

    def _span(
        self, what: str, members: Sequence[Member], update: WeightUpdate | None = None, **args: object
    ) -> OpenSpan:
        details = {"engines": len(members), **args} | ({} if update is None else {"version": update.version})
        return self.recorder.timer(what, "work", True, **details)


def _connect(spec: ServerSpec, url: str) -> Engine:
    return connect(spec.kind, url, sleeps=spec.sleeps, api_key=spec.api_key)


def _named(members: Sequence[Member], names: Collection[str] | None) -> list[Member]:
    return [member for member in members if names is None or member.name in names]


async def _put_to_sleep(member: Member, level: int, in_flight: InFlight) -> None:
    await member.engine.pause(in_flight)
    await member.engine.sleep(level)
