"""OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from roost.net.errors import Refused
from roost.rollout.agents.endpoint.turns import (
    Json,
    RequestRules,
    Turn,
    TurnRequest,
    event,
    new_id,
    now,
    offered,
    openai_calls,
    schema_of,
)
from roost.rollout.episode import TurnOptions

MOST_SAMPLES = 128
DONE = "data: [DONE]\n\n"


class Body(BaseModel):
    """Fields common to both routes; `RequestRules` handles other keys."""

    model_config = ConfigDict(extra="allow")

    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = False

    def request(self, rules: RequestRules, stored: Mapping[str, Sequence[Json]]) -> TurnRequest:
        rules.check(self.model_extra or {})
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options = TurnOptions(self.stops, schema_of(self.response_format))
        return TurnRequest(self.messages, offered(self.tools, self.tool_choice), most, self.count, options)

    def answer(self, model: str, turns: Sequence[Turn]) -> ChatAnswer:
        return ChatAnswer(model, turns, bool(self.logprobs), self.wants_usage)


class ChatAnswer:
    """Turns as messages."""

    def __init__(self, model: str, turns: Sequence[Turn], logprobs: bool, wants_usage: bool) -> None:
        self._turns, self._wants_logprobs, self._wants_usage = turns, logprobs, wants_usage
        self._head = {"id": new_id("chatcmpl"), "created": now(), "model": model}

    def whole(self) -> Json:
        choices = [
            {
                "index": index,
                "message": self._message(turn),
                "logprobs": self._logprobs(turn),
                "finish_reason": turn.finish,
            }
            for index, turn in enumerate(self._turns)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(self._turns)}

    def events(self) -> Iterator[str]:
        for index, turn in enumerate(self._turns):
            yield self._chunk(index, {"role": "assistant", "content": ""})
            for number, part in enumerate(self._parts(turn)):
                yield self._chunk(index, part, None if number else self._logprobs(turn))
            yield self._chunk(index, {}, finish=turn.finish)
        if self._wants_usage:
            about = {"object": "chat.completion.chunk", "choices": [], "usage": usage(self._turns)}
            yield event({**self._head, **about})
        yield DONE

    def _message(self, turn: Turn) -> Json:
        message = turn.message()
        if turn.calls and not turn.parsed.text:
            message["content"] = None
        return {**message, "reasoning_content": turn.parsed.reasoning} if turn.parsed.reasoning else message

    def _parts(self, turn: Turn) -> Iterator[Json]:
        if turn.parsed.reasoning:
            yield {"reasoning_content": turn.parsed.reasoning}
        if turn.parsed.text:
            yield {"content": turn.parsed.text}
        for index, call in enumerate(openai_calls(turn)):
            yield {"tool_calls": [{"index": index, **call}]}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    def _logprobs(self, turn: Turn) -> Json | None:
        if not self._wants_logprobs or not turn.has_logprobs:
            return None
        tokens = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in turn.logprobs()
        ]
        return {"content": tokens, "refusal": None}


class TextBody(Body):
    prompt: str | list[int] | list[str]
    echo: bool | None = False
    logprobs: int | None = None

    def check(self, rules: RequestRules) -> None:
        rules.check(self.model_extra or {})
        if self.echo:
            raise Refused("echo is not offered; leave it out, as the client has the prompt", 400, "echo")
        if (self.logprobs or 0) > 1:
            fix = "write 1; only sampled tokens have log-probs"
            raise Refused(f"logprobs is {self.logprobs}; {fix}", 400, "logprobs")

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt; some clients send a list of one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return prompt[0]
        if any(isinstance(part, str) for part in prompt):
            raise Refused(f"there are {len(prompt)} prompts; send one at a time", 400, "prompt")
        return [int(part) for part in prompt]

    def answer(self, model: str, turns: Sequence[Turn]) -> TextAnswer:
        return TextAnswer(model, turns, self.logprobs is not None, self.wants_usage)


class TextAnswer:
    """Turns as texts."""

    def __init__(self, model: str, turns: Sequence[Turn], logprobs: bool, wants_usage: bool) -> None:
        self._turns, self._wants_logprobs, self._wants_usage = turns, logprobs, wants_usage
        self._head = {"id": new_id("cmpl"), "created": now(), "model": model, "object": "text_completion"}

    def whole(self) -> Json:
        choices = [self._choice(index, turn) for index, turn in enumerate(self._turns)]
        return {**self._head, "choices": choices, "usage": usage(self._turns)}

    def events(self) -> Iterator[str]:
        for index, turn in enumerate(self._turns):
            yield event({**self._head, "choices": [self._choice(index, turn)]})
        if self._wants_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._turns)})
        yield DONE

    def _choice(self, index: int, turn: Turn) -> Json:
        finish = "length" if turn.reply.is_cut else "stop"
        return {"index": index, "text": turn.reply.text, "logprobs": self._logprobs(turn), "finish_reason": finish}

    def _logprobs(self, turn: Turn) -> Json | None:
        if not self._wants_logprobs or not turn.has_logprobs:
            return None
        scored = list(turn.logprobs())
        offsets = [0]
        for text, _ in scored:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": [text for text, _ in scored],
            "token_logprobs": [logprob for _, logprob in scored],
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }


def usage(turns: Sequence[Turn]) -> Json:
    """Token counts; the prompt counts once for all its samples."""
    prompt, completion_tokens = turns[0].prompt_tokens, sum(turn.completion_tokens for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": prompt + completion_tokens}
