"""Learners: the worker of each rank, and the driver's view of a group: scoring, learning, weight sync, checkpoints."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import psutil
import torch

from roost.config.job import MeshSizes, ParallelSizes
from roost.config.train import LearnerSettings, LossSettings
from roost.engines.command import EngineKind
from roost.engines.connect import connect
from roost.engines.fleet import Fleet
from roost.engines.protocol import Engine, EngineError, UpdateFailed
from roost.engines.weights.carriers import (
    Carrier,
    SharedMemoryCarrier,
    VllmWeightGroup,
    device_carrier,
    write_checkpoint,
)
from roost.engines.weights.probe import TOLERANCES, Probe, probe_tokens, probe_with_image
from roost.engines.weights.shards import ShardFiles
from roost.engines.weights.source import WeightStream
from roost.engines.weights.update import BroadcastSender, Sent, WeightUpdate, send
from roost.learner.distributed import init_distributed
from roost.learner.forward import Head
from roost.learner.learner import Learner, in_buckets
from roost.learner.losses import Totals, correction, mean_over_units
from roost.learner.model import float_type, whole_bytes
from roost.learner.residence import PARTS
from roost.learner.sample import Distribution, Floats, Sample, even_parts, pack, picked
from roost.placement.routes import ServerRoute, WeightRoute
from roost.runtime.worker import Worker, WorkerGroup
from roost.trainer.guards import check_policy
from roost.transport.context import FailureKind, WaitedTooLong, WorkerFailed, worker_setup
from roost.vision.image import Image

NOTHING = Sent(0, 0, {}, {})
Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Receiver:
    """An engine that takes weights, and the rank that sends them."""

    kind: EngineKind
    url: str
    sleeps: bool
    api_key: str | None
    sender: int  # the rank of the learner
    route: WeightRoute
    processes: int = 1  # over which its model is sharded


class LearnerWorker(Worker):
    """One rank of a learner. All ranks are called at the same time, each with its share of the samples."""

    def __init__(self, settings: LearnerSettings, head: Head, threads: int | None = None, learns: bool = True) -> None:
        super().__init__()
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(self.has_accelerator and self.worker_info.simulated is None)
        if self._world_size > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            file = self._rendezvous_file(port)
            init_distributed(self._rank, self._world_size, address, port, self._device, file=file)
        self._settings = settings
        self._learner = Learner(settings, self._device, head, learns)

    def _rendezvous_file(self, port: int) -> Path | None:
        """Rendezvous file in the private folder of the node daemon; None if ranks span several nodes."""
        setup = worker_setup()
        if setup is None or not self._is_one_node:
            return None
        return Path(setup.daemon.socket).parent / f"{self._group_name}-{port}.store"

    @property
    def _is_one_node(self) -> bool:
        setup = worker_setup()
        return setup is not None and setup.placement.local_world_size == self._world_size

    def score(self, samples: Sequence[Sample], as_reference: bool = False) -> list[Floats]:
        return self._learner.score(samples, as_reference)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return self._learner.values(samples)

    def distributions(self, samples: Sequence[Sample], top_k: int, vocabulary: int) -> list[Distribution | None]:
        return self._learner.distributions(samples, top_k, vocabulary)

    def learn(self, samples: Sequence[Sample], totals: Totals, position: int) -> dict[str, float]:
        return self._learner.learn(samples, totals, position)

    def offload(self, parts: Sequence[str], in_background: bool = False) -> None:
        self._learner.offload(tuple(parts), in_background)

    def load(self, parts: Sequence[str]) -> None:
        self._learner.load(tuple(parts))

    def save(self, folder: str) -> None:
        """Copy the state and write it in the background."""
        self._learner.save(folder)

    def wait_saved(self) -> None:
        self._learner.wait_saved()

    def is_saved(self) -> bool:
        return self._learner.is_saved()

    def checkpoint_bytes(self) -> int:
        return self._learner.checkpoint_bytes()

    def restore(self, folder: str) -> None:
        self._learner.restore(folder)

    def export(self, folder: str) -> None:
        self._learner.export(folder)

    def export_whole(self, folder: str) -> None:
        self._learner.export_whole(folder)

    def whole_bytes(self) -> int:
        """Bytes of the whole model's weights, as `export_whole` writes them."""
        return whole_bytes(self._learner.module, self._settings)

    def memory(self) -> dict[str, float]:
        """Memory of this process in bytes: on its accelerator, with the peak since the last call, or on the host."""
        if self._device.type != "cuda":
            return {"rss": float(psutil.Process().memory_info().rss)}
        free, total = torch.cuda.mem_get_info(self._device)
        found = {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "peak": torch.cuda.max_memory_allocated(self._device),
            "device": total - free,  # of all processes
        }
        torch.cuda.reset_peak_memory_stats(self._device)
        return {name: float(count) for name, count in found.items()}

    # Weights ------------------------------------------------------------------------------------------------------

    def probe(self, shows_image: bool = False) -> Probe:
        """Probe of these weights: what an engine that has them must answer."""
        tokens = probe_tokens(self._learner.module.config.get_text_config().vocab_size)
        images: tuple[Image, ...] = ()
        if shows_image and self._learner.vision is not None:
            tokens, images = probe_with_image(tokens, self._learner.vision)
        sample = replace(Sample.of_policy(np.array(tokens, np.int64)), images=images)
        [found] = self._learner.score([sample], temperature=1.0)
        return Probe(tokens, tuple(found[1:].tolist()), TOLERANCES.get(self._settings.compute_dtype, 0.25), images)

    def send_weights(self, receivers: Sequence[Receiver], version: int) -> Sent:
        """Send weights to the engines assigned to this rank, route by route. All ranks take part in gathering.

        For an engine that was lost and restarted, the weights may already be offloaded to the host.
        """
        by_route = [[one for one in receivers if one.route is route] for route in WeightRoute]
        try:
            with self._learner.loaded_weights():
                parts = [self._send_by(some, version) for some in by_route if some]
        except MemoryError as error:
            return replace(NOTHING, failed={one.url: UpdateFailed(str(error)) for one in receivers})
        sent = max(parts, key=lambda part: part.buckets)
        return replace(sent, failed={url: error for part in parts for url, error in part.failed.items()})

    def _send_by(self, receivers: Sequence[Receiver], version: int) -> Sent:
        own = [receiver for receiver in receivers if receiver.sender == self._rank]
        shares_files = receivers[0].route is WeightRoute.SHARED_MEMORY and self._world_size > 1 and self._is_one_node
        stream = self._shard_files(receivers[0].sender) if shares_files else self._stream()
        try:
            try:
                return asyncio.run(self._send(own, stream, version)) if own else NOTHING
            finally:
                stream.finish()
        except EngineError as error:
            # Returned, not raised: the next route gathers weights from all ranks.
            return replace(NOTHING, failed={receiver.url: error for receiver in own})

    async def _send(self, receivers: Sequence[Receiver], stream: WeightStream, version: int) -> Sent:
        engines = [connect(one.kind, one.url, sleeps=one.sleeps, api_key=one.api_key) for one in receivers]
        try:
            match receivers[0].route:
                case WeightRoute.BROADCAST:
                    return await self._broadcast_sender(receivers[0], stream).send(engines, version)
                case WeightRoute.SHARED_MEMORY:
                    carrier: Carrier = stream if isinstance(stream, ShardFiles) else SharedMemoryCarrier()
                case WeightRoute.DEVICE:
                    carrier = device_carrier(stream)
                case WeightRoute.RELOAD | WeightRoute.ADAPTER | WeightRoute.RESTART as route:
                    raise ValueError(f"the weight route {route} sends no weights to running engines")
                case route:
                    assert_never(route)
            return await send(engines, stream, version, carrier, with_fingerprints=True)
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    def _broadcast_sender(self, receiver: Receiver, stream: WeightStream) -> BroadcastSender:
        match receiver.kind:
            case EngineKind.VLLM:
                open_group: type[VllmWeightGroup] | None = VllmWeightGroup
            case EngineKind.TORCH | EngineKind.SGLANG:  # torch.distributed
                open_group = None
            case _:
                assert_never(receiver.kind)
        return BroadcastSender(
            stream,
            os.environ["MASTER_ADDR"],  # of rank 0, which broadcasts
            self.acquire_free_port,
            self._device,
            receiver.processes,
            open_group=open_group,
        )

    def give_weights(self, group: str) -> None:
        """Send the weights to all workers of another group, which call `take_weights`. Call it on all ranks."""
        for bucket in in_buckets(self._learner.weights()):
            self._give(bucket, group)
        self._give(None, group)

    def _give(self, bucket: Bucket | None, group: str) -> None:
        if self._rank == 0:  # every rank gathers the weights, one sends them
            if bucket is not None:
                # The storage of a CPU tensor that was sent can no longer be resized, as offloading does.
                bucket = [(name, weight.clone() if weight.device.type == "cpu" else weight) for name, weight in bucket]
            self.broadcast(bucket, [(self._group_name, 0), (group, None)])

    def take_weights(self, group: str) -> None:
        """Take the weights of another group, which calls `give_weights`."""
        self._learner.take(entry for bucket in self._received(group) for entry in bucket)

    def _received(self, group: str) -> Iterator[Bucket]:
        while (bucket := self.broadcast(None, [(group, 0), (self._group_name, None)])) is not None:
            yield bucket

    def write_weights(self, model: str, folder: str) -> str:
        """Write a checkpoint that engines can start from. Return the error as text, or an empty string."""
        try:
            with self._learner.loaded_weights():
                self._write(model, folder)
        except (EngineError, OSError, MemoryError) as error:
            return str(error)
        return ""

    def _write(self, model: str, folder: str) -> None:
        stream = self._stream()
        try:
            if self._rank == 0:
                write_checkpoint(stream, model, folder)
        finally:
            stream.finish()

    def _stream(self) -> WeightStream:
        return WeightStream(self._learner.module, float_type(self._settings.compute_dtype))

    def _shard_files(self, sender: int) -> ShardFiles:
        return ShardFiles(self._learner.module, float_type(self._settings.compute_dtype), sender)


