"""Calls of tools, where a model writes them as JSON between <tool_call> tags (Qwen, Hermes)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool by its name, and its arguments as JSON, in one spelling."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant's turn holds: text, and calls of tools."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def said(text: str) -> Said:
    r"""The calls in a text, and the text without them; where one of them is malformed, all of it is text.

    >>> said('I look.\n<tool_call>\n{"name": "find", "arguments": {"word": "sun"}}\n</tool_call>')
    Said(text='I look.', calls=(ToolCall(name='find', arguments='{"word": "sun"}'),))
    >>> said('<tool_call>find sun</tool_call>')
    Said(text='<tool_call>find sun</tool_call>', calls=())
    """
    calls = [_call(block) for block in BLOCK.findall(text)]
    known = tuple(call for call in calls if call is not None)
    if not known or len(known) != len(calls):
        return Said(text.strip())
    return Said(BLOCK.sub("", text).strip(), known)


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """A call from a message, whose arguments may be JSON in a text already.

    >>> tool_call("find", '{"word":   "sun"}') == tool_call("find", {"word": "sun"})
    True
    """
    return ToolCall(str(name), _canonical(_loaded(arguments)))


def _call(block: str) -> ToolCall | None:
    found = _loaded(block)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    return tool_call(found["name"], found.get("arguments", {}))


def _loaded(value: Any) -> Any:
    """What a text of JSON holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
