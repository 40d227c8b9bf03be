"""Weight sync of a fleet: the current update, how it is loaded by the best weight route, and checks of the result."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from roost.engines.command import TRAITS, ServerSpec
from roost.engines.members import EngineState, FleetMembers, Member
from roost.engines.planned import BACKENDS
from roost.engines.protocol import (
    Capabilities,
    Engine,
    EngineError,
    EngineLost,
    InFlight,
    Part,
    UpdateFailed,
    WeightsRefused,
)
from roost.engines.weights.probe import (
    Expected,
    NotLoaded,
    Probe,
    judge_answers,
    verify_by_fingerprints,
    verify_by_probe,
)
from roost.engines.weights.update import Sender, Sent, WeightUpdate
from roost.placement.routes import WeightRoute


class CurrentWeights:
    """The weight update of the fleet, which restarted engines load; None: the weights that servers start with."""

    def __init__(self, folder: Path, connect: Connect, report: Callable[[str], None]) -> None:
        self.update: WeightUpdate | None = None
        self._folder, self._connect, self._report = folder, connect, report
        self._written = folder / "nothing"  # folder of the update, if it had to be written to disk
        self._syncs = 0
        self.sender_holds_it = False  # the learner's weights are those of the update
        self._writing = asyncio.Lock()  # held while the update's folder is written, which its syncs share

    @property
    def version(self) -> int:
        return self.update.version if self.update is not None else 0

    def is_on(self, member: Member) -> bool:
        return member.version == self.version

    def set(self, update: WeightUpdate, folder: Path) -> None:
        """Make this the current update; `folder` is where it is if it was written to disk."""
        if folder != self._written:
            self.remove_written()
        self.update, self._written = update, folder
        self.sender_holds_it = update.sender is not None

    def learner_moves_on(self) -> None:
        """Record that the learner's weights are no longer those of the update."""
        self.sender_holds_it = False

    @property
    def is_available(self) -> bool:
        """True if an engine can still load it."""
        update = self.update
        return update is None or bool(update.checkpoint or update.adapter or self.is_written or self.sender_holds_it)

    def sync(self, update: WeightUpdate, in_flight: InFlight, offload: Offload | None = None) -> WeightSync:
        """Create a sync with a new folder, because a retried version may have other weights."""
        self._syncs += 1
        folder = self._folder / f"version-{update.version}-{self._syncs}"
        return WeightSync(update, folder, self._connect, in_flight, self._report, offload)

    def sync_again(self) -> WeightSync | None:
        """Sync that loads the current update, which must be available, on one more engine; None: initial weights."""
        update = self.update
        if update is None:
            return None
        if not self.sender_holds_it:  # a sender would send the weights of a later step
            written = str(self._written) if self.is_written else None
            update = replace(update, sender=None, checkpoint=update.checkpoint or written)
        elif update.sender is not None:
            update = replace(update, sender=GuardedSender(update.sender, partial(self._is_held, update)))
        return WeightSync(update, self._written, self._connect, InFlight.DROP, self._report, writing=self._writing)

    def _is_held(self, update: WeightUpdate) -> bool:
        return self.sender_holds_it and self.update is update

    @property
    def is_written(self) -> bool:
        """True if the update had to be written to disk for an engine."""
        return self._written.exists()

    def remove_written(self) -> None:
        shutil.rmtree(self._written, ignore_errors=True)


class LearnerMovedOn(UpdateFailed):
    """The learner began its next step while it sent its weights, so what the engine has is unknown."""


class GuardedSender:
    """Sender that raises LearnerMovedOn if the learner began its next step before or while it sent its weights."""

    def __init__(self, sender: Sender, holds: Callable[[], bool]) -> None:
        self._sender, self._holds = sender, holds  # `holds`: the learner still has the weights of the update

    def route_to(self, server: str) -> WeightRoute:
        return self._sender.route_to(server)

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        self._check()
        sent = await self._sender.send(engines, version)
        self._check()
        return sent

    async def write(self, model: str, folder: str) -> None:
        self._check()
        try:
            await self._sender.write(model, folder)
            self._check()
        except BaseException:  # also if cancelled: the folder must not keep later weights under this version
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _check(self) -> None:
        if not self._holds():
            raise LearnerMovedOn("the learner has begun its next step, and no longer has these weights")


