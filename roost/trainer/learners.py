"""Learner groups as the driver sees them: scoring, learning, and sending weights to engines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import Engine, UpdateFailed
from roost.engines.weights.probe import Probe
from roost.engines.weights.release import Release, Way
from roost.engines.weights.send import Sent
from roost.learner.losses import Totals
from roost.learner.sample import Floats, Sample
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.runtime.worker import WorkerGroup
from roost.trainer.guards import check_policy
from roost.trainer.learner_worker import Receiver
from roost.transport.failure import FailureKind, WaitedTooLong, WorkerFailed


@dataclass(frozen=True, slots=True)
class Sending:
    """Weight route and sending rank of the learner, by engine name."""

    ways: Mapping[str, Way | None]  # None: from disk
    ranks: Mapping[str, int]


def plan_sending(plan: Plan, engines: str, learner: str, kind: EngineKind, on_gpu: bool) -> Sending:
    """Plan the weight routes: on the device if engine and learner share it, else a broadcast from rank 0.

    A broadcast cannot have two members on one device, so each engine has its own route. An engine sharded over several
    devices of the learner would need handles of several ranks at once and reads from disk instead; so does SGLang with
    a sharded learner, as it takes no packed handles. On one node without GPUs all weights go through shared memory.
    """
    placed, learners = plan[engines], plan[learner]
    names = [f"{engines}-{rank}" for rank in range(placed.world_size)]
    if not on_gpu:
        nodes = {placed.table[rank].cluster_node_rank for rank in range(placed.world_size)}
        way = Way.SHARED_MEMORY if nodes == {learners.table[0].cluster_node_rank} else Way.BROADCAST
        return Sending(dict.fromkeys(names, way), dict.fromkeys(names, 0))
    takes_handles = kind is not EngineKind.SGLANG or learners.world_size == 1
    homes = {device: rank for rank in range(learners.world_size) for device in devices_of(learners, rank)}
    ways: dict[str, Way | None] = {}
    ranks: dict[str, int] = {}
    for rank, name in enumerate(names):
        devices = devices_of(placed, rank)
        shared = [device for device in devices if device in homes]
        ways[name] = None if shared else Way.BROADCAST
        if shared and len(devices) == 1 and takes_handles:
            ways[name] = Way.DEVICE
        ranks[name] = homes[shared[0]] if shared else 0
    return Sending(ways, ranks)


def receiver_at(url: str, fleet: Fleet, sending: Sending) -> Receiver:
    """Return the engine at a URL as a receiver of weights."""
    for member in fleet.crew.members.values():
        if member.is_connected and member.engine.url == url:
            spec = member.spec
            way, rank = sending.ways[member.name], sending.ranks[member.name]
            if way is None:
                raise LookupError(f"{member.name} is sent no weights: it reads them from disk")
            return Receiver(spec.kind, url, spec.sleeps, spec.api_key, rank, way, spec.tensor * spec.pipeline)
    raise LookupError(f"no engine of the fleet is at {url}")


def devices_of(part: ComponentPlan, rank: int) -> list[tuple[int, int]]:
    """Accelerators of a process, as (node, device index)."""
    return [(int(node), int(device)) for node, device in part.table[rank].devices]


ALL_PARTS = ("weight", "grad", "optimizer")


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign samples to ranks so that all have about as many tokens; each rank keeps the given order.

    >>> shares([5, 1, 1, 3], 2)
    [[0], [1, 2, 3]]
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = filled.index(min(filled))
        parts[rank].append(index)
        filled[rank] += lengths[index]
    return [sorted(part) for part in parts]


def totals_of(samples: Sequence[Sample], longest: int) -> Totals:
    """Totals of a minibatch. A first token is not predicted, so it does not count."""
    made = [int(sample.is_made[1:].sum()) for sample in samples]
    return Totals(sum(1 for count in made if count), sum(made), longest)


class Learners:
    """Driver-side handle of a group of `LearnerWorker`s."""

    def __init__(
        self,
        group: WorkerGroup,
        ways: Mapping[str, Way | None],
        receiver_at: Callable[[str], Receiver],
        adapters: Path | None = None,
    ) -> None:
        self._group = group
        self._ways, self._receiver_at = ways, receiver_at
        self._adapters = adapters  # folder for adapters, if only an adapter is trained

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def world_size(self) -> int:
        return self._group.world_size

    async def ready(self) -> None:
        """Wait until every rank has loaded its model."""
        await asyncio.to_thread(self._group.wait_ready)

    async def score(self, samples: Sequence[Sample], as_reference: bool = False) -> list[Floats]:
        """Log-probs of every sample, in the order given."""
        return await self._spread("score", samples, as_reference)

    async def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._spread("values", samples)

    async def learn(self, samples: Sequence[Sample], totals: Totals) -> dict[str, float]:
        """Run one optimizer step on a minibatch."""
        parts = shares([len(sample) for sample in samples], self.world_size)
        told = await self._each("learn", [([samples[index] for index in part], totals) for part in parts])
        statistics: dict[str, float] = told[0]
        return statistics

    async def _spread(self, method: str, samples: Sequence[Sample], *more: Any) -> list[Floats]:
        parts = shares([len(sample) for sample in samples], self.world_size)
        told = await self._each(method, [([samples[index] for index in part], *more) for part in parts])
        found = {
            index: array
            for part, arrays in zip(parts, told, strict=True)
            for index, array in zip(part, arrays, strict=True)
        }
        return [found[index] for index in range(len(samples))]

    async def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every rank, each with its own arguments."""
        results = [getattr(self._group.execute_on(rank), method)(*given) for rank, given in enumerate(arguments)]
        return [answer[0] for answer in await asyncio.gather(*results)]

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank with the same arguments."""
        answers: list[Any] = await getattr(self._group, method)(*arguments)
        return answers

    async def offload(self, parts: Sequence[str] = ALL_PARTS) -> None:
        await self.all("offload", tuple(parts))

    async def load(self, parts: Sequence[str] = ALL_PARTS) -> None:
        await self.all("load", tuple(parts))

    # Weights ------------------------------------------------------------------------------------------------------

    async def probe(self) -> Probe:
        """Probe of the current weights: what an engine that has them must answer."""
        found: Probe = (await self.all("probe"))[0]
        return found

    async def release(self, version: int) -> Release:
        """Return the current weights as a policy version."""
        probe = await self.probe()
        check_policy(probe.logprobs, version)
        if self._adapters is not None:
            return Release(version, probe, adapter=await self._write_adapter(self._adapters, version))
        return Release(version, probe, sender=LearnerSender(self, self._ways, self._receiver_at))

    async def _write_adapter(self, folder: Path, version: int) -> str:
        """Write the adapter, keeping the previous version for engines that rejoin."""
        written = folder / f"version-{version}"
        await self.all("export", str(written))
        for old in folder.glob("version-*"):
            if int(old.name.removeprefix("version-")) < version - 1:
                shutil.rmtree(old, ignore_errors=True)
        return str(written)

    async def give_weights(self, other: Learners) -> None:
        """Copy this group's weights to another group, for scoring."""
        await asyncio.gather(self.all("give_weights", other.name), other.all("take_weights", self.name))

    async def send_weights(self, receivers: Sequence[Receiver], version: int) -> list[Sent]:
        sent: list[Sent] = await self.all("send_weights", tuple(receivers), version)
        return sent


class LearnerSender:
    """Sends weights from the learner's processes to engines known to the driver."""

    def __init__(
        self, learners: Learners, ways: Mapping[str, Way | None], receiver_at: Callable[[str], Receiver]
    ) -> None:
        self._learners, self._ways, self._receiver_at = learners, ways, receiver_at

    def way_to(self, server: str) -> Way | None:
        return self._ways[server]

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        """Send weights to each engine from its assigned rank."""
        try:
            asked = [self._receiver_at(engine.url) for engine in engines]
            told = await self._learners.send_weights(asked, version)
        except (WorkerFailed, WaitedTooLong, LookupError) as error:
            if isinstance(error, WorkerFailed) and error.first.kind is FailureKind.NODE_LOST:
                raise  # no other route helps, and it is reported only once
            raise UpdateFailed(f"the learner could not send version {version}: {error}") from error
        largest = max(told, key=lambda sent: sent.buckets)
        return replace(largest, failed={url: error for one in told for url, error in one.failed.items()})

    async def write(self, model: str, folder: str) -> None:
        for error in await self._learners.all("write_weights", model, folder):
            if error:
                raise UpdateFailed(f"no checkpoint could be written of the weights: {error}")
