"""Replies in the form that OpenAI's clients read: whole, or as a stream of chunks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import uuid4

from roost.rollout.agents.chat import RecordedReply
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.agents.tool_calls import Said, ToolCall, said

Json = dict[str, Any]


class ChatAnswer:
    """A reply as a message."""

    def __init__(self, model: str, chat_format: ChatFormat, reply: RecordedReply, logprobs: bool, tools: bool) -> None:
        self._format, self._reply, self._wants_logprobs = chat_format, reply, logprobs
        self._head = head("chatcmpl", model)
        spoken = said(reply.text)
        self._said = spoken if tools and spoken.calls else Said(reply.text)
        self._calls = [_called(call) for call in self._said.calls]

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self._said.text or None if self._calls else self._said.text}
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(), "finish_reason": self._finish}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage(self._reply)}

    def chunks(self, wants_usage: bool) -> Iterator[Json]:
        yield self._chunk({"role": "assistant", "content": ""})
        parts: list[Json] = [{"content": self._said.text}] if self._said.text else []
        parts += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(self._calls)]
        for number, part in enumerate(parts):
            yield self._chunk(part, logprobs=None if number else self._logprobs())
        yield self._chunk({}, finish=self._finish)
        if wants_usage:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(self._reply)}

    @property
    def _finish(self) -> str:
        if self._reply.is_cut:
            return "length"
        return "tool_calls" if self._calls else "stop"

    def _chunk(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self) -> Json | None:
        if not self._wants_logprobs:
            return None
        tokens = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in made_tokens(self._format, self._reply)
        ]
        return {"content": tokens, "refusal": None}


class TextAnswer:
    """A reply as a text."""

    def __init__(self, model: str, chat_format: ChatFormat, reply: RecordedReply, logprobs: bool) -> None:
        self._format, self._reply, self._wants_logprobs = chat_format, reply, logprobs
        self._head = {**head("cmpl", model), "object": "text_completion"}

    def whole(self) -> Json:
        return {**self._head, "choices": [self._choice(self._finish)], "usage": usage(self._reply)}

    def chunks(self, wants_usage: bool) -> Iterator[Json]:
        yield {**self._head, "choices": [self._choice(self._finish)]}
        if wants_usage:
            yield {**self._head, "choices": [], "usage": usage(self._reply)}

    @property
    def _finish(self) -> str:
        return "length" if self._reply.is_cut else "stop"

    def _choice(self, finish: str) -> Json:
        return {"index": 0, "text": self._reply.text, "logprobs": self._logprobs(), "finish_reason": finish}

    def _logprobs(self) -> Json | None:
        if not self._wants_logprobs:
            return None
        made = list(made_tokens(self._format, self._reply))
        offsets = [0]
        for text, _ in made:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": [text for text, _ in made],
            "token_logprobs": [logprob for _, logprob in made],
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }


def sse(chunks: Iterable[Json]) -> Iterator[str]:
    """Chunks as server-sent events.

    >>> list(sse([{"a": 1}]))
    ['data: {"a": 1}\\n\\n', 'data: [DONE]\\n\\n']
    """
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def head(kind: str, model: str) -> Json:
    return {"id": f"{kind}-{uuid4().hex}", "created": int(time.time()), "model": model}


def _called(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}


def usage(reply: RecordedReply) -> Json:
    made = len(reply.token_ids)
    return {"prompt_tokens": reply.start, "completion_tokens": made, "total_tokens": reply.start + made}


def made_tokens(chat_format: ChatFormat, reply: RecordedReply) -> Iterator[tuple[str, float]]:
    """Each token that the policy made and its log-probability, without the one that ended its turn."""
    shown = reply.token_ids if reply.ending is None else reply.token_ids[:-1]
    for token_id, logprob in zip(shown, reply.logprobs, strict=False):
        yield chat_format.token(token_id), logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity
