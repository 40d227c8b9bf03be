"""HTTP requests in flight: deliver progress from the engine's thread, and abort requests without a client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

from roost.engines.protocol import EngineLost, Finish, Sampling, joined_masks
from roost.net.errors import Refused, refusing
from roost.torch_engine.engine import TorchEngine
from roost.torch_engine.request_fields import MOST_SAMPLES
from roost.torch_engine.scheduler import Progress, Request
from roost.torch_engine.text import Piece, Sample, TextCodec, TextWanted

ROUTE_PREFIXES = ("generate-tokens-", "cmpl-", "chatcmpl-")  # prefixes of the client's id in response ids


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One parsed HTTP request: `samples` completions of each prompt."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]  # one per prompt
    samples: int = 1
    adapter: str | None = None
    wants_prompt_logprobs: bool = False
    text: TextWanted | None = None

    def requests(self, streams: bool) -> list[Request]:
        """Requests for the engine, grouped by prompt."""
        single = len(self.prompts) * self.samples == 1
        requests: list[Request] = []
        for prompt, sampling in zip(self.prompts, self.samplings, strict=True):
            for sample in range(self.samples):
                request_id = self.request_id if single else f"{self.request_id}-{len(requests)}"
                wants_scores = self.wants_prompt_logprobs and sample == 0
                requests.append(Request(request_id, prompt, sampling.nth(sample), wants_scores, self.adapter, streams))
        return requests


class ProgressQueue:
    """Queue of progress from the engine's thread to one HTTP request."""

    def __init__(self, wakes_for_each: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._wakes_for_each = wakes_for_each  # if False, wakes only when a completion ends
        self._pending: deque[tuple[int, Progress]] = deque()
        self._arrived = asyncio.Event()
        self._called = False

    def deliver(self, index: int, progress: Progress) -> None:
        """Add progress and wake the request, at most once until it takes; called on the engine's thread."""
        self._pending.append((index, progress))
        if (self._wakes_for_each or progress.finish is not None) and not self._called:
            self._called = True
            with suppress(RuntimeError):  # the server's loop has ended
                self._loop.call_soon_threadsafe(self._arrived.set)

    def last_of(self, index: int) -> Progress | None:
        """The end of a completion, if it has arrived and was not taken."""
        pending = list(self._pending)
        return next((each for owner, each in pending if owner == index and each.finish is not None), None)

    async def take(self) -> Iterator[tuple[int, Progress]]:
        await self._arrived.wait()
        # In this order, so that concurrent deliveries are either taken below or wake again.
        self._arrived.clear()
        self._called = False
        return merged([self._pending.popleft() for _ in range(len(self._pending))])


def merged(deliveries: Sequence[tuple[int, Progress]]) -> Iterator[tuple[int, Progress]]:
    """Merge progress of the same completion and version, as decoding text in one go is faster."""
    by_index: dict[int, list[Progress]] = {}
    for index, progress in deliveries:
        by_index.setdefault(index, []).append(progress)
    for index, steps in by_index.items():
        for version, group in groupby(steps, key=attrgetter("version")):
            run = list(group)
            yield (
                index,
                Progress(
                    tuple(chain.from_iterable(step.token_ids for step in run)),
                    tuple(chain.from_iterable(step.logprobs for step in run)),
                    version,
                    run[-1].finish,
                    next((step.prompt_logprobs for step in run if step.prompt_logprobs is not None), None),
                    max(step.cached_tokens for step in run),
                    joined_masks(step.masks for step in run),
                    run[-1].routing,
                ),
            )


class InFlightRequests:
    """Requests being served, by response id."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._engine_ids: dict[str, list[str]] = {}
        self.closing = False

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Abort these requests, or all, by the client's or the response's id; return the number of completions."""
        if request_ids is None:
            return await asyncio.to_thread(self._engine.abort)
        names = {prefix + request_id for request_id in request_ids for prefix in ("", *ROUTE_PREFIXES)}
        found = [engine_id for name in names for engine_id in self._engine_ids.get(name, ())]
        return await asyncio.to_thread(self._engine.abort, found) if found else 0

    @asynccontextmanager
    async def served(self, requested: GenerateRequest, each_piece: bool) -> AsyncIterator[RequestInFlight]:
        """Context that serves a request; unfinished completions are aborted on exit."""
        self._check(requested)
        served = RequestInFlight(self._engine, requested, each_piece)
        self._engine_ids[requested.request_id] = served.engine_ids
        try:
            await served.submit()
            yield served
        finally:
            await served.abort_unfinished()
            del self._engine_ids[requested.request_id]

    def _check(self, requested: GenerateRequest) -> None:
        if self.closing:
            raise Refused("the server is shutting down", 503)
        if requested.request_id in self._engine_ids:
            raise Refused(f"a request with the id {requested.request_id} is being served already", field="request_id")
        if (completions := len(requested.prompts) * requested.samples) > MOST_SAMPLES:
            raise Refused(
                f"{len(requested.prompts)} prompts with n = {requested.samples} are {completions} completions; "
                f"one request may ask for {MOST_SAMPLES}",
                field="n",
            )


class RequestInFlight:
    """Completions of one HTTP request in progress."""

    def __init__(self, engine: TorchEngine, requested: GenerateRequest, each_piece: bool) -> None:
        self._engine = engine
        self._request = requested
        streams = each_piece or bool(requested.text and requested.text.stops)
        self._requests = requested.requests(streams)
        self.samples: list[Sample] = []  # of the requests that the engine took
        self._progress = ProgressQueue(streams)

    @property
    def engine_ids(self) -> list[str]:
        return [request.request_id for request in self._requests]

    async def submit(self) -> None:
        """Submit all completions; images are cut into patches on another thread, so that the loop serves others."""
        if not any(sampling.images for sampling in self._request.samplings):
            self._submit()
            return
        submitting = asyncio.create_task(asyncio.to_thread(self._submit))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            await asyncio.wait([submitting])  # the thread cannot be stopped, and what it submits must be aborted
            raise

    def _submit(self) -> None:
        for index, request in enumerate(self._requests):
            with refusing():
                self._engine.submit(request, partial(self._progress.deliver, index))
            self.samples.append(Sample(index, request.token_ids, request.sampling, self._request.text))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces of all completions as they arrive."""
        unfinished = len(self.samples)
        while unfinished:
            for index, progress in await self._progress.take():
                sample = self.samples[index]
                if sample.finish is not None:
                    sample.take_routing(progress)
                    continue  # generated before the engine was told of the stop string
                piece = sample.take(progress)
                if sample.finish is Finish.ABORT and self._engine.failure is not None:
                    raise engine_lost(self._engine)
                if sample.cut_short and progress.finish is None:
                    await self._abort([self._requests[index].request_id])
                    sample.take_routing(self._progress.last_of(index))
                unfinished -= sample.finish is not None
                yield piece

    async def finished(self) -> list[Sample]:
        """All completions, after the last has ended."""
        async for _ in self.pieces():
            pass
        return self.samples

    async def abort_unfinished(self) -> None:
        await self._abort([self._requests[sample.index].request_id for sample in self.samples if sample.finish is None])

    async def _abort(self, engine_ids: list[str]) -> None:
        if engine_ids and self._engine.failure is None:
            await asyncio.to_thread(self._engine.abort, engine_ids)  # it waits for the end of a step


def engine_lost(engine: TorchEngine) -> EngineLost:
    return EngineLost(f"the engine stopped working: {type(engine.failure).__name__}: {engine.failure}")


class ModelNames:
    """Model names that requests may use: the model's and those of loaded adapters."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.adapters: dict[str, str] = {}  # the folder of each

    def adapter(self, requested: str | None) -> str | None:
        """Adapter named by a request, or None for the base model."""
        if not requested or requested == self.model:
            return None
        if requested in self.adapters:
            return requested
        served = ", ".join((self.model, *self.adapters))
        raise Refused(f"The model `{requested}` does not exist; served here: {served}", 404, "model")


@dataclass(frozen=True, slots=True)
class Served:
    """An engine behind a server."""

    engine: TorchEngine
    codec: TextCodec
    names: ModelNames
    in_flight: InFlightRequests
    folder: str
    created: int  # seconds since 1970
