"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from roost.net.errors import Refused
from roost.rollout.agents.chat import text_of
from roost.rollout.agents.endpoint.turns import (
    Json,
    RequestRules,
    Turn,
    TurnRequest,
    event,
    function_tool,
    new_id,
    offered,
)
from roost.rollout.episode import TurnOptions

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
TOO_LONG = "prompt is too long"  # programs recognize it, and shorten their prompt


class MessagesBody(BaseModel):
    """A request; `RequestRules` handles keys that are not listed."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = False

    def request(self, rules: RequestRules, stored: Mapping[str, Sequence[Json]]) -> TurnRequest:
        rules.check(self.model_extra or {})
        if self.messages[-1].get("role") == "assistant":
            raise Refused("the last message is the assistant's; end with a message of the user", 400)
        messages = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        for message in self.messages:
            messages += read_message(message)
        tools = [read_tool(tool) for tool in self.tools or ()]
        options = TurnOptions(tuple(self.stop_sequences or ()))
        return TurnRequest(messages, offered(tools, self.tool_choice), self.max_tokens, 1, options)

    def answer(self, model: str, turns: Sequence[Turn]) -> MessageAnswer:
        return MessageAnswer(model, turns[0])


def read_message(message: Mapping[str, Any]) -> list[Json]:
    """Convert a message to OpenAI's chat format: tool results become separate messages.

    >>> result = {"type": "tool_result", "tool_use_id": "1", "content": "yellow"}
    >>> read_message({"role": "user", "content": [result, {"type": "text", "text": "go on"}]})
    [{'role': 'tool', 'tool_call_id': '1', 'content': 'yellow'}, {'role': 'user', 'content': 'go on'}]
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content)}]
    texts, calls, results = [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = text_of(block.get("content"))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):  # parts of the policy's turn, which is recorded
            texts.append(text_of([block]))
    spoken: Json = {"role": role, "content": "".join(texts)}
    if calls:
        return [{**spoken, "tool_calls": calls}]
    return [*results, *([spoken] if texts or not results else [])]


def read_tool(tool: Mapping[str, Any]) -> Json:
    """Convert a tool to OpenAI's format. Raise Refused for those that Anthropic's servers run."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise Refused(f"a tool is of type {kind}; only tools with an input_schema can be offered", 400, "tools")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


class MessageAnswer:
    """A turn as a message of content blocks."""

    def __init__(self, model: str, turn: Turn) -> None:
        self._model, self._turn, self._id = model, turn, new_id("msg")

    def whole(self) -> Json:
        return {**self._head(), "content": self._blocks(), **self._end(), "usage": self._usage}

    def events(self) -> Iterator[str]:
        began = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage}
        yield _event("message_start", message=began)
        for index, block in enumerate(self._blocks()):
            empty, delta = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=self._end(), usage={"output_tokens": self._turn.completion_tokens})
        yield _event("message_stop")

    def _head(self) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _blocks(self) -> list[Json]:
        parsed = self._turn.parsed
        blocks: list[Json] = []
        if parsed.reasoning:
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.text or not self._turn.calls:
            blocks.append({"type": "text", "text": parsed.text})
        for each in self._turn.calls:
            given = json.loads(each.call.arguments)
            used = {"type": "tool_use", "id": each.call_id, "name": each.call.name}
            blocks.append({**used, "input": given if isinstance(given, dict) else {"value": given}})
        return blocks

    def _end(self) -> Json:
        reply = self._turn.reply
        if reply.stop is not None and not self._turn.calls:
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
        return {"stop_reason": STOP_REASONS[self._turn.finish], "stop_sequence": None}

    @property
    def _usage(self) -> Json:
        return {"input_tokens": self._turn.prompt_tokens, "output_tokens": self._turn.completion_tokens}


def _streamed(block: Json) -> tuple[Json, Json]:
    """The block at its start, and the delta that completes it."""
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, kind)


def error_body(message: str, status: int) -> Json:
    """Body of an error in Anthropic's format.

    >>> error_body("no", 400)
    {'type': 'error', 'error': {'type': 'invalid_request_error', 'message': 'no'}}
    """
    return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}
