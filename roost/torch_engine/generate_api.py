"""Tokens in, tokens out: the route that rollouts use, because detokenizing and tokenizing again may change tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from roost.net.errors import Refused, refusing
from roost.net.routing import encode_routing
from roost.torch_engine.requests import (
    EngineApp,
    GenerateRequest,
    Json,
    RequestId,
    SamplingFields,
    StreamOptions,
    StreamReply,
    StrictBody,
    WholeReply,
    chat_logprobs,
    finite,
    prompt_logprobs,
    request_id_of,
    room_for_completion,
    usage,
    weight_versions,
)
from roost.torch_engine.text import Piece, Sample, TextWanted
from roost.vision.image import Image, from_data_url


class TokenSampling(SamplingFields):
    """vLLM's sampling parameters; without `max_tokens`, a completion may fill the context."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # of the sampled token only
    detokenize: bool = True


class PromptImage(StrictBody):
    """An image of a prompt, at the position of its first token."""

    url: str
    start: Annotated[int, Field(ge=0)]


class GenerateBody(StrictBody):
    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: RequestId | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # of the prompt; those of the completion are always returned
    output_mode: Literal["tokens", "text"] = "tokens"
    return_sampling_mask: bool = False  # in vLLM an option of the server
    images: list[PromptImage] | None = None  # vLLM takes processed ones as `features`
    return_routed_experts: bool = False


class GenerateFormat:
    """Response format of /inference/v1/generate."""

    def __init__(self, served: EngineApp, body: GenerateBody, requested: GenerateRequest) -> None:
        self._served, self._body, self._requested = served, body, requested

    def whole(self, samples: list[Sample]) -> Json:
        return {
            **self._head(),
            "model": self._requested.adapter or self._served.names.model,
            "created": int(time.time()),
            "choices": [self._choice(sample.whole, sample) for sample in samples],
            "usage": usage(self._requested, samples),
            "prompt_logprobs": prompt_logprobs(samples[0]),
            "prompt_token_ids": self._body.token_ids if self._body.return_token_ids else None,
        }

    def opening(self) -> Iterable[Json]:
        return ()

    def chunk(self, piece: Piece, sample: Sample) -> Json:
        chunk = {**self._head(), "choices": [self._choice(piece, sample)], "usage": None}
        if self._body.return_token_ids and piece.start == 0:
            chunk["prompt_token_ids"] = self._body.token_ids
        return chunk

    def usage_chunk(self, samples: list[Sample]) -> Json:
        return {**self._head(), "choices": [], "usage": usage(self._requested, samples)}

    def _head(self) -> Json:
        return {"request_id": self._requested.request_id, "output_mode": self._body.output_mode}

    def _choice(self, piece: Piece, sample: Sample) -> Json:
        choice: Json = {
            "index": piece.index,
            "token_ids": list(piece.token_ids),
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
            "weight_versions": weight_versions(sample) if piece.finish is not None else None,
        }
        if self._requested.samplings[0].wants_mask:
            choice["sampling_mask"] = [] if piece.masks is None else piece.masks.lists()
        if sample.routing is not None and piece.finish is not None:
            choice["routed_experts"] = encode_routing(sample.routing)
        return {**choice, "text": piece.text} if self._body.output_mode == "text" else choice

    def _logprobs(self, piece: Piece) -> Json | None:
        requested = self._body.sampling_params.logprobs
        if requested is None:
            return None
        if self._body.output_mode == "text":
            return chat_logprobs(piece, self._served.codec)
        content: list[Json] = [
            {"token_id": token_id, "logprob": finite(logprob), "rank": None, "top_logprobs": []}
            for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
        return {"content": content}


def generate_router(served: EngineApp) -> APIRouter:
    router = APIRouter()

    @router.post("/inference/v1/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        requested = parse_request(served, body, request)
        response_format = GenerateFormat(served, body, requested)
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return StreamReply(served.in_flight, requested, response_format, include_usage)
        return WholeReply(served.in_flight, requested, response_format)

    return router


def parse_request(served: EngineApp, body: GenerateBody, request: Request) -> GenerateRequest:
    fields, prompt = body.sampling_params, tuple(body.token_ids)
    room = room_for_completion(len(prompt), served.engine.max_context)
    if body.stream and fields.prompt_logprobs is not None:
        raise Refused("prompt_logprobs cannot be streamed; write stream: false", field="prompt_logprobs")
    sampling = fields.sampling(room if fields.max_tokens is None else fields.max_tokens)
    with refusing():
        images = tuple(Image(from_data_url(each.url), each.start) for each in body.images or ())
    return GenerateRequest(
        request_id=f"generate-tokens-{request_id_of(request, body.request_id)}",
        prompts=(prompt,),
        samplings=(
            replace(
                sampling,
                return_sampling_mask=body.return_sampling_mask,
                return_routed_experts=body.return_routed_experts,
                images=images,
            ),
        ),
        samples=fields.samples,
        adapter=served.names.adapter(body.model),
        wants_prompt_logprobs=fields.prompt_logprobs is not None,
        text=_text_wanted(served, body),
    )


def _text_wanted(served: EngineApp, body: GenerateBody) -> TextWanted | None:
    """Text options; None if neither text nor a stop string was requested, so that tokens need no detokenization."""
    fields = body.sampling_params
    if body.output_mode == "tokens" and not fields.stop_strings:
        return None
    if not fields.detokenize:
        raise Refused("detokenize is false, but output_mode text and stop strings need it", field="detokenize")
    with refusing():
        return fields.text_wanted(served.codec)
