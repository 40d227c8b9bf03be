"""OpenAI's Responses."""

from __future__ import annotations

import itertools
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
    now,
    offered,
    schema_of,
)
from roost.rollout.episode import TurnOptions


class ResponsesBody(BaseModel):
    """A request; `RequestRules` handles keys that are not listed."""

    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    stream: bool | None = False

    def request(self, rules: RequestRules, stored: Mapping[str, Sequence[Json]]) -> TurnRequest:
        rules.check(self.model_extra or {})
        # The instructions of an earlier response do not apply to this one, so they are stored with none.
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*instructions, *self._before(stored), *read_input(self.input)]
        tools = [read_tool(tool) for tool in self.tools or ()]
        options = TurnOptions(json_schema=schema_of((self.text or {}).get("format"), "text.format"))
        return TurnRequest(messages, offered(tools, self.tool_choice), self.max_output_tokens, 1, options)

    def _before(self, stored: Mapping[str, Sequence[Json]]) -> Sequence[Json]:
        if self.previous_response_id is None:
            return ()
        if self.previous_response_id not in stored:
            raise Refused(f"this episode has no response {self.previous_response_id}", 404, "previous_response_id")
        return stored[self.previous_response_id]

    def answer(self, model: str, turns: Sequence[Turn]) -> ResponseAnswer:
        return ResponseAnswer(model, turns[0], self)

    def conversation(self, stored: Mapping[str, Sequence[Json]], turn: Turn) -> list[Json]:
        """Messages that a later request continues by this response's ID."""
        return [*self._before(stored), *read_input(self.input), turn.message()]


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[Json]:
    """Convert input items to messages of OpenAI's chat format: a turn's text and calls become one message.

    >>> call = {"type": "function_call", "call_id": "1", "name": "find", "arguments": "{}"}
    >>> read_input([{"role": "user", "content": "x"}, call])[1]["tool_calls"][0]["function"]["name"]
    'find'
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    for item in given:
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_of(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # part of the policy's turn, which is recorded
            raise Refused(
                f"an input item is of type {kind}; write messages, function_call and function_call_output", 400, "input"
            )
    return messages


def read_tool(tool: Mapping[str, Any]) -> Json:
    """Convert a tool to the format of chat completions. Raise Refused for those that OpenAI's servers run."""
    if tool.get("type") != "function":
        raise Refused(f"a tool is of type {tool.get('type')}; only functions can be offered", 400, "tools")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


class ResponseAnswer:
    """A turn as a response of output items."""

    def __init__(self, model: str, turn: Turn, body: ResponsesBody) -> None:
        self._model, self._turn, self._body = model, turn, body
        self.id = new_id("resp")
        self._created = now()
        self._items = self._output()

    def whole(self) -> Json:
        return self._response(self._items, "incomplete" if self._turn.reply.is_cut else "completed")

    def events(self) -> Iterator[str]:
        numbers = itertools.count()

        def stream_event(kind: str, **data: Any) -> str:
            return event({"type": f"response.{kind}", "sequence_number": next(numbers), **data}, f"response.{kind}")

        began = self._response([], "in_progress")
        yield stream_event("created", response=began)
        yield stream_event("in_progress", response=began)
        for index, item in enumerate(self._items):
            at = {"output_index": index, "item_id": item["id"]}
            nothing: Json = {"arguments": ""} if "arguments" in item else {"content": []}
            empty = {**item, "status": "in_progress", **nothing}
            yield stream_event("output_item.added", output_index=index, item=empty)
            if item["type"] == "function_call":
                yield stream_event("function_call_arguments.delta", **at, delta=item["arguments"])
                yield stream_event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
            else:
                yield from self._content(item["content"][0], at, stream_event)
            yield stream_event("output_item.done", output_index=index, item=item)
        whole = self.whole()
        yield stream_event(whole["status"], response=whole)

    def _content(self, part: Json, at: Json, stream_event: Any) -> Iterator[str]:
        at = {**at, "content_index": 0}
        more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        yield stream_event("content_part.added", **at, part={**part, "text": ""})
        yield stream_event(f"{part['type']}.delta", **at, delta=part["text"], **more)
        yield stream_event(f"{part['type']}.done", **at, text=part["text"], **more)
        yield stream_event("content_part.done", **at, part=part)

    def _output(self) -> list[Json]:
        parsed, status = self._turn.parsed, "incomplete" if self._turn.reply.is_cut else "completed"
        items: list[Json] = []
        if parsed.reasoning:
            content = [{"type": "reasoning_text", "text": parsed.reasoning}]
            items.append({"type": "reasoning", "id": new_id("rs"), "summary": [], "content": content})
        if parsed.text or not self._turn.calls:
            part: Json = {"type": "output_text", "text": parsed.text, "annotations": [], "logprobs": []}
            about = {"type": "message", "id": new_id("msg"), "role": "assistant", "status": status}
            items.append({**about, "content": [part]})
        for each in self._turn.calls:
            about = {"type": "function_call", "id": new_id("fc"), "call_id": each.call_id, "status": "completed"}
            items.append({**about, "name": each.call.name, "arguments": each.call.arguments})
        return items

    def _response(self, items: list[Json], status: str) -> Json:
        body, turn = self._body, self._turn
        completion_tokens, prompt = turn.completion_tokens, turn.prompt_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion_tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "metadata": {},
            "usage": None if status == "in_progress" else usage,
        }
