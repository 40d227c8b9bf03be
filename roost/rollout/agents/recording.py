"""OpenAI-compatible endpoint that records the policy's turns in an episode's transcript."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from roost.engines.protocol import ContextFull, EngineError, EngineRefused
from roost.net.errors import Refused, answer_errors, error_response
from roost.net.server import LoopServer
from roost.rollout.agents.chat import ChatPolicy, RecordedReply, TurnUnderWay, recorded_turn
from roost.rollout.agents.chat_format import ChatFormat, Said, ToolCall, said
from roost.rollout.episode import Transcript

LOOKED_BACK = 40  # characters of context needed to tokenize a continuation


@dataclass(frozen=True, slots=True)
class _Written:
    """A sequence that the policy completed, with its text up to the end token."""

    transcript: Transcript
    text: str
    ending: int | None


class TextPolicy:
    """Completions over the transcript of an episode. A prompt that starts with recorded text extends its sequence."""

    def __init__(self, policy: ChatPolicy) -> None:
        self._policy, self._format = policy, policy.format
        self._written: list[_Written] = []

    async def complete(self, prompt: str | Sequence[int], max_tokens: int | None = None) -> RecordedReply:
        """Complete a prompt, given as text or as token IDs."""
        if not prompt:
            raise ValueError("the prompt is empty")
        transcript = self._shown(prompt)
        before = prompt if isinstance(prompt, str) else self._format.text(prompt)
        try:
            reply = await recorded_turn(self._format, transcript, max_tokens)
        except BaseException:
            self._written.append(_Written(transcript, before, None))  # the turn may be retried
            raise
        self._written.append(_Written(transcript, before + reply.text, reply.ending))
        self._policy.last_reply = reply
        return reply

    def _shown(self, prompt: str | Sequence[int]) -> Transcript:
        """Return the sequence that ends with the prompt."""
        source = self._source(prompt)
        if source is None:
            return self._opened(self._format.ids(prompt) if isinstance(prompt, str) else prompt)
        known = source.transcript.token_ids
        if isinstance(prompt, str):
            rest = prompt[len(source.text) :]
            end = "" if source.ending is None else self._format.token(source.ending)
            if not rest.startswith(end):  # the prompt continues the text without its end token
                return self._opened((*known[:-1], *self._format.ids_after(source.text[-LOOKED_BACK:], rest)))
            new = self._format.ids_after(end or source.text[-LOOKED_BACK:], rest.removeprefix(end))
        else:
            new = tuple(prompt[len(known) :])
        self._written.remove(source)  # no other prompt may extend it meanwhile
        source.transcript.give(new)
        return source.transcript

    def _opened(self, token_ids: Sequence[int]) -> Transcript:
        opened = self._policy.open_sequence()
        opened.give(token_ids)
        return opened

    def _source(self, prompt: str | Sequence[int]) -> _Written | None:
        """Return the longest recorded text that the prompt starts with."""
        known = [each for each in self._written if self._begins(prompt, each)]
        return max(known, key=lambda each: len(each.transcript.token_ids), default=None)

    def _begins(self, prompt: str | Sequence[int], written: _Written) -> bool:
        if isinstance(prompt, str):
            return prompt.startswith(written.text)
        known = written.transcript.token_ids
        return tuple(prompt[: len(known)]) == known


logger = logging.getLogger(__name__)

# For each key the values without effect, and what to do instead of using others.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "stop": (((), [], ""), "a turn ends where the policy ends it; cut the text yourself"),
    "response_format": (({"type": "text"},), "the policy is not held to a form; ask for it in a message"),
    "functions": (([],), "write them as tools"),
    "function_call": (("none", "auto"), "write tools and tool_choice"),
    "logit_bias": (({},), "tokens are drawn from the policy as it is"),
    "top_logprobs": ((0,), "only the tokens that were made have log-probabilities; ask for logprobs alone"),
    "modalities": ((["text"],), "there is only text"),
    "audio": ((), "there is only text"),
    "best_of": ((1,), "ask again for another sample"),
    "suffix": (("",), "there is nothing after what the policy says"),
    "reasoning_effort": ((), "set it for all episodes, in the scenario's `template`"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "set them for all episodes, in the scenario's `template`"),
    "continue_final_message": ((False,), "the policy's turn begins where the messages end"),
    "add_generation_prompt": ((True,), "the policy's turn begins where the messages end"),
    "guided_json": ((), "the policy is not held to a form; ask for it in a message"),
    "guided_regex": ((), "the policy is not held to a form; ask for it in a message"),
    "structured_outputs": ((), "the policy is not held to a form; ask for it in a message"),
}
# About the caller and storage of the answer; does not affect the policy.
OF_NO_MATTER = frozenset(
    {
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


class RequestRules:
    """Checks keys of requests that are not read."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def check(self, more: Mapping[str, Any]) -> None:
        """Raise Refused for unsupported keys; warn once about keys that the run's settings override.

        >>> RequestRules().check({"stop": None, "response_format": {"type": "text"}, "user": "me"})
        >>> RequestRules().check({"functions": [{"name": "find"}]})
        Traceback (most recent call last):
            ...
        roost.net.errors.Refused: functions is not offered: write them as tools
        """
        asked = {key: value for key, value in more.items() if value is not None}
        for key, value in asked.items():
            idle, instead = REFUSED.get(key, ((value,), ""))
            if value not in idle:
                raise Refused(f"{key} is not offered: {instead}", 400, key)
        others = asked.keys() - REFUSED.keys() - OF_NO_MATTER - self._told
        if others:
            self._told |= others
            logger.warning(
                "a program asks for %s; how tokens are drawn is set for the whole run, and this is not followed",
                ", ".join(sorted(others)),
            )


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
    """Yield each generated token and its log-prob, without the end-of-turn token."""
    shown = reply.token_ids if reply.ending is None else reply.token_ids[:-1]
    for token_id, logprob in zip(shown, reply.logprobs, strict=False):
        yield chat_format.token(token_id), logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity


CONTEXT_FULL = "context_length_exceeded"  # by which programs know that they must shorten what they show
GONE = 410  # clients do not try again what is answered so


class Asked(BaseModel):
    """Fields common to all requests; `RequestRules` handles other keys."""

    model_config = ConfigDict(extra="allow")

    n: int | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None

    def check(self, rules: RequestRules) -> None:
        rules.check(self.model_extra or {})
        if self.n not in (None, 1):
            raise Refused(
                f"n is {self.n}; an episode has one turn at a time, so ask for 1 and again for another", 400, "n"
            )

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatAsked(Asked):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = False

    def check(self, rules: RequestRules) -> None:
        super().check(rules)
        if self.tool_choice not in (None, "auto", "none"):
            fix = "leave tool_choice out, or write auto or none"
            raise Refused(f"a tool cannot be forced upon the policy; {fix}", 400, "tool_choice")

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """Tools shown to the policy."""
        return None if self.tool_choice == "none" else self.tools or None


class TextAsked(Asked):
    prompt: str | list[int] | list[str]
    echo: bool | None = False
    logprobs: int | None = None

    def check(self, rules: RequestRules) -> None:
        super().check(rules)
        if self.echo:
            raise Refused("echo is not offered; the prompt is known to whoever sent it", 400, "echo")
        if (self.logprobs or 0) > 1:
            fix = "only the tokens that were made have one: write 1"
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


def recording_app(recorder: Recorder) -> FastAPI:
    """The FastAPI app; an episode's key is part of its URL, so programs need only a base URL."""
    app, rules = FastAPI(title="Roost's recording endpoint"), RequestRules()
    answer_errors(app, EngineError)

    @app.exception_handler(EpisodeOver)
    async def over(_: Request, error: EpisodeOver) -> JSONResponse:
        return error_response(str(error), GONE)

    @app.exception_handler(ContextFull)
    async def full(_: Request, error: ContextFull) -> JSONResponse:
        told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": CONTEXT_FULL}
        return JSONResponse({"error": told}, 400)

    def episode_of(key: str) -> RecordedEpisode:
        episode = recorder.find(key)
        if episode is None:
            raise Refused("there is no such episode, or it is over", GONE)
        return episode

    @app.get("/episodes/{key}/v1/models")
    async def models(key: str) -> Json:
        episode_of(key)
        return {
            "object": "list",
            "data": [{"id": recorder.model, "object": "model", "created": 0, "owned_by": "roost"}],
        }

    @app.post("/episodes/{key}/v1/chat/completions")
    async def chat_completions(key: str, asked: ChatAsked, request: Request) -> Response:
        episode = episode_of(key)
        asked.check(rules)
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        work = episode.take(episode.policy.chat(asked.messages, most, asked.offered))
        reply = await _unless_gone(work, request)
        answer = ChatAnswer(recorder.model, episode.policy.format, reply, bool(asked.logprobs), bool(asked.offered))
        return _response(asked, answer)

    @app.post("/episodes/{key}/v1/completions")
    async def completions(key: str, asked: TextAsked, request: Request) -> Response:
        episode = episode_of(key)
        asked.check(rules)
        work = episode.take(episode.texts.complete(asked.only_prompt, asked.max_tokens))
        reply = await _unless_gone(work, request)
        return _response(asked, TextAnswer(recorder.model, episode.policy.format, reply, asked.logprobs is not None))

    return app


