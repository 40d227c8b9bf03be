"""Messages in, a message out: OpenAI's chat, written with the model's own chat template."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from roost.net.errors import Refused, refusing
from roost.torch_engine.in_flight import Asked
from roost.torch_engine.openai_fields import OpenAIFields, reply
from roost.torch_engine.reply_parts import Json, chat_logprobs, prompt_logprobs, usage, weight_versions
from roost.torch_engine.request_fields import request_id_of
from roost.torch_engine.sample import Piece, Sample
from roost.torch_engine.served import Served


class TextPart(BaseModel):
    """A part of a message; this engine reads no images or sounds."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message; what else it holds is for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        return {**(self.model_extra or {}), "role": self.role, "content": self._text()}

    def _text(self) -> str | None:
        if not isinstance(self.content, list):
            return self.content
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise Refused(f"a message has a part of type {part.type}; only text is read", field="messages")
        return "".join(part.text or "" for part in self.content)


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


class ChatForm:
    """How /v1/chat/completions writes its answers."""

    def __init__(self, served: Served, body: ChatBody, asked: Asked) -> None:
        self._served, self._body, self._asked = served, body, asked
        self._created = int(time.time())

    def whole(self, samples: list[Sample]) -> Json:
        answer = {
            **self._head("chat.completion"),
            "choices": [self._message(sample) for sample in samples],
            "usage": usage(self._asked, samples),
            "prompt_logprobs": prompt_logprobs(samples[0]),
        }
        return {**answer, **self._prompt()}

    def opening(self) -> Iterable[Json]:
        """Every message begins with who speaks."""
        delta = {"role": "assistant", "content": ""}
        for index in range(self._asked.samples):
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._head("chat.completion.chunk"), "choices": [choice], **(self._prompt() if index == 0 else {})}

    def chunk(self, piece: Piece, sample: Sample) -> Json | None:
        if not (piece.text or piece.finish or self._body.return_token_ids or self._body.logprobs):
            return None
        delta = {"content": piece.text} if piece.text else {}
        choice = {"index": piece.index, "delta": delta, **self._about(piece, sample)}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, samples: list[Sample]) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(self._asked, samples)}

    def _head(self, kind: str) -> Json:
        return {
            "id": self._asked.request_id,
            "object": kind,
            "created": self._created,
            "model": self._asked.adapter or self._served.names.model,
        }

    def _prompt(self) -> Json:
        return {"prompt_token_ids": list(self._asked.prompts[0])} if self._body.return_token_ids else {}

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


def chat_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        with refusing():
            text = body.text_wanted(served.codec)
            prompt = await run_in_threadpool(prompt_of, served, body)
        asked = Asked(
            request_id=f"chatcmpl-{request_id_of(request, body.request_id)}",
            prompts=(prompt,),
            samplings=(body.sampling_for(prompt, body.most_tokens, served.engine.max_context),),
            samples=body.samples,
            adapter=served.names.adapter(body.model),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            text=text,
        )
        return reply(served, body, asked, ChatForm(served, body, asked))

    return router


def prompt_of(served: Served, body: ChatBody) -> tuple[int, ...]:
    return served.codec.encode_chat(
        [message.for_template() for message in body.messages],
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs or {},
    )
