"""`WeightUpdate`: a policy version with the sources of its weights, and the senders that stream them to engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roost.engines.protocol import Engine, EngineError, UpdateFailed, WeightsRefused
from roost.engines.weights.carriers import BroadcastCarrier, Carrier, VllmWeightGroup, WeightGroup, write_checkpoint
from roost.engines.weights.payload import (
    BUCKET_BYTES,
    GroupInvitation,
    Manifest,
    TensorInfo,
    WeightPayload,
    size_of,
    split_buckets,
)
from roost.engines.weights.probe import Fingerprints, Probe
from roost.engines.weights.source import WeightSource
from roost.placement.routes import WeightRoute
from roost.procs.user_code import in_daemon_thread

PACKING_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of sending: size, fingerprints of the sent tensors, and the engines that failed."""

    size: int
    buckets: int
    fingerprints: Mapping[str, str]
    failed: Mapping[str, EngineError]  # by the engine's url


async def send(
    engines: Sequence[Engine],
    source: WeightSource,
    version: int,
    carrier: Carrier,
    bucket_bytes: int = BUCKET_BYTES,
    with_fingerprints: bool = False,
) -> Sent:
    """Send a version to engines, which must be paused, or asleep with their weights awake.

    An engine that fails is skipped from then on and restores its old weights if it can; the others continue. If the
    source fails, all engines restore theirs. At most two buckets exist at a time besides the weights.
    """
    manifest = Manifest(version, source.tensors, carrier.is_packed)
    fingerprints = Fingerprints()
    stream = _fingerprinted(source, fingerprints) if with_fingerprints else source.stream()
    buckets = list(split_buckets(manifest.tensors, bucket_bytes))
    receivers = _Receivers(engines)
    size = sum(map(size_of, manifest.tensors))
    try:
        await receivers.call(lambda engine: _announce(engine, manifest))
        await _send_buckets(receivers, buckets, stream, carrier)
        await receivers.call(lambda engine: engine.finish_update(version))
    except _NoEngineLeft:
        # Fingerprints are not read: the device may be stuck in a broadcast to engines that are gone.
        return Sent(size, len(buckets), {}, receivers.failed)
    except BaseException as error:
        await receivers.abandon(receivers.left)
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            raise UpdateFailed(f"version {version} was not sent: {error}") from error
        raise
    finally:
        carrier.close()
    return Sent(size, len(buckets), fingerprints.read(), receivers.failed)


async def _send_buckets(
    receivers: _Receivers, buckets: Sequence[tuple[TensorInfo, ...]], stream: Iterator[torch.Tensor], carrier: Carrier
) -> None:
    loop = asyncio.get_running_loop()
    # One thread, so that the collectives that gather shards stay in order.
    with _transfer_thread() as thread:

        def packing(index: int) -> asyncio.Future[WeightPayload]:
            return loop.run_in_executor(thread, carrier.pack, buckets[index], stream, index + 1 == len(buckets))

        following = packing(0)
        try:
            for index in range(len(buckets)):
                payload = await following
                transferring = loop.run_in_executor(thread, carrier.transfer, payload)
                if index + 1 < len(buckets):
                    following = packing(index + 1)
                await receivers.call(lambda engine, payload=payload: engine.take(payload))  # type: ignore[misc]
                await _wait_for_transfer(transferring, receivers.failed)
                carrier.release(payload)
        except BaseException:
            # Let packing finish before its memory is freed, but do not wait long for a broadcast without receivers.
            await asyncio.wait([following], timeout=PACKING_LIMIT_S)
            raise


async def _wait_for_transfer(transferring: asyncio.Future[None], failed: Mapping[str, EngineError]) -> None:
    """Wait for the sender's side of a transfer; only briefly if an engine failed, as a broadcast may never end then."""
    if failed:
        await asyncio.wait([transferring], timeout=PACKING_LIMIT_S)
        if not transferring.done():
            raise UpdateFailed(f"the broadcast does not end without {', '.join(failed)}")
    await transferring


async def _announce(engine: Engine, manifest: Manifest) -> None:
    try:
        await engine.start_update(manifest)
    except UpdateFailed as error:
        raise WeightsRefused(str(error)) from error


class _NoEngineLeft(Exception):
    """Raised when every engine has failed."""


class _Receivers:
    """Engines of an update, without those that failed."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.left = list(engines)
        self.failed: dict[str, EngineError] = {}

    async def call(self, step: Callable[[Engine], Awaitable[None]]) -> None:
        answers = await asyncio.gather(*(step(engine) for engine in self.left), return_exceptions=True)
        lost = []
        for engine, answer in zip(self.left, answers, strict=True):
            if isinstance(answer, EngineError):
                self.failed[engine.url] = answer
                lost.append(engine)
            elif isinstance(answer, BaseException):
                raise answer
        self.left = [engine for engine in self.left if engine not in lost]
        await self.abandon(lost)
        if not self.left:
            raise _NoEngineLeft

    async def abandon(self, engines: Sequence[Engine]) -> None:
        """Cancel the update on engines; verification finds those that cannot restore their weights."""
        await asyncio.gather(*(engine.abandon_update() for engine in engines), return_exceptions=True)


@contextlib.contextmanager
def _transfer_thread() -> Iterator[ThreadPoolExecutor]:
    """One thread on the caller's device. It is not joined, because a broadcast to a dead engine may never return."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    threads = ThreadPoolExecutor(1, "weights", _use_device, (device,))
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _use_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _fingerprinted(source: WeightSource, fingerprints: Fingerprints) -> Iterator[torch.Tensor]:
    for info, tensor in zip(source.tensors, source.stream(), strict=True):
        fingerprints.add(info.name, tensor)
        yield tensor


