"""A stand-in for vLLM's control routes as three servers have them; it notes what it is asked and insists on the order.

What real servers answer is tried in live/; this is for the releases and the devices that are not at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.engines.server_thread import serving

SLEEP = {"/sleep", "/wake_up", "/is_sleeping"}
CONTROL = {"/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/collective_rpc"} | SLEEP
TRANSFER = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
VERSIONS = {"/weight_info", "/update_weight_version", "/weight_checker", "/abort_requests", "/server_info"}
PLAIN = {"/health", "/version", "/v1/models", "/v1/completions", "/inference/v1/generate"}
OLD = PLAIN | CONTROL | TRANSFER  # 0.22
NEW = OLD | VERSIONS | {"/shutdown_weight_transfer_engine", "/v1/load_lora_adapter"}  # 0.32
BUILT_IN = (NEW - {"/collective_rpc"}) | {"/abandon_weight_update"}
ABILITIES = {"sleeps": True, "shared_memory": True, "undo": True, "spans": True, "adapters": False}


@dataclass(frozen=True)
class Asked:
    path: str
    query: dict[str, list[str]]
    body: Any


class VllmStandIn:
    """The server's state; tests read it, and put answers into it."""

    def __init__(self, routes: set[str] = NEW, *, opens_token_route: bool = True, sleeps: bool = False) -> None:
        self.routes = routes
        self.opens_token_route = opens_token_route
        self.sleeps = sleeps
        self.asked: list[Asked] = []
        self.hangs: set[str] = set()  # paths that get no answer
        self.answers: dict[str, deque[Any]] = {}  # in place of its own: a body, or (status, body)
        self.is_updating = False
        self.is_ready_to_receive = False
        self.is_paused = False
        self.version = "default"
        self.most_samples = 8
        self.placeholder, self.image_tokens = 9, 3  # of images, and how many tokens each has

    def bodies_of(self, path: str) -> list[Any]:
        return [asked.body for asked in self.asked if asked.path == path]

    def answer(self, asked: Asked) -> Any:
        """The status and the body of an answer."""
        if asked.path == "/openapi.json":
            fields = {"content_parts": {}} if self.routes is NEW else {}
            schemas = {"GenerateRequest": {"properties": {"token_ids": {}, **fields}}}
            return 200, {"paths": {route: {} for route in self.routes}, "components": {"schemas": schemas}}
        if asked.path not in self.routes:
            return 404, {"detail": "Not Found"}
        if self.answers.get(asked.path):
            put = self.answers[asked.path].popleft()
            return put if isinstance(put, tuple) else (200, put)
        own = getattr(self, "on_" + asked.path.strip("/").replace("/", "_"), None)
        return (200, {}) if own is None else own(asked)

    def on_version(self, asked: Asked) -> Any:
        if self.routes is BUILT_IN:
            return 200, {"version": "0.1", "roost": ABILITIES}
        return 200, {"version": "0.22.1" if self.routes is OLD else "0.32.0"}

    def on_v1_models(self, asked: Asked) -> Any:
        adapter = {"id": "policy-adapter", "parent": "tiny"}
        return 200, {"data": [adapter, {"id": "tiny", "parent": None, "max_model_len": 64}]}

    def on_server_info(self, asked: Asked) -> Any:
        return 200, {"vllm_config": {"model_config": {"enable_sleep_mode": self.sleeps}}}

    def on_inference_v1_generate(self, asked: Asked) -> Any:
        if not self.opens_token_route:
            return 403, {"error": {"message": "start with --enable-scale-out"}}
        if "token_ids" not in asked.body:
            return 400, {"error": {"message": "token_ids is missing"}}
        content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]
        choice = {"index": 0, "token_ids": [5, 6], "logprobs": {"content": content}, "finish_reason": "length"}
        spans = [{"version": self.version, "start": 0, "end": 2}] if "/weight_info" in self.routes else None
        if asked.body["sampling_params"].get("n", 1) > self.most_samples:
            return 400, {"error": {"message": f"n must be at most {self.most_samples}"}}
        count = asked.body["sampling_params"].get("n", 1)
        choices = [{**choice, "index": index, "weight_versions": spans} for index in range(count)]
        return 200, {"choices": choices, "prompt_token_ids": self.expanded(asked.body)}

    def expanded(self, body: Any) -> list[int] | None:
        """The prompt as it is computed: of the first placeholders, each is an image."""
        left = len(body.get("content_parts") or ())
        found: list[int] = []
        for token in body["token_ids"]:
            is_image = token == self.placeholder and left > 0
            found += [token] * (self.image_tokens if is_image else 1)
            left -= is_image
        return found if body.get("return_token_ids") else None

    def on_v1_completions(self, asked: Asked) -> Any:
        choice = {
            "index": 0,
            "token_ids": [5, 6],
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
            "finish_reason": "length",
        }
        return 200, {"choices": [choice]}

    def on_pause(self, asked: Asked) -> Any:
        self.is_paused = True
        return 200, {"status": "paused"}

    def on_resume(self, asked: Asked) -> Any:
        self.is_paused = False
        return 200, {"status": "resumed"}

    def on_is_paused(self, asked: Asked) -> Any:
        return 200, {"is_paused": self.is_paused}

    def on_init_weight_transfer_engine(self, asked: Asked) -> Any:
        self.is_ready_to_receive = True
        return 200, {}

    def on_start_weight_update(self, asked: Asked) -> Any:
        if self.is_updating:
            return 500, {"error": {"message": "a weight update is already active"}}
        if self.routes is OLD and "is_checkpoint_format" not in (asked.body or {}):
            return 400, {"detail": [{"loc": ["body", "is_checkpoint_format"], "msg": "Field required"}]}
        if self.routes is not BUILT_IN and not self.is_ready_to_receive:
            return 500, {"error": {"message": "weight transfer was not initialized"}}
        self.is_updating = True
        return 200, {}

    def on_update_weights(self, asked: Asked) -> Any:
        if not self.is_updating:
            return 500, {"error": {"message": "no weight update is active"}}
        return 200, {}

    def on_finish_weight_update(self, asked: Asked) -> Any:
        if not self.is_updating:
            return 500, {"error": {"message": "no weight update is active"}}
        self.is_updating = False
        self.version = asked.body.get("weight_version", self.version)
        return 200, {}

    def on_abandon_weight_update(self, asked: Asked) -> Any:
        self.is_updating = False
        return 200, {"is_whole": True}

    def on_weight_info(self, asked: Asked) -> Any:
        return 200, {"weight_version": self.version}

    def on_update_weight_version(self, asked: Asked) -> Any:
        self.version = asked.body["new_version"]
        return 200, {"success": True}

    def on_weight_checker(self, asked: Asked) -> Any:
        return 200, {"checksums": {"head": "ab12"}}


def app_of(state: VllmStandIn) -> Starlette:
    async def call(request: Request) -> Response:
        query = {key: request.query_params.getlist(key) for key in request.query_params}
        raw = await request.body()
        asked = Asked(request.url.path, query, json.loads(raw) if raw else None)
        state.asked.append(asked)
        while asked.path in state.hangs and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        status, body = state.answer(asked)
        return Response(status_code=status) if body is None else JSONResponse(body, status)

    return Starlette(routes=[Route("/{path:path}", call, methods=["GET", "POST"])])


@contextlib.contextmanager
def running_standin(*args: Any, **settings: Any) -> Iterator[tuple[str, VllmStandIn]]:
    """A stand-in: its address, and its state."""
    state = VllmStandIn(*args, **settings)
    with serving(app_of(state)) as url:
        yield url, state