def _response(asked: Asked, answer: ChatAnswer | TextAnswer) -> Response:
    if not asked.stream:
        return JSONResponse(answer.whole())
    return StreamingResponse(_events(sse(answer.chunks(asked.wants_usage))), media_type="text/event-stream")


async def _events(lines: Iterable[str]) -> Any:
    for line in lines:
        yield line


async def _unless_gone(work: Coroutine[Any, Any, RecordedReply], request: Request) -> RecordedReply:
    """Return the reply; if the client disconnects, cancel the turn, which may be requested again."""
    turn, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait([turn, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not turn.done():
            turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turn
    if turn.cancelled():
        raise EpisodeOver("whoever asked is gone")
    try:
        return turn.result()
    except ContextFull:
        raise
    except (EngineRefused, TurnUnderWay, ValueError) as error:
        raise Refused(str(error)) from error


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EpisodeOver(Exception):
    """The episode takes no more turns; the message is the reason."""


class RecordedEpisode:
    """An episode as the endpoint sees it; its URL gives access to its policy."""

    def __init__(self, url: str, policy: ChatPolicy, max_turns: int | None = None) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = f"{url}/episodes/{self.api_key}/v1"
        self.policy, self.texts = policy, TextPolicy(policy)
        self._max_turns, self._answered = max_turns, 0
        self._under_way: set[asyncio.Task[RecordedReply]] = set()
        self._is_closed = False
        self.is_used_up = False  # turns, or the engine's context: the program's next error is the end, not a failure

    async def take(self, work: Coroutine[Any, Any, RecordedReply]) -> RecordedReply:
        """Take a turn. Raise EpisodeOver if there is none left."""
        if self._is_closed or not self._has_turns:
            work.close()
            self.is_used_up = True
            raise EpisodeOver("the episode is over" if self._is_closed else f"its {self._max_turns} turns are used up")
        turn = asyncio.create_task(work)
        self._under_way.add(turn)
        turn.add_done_callback(self._under_way.discard)
        try:
            await asyncio.wait([turn])
        finally:
            turn.cancel()  # the client has disconnected
        if turn.cancelled():
            raise EpisodeOver("the episode was cancelled")
        if isinstance(turn.exception(), ContextFull) and self._answered:
            self.is_used_up = True
        reply = turn.result()
        self._answered += 1
        self.is_used_up = False  # it shortened its prompt and continued
        return reply

    @property
    def _has_turns(self) -> bool:
        return self._max_turns is None or self._answered + len(self._under_way) < self._max_turns

    def close(self) -> None:
        """End the episode; pending requests for a turn fail."""
        self._is_closed = True
        for turn in self._under_way:
            turn.cancel()


class Recorder:
    """The endpoint of a process, on the loopback interface, in the event loop of its first episode."""

    def __init__(self, model: str = "policy") -> None:
        self.model = model
        self._episodes: dict[str, RecordedEpisode] = {}
        self._server: LoopServer | None = None

    @contextlib.asynccontextmanager
    async def episode(self, policy: ChatPolicy, max_turns: int | None = None) -> AsyncIterator[RecordedEpisode]:
        """Open a URL for an episode, closed when the context ends."""
        if self._server is None or not self._server.is_running:
            from roost.rollout.agents.recording import recording_app

            self._server = LoopServer(recording_app(self))
        opened = RecordedEpisode(self._server.url, policy, max_turns)
        self._episodes[opened.api_key] = opened
        try:
            yield opened
        finally:
            opened.close()
            del self._episodes[opened.api_key]

    def find(self, key: str) -> RecordedEpisode | None:
        return self._episodes.get(key)

    async def close(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