def _device(has_gpu: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


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


def shares(lengths: Sequence[int], mesh: MeshSizes) -> list[list[int]]:
    """Assign samples to ranks so that all have about as many tokens; each rank keeps the given order.

    Ranks of a context or tensor group compute the samples of all of them, so these groups come first.

    >>> shares([5, 1, 1, 3], MeshSizes(shard=2)), shares([5, 1, 1, 3], MeshSizes(shard=2, context=2))
    ([[0], [1, 2, 3]], [[0], [], [3], [1, 2]])
    """
    return [
        [group[index] for index in part]
        for group in even_parts(lengths, mesh.data)
        for part in even_parts([lengths[index] for index in group], mesh.model)
    ]


def totals_of(samples: Sequence[Sample], longest: int, loss: LossSettings | None = None) -> Totals:
    """Totals of a minibatch. The first token of a sample is not predicted, so it does not count.

    Where the learner's log-probs are known, rejected tokens are counted, and the mean of importance weights is taken.
    """
    generated = [int(sample.is_generated[1:].sum()) for sample in samples]
    whole = Totals(sum(1 for count in generated if count), sum(generated), longest)
    scored = [sample for sample, count in zip(samples, generated, strict=True) if count]
    old = [sample.old_logprobs for sample in scored if sample.old_logprobs is not None]
    if loss is None or not loss.corrects_rollout or not old or len(old) != len(scored):
        return whole
    packed = pack([replace(sample, mask_ids=None, mask_sizes=None) for sample in scored])
    sequence, turn = torch.from_numpy(packed.sequence), torch.from_numpy(packed.turn)
    learner, engine = (
        torch.from_numpy(picked(scored, arrays)) for arrays in (old, [sample.logprobs for sample in scored])
    )
    found = correction(learner, engine, sequence, turn, loss)
    if found.kept is not None:
        kept = found.kept
        whole = replace(whole, kept_sequences=len(sequence[kept].unique()), kept_tokens=int(kept.sum()))
    if found.weights is not None and loss.rollout_is_batch_normalize:
        whole = replace(whole, mean_weight=mean_over_units(found.weights, sequence, turn, loss.weight_level))
    return whole


class Learners:
    """Driver-side handle of a group of `LearnerWorker`s."""

    def __init__(
        self,
        group: WorkerGroup,
        parallel: ParallelSizes,
        routes: SendingRoutes,
        receiver_at: Callable[[str], Receiver],
        adapters: Path | None = None,
        shows_image: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group = group
        self._mesh = MeshSizes.of(parallel, group.world_size)
        self._shows_image = shows_image  # to engines in a probe, to check their vision tower
        self._routes, self._receiver_at = routes, receiver_at
        self._adapters = adapters  # folder for adapters, if only an adapter is trained

    @property
    def name(self) -> str:
        return self._group.name

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
        parts = shares([len(sample) for sample in samples], self._mesh)
        of_ranks = await self._each("learn", [([samples[index] for index in part], totals, position) for part in parts])
        statistics: dict[str, float] = of_ranks[0]
        return statistics

    async def _spread(self, method: str, samples: Sequence[Sample], *more: Any) -> list[Any]:
        parts = shares([len(sample) for sample in samples], self._mesh)
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

    async def offload(self, parts: Sequence[str] = PARTS, in_background: bool = False) -> None:
        await self.all("offload", tuple(parts), in_background)

    async def load(self, parts: Sequence[str] = PARTS) -> None:
        await self.all("load", tuple(parts))

    # Weights ------------------------------------------------------------------------------------------------------

    async def probe(self) -> Probe:
        """Probe of the current weights: what an engine that has them must answer."""
        found: Probe = (await self.all("probe", self._shows_image()))[0]
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
