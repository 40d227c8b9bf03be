"""Messages as agents write them: read for a chat template, and compared with one another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.rollout.agents.agent import Message
from roost.rollout.agents.tool_calls import ToolCall, said, tool_call


@dataclass(frozen=True, slots=True)
class Key:
    """What makes two messages the same: who says it, and what."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()


def for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: content is a text, arguments of tools are mappings.

    >>> for_template({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    {'role': 'user', 'content': 'hi'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is a mapping with role and content, not {message!r:.80}")
    read = {key: value for key, value in message.items() if value is not None}
    read["content"] = text_of(message.get("content"))
    if "tool_calls" in read:
        read["tool_calls"] = [_with_mapping(call) for call in read["tool_calls"]]
    return read


def text_of(content: Any) -> str:
    """The text of a message, which may come in parts.

    >>> text_of(None), text_of("hi"), text_of([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}])
    ('', 'hi', 'hi')
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of a message is a text, not {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a message has a part of type {kind}; only text is read")
    return "".join(part["text"] for part in content)


def as_read(message: Mapping[str, Any]) -> tuple[str, str]:
    """Role and text of a message, with calls of tools as JSON after the text.

    >>> as_read({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]})
    ('assistant', '{"name": "find", "arguments": {}}')
    """
    calls = [json.dumps(call.get("function", call), default=str) for call in message.get("tool_calls") or ()]
    return message["role"], "\n".join(filter(None, [text_of(message.get("content")), *calls]))


def key_of(message: Mapping[str, Any]) -> Key:
    """What a message is known by. Blanks around an assistant's text, and how its calls are spelt, make no difference.

    >>> call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word":"sun"}'}}
    >>> written = '<tool_call>{"name": "find", "arguments": {"word": "sun"}}</tool_call>'
    >>> one = key_of({"role": "assistant", "content": "", "tool_calls": [call]})
    >>> one == key_of({"role": "assistant", "content": written})
    True
    """
    role, text = message["role"], text_of(message.get("content"))
    if role != "assistant":
        return Key(role, text)
    if message.get("tool_calls"):
        functions = [call.get("function", call) for call in message["tool_calls"]]
        return Key(role, text.strip(), tuple(tool_call(each.get("name"), each.get("arguments")) for each in functions))
    spoken = said(text)
    return Key(role, spoken.text, spoken.calls)


def _with_mapping(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are a mapping: templates write them as JSON themselves."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