@dataclass(frozen=True, slots=True)
class WrongWeights:
    """An engine whose probe answers do not match its version."""

    name: str
    why: str


class WeightCheck:
    """Compares log-probs of engines and learner, relative to their difference with equal weights."""

    def __init__(self, pool: FleetMembers, report: Callable[[str], None]) -> None:
        self._pool, self._report = pool, report
        self.first_probe: Probe | None = None  # of the initial weights

    async def calibrate(self, probe: Probe) -> None:
        """Record each engine's difference from the learner while both have the initial weights."""
        self.first_probe = probe
        for member, answers in await self._answers(probe):
            member.probe, member.baseline = probe, probe.difference(answers)
            if not member.baseline <= probe.tolerance:
                apart = f"log-probabilities differ by up to {member.baseline:.3g}; {probe.tolerance:g} is usual"
                self._report(
                    f"{member.name} and the learner have the same weights, but their {apart}. The model is sensitive "
                    "to rounding: updates are judged relative to this, and float32 would be closer"
                )

    async def wrong(self) -> list[WrongWeights]:
        """Engines whose answers do not match their version; engines that do not answer are skipped."""
        members = [member for member in self._pool.in_state(EngineState.READY) if member.probe is not None]
        by_probe: dict[Probe, list[Member]] = {}
        for member in members:
            if member.probe is not None:
                by_probe.setdefault(member.probe, []).append(member)
        found = []
        for probe, some in by_probe.items():
            for member, answers in await self._answers(probe, some):
                why = judge_answers(Expected(probe, member.baseline), answers)
                if why and member.probe is probe:
                    found.append(WrongWeights(member.name, why))
        return found

    async def _answers(
        self, probe: Probe, members: Sequence[Member] | None = None
    ) -> list[tuple[Member, tuple[float, ...]]]:
        ready = self._pool.in_state(EngineState.READY) if members is None else members
        answers = await asyncio.gather(*(_answer(probe, member) for member in ready), return_exceptions=True)
        found = []
        for member, answer in zip(ready, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, EngineError):
                    raise answer
                continue  # the supervisor decides whether it is lost
            found.append((member, answer))
        return found


async def _answer(probe: Probe, member: Member) -> tuple[float, ...]:
    """Probe answers of a member; raises EngineLost if it has been disconnected."""
    return await probe.answers(member.engine, member.adapter)


async def outcome_of(action: Awaitable[object]) -> EngineError | None:
    """Await an action; return its EngineError, or None."""
    try:
        await action
    except EngineError as error:
        return error
    return None