class Sender(Protocol):
    """Holder of a version's weights that can send them; in a job, the learner."""

    def route_to(self, server: str) -> WeightRoute:
        """Weight route to a server by its name."""
        ...

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        """Send the version to engines; the result lists those that failed."""
        ...

    async def write(self, model: str, folder: str) -> None:
        """Write the weights as a checkpoint, with the other files of the model's folder."""
        ...


class LocalSender:
    """Sender of weights held by this process."""

    def __init__(
        self, source: WeightSource, route: WeightRoute, carrier: Callable[[], Carrier], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.source = source
        self._route = route
        self._new_carrier = carrier
        self._bucket_bytes = bucket_bytes

    def route_to(self, server: str) -> WeightRoute:
        return self._route

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        return await send(
            engines, self.source, version, self._new_carrier(), self._bucket_bytes, with_fingerprints=True
        )

    async def write(self, model: str, folder: str) -> None:
        try:
            await asyncio.to_thread(write_checkpoint, self.source, model, folder)
        except EngineError:
            raise
        except Exception as error:
            raise UpdateFailed(f"cannot write a checkpoint of the weights: {error}") from error


@dataclass(frozen=True)
class WeightUpdate:
    """A policy version with everything engines need to load it.

    `sender` holds the weights, `checkpoint` is a folder that engines can start from, `adapter` the folder of a LoRA
    adapter for engines that hold the base model. The probe has the log-probs that an engine on this version must give.
    """

    version: int
    probe: Probe
    sender: Sender | None = None
    checkpoint: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a policy version is 0 or more, not {self.version}")
        if self.sender is None and self.checkpoint is None and self.adapter is None:
            raise ValueError(f"version {self.version} has no weights: give a sender, a checkpoint or an adapter")


JOIN_LIMIT_S = 300.0


class BroadcastSender(LocalSender):
    """Sends to engines on other devices or machines.

    Engines come and go while the ranks of a group are fixed, so each transfer creates its own group. `processes` is
    the number of processes per engine (tensor * pipeline size). For vLLM, which creates groups differently, pass
    `VllmWeightGroup` as `open_group`.
    """

    def __init__(
        self,
        source: WeightSource,
        address: str,
        free_port: Callable[[], int],
        device: torch.device,
        processes: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        open_group: Callable[[GroupInvitation, torch.device], WeightGroup | VllmWeightGroup] | None = None,
    ) -> None:
        super().__init__(source, WeightRoute.BROADCAST, self._carrier, bucket_bytes)
        self._address, self._free_port, self._device, self._processes = address, free_port, device, processes
        self._open_group = open_group or _open_group
        self._group: WeightGroup | VllmWeightGroup | None = None

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        self._group = await self._join_group(engines)
        try:
            return await send(engines, self.source, version, self._carrier(), self._bucket_bytes, True)
        finally:
            self._group.close()
            await asyncio.gather(*(engine.leave_group() for engine in engines), return_exceptions=True)

    async def _join_group(self, engines: Sequence[Engine]) -> WeightGroup | VllmWeightGroup:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        port, size = self._free_port(), 1 + self._processes * len(engines)
        invitations = [
            GroupInvitation(self._address, port, 1 + self._processes * index, size, backend)
            for index in range(len(engines))
        ]
        joining = [
            asyncio.create_task(engine.join_group(invitation))
            for engine, invitation in zip(engines, invitations, strict=True)
        ]
        # Its own daemon thread: without one of the engines, opening the group ends only at its time limit.
        opening = asyncio.wrap_future(
            in_daemon_thread("weight group", lambda: self._open_group(invitations[0], self._device))
        )
        try:
            # An engine that cannot join is noticed at once; the group alone would wait for it until its time limit.
            together: list[asyncio.Future[Any]] = [*joining, opening]
            await asyncio.wait(together, return_when=asyncio.FIRST_EXCEPTION)
            for each in together:
                if each.done():
                    each.result()
            return await opening
        except BaseException:
            for task in joining:
                task.cancel()
            opening.add_done_callback(_close_late)
            raise

    def _carrier(self) -> BroadcastCarrier:
        if self._group is None:
            raise RuntimeError("no broadcast group is open; call send")
        return BroadcastCarrier(self._group.broadcast)


def _close_late(opening: asyncio.Future[WeightGroup | VllmWeightGroup]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _open_group(invitation: GroupInvitation, device: torch.device) -> WeightGroup:
    return WeightGroup(invitation, 0, device, JOIN_LIMIT_S)
