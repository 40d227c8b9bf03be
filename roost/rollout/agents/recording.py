"""Endpoint for agents' programs, in three protocols, that records the policy's turns in an episode's transcript."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from roost.engines.protocol import ContextFull, EngineError, EngineRefused
from roost.net.errors import Refused, answer_errors, error_response, refusing
from roost.net.server import LoopServer
from roost.rollout.agents.chat import (
    ChatPolicy,
    RecordedReply,
    TurnInProgress,
    all_or_none,
    for_template,
    recorded_turn,
)
from roost.rollout.agents.endpoint.completions import ChatBody, TextBody
from roost.rollout.agents.endpoint.messages import TOO_LONG, MessagesBody, error_body
from roost.rollout.agents.endpoint.responses import ResponsesBody
from roost.rollout.agents.endpoint.turns import Answer, Json, RequestRules, Turn, TurnRequest, read_turn
from roost.rollout.episode import Transcript, TurnOptions

CONTEXT_CHARACTERS = 40  # characters of context needed to tokenize a continuation


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence that a prompt may continue, with its text up to the end token."""

    transcript: Transcript
    text: str
    ending: int | None


class TextPolicy:
    """Completions over the transcript of an episode. A prompt that starts with recorded text extends its sequence."""

    def __init__(self, policy: ChatPolicy) -> None:
        self._policy, self._format = policy, policy.format
        self._sequences: list[_Sequence] = []

    async def complete(self, prompt: str | Sequence[int], max_tokens: int | None = None) -> RecordedReply:
        """Complete a prompt, given as text or as token IDs."""
        return (await self.samples(prompt, max_tokens))[0]

    async def samples(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        count: int = 1,
        options: TurnOptions | None = None,
    ) -> list[RecordedReply]:
        """Complete a prompt `count` times, each in its own sequence."""
        if not prompt:
            raise ValueError("the prompt is empty")
        shown = [self._shown(prompt) for _ in range(count)]
        before = prompt if isinstance(prompt, str) else self._format.text(prompt)
        try:
            replies = await all_or_none([recorded_turn(self._format, each, max_tokens, options) for each in shown])
        except BaseException:
            self._sequences += [_Sequence(each, before, None) for each in shown]  # the turn may be retried
            raise
        for transcript, reply in zip(shown, replies, strict=True):
            # With the stop string: a program that continues the text writes it itself.
            text = reply.text if reply.stop is None else self._format.text(reply.token_ids)
            self._sequences.append(_Sequence(transcript, before + text, reply.ending))
        self._policy.last_reply = replies[-1]
        return replies

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
                return self._opened((*known[:-1], *self._format.ids_after(source.text[-CONTEXT_CHARACTERS:], rest)))
            new = self._format.ids_after(end or source.text[-CONTEXT_CHARACTERS:], rest.removeprefix(end))
        else:
            new = tuple(prompt[len(known) :])
        self._sequences.remove(source)  # no other prompt may extend it at the same time
        source.transcript.give(new)
        return source.transcript

    def _opened(self, token_ids: Sequence[int]) -> Transcript:
        opened = self._policy.open_sequence()
        opened.give(token_ids)
        return opened

    def _source(self, prompt: str | Sequence[int]) -> _Sequence | None:
        """Return the longest recorded text that the prompt starts with."""
        known = [each for each in self._sequences if self._begins(prompt, each)]
        return max(known, key=lambda each: len(each.transcript.token_ids), default=None)

    def _begins(self, prompt: str | Sequence[int], written: _Sequence) -> bool:
        if isinstance(prompt, str):
            return prompt.startswith(written.text)
        known = written.transcript.token_ids
        return tuple(prompt[: len(known)]) == known


CONTEXT_FULL = "context_length_exceeded"  # programs recognize it, and shorten their prompt
GONE = 410  # clients do not retry on this status
# Clients differ in whether a base URL ends with /v1, and Anthropic's adds one.
PREFIXES = ("/episodes/{key}/v1", "/episodes/{key}", "/episodes/{key}/v1/v1")


