"""Chat with the policy: match messages against recorded turns, and continue their token sequences."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.engines.protocol import Finish
from roost.rollout.agents.agent import Message, Reply
from roost.rollout.agents.chat_format import ChatFormat, Ids, Parser, ToolCall, Tools, parse_reply, tool_call
from roost.rollout.episode import Transcript, TurnOptions
from roost.vision.image import Image, count_placeholders, files_of, fill_images, has_images, read_text


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a message: equal keys mean the same message."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()


def for_template(message: Message) -> dict[str, Any]:
    """Convert a message for chat templates: content as a string, or parts if any is an image; arguments as mappings.

    >>> for_template({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    {'role': 'user', 'content': 'hi'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message must be a mapping with role and content, not {message!r:.80}")
    read = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if has_images(content):
        if count_placeholders([message]):
            raise ValueError("a message has an image part without an image; send it as a data URL")
        read["content"] = fill_images([message], ())[0]["content"]
    else:
        read["content"] = text_of(content)
    if "tool_calls" in read:
        read["tool_calls"] = [_with_mapping(call) for call in read["tool_calls"]]
    return read


def text_of(content: Any) -> str:
    """Text of a message, which may be split into parts.

    >>> text_of(None), text_of("hi"), text_of([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}])
    ('', 'hi', 'hi')
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of a message must be a string, not {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a message has a part of type {kind}; only text is read")
    return "".join(part["text"] for part in content)


def as_read(message: Mapping[str, Any]) -> tuple[str, str]:
    """Role and text of a message, with tool calls appended as JSON.

    >>> as_read({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]})
    ('assistant', '{"name": "find", "arguments": {}}')
    """
    calls = [json.dumps(call.get("function", call), default=str) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    text = read_text(content) if has_images(content) else text_of(content)
    return message["role"], "\n".join(filter(None, [text, *calls]))


def key_of(message: Mapping[str, Any], read: Parser = parse_reply, tools: Tools = None) -> Key:
    """Return the key of a message.

    That of an assistant's message ignores the format of tool calls, whitespace around the text, and reasoning, which
    clients do not send back.

    >>> call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word":"sun"}'}}
    >>> written = '<tool_call>{"name": "find", "arguments": {"word": "sun"}}</tool_call>'
    >>> one = key_of({"role": "assistant", "content": "", "tool_calls": [call]})
    >>> one == key_of({"role": "assistant", "content": written})
    True
    """
    role, content = message["role"], message.get("content")
    text = read_text(content, with_names=True) if has_images(content) else text_of(content)
    if role != "assistant":
        return Key(role, text)
    if message.get("tool_calls"):
        functions = [call.get("function", call) for call in message["tool_calls"]]
        return Key(role, text.strip(), tuple(tool_call(each.get("name"), each.get("arguments")) for each in functions))
    spoken = read(text, tools)
    return Key(role, spoken.text, spoken.calls)


def _with_mapping(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as a mapping: templates write the JSON themselves."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


class TurnInProgress(RuntimeError):
    """A turn was requested in a conversation that already has one in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply(Reply):
    """A reply with its position in the transcript."""

    transcript: Transcript
    start: int  # index of its first token in the sequence
    ending: int | None  # the token with which the policy ended its turn
    stop: str | None = None  # the stop string that ended it; the text is cut there, the tokens are not

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token IDs of the prompt."""
        return self.transcript.token_ids[: self.start]

    def leave_out(self) -> None:
        """Exclude the reply from learning, because the agent dropped it."""
        self.transcript.leave_out(self.start, len(self.token_ids))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-prob of each generated token."""
        generated = self.transcript.tokens().logprobs[self.start : self.start + len(self.token_ids)]
        return tuple(float(logprob) for logprob in generated)


async def recorded_turn(
    chat_format: ChatFormat, transcript: Transcript, max_tokens: int | None, options: TurnOptions | None = None
) -> RecordedReply:
    """Sample the policy's next turn."""
    start = len(transcript.token_ids)
    token_ids = await transcript.take(max_tokens, options)
    has_ended = transcript.finish is Finish.STOP
    text, stop = cut_at_stop(chat_format.text(token_ids), () if options is None else options.stop)
    ending = token_ids[-1] if has_ended and token_ids and stop is None else None
    if ending is not None:
        text = chat_format.text(token_ids[:-1])
    return RecordedReply(text, token_ids, not has_ended, transcript=transcript, start=start, ending=ending, stop=stop)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Cut a text at the first stop string; return it with that string.

    >>> cut_at_stop("one END. two", ["two", "END"]), cut_at_stop("one", ["END"])
    (('one ', 'END'), ('one', None))
    """
    found = [(text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    place, _, stop = min(found)
    return text[:place], stop


async def all_or_none(turns: Sequence[Coroutine[Any, Any, RecordedReply]]) -> list[RecordedReply]:
    """Sample turns at the same time. If one fails or the caller is cancelled, all are taken back."""
    if len(turns) == 1:
        return [await turns[0]]
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for reply in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(reply, RecordedReply):
                reply.transcript.take_back(reply.start)
        raise


@dataclass(frozen=True, slots=True)
class _Turn:
    """A recorded turn that a conversation can continue from."""

    messages: int  # length of the conversation including it
    tokens: int  # length of the sequence including it
    ending: int | None


@dataclass(slots=True)
class _Conversation:
    """A sequence and its messages."""

    transcript: Transcript
    tools: str  # as JSON
    messages: list[dict[str, Any]] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    is_at_turn: bool = False  # the policy has not answered the last messages yet

    @property
    def generated(self) -> list[int]:
        """Indices of the messages that the policy generated."""
        return [turn.messages - 1 for turn in self.turns]

    def known_turns(self, keys: Sequence[Key]) -> int:
        """Number of turns of this conversation that a conversation with these keys begins with."""
        common = 0
        while common < min(len(keys), len(self.keys)) and keys[common] == self.keys[common]:
            common += 1
        return sum(turn.messages <= common for turn in self.turns)

    def show(
        self, messages: Sequence[dict[str, Any]], keys: Sequence[Key], shown: tuple[Sequence[int], Sequence[Image]]
    ) -> None:
        """Append messages that the policy did not generate, as tokens and images."""
        self.transcript.give(shown[0], [as_read(message) for message in messages], shown[1])
        self.messages += messages
        self.keys += keys
        self.is_at_turn = True

    def answered(self, reply: RecordedReply, key: Key) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})
        self.keys.append(key)
        self.turns.append(_Turn(len(self.messages), reply.start + len(reply.token_ids), reply.ending))
        self.is_at_turn = False


class ChatPolicy:
    """Conversations over the transcript of one episode.

    A conversation that continues a recorded one extends its sequence. One that diverges earlier gets a new sequence
    with the recorded tokens up to that point; any other starts from scratch.
    """

    def __init__(self, transcript: Transcript, chat_format: ChatFormat) -> None:
        self._first, self.format = transcript, chat_format
        self._conversations: list[_Conversation] = []
        self._under_way: set[tuple[tuple[Key, ...], str]] = set()
        self.last_reply: RecordedReply | None = None  # over all conversations and texts

    async def chat(
        self, messages: Sequence[Message], max_tokens: int | None = None, tools: Tools = None
    ) -> RecordedReply:
        """Sample the policy's next turn in a conversation."""
        return (await self.samples(messages, max_tokens, tools))[0]

    async def samples(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        tools: Tools = None,
        count: int = 1,
        options: TurnOptions | None = None,
    ) -> list[RecordedReply]:
        """Sample the next turn `count` times, each in its own sequence; the conversation may continue with any."""
        if not messages:
            raise ValueError("a conversation has at least one message")
        read = [for_template(message) for message in messages]
        key = (tuple(self._key(message, tools) for message in read), _tools_key(tools))
        if key in self._under_way:
            raise TurnInProgress("this conversation already has a turn in progress; wait for its reply before the next")
        self._under_way.add(key)
        try:
            shown: list[_Conversation] = []
            for _ in range(count):
                shown.append(self._shown(read, *key, tools, shown))
            replies = await all_or_none(
                [recorded_turn(self.format, each.transcript, max_tokens, options) for each in shown]
            )
        finally:
            self._under_way.remove(key)
        for conversation, reply in zip(shown, replies, strict=True):
            conversation.answered(reply, self._key({"role": "assistant", "content": reply.text}, tools))
        self.last_reply = replies[-1]
        return replies

    def _key(self, message: Mapping[str, Any], tools: Tools) -> Key:
        return key_of(message, self.format.parse, tools)

    def open_sequence(self) -> Transcript:
        """Return an empty sequence of the episode."""
        is_used = bool(self._first.token_ids) or any(each.transcript is self._first for each in self._conversations)
        return self._first.branch() if is_used else self._first

    def _shown(
        self,
        messages: list[dict[str, Any]],
        keys: tuple[Key, ...],
        tools_key: str,
        tools: Tools,
        others: Sequence[_Conversation],
    ) -> _Conversation:
        """Return a conversation that ends with the prompt, so that the policy is next; it is none of `others`."""
        for waiting in self._conversations:
            is_free = waiting.is_at_turn and all(waiting is not other for other in others)
            if is_free and waiting.tools == tools_key and tuple(waiting.keys) == keys:
                return waiting  # a retry after its turn failed
        return self._continued(messages, keys, tools_key, tools) or self._started(messages, keys, tools_key, tools)

    def _started(
        self, messages: list[dict[str, Any]], keys: tuple[Key, ...], tools_key: str, tools: Tools
    ) -> _Conversation:
        token_ids = self.format.opening(messages, tools)
        started = _Conversation(self.open_sequence(), tools_key)
        self._conversations.append(started)
        started.show(messages, keys, self._with_images(token_ids, messages))
        return started

    def _continued(
        self, messages: list[dict[str, Any]], keys: tuple[Key, ...], tools_key: str, tools: Tools
    ) -> _Conversation | None:
        """Return the recorded conversation that this one continues, if there is one."""
        same_tools = [each for each in self._conversations if each.tools == tools_key]
        known = [(each.known_turns(keys), each) for each in same_tools]
        count, source = max(known, key=lambda pair: (pair[0], _is_open(*pair)), default=(0, None))
        if source is None or count == 0:
            return None
        turn = source.turns[count - 1]
        new = messages[turn.messages :]
        generated = source.generated[:count]
        added = self.format.continuation(source.messages[: turn.messages], generated, turn.ending, new, tools)
        if added is None:
            return None
        if not _is_open(count, source):
            source = self._branched(source, count)
        source.show(new, keys[turn.messages :], self._with_images(added, new))
        return source

    def _with_images(self, token_ids: Ids, messages: Sequence[Mapping[str, Any]]) -> tuple[Ids, tuple[Image, ...]]:
        files = files_of(messages)
        return self.format.with_images(token_ids, files) if files else (token_ids, ())

    def _branched(self, source: _Conversation, count: int) -> _Conversation:
        """Return a copy of the conversation up to a turn, in a new sequence."""
        turn = source.turns[count - 1]
        branched = _Conversation(
            self.open_sequence(),
            source.tools,
            source.messages[: turn.messages],
            source.keys[: turn.messages],
            source.turns[:count],
        )
        known = [as_read(message) for message in branched.messages]
        images = [image for image in source.transcript.images if image.start < turn.tokens]
        branched.transcript.give(source.transcript.token_ids[: turn.tokens], known, images)
        self._conversations.append(branched)
        return branched


def _is_open(count: int, conversation: _Conversation) -> bool:
    """Return True if the sequence ends after `count` turns, so that it can be extended."""
    return not conversation.is_at_turn and count == len(conversation.turns)


def _tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    return json.dumps(list(tools or ()), sort_keys=True)
