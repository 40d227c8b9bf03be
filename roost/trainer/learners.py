"""Learner groups as the driver sees them: scoring, learning, and sending weights to engines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roost.engines.fleet import Fleet
from roost.engines.protocol import Engine, UpdateFailed
from roost.engines.weights.probe import Probe
from roost.engines.weights.send import Sent
from roost.engines.weights.update import WeightUpdate
from roost.learner.losses import Totals
from roost.learner.sample import Distribution, Floats, Sample
from roost.placement.routes import ServerRoute, WeightRoute
from roost.runtime.worker import WorkerGroup
from roost.trainer.guards import check_policy
from roost.trainer.learner_worker import Receiver
from roost.transport.failure import FailureKind, WaitedTooLong, WorkerFailed

SendingRoutes = Mapping[str, ServerRoute]  # by engine name, as planned


def receiver_at(url: str, fleet: Fleet, routes: SendingRoutes) -> Receiver:
    """Return the engine at a URL as a receiver of weights."""
    for member in fleet.pool.members.values():
        if member.is_connected and member.engine.url == url:
            spec, planned = member.spec, routes[member.name]
            if planned.route is WeightRoute.RELOAD:
                raise LookupError(f"{member.name} is sent no weights: it reads them from disk")
            processes = spec.tensor * spec.pipeline
            return Receiver(spec.kind, url, spec.sleeps, spec.api_key, planned.sender, planned.route, processes)
    raise LookupError(f"no engine of the fleet is at {url}")


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
    generated = [int(sample.is_generated[1:].sum()) for sample in samples]
    return Totals(sum(1 for count in generated if count), sum(generated), longest)


class Learners:
    """Driver-side handle of a group of `LearnerWorker`s."""

    def __init__(
        self,
        group: WorkerGroup,
        routes: SendingRoutes,
        receiver_at: Callable[[str], Receiver],
        adapters: Path | None = None,
    ) -> None:
        self._group = group
        self._routes, self._receiver_at = routes, receiver_at
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

    async def distributions(self, samples: Sequence[Sample], top_k: int, vocabulary: int) -> list[Distribution | None]:
        """The most likely tokens at each predicted token of every sample, in the order given."""
        return await self._spread("distributions", samples, top_k, vocabulary)

    async def learn(self, samples: Sequence[Sample], totals: Totals, position: int) -> dict[str, float]:
        """Run one optimizer step on a minibatch, at a position of the learning-rate schedule."""
        parts = shares([len(sample) for sample in samples], self.world_size)
        of_ranks = await self._each("learn", [([samples[index] for index in part], totals, position) for part in parts])
        statistics: dict[str, float] = of_ranks[0]
        return statistics

    async def _spread(self, method: str, samples: Sequence[Sample], *more: Any) -> list[Any]:
        parts = shares([len(sample) for sample in samples], self.world_size)
        of_ranks = await self._each(method, [([samples[index] for index in part], *more) for part in parts])
        found = {
            index: array
            for part, arrays in zip(parts, of_ranks, strict=True)
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

    async def weight_update(self, version: int) -> WeightUpdate:
        """Return the current weights as a policy version."""
        probe = await self.probe()
        check_policy(probe.logprobs, version)
        if self._adapters is not None:
            return WeightUpdate(version, probe, adapter=await self._write_adapter(self._adapters, version))
        return WeightUpdate(version, probe, sender=LearnerSender(self, self._routes, self._receiver_at))

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

    def __init__(self, learners: Learners, routes: SendingRoutes, receiver_at: Callable[[str], Receiver]) -> None:
        self._learners, self._routes, self._receiver_at = learners, routes, receiver_at

    def route_to(self, server: str) -> WeightRoute:
        return self._routes[server].route

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        """Send weights to each engine from its assigned rank."""
        try:
            receivers = [self._receiver_at(engine.url) for engine in engines]
            sent = await self._learners.send_weights(receivers, version)
        except (WorkerFailed, WaitedTooLong, LookupError) as error:
            if isinstance(error, WorkerFailed) and error.first.kind is FailureKind.NODE_LOST:
                raise  # no other route helps, and it is reported only once
            raise UpdateFailed(f"the learner could not send version {version}: {error}") from error
        largest = max(sent, key=lambda one: one.buckets)
        return replace(largest, failed={url: error for one in sent for url, error in one.failed.items()})

    async def write(self, model: str, folder: str) -> None:
        for error in await self._learners.all("write_weights", model, folder):
            if error:
                raise UpdateFailed(f"cannot write a checkpoint of the weights: {error}")
