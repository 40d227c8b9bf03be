"""Sampling for episodes in other processes: they send requests to the driver, which knows the engines.

The driver alone chooses the engine of a turn, waits for weight syncs, and retries turns of lost engines. Agents in
other processes need not know about any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.engines.http_calls import HttpCalls
from roost.engines.protocol import (
    Completion,
    EngineError,
    EngineRefused,
    Finish,
    SamplingMasks,
    VersionSpan,
    unknown_logprobs,
)
from roost.net.routing import decode_routing, encode_routing
from roost.net.server import LoopServer
from roost.rollout.episode import Sampler, TurnOptions
from roost.rollout.episode_runner import OpenPolicy
from roost.vision.image import Image, from_data_url

PATH = "/sample"
SAMPLE_LIMIT_S = 24 * 3600.0  # the driver has its own limits for requests and episodes
LARGEST_BODY = 64 * 2**20

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Contact:
    """URL of a gateway and the key that it requires."""

    url: str
    key: str


class Gateway:
    """Driver side: samples turns for callers with the key; a label selects training or evaluation."""

    def __init__(self) -> None:
        self._labels: dict[str, OpenPolicy] = {}
        self._key = secrets.token_urlsafe(32)

    def serve(self, label: str, open_policy: OpenPolicy) -> None:
        """Answer requests with this label from now on."""
        self._labels[label] = open_policy

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1") -> AsyncIterator[Contact]:
        """Serve in the running event loop."""
        server = LoopServer(self, host)
        try:
            yield Contact(server.url, self._key)
        finally:
            await server.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = await self._respond(scope, receive)
            if answer is not None:
                await _answer(send, *answer)

    async def _respond(self, scope: Scope, receive: Receive) -> tuple[int, Any] | None:
        """Return status and content of the answer; None if the caller has disconnected."""
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._key}".encode()):
            return 401, {"error": "invalid key"}
        if (scope["method"], scope["path"]) != ("POST", PATH):
            return 404, {"error": f"unknown route; use POST {PATH}"}
        try:
            request = json.loads(await _body(receive))
        except ValueError as error:
            return 400, {"error": str(error)}
        return await _unless_disconnected(asyncio.ensure_future(self._sample(request)), receive)

    async def _sample(self, request: Mapping[str, Any]) -> tuple[int, Any]:
        try:
            sample = self._labels[request["label"]](request["number"], request["episode"], request["attempt"])
            images = tuple(Image(from_data_url(url), start) for url, start in request.get("images", ()))
            options = TurnOptions(tuple(request.get("stop", ())), request.get("json_schema"), images)
            limits = (request["max_tokens"], options) if options else (request["max_tokens"],)
            return 200, encode_completion(await sample(request["token_ids"], request["turn"], *limits))
        except EngineRefused as error:
            return 422, {"error": str(error)}
        except EngineError as error:
            return 500, {"error": str(error)}
        except (ValueError, TypeError, KeyError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}


class GatewaySamplers:
    """Client side, in an agent's process: samples turns through the gateway."""

    def __init__(self, contact: Contact) -> None:
        self._calls = HttpCalls(contact.url, contact.key)

    def opener(self, label: str) -> OpenPolicy:
        """Return a function that opens samplers for attempts at episodes."""

        def open_policy(number: int, episode: int, attempt: int) -> Sampler:
            async def sample(
                token_ids: Sequence[int], turn: int, max_tokens: int | None, options: TurnOptions | None = None
            ) -> Completion:
                request = {
                    "label": label,
                    "number": number,
                    "episode": episode,
                    "attempt": attempt,
                    "token_ids": list(token_ids),
                    "turn": turn,
                    "max_tokens": max_tokens,
                    **({} if options is None else _encode_options(options)),
                }
                about = f"turn {turn} of episode {episode} of group {number}"
                # A retry samples the turn again with the same seed; only one result is used.
                reply = await self._calls.post(PATH, request, limit_s=SAMPLE_LIMIT_S, is_idempotent=True, about=about)
                return completion_of(reply)

            return sample

        return open_policy

    async def close(self) -> None:
        await self._calls.close()


def _encode_options(options: TurnOptions) -> dict[str, Any]:
    images = [(image.data_url, image.start) for image in options.images]
    return {"stop": options.stop, "json_schema": options.json_schema, **({"images": images} if images else {})}


def encode_completion(completion: Completion) -> dict[str, Any]:
    """Convert a completion to JSON, which has no NaN.

    >>> from dataclasses import replace
    >>> done = Completion((5,), (-0.5,), Finish.STOP, (VersionSpan(3, 0, 1),))
    >>> masked = replace(done, sampling_mask=SamplingMasks.of([(5, 7)]))
    >>> completion_of(encode_completion(done)) == done, completion_of(encode_completion(masked)) == masked
    (True, True)
    >>> json.dumps(encode_completion(replace(done, logprobs=unknown_logprobs(1))), allow_nan=False)
    '{"token_ids": [5], "logprobs": null, "finish": "stop", "versions": [[3, 0, 1]]}'
    """
    spans = [(span.version, span.start, span.end) for span in completion.versions]
    logprobs = None if any(map(math.isnan, completion.logprobs)) else completion.logprobs
    return {
        "token_ids": completion.token_ids,
        "logprobs": logprobs,
        "finish": completion.finish.value,
        "versions": spans,
        **({} if completion.sampling_mask is None else {"sampling_mask": completion.sampling_mask.lists()}),
        **({} if completion.routed_experts is None else {"routed_experts": encode_routing(completion.routed_experts)}),
    }


def completion_of(reply: Mapping[str, Any]) -> Completion:
    """The inverse of `encode_completion`."""
    spans = tuple(VersionSpan(*span) for span in reply["versions"])
    token_ids, found = tuple(reply["token_ids"]), reply["logprobs"]
    logprobs = unknown_logprobs(len(token_ids)) if found is None else tuple(found)
    masks = SamplingMasks.of(reply["sampling_mask"]) if "sampling_mask" in reply else None
    routing = decode_routing(reply["routed_experts"]) if "routed_experts" in reply else None
    return Completion(token_ids, logprobs, Finish(reply["finish"]), spans, masks, routing)


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the caller has disconnected")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            raise ValueError(f"the request body exceeds {LARGEST_BODY} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _unless_disconnected(work: asyncio.Future[tuple[int, Any]], receive: Receive) -> tuple[int, Any] | None:
    """Return the result of `work`; cancel it if the caller disconnects, as the turn would not be used."""
    disconnected = asyncio.ensure_future(receive())
    both: list[asyncio.Future[Any]] = [work, disconnected]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for left in both:
            left.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
