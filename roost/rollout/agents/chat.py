"""Messages as agents write them: read for a chat template, and compared with one another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.engines.protocol import Finish
from roost.rollout.agents.agent import Message, Reply
from roost.rollout.agents.chat_format import ChatFormat, ToolCall, Tools, said, tool_call
from roost.rollout.episode import Transcript


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


class TurnUnderWay(RuntimeError):
    """A conversation was asked to go on while the policy is at its turn in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply(Reply):
    """A reply, and where it stands in the episode's record."""

    transcript: Transcript
    start: int  # of its tokens in the sequence
    ending: int | None  # the token with which the policy ended its turn

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What the policy was shown."""
        return self.transcript.token_ids[: self.start]

    def leave_out(self) -> None:
        """Nothing is to be learnt from it: the agent has dropped it."""
        self.transcript.leave_out(self.start, len(self.token_ids))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of each of its tokens."""
        made = self.transcript.tokens().logprobs[self.start : self.start + len(self.token_ids)]
        return tuple(float(logprob) for logprob in made)


async def recorded_turn(chat_format: ChatFormat, transcript: Transcript, max_tokens: int | None) -> RecordedReply:
    """The policy's turn, now."""
    start = len(transcript.token_ids)
    token_ids = await transcript.take(max_tokens)
    has_ended = transcript.finish is Finish.STOP
    ending = token_ids[-1] if has_ended and token_ids else None
    text = chat_format.text(token_ids if ending is None else token_ids[:-1])
    return RecordedReply(text, token_ids, not has_ended, transcript=transcript, start=start, ending=ending)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that the policy made, as a place to go on from."""

    messages: int  # of the conversation with it
    tokens: int  # of the sequence with it
    ending: int | None


@dataclass(slots=True)
class _Conversation:
    """A sequence, and the messages that it holds."""

    transcript: Transcript
    tools: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    is_at_turn: bool = False  # the policy was shown messages, and has not answered them

    @property
    def made(self) -> list[int]:
        """Which of its messages the policy made."""
        return [turn.messages - 1 for turn in self.turns]

    def known_turns(self, keys: Sequence[Key]) -> int:
        """How many of its turns are part of a conversation."""
        common = 0
        while common < min(len(keys), len(self.keys)) and keys[common] == self.keys[common]:
            common += 1
        return sum(turn.messages <= common for turn in self.turns)

    def show(self, messages: Sequence[dict[str, Any]], keys: Sequence[Key], token_ids: Sequence[int]) -> None:
        """Go on with messages that the policy did not make."""
        self.transcript.give(token_ids, [as_read(message) for message in messages])
        self.messages += messages
        self.keys += keys
        self.is_at_turn = True

    def answered(self, reply: RecordedReply) -> None:
        made = {"role": "assistant", "content": reply.text}
        self.messages.append(made)
        self.keys.append(key_of(made))
        self.turns.append(_Turn(len(self.messages), reply.start + len(reply.token_ids), reply.ending))
        self.is_at_turn = False


class ChatPolicy:
    """Conversations over the record of one episode.

    A conversation that goes on from one that is recorded goes on in its sequence. One that leaves it earlier gets
    a sequence of its own, with the tokens up to there as they were; any other begins from nothing.
    """

    def __init__(self, transcript: Transcript, chat_format: ChatFormat) -> None:
        self._first, self.format = transcript, chat_format
        self._conversations: list[_Conversation] = []
        self._under_way: set[tuple[tuple[Key, ...], str]] = set()
        self.last_reply: RecordedReply | None = None  # of all its conversations and texts

    async def chat(
        self, messages: Sequence[Message], max_tokens: int | None = None, tools: Tools = None
    ) -> RecordedReply:
        """The policy's next turn in a conversation."""
        if not messages:
            raise ValueError("a conversation has at least one message")
        read = [for_template(message) for message in messages]
        asked = (tuple(key_of(message) for message in read), _spelt(tools))
        if asked in self._under_way:
            raise TurnUnderWay("the policy is at its turn in this conversation; wait for its reply before the next")
        self._under_way.add(asked)
        try:
            conversation = self._shown(read, *asked, tools)
            reply = await recorded_turn(self.format, conversation.transcript, max_tokens)
        finally:
            self._under_way.remove(asked)
        conversation.answered(reply)
        self.last_reply = reply
        return reply

    def open_sequence(self) -> Transcript:
        """A sequence of the episode in which there is nothing yet."""
        is_used = bool(self._first.token_ids) or any(each.transcript is self._first for each in self._conversations)
        return self._first.branch() if is_used else self._first

    def _shown(self, messages: list[dict[str, Any]], keys: tuple[Key, ...], spelt: str, tools: Tools) -> _Conversation:
        """The conversation with the policy at its turn."""
        for waiting in self._conversations:
            if waiting.is_at_turn and waiting.tools == spelt and tuple(waiting.keys) == keys:
                return waiting  # its turn failed, and is asked for again
        return self._gone_on(messages, keys, spelt, tools) or self._begun(messages, keys, spelt, tools)

    def _begun(self, messages: list[dict[str, Any]], keys: tuple[Key, ...], spelt: str, tools: Tools) -> _Conversation:
        token_ids = self.format.opening(messages, tools)
        begun = _Conversation(self.open_sequence(), spelt)
        self._conversations.append(begun)
        begun.show(messages, keys, token_ids)
        return begun

    def _gone_on(
        self, messages: list[dict[str, Any]], keys: tuple[Key, ...], spelt: str, tools: Tools
    ) -> _Conversation | None:
        """The recorded conversation that this one goes on from, if there is one."""
        same_tools = [each for each in self._conversations if each.tools == spelt]
        known = [(each.known_turns(keys), each) for each in same_tools]
        count, source = max(known, key=lambda pair: (pair[0], _is_open(*pair)), default=(0, None))
        if source is None or count == 0:
            return None
        turn = source.turns[count - 1]
        new = messages[turn.messages :]
        made = source.made[:count]
        added = self.format.continuation(source.messages[: turn.messages], made, turn.ending, new, tools)
        if added is None:
            return None
        if not _is_open(count, source):
            source = self._branched(source, count)
        source.show(new, keys[turn.messages :], added)
        return source

    def _branched(self, source: _Conversation, count: int) -> _Conversation:
        """Another conversation that is the same up to a turn."""
        turn = source.turns[count - 1]
        branched = _Conversation(
            self.open_sequence(),
            source.tools,
            source.messages[: turn.messages],
            source.keys[: turn.messages],
            source.turns[:count],
        )
        known = [as_read(message) for message in branched.messages]
        branched.transcript.give(source.transcript.token_ids[: turn.tokens], known)
        self._conversations.append(branched)
        return branched


def _is_open(count: int, conversation: _Conversation) -> bool:
    """Whether tokens that follow so many turns can be added at the end of the sequence."""
    return not conversation.is_at_turn and count == len(conversation.turns)


def _spelt(tools: Sequence[Mapping[str, Any]] | None) -> str:
    return json.dumps(list(tools or ()), sort_keys=True)
