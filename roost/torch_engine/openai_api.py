"""OpenAI's routes: models, completions and chat."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from roost.engines.protocol import Sampling
from roost.net.errors import Refused, refusing
from roost.torch_engine.requests import (
    EngineApp,
    GenerateRequest,
    Json,
    RequestId,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    StreamReply,
    WholeReply,
    chat_logprobs,
    finite,
    prompt_logprobs,
    request_id_of,
    room_for_completion,
    token_text,
    usage,
    weight_versions,
)
from roost.torch_engine.text import Piece, Sample
from roost.vision.image import Image, from_data_url


class OpenAIFields(SamplingFields):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling_for(self, prompt: tuple[int, ...], max_tokens: int | None, max_context: int) -> Sampling:
        """Sampling for a prompt; as with OpenAI, max_tokens beyond the context is refused, not truncated."""
        room = room_for_completion(len(prompt), max_context)
        if max_tokens is not None and max_tokens > room:
            raise Refused(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together more than the context "
                f"of {max_context}; write at most {room}",
                field="max_tokens",
            )
        return self.sampling(room if max_tokens is None else max_tokens)


def reply(
    served: EngineApp, body: OpenAIFields, requested: GenerateRequest, response_format: ResponseFormat
) -> Response:
    if not body.stream:
        if body.stream_options is not None:
            raise Refused("stream_options are for streams; write stream: true", field="stream_options")
        return WholeReply(served.in_flight, requested, response_format)
    if requested.wants_prompt_logprobs:
        raise Refused("prompt_logprobs cannot be streamed; write stream: false", field="prompt_logprobs")
    return StreamReply(
        served.in_flight, requested, response_format, bool(body.stream_options and body.stream_options.include_usage)
    )


NotEmpty = Annotated[str, Field(min_length=1)]


class LoadBody(BaseModel):
    lora_name: NotEmpty
    lora_path: NotEmpty
    load_inplace: bool = False


class UnloadBody(BaseModel):
    lora_name: NotEmpty


def models_router(served: EngineApp) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_cards(served)}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        for card in model_cards(served):
            if card["id"] == name:
                return card
        raise Refused(f"The model `{name}` does not exist", 404, "model")

    return router


def adapters_router(served: EngineApp) -> APIRouter:
    router = APIRouter()
    one_at_a_time = threading.Lock()  # between checking the names and changing them

    @router.post("/v1/load_lora_adapter")
    def load_lora_adapter(body: LoadBody) -> PlainTextResponse:
        names = served.names
        with one_at_a_time:
            if body.lora_name == names.model:
                raise Refused(f"{body.lora_name} is the name of the model itself", field="lora_name")
            if body.lora_name in names.adapters and not body.load_inplace:
                raise Refused(
                    f"an adapter {body.lora_name} is loaded already; write load_inplace: true to replace it",
                    field="lora_name",
                )
            try:
                with refusing():
                    served.engine.load_adapter(body.lora_name, body.lora_path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise Refused(f"there is no adapter in {body.lora_path}: {error}", 404, "lora_path") from error
            names.adapters[body.lora_name] = body.lora_path
        return PlainTextResponse(f"Success: adapter {body.lora_name} was loaded.")

    @router.post("/v1/unload_lora_adapter")
    def unload_lora_adapter(body: UnloadBody) -> PlainTextResponse:
        with one_at_a_time:
            if body.lora_name not in served.names.adapters:
                raise Refused(f"there is no adapter {body.lora_name}", 404, "lora_name")
            with refusing():
                served.engine.unload_adapter(body.lora_name)
            del served.names.adapters[body.lora_name]
        return PlainTextResponse(f"Success: adapter {body.lora_name} was unloaded.")

    return router


def model_cards(served: EngineApp) -> list[dict[str, Any]]:
    names = served.names
    base: dict[str, Any] = {"object": "model", "created": served.created, "owned_by": "roost"}
    model: dict[str, Any] = {
        "id": names.model,
        "root": served.folder,
        "parent": None,
        "max_model_len": served.engine.max_context,
    }
    adapters: list[dict[str, Any]] = [
        {"id": name, "root": folder, "parent": names.model, "max_model_len": None}
        for name, folder in names.adapters.items()
    ]
    return [{**card, **base} for card in (model, *adapters)]


class ImageUrl(BaseModel):
    url: str
    detail: str | None = None  # the model's own processor decides the size


class MessagePart(BaseModel):
    """A part of a message: text, or an image as a data URL. Video and audio are not supported."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(BaseModel):
    """A message; the chat template gets its other fields too."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[MessagePart] | None = None

    def for_template(self) -> dict[str, Any]:
        return {**(self.model_extra or {}), "role": self.role, "content": self._content()}

    def _content(self) -> str | list[dict[str, str]] | None:
        """Text, or parts for the template if any is an image."""
        if not isinstance(self.content, list):
            return self.content
        for part in self.content:
            if not ((part.type == "text" and part.text is not None) or (part.type == "image_url" and part.image_url)):
                raise Refused(f"a message has a part of type {part.type}; use text and image_url", field="messages")
        if not self.image_urls:
            return "".join(part.text or "" for part in self.content)
        return [
            {"type": "image"} if part.image_url else {"type": "text", "text": part.text or ""} for part in self.content
        ]

    @property
    def image_urls(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if part.image_url is not None]


class ChatBody(OpenAIFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatFormat:
    """Response format of /v1/chat/completions."""

    def __init__(self, served: EngineApp, body: ChatBody, requested: GenerateRequest) -> None:
        self._served, self._body, self._requested = served, body, requested
        self._created = int(time.time())

    def whole(self, samples: list[Sample]) -> Json:
        answer = {
            **self._head("chat.completion"),
            "choices": [self._message(sample) for sample in samples],
            "usage": usage(self._requested, samples),
            "prompt_logprobs": prompt_logprobs(samples[0]),
        }
        return {**answer, **self._prompt()}

    def opening(self) -> Iterable[Json]:
        """The role of each message, in a first event without text."""
        delta = {"role": "assistant", "content": ""}
        for index in range(self._requested.samples):
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._head("chat.completion.chunk"), "choices": [choice], **(self._prompt() if index == 0 else {})}

    def chunk(self, piece: Piece, sample: Sample) -> Json | None:
        if not (piece.text or piece.finish or self._body.return_token_ids or self._body.logprobs):
            return None
        delta = {"content": piece.text} if piece.text else {}
        choice = {"index": piece.index, "delta": delta, **self._about(piece, sample)}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, samples: list[Sample]) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(self._requested, samples)}

    def _head(self, kind: str) -> Json:
        return {
            "id": self._requested.request_id,
            "object": kind,
            "created": self._created,
            "model": self._requested.adapter or self._served.names.model,
        }

    def _prompt(self) -> Json:
        return {"prompt_token_ids": list(self._requested.prompts[0])} if self._body.return_token_ids else {}

    def _message(self, sample: Sample) -> Json:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        return {"index": sample.index, "message": message, **self._about(sample.whole, sample)}

    def _about(self, piece: Piece, sample: Sample) -> Json:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        about: Json = {
            "logprobs": chat_logprobs(piece, self._served.codec, as_ids) if self._body.logprobs else None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            about["token_ids"] = list(piece.token_ids)
            if piece.finish is not None:
                about["weight_versions"] = weight_versions(sample)
        return about


def chat_router(served: EngineApp) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        with refusing():
            text = body.text_wanted(served.codec)
            prompt, images = await run_in_threadpool(prompt_of, served, body)
        sampling = body.sampling_for(prompt, body.most_tokens, served.engine.max_context)
        requested = GenerateRequest(
            request_id=f"chatcmpl-{request_id_of(request, body.request_id)}",
            prompts=(prompt,),
            samplings=(replace(sampling, images=images),),
            samples=body.samples,
            adapter=served.names.adapter(body.model),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            text=text,
        )
        return reply(served, body, requested, ChatFormat(served, body, requested))

    return router


def prompt_of(served: EngineApp, body: ChatBody) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """Token ids of a conversation, and its images."""
    files = [from_data_url(url) for message in body.messages for url in message.image_urls]
    token_ids = served.codec.encode_chat(
        [message.for_template() for message in body.messages],
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs or {},
    )
    if not files:
        return token_ids, ()
    processor = served.engine.model.processor
    if processor is None:
        raise Refused(f"the messages have {len(files)} images, but the model reads text alone", field="messages")
    expanded, images = processor.expand(token_ids, files)
    return tuple(expanded), images


Tokens = Annotated[list[int], Field(min_length=1)]
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(OpenAIFields):
    prompt: str | Tokens | list[str] | list[Tokens]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # of the sampled token only
    add_special_tokens: bool = True


class CompletionFormat:
    """Response format of /v1/completions."""

    def __init__(self, served: EngineApp, body: CompletionBody, requested: GenerateRequest) -> None:
        self._served, self._body, self._requested = served, body, requested
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}  # of each completion's next token in its text

    def whole(self, samples: list[Sample]) -> Json:
        choices = [
            {**self._choice(sample.whole, sample), "prompt_logprobs": prompt_logprobs(self._first(samples, sample))}
            for sample in samples
        ]
        return {**self._head(), "choices": choices, "usage": usage(self._requested, samples)}

    def opening(self) -> Iterable[Json]:
        return ()

    def chunk(self, piece: Piece, sample: Sample) -> Json | None:
        if not (piece.text or piece.finish or self._body.return_token_ids or self._body.logprobs is not None):
            return None
        return {**self._head(), "choices": [self._choice(piece, sample)]}

    def usage_chunk(self, samples: list[Sample]) -> Json:
        return {**self._head(), "choices": [], "usage": usage(self._requested, samples)}

    def _head(self) -> Json:
        return {
            "id": self._requested.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._requested.adapter or self._served.names.model,
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
        """First completion of the same prompt, which has the prompt's log-probs."""
        return samples[sample.index - sample.index % self._requested.samples]


def completions_router(served: EngineApp) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        with refusing():
            text = body.text_wanted(served.codec)
            prompts = await run_in_threadpool(prompts_of, served, body)
        max_context = served.engine.max_context
        requested = GenerateRequest(
            request_id=f"cmpl-{request_id_of(request, body.request_id)}",
            prompts=prompts,
            samplings=tuple(body.sampling_for(prompt, body.max_tokens, max_context) for prompt in prompts),
            samples=body.samples,
            adapter=served.names.adapter(body.model),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            text=text,
        )
        return reply(served, body, requested, CompletionFormat(served, body, requested))

    return router


def prompts_of(served: EngineApp, body: CompletionBody) -> tuple[tuple[int, ...], ...]:
    """Token ids of the prompts: one or several, each given as text or as token ids."""
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
