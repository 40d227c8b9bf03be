"""Bringing engines to a release: by the best way each of them has, verified, and by the next way if it did not take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from roost.engines.capabilities import Capabilities
from roost.engines.errors import EngineError, EngineLost, UpdateFailed, WeightsRefused
from roost.engines.member import Member, Standing
from roost.engines.outcomes import outcome_of, outcomes_of
from roost.engines.protocol import Engine, InFlight, Part
from roost.engines.spec import EngineKind, ServerSpec
from roost.engines.weights.release import Release, Way
from roost.engines.weights.send import Sent
from roost.engines.weights.verify import Expected, NotTaken, verify_by_fingerprints, verify_by_probe

SENT = (Way.DEVICE, Way.SHARED_MEMORY, Way.BROADCAST)
RELOADS = {
    EngineKind.TORCH: "/collective_rpc",
    EngineKind.VLLM: "/collective_rpc",
    EngineKind.SGLANG: "/update_weights_from_disk",
}
UPDATES = {
    EngineKind.TORCH: "/start_weight_update",
    EngineKind.VLLM: "/start_weight_update",
    EngineKind.SGLANG: "/begin_weight_update",
}
Connect = Callable[[ServerSpec, str], Engine]


def ways_for(release: Release, spec: ServerSpec, abilities: Capabilities, useless: set[Way]) -> tuple[Way, ...]:
    """The ways a server can be brought to a release, the best first; a restart is the last of them."""
    if release.adapter is not None:
        return (Way.ADAPTER,) if abilities.takes_adapters else ()
    found: list[Way] = []
    way = None if release.sender is None else release.sender.way_to(spec.name)
    if way is not None and _takes(way, spec, abilities):
        found.append(way)
    if abilities.has(RELOADS[spec.kind]):
        found.append(Way.RELOAD)
    found.append(Way.RESTART)
    return tuple(way for way in found if way not in useless)


def _takes(way: Way, spec: ServerSpec, abilities: Capabilities) -> bool:
    if not abilities.has(UPDATES[spec.kind]):
        return False
    if way is Way.SHARED_MEMORY:
        return abilities.takes_shared_memory
    # The built-in engine takes every way; vLLM must have been started for one.
    backend = "ipc" if way is Way.DEVICE else "nccl"
    return spec.kind is not EngineKind.VLLM or spec.weight_transfer == backend


class Delivery:
    """One release on its way to members of a fleet, whom nobody else changes meanwhile.

    Afterwards an engine either works with the new weights, or is known to work with its old ones (`whole`), or works no
    more: it stays paused, and its server must be started again.
    """

    def __init__(
        self,
        release: Release,
        folder: Path,
        connect: Connect,
        in_flight: InFlight,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder = folder  # where the release is written, for engines that read it from disk
        self.whole: set[str] = set()  # who failed, and goes on with what it had
        self._release = release
        self._connect = connect
        self._in_flight = in_flight
        self._report = report
        self._writing = asyncio.Lock()

    async def bring(self, members: Sequence[Member]) -> dict[str, EngineError]:
        """Bring all of them to the release, each by its best way that works; the errors of those without one."""
        release = self._release
        left = {
            member: list(ways_for(release, member.spec, member.abilities, member.useless_ways)) for member in members
        }
        errors: dict[Member, EngineError] = {
            member: UpdateFailed(f"{member.name} has no way to load version {release.version}") for member in left
        }
        not_taken: dict[Member, set[Way]] = {member: set() for member in left}
        tried: set[Member] = set()  # by a way that did not work
        began = asyncio.get_running_loop().time()
        while left := {member: ways for member, ways in left.items() if ways}:
            for member, error in (await self._try_next(left)).items():
                way = left[member].pop(0)
                if error is None:
                    del left[member], errors[member]
                    if member in tried:
                        seconds = asyncio.get_running_loop().time() - began
                        self._report(f"{member.name} loaded version {release.version} by {way}, after {seconds:.0f} s")
                    member.version, member.probe = release.version, release.probe
                    member.useless_ways |= not_taken[member]  # this release took another way, so they were at fault
                    continue
                errors[member] = error
                member.last_error = str(error)
                if isinstance(error, NotTaken):
                    not_taken[member].add(way)
                elif member.abilities.undoes_updates and (isinstance(error, WeightsRefused) or way is Way.RELOAD):
                    left[member].clear()  # the weights themselves are wrong: a restart would only lose the old ones
                tried.add(member)
                last = "it is started again" if isinstance(error, EngineLost) else "there is no other way"
                instead = f"next: {left[member][0]}" if left[member] else last
                self._report(
                    f"{member.name} failed to load version {release.version} by {way}: {_first_line(error)}; {instead}"
                )
        await asyncio.gather(*(self._go_on_as_before(member) for member in errors))
        return {member.name: error for member, error in errors.items()}

    async def write_for(self, members: Sequence[Member]) -> None:
        """Have the release on disk, if these are started from there."""
        if self._release.adapter is None and members:
            await self._checkpoint(members[0])

    async def _try_next(self, left: dict[Member, list[Way]]) -> dict[Member, EngineError | None]:
        """The next way of each member; those that are sent the weights get them in one sending."""
        together = [member for member, ways in left.items() if ways[0] in SENT]
        alone = [member for member in left if member not in together]
        outcomes = await self._send(together) if together else {}
        tried = await outcomes_of(self._alone(member, left[member][0]) for member in alone)
        return outcomes | dict(zip(alone, tried, strict=True))

    async def _go_on_as_before(self, member: Member) -> None:
        """Let a member that can undo an update go on, if it has its old weights; others stay as they are."""
        if not (member.abilities.undoes_updates and member.is_connected):
            return
        try:
            await member.engine.abandon_update()
            if await member.engine.version() == member.version:  # it is not on weights that did not verify
                await self._close(member)
                self.whole.add(member.name)
        except EngineError:
            return

    async def _alone(self, member: Member, way: Way) -> None:
        if way is Way.RESTART:
            await self._restart(member)
        elif way is Way.ADAPTER:
            await self._adapt(member)
        else:
            await self._reload(member)

    async def _send(self, members: Sequence[Member]) -> dict[Member, EngineError | None]:
        """One sending for all of them; what failed for each."""
        sender = self._release.sender
        if sender is None:
            raise ValueError(f"version {self._release.version} has nobody who sends it")
        await asyncio.gather(*(self._note_answers(member) for member in members))
        opened = await outcomes_of(self._open(member) for member in members)
        outcomes = dict(zip(members, opened, strict=True))
        able = [member for member in members if outcomes[member] is None]
        sent = Sent(0, 0, {}, {})
        if able:
            try:
                sent = await sender.send([member.engine for member in able], self._release.version)
                outcomes |= {member: sent.failed.get(member.engine.url) for member in able}
            except EngineError as error:
                outcomes |= dict.fromkeys(able, error)
        taken = [member for member in members if outcomes[member] is None]
        ended = await outcomes_of(self._after_sending(member, sent) for member in taken)
        return outcomes | dict(zip(taken, ended, strict=True))

    async def _after_sending(self, member: Member, sent: Sent) -> None:
        # Compared before it goes on, so that requests on hold are not continued with weights that are wrong.
        is_checked = member.abilities.undoes_updates and await verify_by_fingerprints(member.engine, sent.fingerprints)
        # Who sent them may be another process: of servers that do not tell their version, this client keeps count.
        await member.engine.set_version(self._release.version)
        await self._close(member)
        if not is_checked:
            await self._verify(member)

    async def _reload(self, member: Member) -> None:
        checkpoint = await self._checkpoint(member)
        await self._note_answers(member)
        await self._open(member)
        await member.engine.load_checkpoint(checkpoint, self._release.version)
        if self._in_flight is not InFlight.HOLD:
            await member.engine.reset_cache()
        await self._close(member)
        await self._verify(member)

    async def _restart(self, member: Member) -> None:
        checkpoint = await self._checkpoint(member)
        await member.disconnect()
        member.answers_before = None
        await member.connect(self._connect(member.spec, await member.owner.start(checkpoint)))
        await member.engine.set_version(self._release.version)
        member.standing = Standing.UPDATING
        await self._verify(member)

    async def _adapt(self, member: Member) -> None:
        if self._release.adapter is None:
            raise ValueError(f"version {self._release.version} has no adapter")
        name = f"policy-{self._release.version}"
        await self._open(member)
        await member.engine.load_adapter(name, self._release.adapter)
        await member.engine.set_version(self._release.version)
        before, member.adapter = member.adapter, name
        member.answers_before = None
        await self._close(member)
        try:
            await self._verify(member)
        except EngineError:
            member.adapter = before
            await member.engine.set_version(member.version)
            raise
        if before is not None and before != name:
            await outcome_of(member.engine.unload_adapter(before))  # what is left of it does no harm

    async def _open(self, member: Member) -> None:
        """Make the engine ready to take weights: paused if it is awake, its weights woken if it is asleep."""
        if member.standing is Standing.ASLEEP:
            await member.engine.wake([Part.WEIGHTS])
        else:
            await member.engine.pause(self._in_flight)

    async def _close(self, member: Member) -> None:
        if member.standing is Standing.ASLEEP:
            await member.engine.wake([Part.KV_CACHE])
            member.standing = Standing.UPDATING
        else:
            await member.engine.resume()

    async def _note_answers(self, member: Member) -> None:
        """What the engine answers to the probe before, to see that it answers otherwise afterwards."""
        member.answers_before = None
        if member.standing is not Standing.ASLEEP and not member.abilities.undoes_updates:
            try:
                member.answers_before = await member.engine.score(self._release.probe.token_ids, member.adapter)
            except EngineError:
                return  # it is about to show whether it can still be used

    async def _verify(self, member: Member) -> None:
        expected = Expected(self._release.probe, member.baseline, member.answers_before, member.probe)
        await verify_by_probe(member.engine, expected, member.adapter)

    async def _checkpoint(self, member: Member) -> str:
        """The release as a folder that a server can be started on; written once if there is none."""
        if self._release.checkpoint is not None:
            return self._release.checkpoint
        async with self._writing:
            if not self.folder.exists():
                if self._release.sender is None:
                    raise UpdateFailed(
                        f"version {self._release.version} has no checkpoint that {member.name} could load"
                    )
                await self._release.sender.write(member.spec.model, str(self.folder))
        return str(self.folder)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
