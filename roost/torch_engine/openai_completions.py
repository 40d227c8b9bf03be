"""Text or tokens in, text out: OpenAI's completions, with vLLM's extra fields."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field
from starlette.responses import Response

from roost.net.errors import Refused, refusing
from roost.torch_engine.in_flight import Asked
from roost.torch_engine.openai_fields import OpenAIFields, reply
from roost.torch_engine.reply_parts import Json, finite, prompt_logprobs, token_text, usage, weight_versions
from roost.torch_engine.request_fields import request_id_of
from roost.torch_engine.sample import Piece, Sample
from roost.torch_engine.served import Served

Tokens = Annotated[list[int], Field(min_length=1)]
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(OpenAIFields):
    prompt: str | Tokens | list[str] | list[Tokens]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # only the drawn token is told
    add_special_tokens: bool = True


class CompletionForm:
    """How /v1/completions writes its answers."""

    def __init__(self, served: Served, body: CompletionBody, asked: Asked) -> None:
        self._served, self._body, self._asked = served, body, asked
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}  # where the next token of each completion begins in its text

    def whole(self, samples: list[Sample]) -> Json:
        choices = [
            {**self._choice(sample.whole, sample), "prompt_logprobs": prompt_logprobs(self._first(samples, sample))}
            for sample in samples
        ]
        return {**self._head(), "choices": choices, "usage": usage(self._asked, samples)}

    def opening(self) -> Iterable[Json]:
        return ()

    def chunk(self, piece: Piece, sample: Sample) -> Json | None:
        if not (piece.text or piece.finish or self._body.return_token_ids or self._body.logprobs is not None):
            return None
        return {**self._head(), "choices": [self._choice(piece, sample)]}

    def usage_chunk(self, samples: list[Sample]) -> Json:
        return {**self._head(), "choices": [], "usage": usage(self._asked, samples)}

    def _head(self) -> Json:
        return {
            "id": self._asked.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._asked.adapter or self._served.names.model,
        }

    def _choice(self, piece: Piece, sample: Sample) -> Json:
        choice: Json = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(piece),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if piece.start == 0:
                choice["prompt_token_ids"] = list(sample.prompt)
            if piece.finish is not None:
                choice["weight_versions"] = weight_versions(sample)
        return choice

    def _logprobs(self, piece: Piece) -> Json:
        codec, as_ids = self._served.codec, bool(self._body.return_tokens_as_token_ids)
        tokens = [token_text(codec, token_id, as_ids) for token_id in piece.token_ids]
        logprobs = [finite(logprob) for logprob in piece.logprobs]
        offset, offsets = self._offsets.get(piece.index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[piece.index] = offset
        top = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _first(self, samples: list[Sample], sample: Sample) -> Sample:
        """The first completion of the same prompt, with which the prompt was scored."""
        return samples[sample.index - sample.index % self._asked.samples]


def completions_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        with refusing():
            text = body.text_wanted(served.codec)
            prompts = await run_in_threadpool(prompts_of, served, body)
        max_context = served.engine.max_context
        asked = Asked(
            request_id=f"cmpl-{request_id_of(request, body.request_id)}",
            prompts=prompts,
            samplings=tuple(body.sampling_for(prompt, body.max_tokens, max_context) for prompt in prompts),
            samples=body.samples,
            adapter=served.names.adapter(body.model),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            text=text,
        )
        return reply(served, body, asked, CompletionForm(served, body, asked))

    return router


def prompts_of(served: Served, body: CompletionBody) -> tuple[tuple[int, ...], ...]:
    """The prompts as tokens: there may be one or several, each text or tokens already."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return (served.codec.encode(prompt, body.add_special_tokens),)
    if not prompt:
        raise Refused("prompt is an empty list", field="prompt")
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(
        served.codec.encode(each, body.add_special_tokens) if isinstance(each, str) else tuple(each) for each in prompt
    )
