"""Parts of JSON responses that all routes share, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roost.engines.protocol import EngineError
from roost.net.errors import Refused, error_body, logger, status_of
from roost.torch_engine.in_flight import GenerateRequest, InFlightRequests, RequestInFlight
from roost.torch_engine.text import Piece, Sample, TextCodec

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
    """The log-probability of each token of the prompt, by its id; nothing precedes the first, so it has none."""
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


class Form(Protocol):
    """Response format of one route."""

    def whole(self, samples: list[Sample]) -> Json: ...

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

    def __init__(self, requests: InFlightRequests, request: GenerateRequest, form: Form) -> None:
        super().__init__()
        self._requests, self._request, self._form = requests, request, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._requests.served(self._request, each_piece=False) as in_flight:
            samples = await unless_disconnected(in_flight.finished(), receive)
        if samples is not None:
            await JSONResponse(self._form.whole(samples))(scope, receive, send)


class StreamReply(Response):
    """Stream completions as server-sent events."""

    def __init__(self, requests: InFlightRequests, request: GenerateRequest, form: Form, tells_usage: bool) -> None:
        super().__init__()
        self._requests, self._request, self._form = requests, request, form
        self._tells_usage = tells_usage

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
        for chunk in self._form.opening():
            yield chunk
        async for piece in in_flight.pieces():
            if (piece_json := self._form.chunk(piece, in_flight.samples[piece.index])) is not None:
                yield piece_json
        if self._tells_usage:
            yield self._form.usage_chunk(in_flight.samples)


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
