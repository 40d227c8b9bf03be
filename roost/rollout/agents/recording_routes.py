"""The routes of the recording endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from roost.engines.errors import ContextFull, EngineError, EngineRefused
from roost.net.errors import Refused, answer_errors, error_response
from roost.rollout.agents.chat import RecordedReply, TurnUnderWay
from roost.rollout.agents.recording import EpisodeOver, RecordedEpisode
from roost.rollout.agents.recording_answers import ChatAnswer, Json, TextAnswer, sse
from roost.rollout.agents.recording_rules import RequestRules

if TYPE_CHECKING:
    from roost.rollout.agents.recording import Recorder

CONTEXT_FULL = "context_length_exceeded"  # by which programs know that they must shorten what they show
GONE = 410  # clients do not try again what is answered so


class Asked(BaseModel):
    """What all requests have; `RequestRules` says what becomes of other keys."""

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
        """The tools that the policy is told of."""
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
        """The prompt, which some clients write as a list of one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return prompt[0]
        if any(isinstance(part, str) for part in prompt):
            raise Refused(f"there are {len(prompt)} prompts; send one at a time", 400, "prompt")
        return [int(part) for part in prompt]


def recording_app(recorder: Recorder) -> FastAPI:
    """The app; an episode's key is part of its address, so programs need nothing but a base URL."""
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
    """The reply, unless whoever asked goes away: then the turn is given up, and may be asked for again."""
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
