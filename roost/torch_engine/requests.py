"""HTTP requests of the built-in engine: fields, requests in flight, and the parts of responses that routes share."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roost.engines.protocol import EngineError, EngineLost, Finish, Sampling, joined_masks
from roost.net.errors import Refused, error_body, logger, refusing, status_of
from roost.torch_engine.engine import TorchEngine
from roost.torch_engine.scheduler import Progress, Request
from roost.torch_engine.text import Piece, Sample, TextCodec, TextWanted

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    """Log-prob as a number that JSON supports.

    >>> finite(-0.5), finite(float("-inf")), finite(float("nan"))
    (-0.5, -9999.0, -9999.0)
    """
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def usage(request: GenerateRequest, samples: Sequence[Sample]) -> Json:
    """Token counts of prompts and completions; a prompt counts once for all its completions."""
    prompt_tokens = sum(len(prompt) for prompt in request.prompts)
    completion_tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in samples[:: request.samples])},
    }


def weight_versions(sample: Sample) -> list[Json]:
    """Policy versions by token range; versions are strings in responses."""
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in sample.versions]


def prompt_logprobs(sample: Sample) -> list[Json | None] | None:
    """Log-prob of each prompt token, by its id, in vLLM's format; None for the first, which nothing precedes."""
    if sample.prompt_logprobs is None:
        return None
    reply: list[Json | None] = [None]
    for token_id, logprob in zip(sample.prompt[1:], sample.prompt_logprobs, strict=True):
        reply.append({str(token_id): {"logprob": finite(logprob), "rank": None, "decoded_token": None}})
    return reply


def token_text(codec: TextCodec, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else codec.token_text(token_id)


def chat_logprobs(piece: Piece, codec: TextCodec, as_ids: bool = False) -> Json:
    """Generated tokens and their log-probs, with the tokens as text."""
    content = []
    for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
        text = token_text(codec, token_id, as_ids)
        content.append({"token": text, "logprob": finite(logprob), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}


T = TypeVar("T")


class ResponseFormat(Protocol):
    """Response format of one route."""

    def whole(self, samples: list[Sample]) -> Json:
        """Body of a response that is not streamed."""
        ...

    def opening(self) -> Iterable[Json]:
        """First events of a stream."""
        ...

    def chunk(self, piece: Piece, sample: Sample) -> Json | None:
        """Event for a piece; None if it has nothing that was requested."""
        ...

    def usage_chunk(self, samples: list[Sample]) -> Json:
        """Last event of a stream, if the client requested it."""
        ...


class WholeReply(Response):
    """All completions of a request in one response, after the last has ended."""

    def __init__(self, requests: InFlightRequests, request: GenerateRequest, response_format: ResponseFormat) -> None:
        super().__init__()
        self._requests, self._request, self._format = requests, request, response_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._requests.served(self._request, each_piece=False) as in_flight:
            samples = await unless_disconnected(in_flight.finished(), receive)
        if samples is not None:
            await JSONResponse(self._format.whole(samples))(scope, receive, send)


class StreamReply(Response):
    """Stream completions as server-sent events."""

    def __init__(
        self, requests: InFlightRequests, request: GenerateRequest, response_format: ResponseFormat, include_usage: bool
    ) -> None:
        super().__init__()
        self._requests, self._request, self._format = requests, request, response_format
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Submitted before the first byte is sent, so that a refusal still has a status of its own.
        async with self._requests.served(self._request, each_piece=True) as in_flight:
            events = StreamingResponse(self._events(in_flight), media_type="text/event-stream")
            await events(scope, receive, send)

    async def _events(self, in_flight: RequestInFlight) -> AsyncIterator[str]:
        try:
            async for chunk in self._chunks(in_flight):
                yield _event(chunk)
        except (Refused, EngineError) as error:  # the status has already been sent
            logger.error("%s: %s", self._request.request_id, error)
            yield _event(error_body(str(error), status_of(error)))
        yield "data: [DONE]\n\n"

    async def _chunks(self, in_flight: RequestInFlight) -> AsyncIterator[Json]:
        for chunk in self._format.opening():
            yield chunk
        async for piece in in_flight.pieces():
            if (piece_json := self._format.chunk(piece, in_flight.samples[piece.index])) is not None:
                yield piece_json
        if self._include_usage:
            yield self._format.usage_chunk(in_flight.samples)


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Result of the work, or None as soon as the client disconnects."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(chunk: Json) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


MOST_SAMPLES = 4096  # of one request, over all its prompts

# Fields that do not change the tokens.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id"}
)

# Unsupported fields, with the values that have no effect; null has none in any of them.
NO_EFFECT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "suffix": (),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": (),
    "top_logprobs": (0,),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "chat_template": (),
    "documents": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "features": (),
    "content_parts": (),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": (),
    "extra_args": (),
    "repetition_detection": (),
    "stream_interval": (1,),
}


