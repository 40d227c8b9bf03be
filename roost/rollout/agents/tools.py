"""Agent that lets the policy call tools, in a conversation or in plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from roost.rollout.agents.agent import Message, Policy
from roost.rollout.agents.chat import ChatPolicy, RecordedReply
from roost.rollout.agents.chat_format import BLOCK
from roost.rollout.agents.recording import TextPolicy
from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Task, TurnOptions

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
SEARCH_END = "</search>"
FOUND = "\n\n<information>\n{answer}\n</information>\n<think>\n"
RESPONSE = "\n<tool_response>\n{answer}\n</tool_response>\n"
Call = dict[str, Any]  # `name` and `arguments`


class Kept(StrEnum):
    """Part of a tool's long answer that the policy is shown."""

    START = "start"
    END = "end"
    BOTH = "both"


def shortened(text: str, limit: int | None, kept: Kept) -> str:
    """Cut a tool's answer to `limit` characters, and say so in it.

    >>> [shortened("0123456789", 4, kept) for kept in Kept]
    ['0123...(truncated)', '(truncated)...6789', '01...(truncated)...89']
    """
    if limit is None or len(text) <= limit:
        return text
    if kept is Kept.START:
        return f"{text[:limit]}...(truncated)"
    if kept is Kept.END:
        return f"(truncated)...{text[-limit:]}"
    half = limit // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


def tool_calls(text: str) -> list[Call | str]:
    """Calls in Hermes and Qwen style; the error as text for one that cannot be parsed.

    >>> tool_calls('<tool_call>{"name": "find", "arguments": {"word": "sun"}}</tool_call> <tool_call>{}</tool_call>')
    [{'name': 'find', 'arguments': {'word': 'sun'}}, "Failed to decode tool call: 'name'"]
    """
    found: list[Call | str] = []
    for block in BLOCK.findall(text):
        try:
            call = json.loads(block)
            found.append({"name": call["name"], "arguments": call["arguments"]})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            found.append(f"Failed to decode tool call: {error}")
    return found


def searches(text: str) -> list[Call | str]:
    """The last search between `<search>` tags, as Search-R1 writes them.

    >>> searches("<search>sun</search> or <search> moon </search>"), searches("<search></search>")
    ([{'name': 'search', 'arguments': {'query': 'moon'}}], [])
    """
    queries = [one.strip() for one in SEARCH.findall(text)]
    return [{"name": "search", "arguments": {"query": queries[-1]}}] if queries and queries[-1] else []


PARSERS: Mapping[str, Callable[[str], list[Call | str]]] = {"tool_call": tool_calls, "search": searches}


class ToolAgent:
    """Calls the tools that the policy asks for until a turn has no call. The environment is a `ToolEnvironments`.

    A task with messages is a conversation: the chat template shows the tools and their answers. A task whose prompt is
    finished text continues as text: the prompt is cut to `max_prompt_tokens`, and a turn is followed by
    `answer_template` with the tool's answer in place of `{answer}`. `parser` is `tool_call` (Hermes and Qwen) or
    `search` (Search-R1). `stop` lists strings that end a turn.

    A call that fails is answered with its error, or ends the episode with `continues_at_failure: false`.
    """

    def __init__(
        self,
        task: Task,
        parser: str = "tool_call",
        max_parallel_calls: int | None = None,
        max_answer_characters: int | None = None,
        kept: str = Kept.BOTH,
        answer_template: str | None = None,
        stop: Sequence[str] = (),
        continues_at_failure: bool = True,
        max_prompt_tokens: int | None = None,
    ) -> None:
        if parser not in PARSERS:
            raise ValueError(f"parser is {parser!r}; write one of {', '.join(PARSERS)}")
        self._task, self._parse_calls = task, PARSERS[parser]
        self._max_calls, self._max_characters, self._kept = max_parallel_calls, max_answer_characters, Kept(kept)
        default = FOUND if parser == "search" else RESPONSE
        self._template, self._continues = default if answer_template is None else answer_template, continues_at_failure
        self._options = TurnOptions(tuple(dict.fromkeys([*stop, *([SEARCH_END] if parser == "search" else [])])))
        self._max_prompt_tokens = max_prompt_tokens
        self.answer = ""  # the policy's turns, without the tools' answers

    async def run_episode(self, policy: Policy, environment: Environment, first: Observation, max_turns: int) -> None:
        if not isinstance(policy, ChatPolicy):
            raise TypeError(f"this agent needs a policy that records its tokens, not {type(policy).__name__}")
        data = self._task.data
        conversation: _Text | _Chat
        if data.get("prompt_text") and not data.get("is_rendered"):
            ids = policy.format.ids(data["prompt_text"], adds_special=True)[: self._max_prompt_tokens]
            conversation = _Text(policy, ids, self._template)
        else:
            conversation = _Chat(policy, self._task, first)
        for turn in range(1, max_turns + 1):
            reply = await conversation.turn(self._options)
            generated = policy.format.text(reply.token_ids)  # with the stop string that ended it
            self.answer += generated
            calls = self._parse_calls(generated)[: self._max_calls]
            if reply.is_cut or turn == max_turns or not calls:
                return
            seen = await environment.step([call for call in calls if not isinstance(call, str)])
            shortened_answers = (shortened(text, self._max_characters, self._kept) for text in seen.content)
            answers = [call if isinstance(call, str) else next(shortened_answers) for call in calls]
            has_failed = bool(seen.info.get("failed")) or any(isinstance(call, str) for call in calls)
            room = reply.transcript.room
            if has_failed and not self._continues:
                return
            if room is not None and len(policy.format.ids("".join(answers))) >= room:
                return  # the answers do not fit, and a part of them would mislead the policy
            conversation.show(reply, generated, answers)


class _Chat:
    """A conversation with tools, written by the chat template."""

    def __init__(self, policy: ChatPolicy, task: Task, first: Observation) -> None:
        self._policy, self._tools = policy, first.info.get("tools")
        self._messages: list[Message] = list(task.data.get("messages") or [{"role": "user", "content": task.name}])

    async def turn(self, options: TurnOptions) -> RecordedReply:
        return (await self._policy.samples(self._messages, tools=self._tools, options=options))[0]

    def show(self, reply: RecordedReply, generated: str, answers: Sequence[str]) -> None:
        self._messages.append({"role": "assistant", "content": reply.text})
        self._messages += [{"role": "tool", "content": answer} for answer in answers]


class _Text:
    """A text that the policy and the tools extend in turn."""

    def __init__(self, policy: ChatPolicy, prompt: Sequence[int], template: str) -> None:
        self._texts, self._template = TextPolicy(policy), template
        self._first, self._written = prompt, policy.format.text(prompt)
        self._added = ""

    async def turn(self, options: TurnOptions) -> RecordedReply:
        prompt = self._written + self._added if self._added else self._first
        return (await self._texts.samples(prompt, options=options))[0]

    def show(self, reply: RecordedReply, generated: str, answers: Sequence[str]) -> None:
        # Not str.format: answers and templates may contain braces.
        shown = self._template.replace("{answer}", "\n\n".join(answers))
        self._added += (generated if reply.stop is not None else reply.text) + shown
