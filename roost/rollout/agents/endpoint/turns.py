"""The internal request and reply that every protocol is translated to and from, and rules for other keys."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from roost.net.errors import Refused
from roost.rollout.agents.chat import RecordedReply
from roost.rollout.agents.chat_format import ChatFormat, ParsedReply, ToolCall, split_reasoning
from roost.rollout.episode import TurnOptions

logger = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One or several samples of the policy's next turn in a conversation."""

    messages: Sequence[Json]  # as in OpenAI's chat completions
    tools: Sequence[Json] | None = None  # likewise; None: no tools are offered
    max_tokens: int | None = None
    count: int = 1
    options: TurnOptions = field(default_factory=TurnOptions)


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A tool call with the ID by which its result refers to it."""

    call_id: str
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, split into reasoning, text and tool calls."""

    reply: RecordedReply
    parsed: ParsedReply
    calls: tuple[NamedCall, ...]
    chat_format: ChatFormat

    @property
    def finish(self) -> str:
        """`length`, `tool_calls` or `stop`."""
        if self.reply.is_cut:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def prompt_tokens(self) -> int:
        return self.reply.start

    @property
    def completion_tokens(self) -> int:
        return len(self.reply.token_ids)

    def message(self) -> Json:
        """The turn as a message of a conversation."""
        spoken: Json = {"role": "assistant", "content": self.parsed.text}
        return {**spoken, "tool_calls": openai_calls(self)} if self.calls else spoken

    @property
    def has_logprobs(self) -> bool:
        """True if the engine was asked for log-probs; see `rollout_logprobs`."""
        return not any(map(math.isnan, self.reply.logprobs))

    def logprobs(self) -> Iterator[tuple[str, float]]:
        """Yield each generated token and its log-prob, without the end-of-turn token."""
        shown = self.reply.token_ids if self.reply.ending is None else self.reply.token_ids[:-1]
        for token_id, logprob in zip(shown, self.reply.logprobs, strict=False):
            text = self.chat_format.token(token_id)
            yield text, logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity


def read_turn(reply: RecordedReply, chat_format: ChatFormat, tools: Sequence[Json] | None) -> Turn:
    """Split a reply. Calls of tools that were not offered stay text; text alone stays as it was generated."""
    parsed = chat_format.parse(reply.text, tools)
    if parsed.calls and not tools:
        parsed = ParsedReply(split_reasoning(reply.text)[1].lstrip("\n"), (), parsed.reasoning)
    elif not parsed.calls and not parsed.reasoning:
        parsed = ParsedReply(reply.text)
    calls = tuple(NamedCall(new_id("call"), call) for call in parsed.calls)
    return Turn(reply, parsed, calls, chat_format)


def openai_calls(turn: Turn) -> list[Json]:
    """Tool calls in OpenAI's format."""
    return [
        {
            "id": each.call_id,
            "type": "function",
            "function": {"name": each.call.name, "arguments": each.call.arguments},
        }
        for each in turn.calls
    ]


class Answer(Protocol):
    """The answer to a request in a protocol."""

    def whole(self) -> Json: ...

    def events(self) -> Iterator[str]:
        """The same as server-sent events."""
        ...


def event(data: Json, name: str = "") -> str:
    r"""A server-sent event.

    >>> event({"a": 1}, "start")
    'event: start\ndata: {"a": 1}\n\n'
    """
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def now() -> int:
    return int(time.time())


# Keys that are refused: for each the values that are accepted because they have no effect, and a fix for others.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "write them as tools"),
    "function_call": (("none", "auto"), "write tools and tool_choice"),
    "logit_bias": (({},), "leave it out; tokens are sampled from the policy unchanged"),
    "top_logprobs": ((0,), "only sampled tokens have log-probs; ask for logprobs alone"),
    "modalities": ((["text"],), "leave it out; replies are text"),
    "audio": ((), "leave it out; replies are text"),
    "best_of": ((1,), "ask for n samples"),
    "suffix": (("",), "leave it out; a completion ends its sequence"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "set them for all episodes, in the scenario's `template`"),
    "continue_final_message": ((False,), "the policy's turn begins where the messages end"),
    "add_generation_prompt": ((True,), "the policy's turn begins where the messages end"),
    "guided_json": ((), "write response_format"),
    "guided_regex": ((), "write response_format with a schema"),
    "structured_outputs": ((), "write response_format"),
    "background": ((False,), "wait for the answer"),
    "conversation": ((), "write previous_response_id, or send all items"),
    "prompt": ((), "write input"),
    "mcp_servers": (([],), "offer tools, and call them in the program"),
}
# Keys about the caller or the storage of the answer, which do not affect the policy.
IGNORED = frozenset(
    {
        "include",
        "metadata",
        "model",
        "prediction",
        "prompt_cache_key",
        "return_token_ids",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Other keys are about sampling; these are their defaults.
DEFAULTS: Mapping[str, Any] = {"parallel_tool_calls": True, "truncation": "disabled", "thinking": {"type": "disabled"}}


class RequestRules:
    """Checks keys of requests that Roost does not read."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, extra: Mapping[str, Any]) -> None:
        """Raise Refused for unsupported keys; warn once about keys that the run's settings override.

        >>> RequestRules().check({"logit_bias": None, "modalities": ["text"], "user": "me"})
        >>> RequestRules().check({"functions": [{"name": "find"}]})
        Traceback (most recent call last):
            ...
        roost.net.errors.Refused: functions is not offered: write them as tools
        """
        given = {key: value for key, value in extra.items() if value is not None and value != DEFAULTS.get(key)}
        for key, value in given.items():
            accepted, fix = REFUSED.get(key, ((value,), ""))
            if value not in accepted:
                raise Refused(f"{key} is not offered: {fix}", 400, key)
        others = given.keys() - REFUSED.keys() - IGNORED - self._warned
        if others:
            self._warned |= others
            logger.warning(
                "a request sets %s, which is ignored: the run's settings decide how turns are sampled",
                ", ".join(sorted(others)),
            )


def offered(tools: Sequence[Json] | None, choice: Any) -> list[Json] | None:
    """Return the tools to show to the policy; None if there are none.

    >>> offered([{"type": "function"}], "none") is None, offered([{"type": "function"}], {"type": "auto"})
    (True, [{'type': 'function'}])
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        fix = "leave tool_choice out, or write auto or none"
        raise Refused(f"tool_choice cannot force a tool call; {fix}", 400, "tool_choice")
    return None if kind == "none" else list(tools or ()) or None


def function_tool(name: Any, description: Any, parameters: Any) -> Json:
    """A tool in OpenAI's format for chat completions."""
    if not isinstance(name, str):
        raise Refused("a tool has no name", 400, "tools")
    about = {} if description is None else {"description": description}
    shape = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **about, "parameters": shape}}


def schema_of(response_format: Mapping[str, Any] | None, field_name: str = "response_format") -> str | None:
    """The JSON schema that an answer must follow; None if there is none.

    >>> schema_of({"type": "text"}) is None, schema_of({"type": "json_object"})
    (True, '{"type": "object"}')
    >>> schema_of({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}})
    '{"type": "array"}'
    """
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    if kind != "json_schema":
        raise Refused(f"{field_name} is {kind}; write text, json_object or json_schema", 400, field_name)
    schema = (response_format.get("json_schema") or response_format).get("schema")
    if not isinstance(schema, Mapping):
        raise Refused(f"{field_name} of type json_schema has no schema", 400, field_name)
    return json.dumps(schema)
