"""Bringing engines to a release: by the best way each of them has, verified, and by the next way if it did not take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from roost.engines.capabilities import Capabilities
from roost.engines.errors import EngineError, UpdateFailed
from roost.engines.member import Member, Standing
from roost.engines.protocol import Engine, InFlight, Part
from roost.engines.spec import EngineKind, ServerSpec
from roost.engines.weights.release import Release, Way
from roost.engines.weights.send import Sent
from roost.engines.weights.verify import verify_by_fingerprints, verify_by_probe

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
    if release.sender is not None and _takes(release.sender.way, spec, abilities):
        found.append(release.sender.way)
    if abilities.has(RELOADS[spec.kind]):
        found.append(Way.RELOAD)
    found.append(Way.RESTART)
    return tuple(way for way in found if way not in useless)


def _takes(way: Way, spec: ServerSpec, abilities: Capabilities) -> bool:
    if not abilities.has(UPDATES[spec.kind]):
        return False
    if way is Way.SHARED_MEMORY:
        return abilities.takes_shared_memory
    # The built-in engine takes every way; others must have been started for one.
    backend = "ipc" if way is Way.DEVICE else "nccl"
    return spec.kind is not EngineKind.VLLM or spec.weight_transfer == backend


class Delivery:
    """One release on its way to the members of a fleet, whose changes nobody else makes meanwhile."""

    def __init__(self, release: Release, folder: Path, connect: Connect, in_flight: InFlight) -> None:
        self.folder = folder  # where the release is written, for engines that must be started on it
        self._release = release
        self._connect = connect
        self._in_flight = in_flight
        self._writing = asyncio.Lock()

    async def bring(self, members: Sequence[Member]) -> dict[str, EngineError]:
        """Bring all of them to the release, each by its best way that works; the errors of those without one."""
        left = {member: list(self._ways(member)) for member in members}
        errors: dict[Member, EngineError] = {
            member: UpdateFailed(f"{member.name} has no way to take version {self._release.version}") for member in left
        }
        not_taken: dict[Member, set[Way]] = {member: set() for member in left}
        while left := {member: ways for member, ways in left.items() if ways}:
            together = [member for member, ways in left.items() if ways[0] in SENT]
            alone = [member for member, ways in left.items() if ways[0] not in SENT]
            outcomes = await self._send(together) if together else {}
            tried = await asyncio.gather(*(self._try(member, left[member][0]) for member in alone))
            outcomes |= dict(zip(alone, tried, strict=True))
            for member, error in outcomes.items():
                way = left[member].pop(0)
                if error is None:
                    del left[member], errors[member]
                    member.version = self._release.version
                    member.useless_ways |= not_taken[member]  # this release took another way, so they were at fault
                    continue
                errors[member] = error
                member.last_error = str(error)
                if isinstance(error, _NotTaken):
                    not_taken[member].add(way)
                elif isinstance(error, UpdateFailed) and member.abilities.undoes_updates:
                    left[member].clear()  # it has looked at the weights and refused them, as it would any other way
        return {member.name: error for member, error in errors.items()}

    def _ways(self, member: Member) -> tuple[Way, ...]:
        return ways_for(self._release, member.spec, member.abilities, member.useless_ways)

    async def _try(self, member: Member, way: Way) -> EngineError | None:
        try:
            if way is Way.RESTART:
                await self._restart(member)
            elif way is Way.ADAPTER:
                await self._adapt(member)
            else:
                await self._reload(member)
        except EngineError as error:
            return error
        return None

    async def _send(self, members: Sequence[Member]) -> dict[Member, EngineError | None]:
        """One sending for all of them; what failed for each."""
        sender = self._release.sender
        if sender is None:
            raise ValueError(f"version {self._release.version} has nobody who sends it")
        opened = await asyncio.gather(*(_outcome(self._open(member)) for member in members))
        outcomes = dict(zip(members, opened, strict=True))
        able = [member for member in members if outcomes[member] is None]
        sent = Sent(0, 0, {}, {})
        if able:
            try:
                sent = await sender.send([member.engine for member in able], self._release.version)
                outcomes |= {member: sent.failed.get(member.engine.url) for member in able}
            except EngineError as error:
                outcomes |= dict.fromkeys(able, error)
        ended = await asyncio.gather(*(self._after_sending(member, outcomes[member], sent) for member in members))
        return dict(zip(members, ended, strict=True))

    async def _after_sending(self, member: Member, error: EngineError | None, sent: Sent) -> EngineError | None:
        is_checked = False
        if error is None and member.abilities.undoes_updates:
            # Compared before it goes on, so that requests on hold are not continued with weights that are wrong.
            try:
                is_checked = await verify_by_fingerprints(member.engine, sent.fingerprints)
            except UpdateFailed as mismatch:
                error = _NotTaken(str(mismatch))
        closed = await _outcome(self._close(member))
        if error is None and closed is None and not is_checked:
            return await _outcome(self._verify(member))
        return error or closed

    async def _reload(self, member: Member) -> None:
        checkpoint = await self._checkpoint(member)
        await self._open(member)
        await member.engine.load_checkpoint(checkpoint, self._release.version)
        await self._close(member)
        await member.engine.reset_cache()
        await self._verify(member)

    async def _restart(self, member: Member) -> None:
        checkpoint = await self._checkpoint(member)
        await member.disconnect()
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
        before, member.adapter = member.adapter, name
        await member.engine.set_version(self._release.version)
        await self._close(member)
        try:
            await self._verify(member)
        except EngineError:
            member.adapter = before
            raise
        if before is not None and before != name:
            await member.engine.unload_adapter(before)

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

    async def _verify(self, member: Member) -> None:
        if self._release.probe is None:
            raise UpdateFailed(
                f"version {self._release.version} cannot be verified on {member.name}: give its release a probe"
            )
        try:
            await verify_by_probe(member.engine, self._release.probe, member.adapter)
        except UpdateFailed as error:
            raise _NotTaken(str(error)) from error

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


class _NotTaken(UpdateFailed):
    """Every call succeeded, and the engine still does not answer with the new weights."""


async def _outcome(action: Awaitable[None]) -> EngineError | None:
    try:
        await action
    except EngineError as error:
        return error
    return None