async def outcomes_of(actions: Iterable[Awaitable[object]]) -> list[EngineError | None]:
    """Await all actions; return the EngineError or None of each. Any other error is raised when all have ended."""
    # gather awaits them directly: a coroutine wrapped in one that is cancelled before it runs is never awaited.
    answers = await asyncio.gather(*actions, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
            raise answer
    return [answer if isinstance(answer, EngineError) else None for answer in answers]


async def wait_for_all(actions: Iterable[Awaitable[object]]) -> None:
    """Wait for all actions even if one fails; then raise the first error."""
    raise_first(await outcomes_of(actions))


def raise_first(outcomes: Iterable[EngineError | None]) -> None:
    for error in outcomes:
        if error is not None:
            raise error


Offload = Callable[[], Awaitable[None]]  # frees the learner's memory on devices that it shares with engines
SENT = (WeightRoute.DEVICE, WeightRoute.SHARED_MEMORY, WeightRoute.BROADCAST)
Connect = Callable[[ServerSpec, str], Engine]


def routes_for(
    update: WeightUpdate, spec: ServerSpec, capabilities: Capabilities, useless: set[WeightRoute]
) -> tuple[WeightRoute, ...]:
    """Routes to try, in order: the planned one if the server takes it, then from disk."""
    if update.adapter is not None:
        return (WeightRoute.ADAPTER,) if capabilities.takes_adapters else ()
    found: list[WeightRoute] = []
    planned = planned_route(update, spec)
    if planned is not None and not refusal(planned, spec, capabilities):
        found.append(planned)
    if capabilities.has(TRAITS[spec.kind].reload_route):
        found.append(WeightRoute.RELOAD)
    found.append(WeightRoute.RESTART)
    return tuple(route for route in found if route not in useless)


def planned_route(update: WeightUpdate, spec: ServerSpec) -> WeightRoute | None:
    """Route by which the plan sends weights to a server; None if it reads them from disk."""
    route = update.sender.route_to(spec.name) if update.sender is not None and update.adapter is None else None
    return route if route in SENT else None


def refusal(route: WeightRoute, spec: ServerSpec, capabilities: Capabilities) -> str:
    """Why a running server does not take weights that are sent by this route; empty if it does."""
    traits = TRAITS[spec.kind]
    if not capabilities.has(traits.update_route):
        return f"the server has no {traits.update_route}"
    if route is WeightRoute.SHARED_MEMORY:
        return "" if capabilities.takes_shared_memory else f"{spec.kind.value} cannot map files of the learner"
    if traits.takes_any_transfer or spec.weight_transfer == BACKENDS[route]:
        return ""
    return f"the server was started with weight_transfer {spec.weight_transfer}, not {BACKENDS[route]}"


class WeightSync:
    """Loads one weight update on members of a fleet, whose locks the caller holds.

    Afterwards an engine either runs the new weights, or verifiably its old ones (`whole`), or stays paused and its
    server must be restarted.
    """

    def __init__(
        self,
        update: WeightUpdate,
        folder: Path,
        connect: Connect,
        in_flight: InFlight,
        report: Callable[[str], None] = lambda text: None,
        offload: Offload | None = None,
        writing: asyncio.Lock | None = None,
    ) -> None:
        """Set up a sync. `offload` is called once: before a woken engine restores its KV cache, or else at the end.

        `writing` is held while the folder is written.
        """
        self.folder = folder  # checkpoint folder for engines that read the update from disk
        self.kept_old_weights: set[str] = set()  # members that failed but still have their old weights
        self._update = update
        self._connect = connect
        self._in_flight = in_flight
        self._report = report
        self._writing = writing or asyncio.Lock()
        self._offload = offload
        self._from_disk: Member | None = None  # a member that loads the update from disk
        self._offloading = asyncio.Lock()

    async def load_on(self, members: Sequence[Member]) -> dict[str, EngineError]:
        """Load the update on all members, each by the best route that works; return the errors of the others."""
        update = self._update
        for member in members:
            self._report_refusal(member)
        left = {
            member: list(routes_for(update, member.spec, member.capabilities, member.useless_routes))
            for member in members
        }
        errors: dict[Member, EngineError] = {
            member: UpdateFailed(f"{member.name} has no route to load version {update.version}") for member in left
        }
        not_loaded: dict[Member, set[WeightRoute]] = {member: set() for member in left}
        tried: set[Member] = set()  # members for which a route failed
        began = asyncio.get_running_loop().time()
        while left := {member: routes for member, routes in left.items() if routes}:
            for member, error in (await self._try_next(left)).items():
                route = left[member].pop(0)
                if error is None:
                    del left[member], errors[member]
                    if member in tried:
                        seconds = asyncio.get_running_loop().time() - began
                        self._report(f"{member.name} loaded version {update.version} by {route}, after {seconds:.0f} s")
                    member.version, member.probe = update.version, update.probe
                    member.useless_routes |= not_loaded[member]  # another route worked, so these are broken
                    continue
                errors[member] = error
                member.last_error = str(error)
                if isinstance(error, NotLoaded):
                    not_loaded[member].add(route)
                elif member.capabilities.undoes_updates and (
                    isinstance(error, WeightsRefused) or route is WeightRoute.RELOAD
                ):
                    left[member].clear()  # the weights are wrong: a restart would only lose the old ones
                tried.add(member)
                last = "it is started again" if isinstance(error, EngineLost) else "no route is left"
                instead = f"next: {left[member][0]}" if left[member] else last
                why = str(error).partition("\n")[0]
                self._report(f"{member.name} failed to load version {update.version} by {route}: {why}; {instead}")
        await asyncio.gather(*(self._keep_old_weights(member) for member in errors))
        await self._offload_learner()
        return {member.name: error for member, error in errors.items()}

    def _report_refusal(self, member: Member) -> None:
        """Report once per server that it does not take weights by the planned route."""
        planned = planned_route(self._update, member.spec)
        is_starting = not member.capabilities.routes  # its capabilities are not known yet
        if planned is None or is_starting or planned in member.useless_routes:
            return
        why = refusal(planned, member.spec, member.capabilities)
        if why:
            member.useless_routes.add(planned)
            self._report(
                f"{member.name} does not take weights by {planned}, the planned route: {why}; it reads them from disk"
            )

    async def write_for(self, members: Sequence[Member]) -> None:
        """Write the update to disk, from which these members will start; an adapter is there already."""
        if self._update.adapter is None and members:
            await self._checkpoint(members[0])

    async def _try_next(self, left: dict[Member, list[WeightRoute]]) -> dict[Member, EngineError | None]:
        """Try the next route of each member; members on sent routes share one transfer."""
        together = [member for member, routes in left.items() if routes[0] in SENT]
        alone = [member for member in left if member not in together]
        self._from_disk = next((member for member in alone if left[member][0] is not WeightRoute.ADAPTER), None)
        outcomes = await self._send(together) if together else {}
        tried = await outcomes_of(self._load_alone(member, left[member][0]) for member in alone)
        return outcomes | dict(zip(alone, tried, strict=True))

    async def _keep_old_weights(self, member: Member) -> None:
        """Resume a member that can undo the update and has its old weights; leave others paused."""
        if not (member.capabilities.undoes_updates and member.is_connected):
            return
        try:
            await member.engine.abandon_update()
            if await member.engine.version() == member.version:  # not on weights that failed verification
                await self._resume(member)
                self.kept_old_weights.add(member.name)
        except EngineError:
            return

    async def _load_alone(self, member: Member, route: WeightRoute) -> None:
        if route is WeightRoute.RESTART:
            await self._restart(member)
        elif route is WeightRoute.ADAPTER:
            await self._load_adapter(member)
        elif route is WeightRoute.RELOAD:
            await self._reload(member)
        else:
            raise ValueError(f"{route} is not a weight route to a single engine")

    async def _send(self, members: Sequence[Member]) -> dict[Member, EngineError | None]:
        """Send the weights to all members in one transfer; return the error of each."""
        sender = self._update.sender
        if sender is None:
            raise ValueError(f"version {self._update.version} has no sender")
        await asyncio.gather(*(self._record_answers(member) for member in members))
        opened = await outcomes_of(self._pause_or_wake(member) for member in members)
        outcomes = dict(zip(members, opened, strict=True))
        able = [member for member in members if outcomes[member] is None]
        sent = Sent(0, 0, {}, {})
        if able:
            try:
                sent = await sender.send([member.engine for member in able], self._update.version)
                outcomes |= {member: sent.failed.get(member.engine.url) for member in able}
            except EngineError as error:
                outcomes |= dict.fromkeys(able, error)
        loaded = [member for member in members if outcomes[member] is None]
        self._from_disk = self._from_disk or next((member for member in members if member not in loaded), None)
        ended = await outcomes_of(self._finish_sent(member, sent) for member in loaded)
        return outcomes | dict(zip(loaded, ended, strict=True))

    async def _finish_sent(self, member: Member, sent: Sent) -> None:
        # Compared before it resumes, so that held requests do not continue with wrong weights.
        is_checked = member.capabilities.undoes_updates and await verify_by_fingerprints(
            member.engine, sent.fingerprints
        )
        # The sender may be another process; for servers that do not report a version, this client tracks it.
        await member.engine.set_version(self._update.version)
        await self._resume(member)
        if not is_checked:
            await self._verify(member)

    async def _reload(self, member: Member) -> None:
        checkpoint = await self._checkpoint(member)
        await self._record_answers(member)
        await self._pause_or_wake(member)
        await member.engine.load_checkpoint(checkpoint, self._update.version)
        if self._in_flight is not InFlight.HOLD:
            await member.engine.reset_cache()
        await self._resume(member)
        await self._verify(member)

    async def _restart(self, member: Member) -> None:
        checkpoint = await self._checkpoint(member)
        if member.state is EngineState.ASLEEP:
            await self._offload_learner()
        await member.disconnect()
        member.answers_before = None
        await member.connect(self._connect(member.spec, await member.owner.start(checkpoint)))
        await member.engine.set_version(self._update.version)
        member.state = EngineState.UPDATING
        await self._verify(member)

    async def _load_adapter(self, member: Member) -> None:
        if self._update.adapter is None:
            raise ValueError(f"version {self._update.version} has no adapter")
        name = f"policy-{self._update.version}"
        await self._pause_or_wake(member)
        await member.engine.load_adapter(name, self._update.adapter)
        await member.engine.set_version(self._update.version)
        before, member.adapter = member.adapter, name
        member.answers_before = None
        await self._resume(member)
        try:
            await self._verify(member)
        except EngineError:
            member.adapter = before
            await member.engine.set_version(member.version)
            raise
        if before is not None and before != name:
            await outcome_of(member.engine.unload_adapter(before))  # harmless if it stays loaded

    async def _pause_or_wake(self, member: Member) -> None:
        """Prepare a member for new weights: pause it, or wake its weights if it is asleep."""
        if member.state is EngineState.ASLEEP:
            await member.engine.wake([Part.WEIGHTS])
        else:
            await member.engine.pause(self._in_flight)

    async def _resume(self, member: Member) -> None:
        """Resume a member with its new weights; one that was asleep restores its KV cache."""
        if member.state is EngineState.ASLEEP:
            await self._offload_learner()
            await member.engine.wake([Part.KV_CACHE])
            member.state = EngineState.UPDATING
        else:
            await member.engine.resume()

    async def _offload_learner(self) -> None:
        """Let the learner free the devices, whose memory the KV caches need.

        A checkpoint that engines load is written first: afterwards the learner's weights do not fit beside the caches.
        """
        async with self._offloading:
            offload, self._offload = self._offload, None
            if offload is None:
                return
            if self._from_disk is not None:
                await outcome_of(self._checkpoint(self._from_disk))  # the member's own attempt reports an error
            await offload()

    async def _record_answers(self, member: Member) -> None:
        """Record the engine's probe answers before the update, to check that they change."""
        member.answers_before = None
        if member.state is not EngineState.ASLEEP and not member.capabilities.undoes_updates:
            try:
                member.answers_before = await self._update.probe.answers(member.engine, member.adapter)
            except EngineError:
                return  # the update will show whether the engine is usable

    async def _verify(self, member: Member) -> None:
        expected = Expected(self._update.probe, member.baseline, member.answers_before, member.probe)
        await verify_by_probe(member.engine, expected, member.adapter)

    async def _checkpoint(self, member: Member) -> str:
        """Checkpoint folder of the update; written on the first call if there is none."""
        if self._update.checkpoint is not None:
            return self._update.checkpoint
        async with self._writing:
            if not self.folder.exists():
                if self._update.sender is None:
                    raise UpdateFailed(
                        f"version {self._update.version} has no checkpoint that {member.name} could load"
                    )
                await self._update.sender.write(member.spec.model, str(self.folder))
        return str(self.folder)