def recording_app(recorder: Recorder) -> FastAPI:
    """The FastAPI app; an episode's key is part of its URL, so programs need only a base URL."""
    app, rules, router = FastAPI(title="Roost's recording endpoint"), RequestRules(), APIRouter()
    answer_errors(app, EngineError)

    @app.exception_handler(EpisodeOver)
    async def over(_: Request, error: EpisodeOver) -> JSONResponse:
        return error_response(str(error), GONE)

    @app.exception_handler(ContextFull)
    async def full(request: Request, error: ContextFull) -> JSONResponse:
        message = f"{TOO_LONG}: {error}" if _is_anthropic(request) else str(error)
        details = {"message": message, "type": "invalid_request_error", "param": None, "code": CONTEXT_FULL}
        return JSONResponse({"error": details}, 400)

    for kind, handler in list(app.exception_handlers.items()):
        app.add_exception_handler(kind, _in_dialect(handler))

    def episode_of(key: str) -> RecordedEpisode:
        episode = recorder.find(key)
        if episode is None:
            raise Refused("there is no such episode, or it is over", GONE)
        return episode

    def turn_request(body: ChatBody | MessagesBody | ResponsesBody, episode: RecordedEpisode) -> TurnRequest:
        with refusing():
            return body.request(rules, episode.stored)

    async def turns_of(
        body: ChatBody | MessagesBody | ResponsesBody, episode: RecordedEpisode, request: Request
    ) -> list[Turn]:
        policy, requested = episode.policy, turn_request(body, episode)
        work = policy.samples(
            requested.messages, requested.max_tokens, requested.tools, requested.count, requested.options
        )
        replies = await _unless_disconnected(episode.take(work, requested.count), request)
        return [read_turn(reply, policy.format, requested.tools) for reply in replies]

    @router.get("/models")
    async def models(key: str) -> Json:
        episode_of(key)
        card = {"id": recorder.model, "object": "model", "created": 0, "owned_by": "roost"}
        return {"object": "list", "data": [card]}

    @router.post("/chat/completions")
    async def chat_completions(key: str, body: ChatBody, request: Request) -> Response:
        episode = episode_of(key)
        turns = await turns_of(body, episode, request)
        return _response(body.stream, body.answer(recorder.model, turns))

    @router.post("/messages")
    async def messages(key: str, body: MessagesBody, request: Request) -> Response:
        episode = episode_of(key)
        turns = await turns_of(body, episode, request)
        return _response(body.stream, body.answer(recorder.model, turns))

    @router.post("/messages/count_tokens")
    async def count_tokens(key: str, body: MessagesBody) -> Json:
        episode = episode_of(key)
        requested = turn_request(body, episode)
        with refusing():
            shown = episode.policy.format.opening([for_template(each) for each in requested.messages], requested.tools)
        return {"input_tokens": len(shown)}

    @router.post("/responses")
    async def responses(key: str, body: ResponsesBody, request: Request) -> Response:
        episode = episode_of(key)
        turns = await turns_of(body, episode, request)
        answer = body.answer(recorder.model, turns)
        episode.stored[answer.id] = body.conversation(episode.stored, turns[0])
        return _response(body.stream, answer)

    @router.post("/completions")
    async def completions(key: str, body: TextBody, request: Request) -> Response:
        episode = episode_of(key)
        body.check(rules)
        work = episode.texts.samples(body.only_prompt, body.max_tokens, body.count, TurnOptions(body.stops))
        replies = await _unless_disconnected(episode.take(work, body.count), request)
        turns = [read_turn(reply, episode.policy.format, None) for reply in replies]
        return _response(body.stream, body.answer(recorder.model, turns))

    for prefix in PREFIXES:
        app.include_router(router, prefix=prefix)
    return app


def _response(streams: bool | None, answer: Answer) -> Response:
    if not streams:
        return JSONResponse(answer.whole())
    return StreamingResponse(_sent(answer.events()), media_type="text/event-stream")


async def _sent(lines: Iterable[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


def _is_anthropic(request: Request) -> bool:
    return "/messages" in request.url.path


def _in_dialect(handler: Any) -> Any:
    """Wrap an error handler to answer in the format of the route's protocol."""

    async def handled(request: Request, error: Exception) -> JSONResponse:
        response: JSONResponse = await handler(request, error)
        if not _is_anthropic(request):
            return response
        message = json.loads(bytes(response.body))["error"]["message"]
        return JSONResponse(error_body(message, response.status_code), response.status_code)

    return handled


async def _unless_disconnected(work: Coroutine[Any, Any, list[RecordedReply]], request: Request) -> list[RecordedReply]:
    """Return the replies; if the client disconnects, cancel the turn, which may be requested again."""
    turn, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnected(request))
    try:
        await asyncio.wait([turn, disconnected], return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected.cancel()
        if not turn.done():
            turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turn
    if turn.cancelled():
        raise EpisodeOver("the client disconnected")
    try:
        return turn.result()
    except ContextFull:
        raise
    except (EngineRefused, TurnInProgress, ValueError) as error:
        raise Refused(str(error)) from error


async def _until_disconnected(request: Request) -> None:
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
        self.stored: dict[str, list[Json]] = {}  # conversations by the ID of a response
        self._max_turns, self._begun = max_turns, 0  # turns that were answered or are in progress
        self._has_answered = False
        self._under_way: set[asyncio.Task[list[RecordedReply]]] = set()
        self._is_closed = False
        self.is_used_up = False  # no turns or context are left: an error of the program then ends the episode normally

    async def take(self, work: Coroutine[Any, Any, list[RecordedReply]], count: int = 1) -> list[RecordedReply]:
        """Sample `count` turns. Raise EpisodeOver if fewer are left."""
        if self._is_closed or self._lacks(count):
            work.close()
            self.is_used_up = True
            raise EpisodeOver("the episode is over" if self._is_closed else self._used_up(count))
        turn = asyncio.create_task(work)
        self._begun += count
        self._under_way.add(turn)
        turn.add_done_callback(self._under_way.discard)
        try:
            await asyncio.wait([turn])
        finally:
            turn.cancel()  # unless it is done: the client has disconnected
            if not turn.done() or turn.cancelled() or turn.exception() is not None:
                self._begun -= count
        if turn.cancelled():
            raise EpisodeOver("the episode was cancelled")
        if isinstance(turn.exception(), ContextFull) and self._has_answered:
            self.is_used_up = True
        replies = turn.result()
        self._has_answered = True
        self.is_used_up = False  # the program shortened its prompt and continued
        return replies

    def _lacks(self, count: int) -> bool:
        return self._max_turns is not None and self._begun + count > self._max_turns

    def _used_up(self, count: int) -> str:
        left = (self._max_turns or 0) - self._begun
        return f"n is {count}, but {left} turns are left" if left > 0 else f"its {self._max_turns} turns are used up"

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