class StrictBody(BaseModel):
    """A request body that refuses unknown fields, unless they have no effect."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _refuse_unknown(self) -> StrictBody:
        if refused := refused_fields(self.model_extra or {}, type(self).model_fields):
            raise ValueError("; ".join(refused))
        return self


def refused_fields(extra: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Reasons that unknown fields of a body cannot be ignored.

    >>> refused_fields({"user": "me", "presence_penalty": 0.0, "best_of": 4, "temprature": 1}, ["temperature"])
    ['best_of is not supported by this engine, got 4', 'temprature is unknown; did you mean temperature?']
    """
    return [
        _why_refused(name, value, known)
        for name, value in extra.items()
        if name not in WITHOUT_EFFECT
        and not (name in NO_EFFECT_VALUES and (value is None or value in NO_EFFECT_VALUES[name]))
    ]


def _why_refused(name: str, value: Any, known: Collection[str]) -> str:
    if name in NO_EFFECT_VALUES:
        shown = repr(value)
        return f"{name} is not supported by this engine, got {shown if len(shown) <= 60 else shown[:60] + '...'}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


ID_PATTERN = r"^[!-~]{1,256}$"  # ids are written to responses and logs
RequestId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


def request_id_of(request: HttpRequest, given: str | None) -> str:
    """Id of a request: the client's, from its header or body, else a new one."""
    header = request.headers.get("x-request-id")
    if header is not None and not re.match(ID_PATTERN, header):
        raise Refused("X-Request-Id must be 1 to 256 visible ASCII characters", field="request_id")
    return header or given or uuid.uuid4().hex


class StreamOptions(StrictBody):
    """Options for the end of a stream."""

    include_usage: bool | None = False


class SamplingFields(StrictBody):
    """Sampling parameters in OpenAI's and vLLM's format; defaults sample from the model's own distribution."""

    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # of the prompt's tokens, no others

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def text_wanted(self, codec: TextCodec) -> TextWanted:
        codec.check()
        return TextWanted(codec, self.stop_strings, self.include_stop_str_in_output, self.skip_special_tokens)

    def sampling(self, max_tokens: int) -> Sampling:
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # both mean all tokens
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        with refusing():
            return Sampling(max_tokens, **{name: value for name, value in given.items() if value is not None})


def room_for_completion(prompt_tokens: int, max_context: int) -> int:
    """Number of tokens that fit after a prompt; raise Refused if there is no room."""
    room = max_context - prompt_tokens
    if room < 1:
        raise Refused(
            f"the prompt has {prompt_tokens} tokens and the context holds {max_context}, which leaves no room for a "
            f"completion; shorten the prompt by {1 - room}, or raise max_context",
            field="prompt",
        )
    return room


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
                wants_prompt_logprobs = self.wants_prompt_logprobs and sample == 0
                requests.append(
                    Request(request_id, prompt, sampling.nth(sample), wants_prompt_logprobs, self.adapter, streams)
                )
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
            with suppress(RuntimeError):  # the server's event loop has ended
                self._loop.call_soon_threadsafe(self._arrived.set)

    def last_of(self, index: int) -> Progress | None:
        """Last progress of a completion, if it has arrived and was not taken yet."""
        pending = list(self._pending)
        return next((each for owner, each in pending if owner == index and each.finish is not None), None)

    async def take(self) -> Iterator[tuple[int, Progress]]:
        await self._arrived.wait()
        # In this order, so that concurrent deliveries are either taken below or wake this request again.
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
                f"request at most {MOST_SAMPLES} at once",
                field="n",
            )


class RequestInFlight:
    """Completions of one HTTP request in progress."""

    def __init__(self, engine: TorchEngine, requested: GenerateRequest, each_piece: bool) -> None:
        self._engine = engine
        self._request = requested
        streams = each_piece or bool(requested.text and requested.text.stops)
        self._requests = requested.requests(streams)
        self.samples: list[Sample] = []  # of the requests that the engine accepted
        self._progress = ProgressQueue(streams)

    @property
    def engine_ids(self) -> list[str]:
        return [request.request_id for request in self._requests]

    async def submit(self) -> None:
        """Submit all completions. Images are processed in a thread, so that the event loop is not blocked."""
        if not any(sampling.images for sampling in self._request.samplings):
            self._submit()
            return
        submitting = asyncio.create_task(asyncio.to_thread(self._submit))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            await asyncio.wait([submitting])  # the thread cannot be stopped, and its completions must be aborted
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
                    continue  # generated before the engine received the stop string
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
            await asyncio.to_thread(self._engine.abort, engine_ids)  # waits for the end of a step


def engine_lost(engine: TorchEngine) -> EngineLost:
    return EngineLost(f"the engine stopped working: {type(engine.failure).__name__}: {engine.failure}")


class ModelNames:
    """Model names that requests may use: the model's and those of loaded adapters."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.adapters: dict[str, str] = {}  # name -> folder

    def adapter(self, requested: str | None) -> str | None:
        """Adapter named by a request, or None for the base model."""
        if not requested or requested == self.model:
            return None
        if requested in self.adapters:
            return requested
        served = ", ".join((self.model, *self.adapters))
        raise Refused(f"The model `{requested}` does not exist; served here: {served}", 404, "model")


@dataclass(frozen=True, slots=True)
class EngineApp:
    """The engine that a server serves, and what its routes need."""

    engine: TorchEngine
    codec: TextCodec
    names: ModelNames
    in_flight: InFlightRequests
    folder: str
    created: int  # seconds since 1970
