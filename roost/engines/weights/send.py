"""Send weights bucket by bucket; the next one is gathered while the engines load the current one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from roost.engines.protocol import Engine, EngineError, UpdateFailed, WeightsRefused
from roost.engines.weights.carriers import Carrier
from roost.engines.weights.payload import BUCKET_BYTES, Manifest, TensorInfo, WeightPayload, cut, size_of
from roost.engines.weights.probe import fingerprint
from roost.engines.weights.source import WeightSource

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
    source fails, all of them restore. At most two buckets exist at a time besides the weights.
    """
    manifest = Manifest(version, source.tensors, carrier.is_packed)
    noted: dict[str, str] = {}
    stream = _noted(source, noted) if with_fingerprints else source.stream()
    buckets = list(cut(manifest.tensors, bucket_bytes))
    taking = _Taking(engines)
    try:
        await taking.each(lambda engine: _announce(engine, manifest))
        await _send_buckets(taking, buckets, stream, carrier)
        await taking.each(lambda engine: engine.finish_update(version))
    except _NobodyLeft:
        pass  # the errors are in the result
    except BaseException as error:
        await taking.abandon(taking.left)
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            raise UpdateFailed(f"version {version} was not sent: {error}") from error
        raise
    finally:
        carrier.close()
    return Sent(sum(map(size_of, manifest.tensors)), len(buckets), noted, taking.failed)


async def _send_buckets(
    taking: _Taking, buckets: Sequence[tuple[TensorInfo, ...]], stream: Iterator[torch.Tensor], carrier: Carrier
) -> None:
    loop = asyncio.get_running_loop()
    # One thread, so that the collectives that gather shards stay in order.
    with _sending_thread() as thread:

        def packing(index: int) -> asyncio.Future[WeightPayload]:
            return loop.run_in_executor(thread, carrier.pack, buckets[index], stream, index + 1 == len(buckets))

        following = packing(0)
        try:
            for index in range(len(buckets)):
                payload = await following
                accompanied = loop.run_in_executor(thread, carrier.accompany, payload)
                if index + 1 < len(buckets):
                    following = packing(index + 1)
                await taking.each(lambda engine, payload=payload: engine.take(payload))  # type: ignore[misc]
                await accompanied
                carrier.release(payload)
        except BaseException:
            # Let packing finish before its memory is freed, but do not wait long for a broadcast without receivers.
            await asyncio.wait([following], timeout=PACKING_LIMIT_S)
            raise


async def _announce(engine: Engine, manifest: Manifest) -> None:
    try:
        await engine.start_update(manifest)
    except UpdateFailed as error:
        raise WeightsRefused(str(error)) from error


class _NobodyLeft(Exception):
    """Raised when every engine has failed."""


class _Taking:
    """Engines of an update, without those that failed."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.left = list(engines)
        self.failed: dict[str, EngineError] = {}

    async def each(self, step: Callable[[Engine], Awaitable[None]]) -> None:
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
            raise _NobodyLeft

    async def abandon(self, engines: Sequence[Engine]) -> None:
        """Cancel the update on engines; verification finds those that cannot restore their weights."""
        await asyncio.gather(*(engine.abandon_update() for engine in engines), return_exceptions=True)


@contextlib.contextmanager
def _sending_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread on the caller's device that is not joined: a broadcast to a dead engine may never return."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    threads = ThreadPoolExecutor(1, "weights", _use_device, (device,))
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _use_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _noted(source: WeightSource, noted: dict[str, str]) -> Iterator[torch.Tensor]:
    for info, tensor in zip(source.tensors, source.stream(), strict=True):
        noted[info.name] = fingerprint(tensor)
        yield tensor
