"""A stand-in for SGLang that insists on its rules: the order of calls, their bodies, and what dies of what.

Its model is a sum of weights, so that every token tells which weights made it. Weights come as in the real server
(from a folder, by handles of device memory, by broadcast), except that a handle holds its value itself, and what is
broadcast is put into `broadcast` by the test.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Body, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from tests.engines.server_thread import serving
from tests.engines.sglang_standin_bodies import (
    Abort,
    Adapter,
    Begin,
    FromDisk,
    FromDistributed,
    FromTensor,
    Generate,
    Group,
    Pause,
    Tags,
    Update,
    Version,
)

VOCABULARY = 997
MAX_CONTEXT = 100_000
TAGS = ("kv_cache", "weights", "cuda_graph")
TICK = 0.001  # seconds a token takes


def next_token(weight: int, tokens: list[int]) -> int:
    return (7 * tokens[-1] + 13 * weight + len(tokens)) % VOCABULARY


def logprob_of(weight: int, token: int) -> float:
    return -(token + 1) / (VOCABULARY + weight)


@dataclass(eq=False)
class Running:
    rid: str
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)  # a version, and how many tokens it had made by its end
    is_aborted: bool = False


class SglangStandIn:
    """The server's state; tests read it and put failures into it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": False,
            "version": "0.5.23",
            **settings,
        }
        self.reports_versions = True
        self.weights: dict[str, int] = {"embed": 1, "head": 2}
        self.version = "default"
        self.running: list[Running] = []
        self.waiting = 0
        self.paused: str | None = None
        self.released: set[str] = set()
        self.session: str | None = None
        self.group: str | None = None
        self.adapters: dict[str, str] = {}
        self.cache_of: int | None = None  # the weights that the prefix cache was made with
        self.broadcast: deque[int] = deque()
        self.fail_next: dict[str, str] = {}  # a route, and the message it fails with
        self.death: str | None = None
        self.calls: list[str] = []
        self.tokens_made = 0

    # What the scheduler does

    @property
    def weight(self) -> int:
        return sum(self.weights.values())

    def die(self, why: str) -> None:
        self.death = why
        raise HTTPException(500, why)

    def let_go(self) -> None:
        """End all that runs or waits."""
        self.paused = None
        for request in self.running:
            request.is_aborted = True

    def may_step(self) -> bool:
        return self.paused is None and not self.released

    def flushed(self) -> bool:
        """Empty the cache; refused while requests use it. Requests that were retracted use none."""
        if self.running and self.paused != "retract":
            return False
        self.cache_of = None
        return True

    def version_is(self, version: str) -> None:
        for request in self.running:
            request.marks.append((self.version, len(request.generated)))
        self.version = version

    def spans(self, request: Running) -> list[dict[str, Any]]:
        spans, start = [], 0
        for version, end in [*request.marks, (self.version, len(request.generated))]:
            if end > start:
                spans.append({"version": version, "start": start, "end": end})
                start = end
        return spans

    async def work(self, request: Running, sampling: dict[str, Any]) -> str:
        """Make tokens until the end; why it ended."""
        stops = set(sampling.get("stop_token_ids", ()))
        while len(request.generated) < sampling["max_new_tokens"]:
            await asyncio.sleep(TICK)
            if request.is_aborted:
                return "abort"
            if not self.may_step():
                continue
            self.cache_of = self.weight
            token = next_token(self.weight, request.prompt + request.generated)
            request.generated.append(token)
            self.tokens_made += 1
            request.logprobs.append(logprob_of(self.weight, token))
            if token in stops:
                return "stop"
        return "length"

    def take(self, named: dict[str, int], body: Update) -> JSONResponse:
        if self.session is None:
            return _failed("must run between begin_weight_update() and end_weight_update()")
        if body.selector not in (self.session, "all"):
            return _failed(f"the session is of {self.session}, not {body.selector}")
        if "weights" in self.released:
            self.die("weights were written to memory that is not there")
        self.weights.update(named)
        if body.weight_version is not None:
            self.version_is(body.weight_version)
        if body.flush_cache and not self.flushed():
            return _failed("Weights were updated, but the cache was not flushed")
        return _done()


def _done(**more: Any) -> JSONResponse:
    return JSONResponse({"success": True, "message": "Success", **more})


def _failed(message: str) -> JSONResponse:
    return JSONResponse({"success": False, "message": message}, 400)


class _HandleReader(pickle.Unpickler):
    """Opens a message as the real server does, except that a tensor on a device becomes the value in its handle."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return lambda *arguments: arguments
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a tensor")


def read_payload(payload: str) -> dict[str, tuple[Any, ...]]:
    return dict(_HandleReader(io.BytesIO(base64.b64decode(payload, validate=True))).load())


def watched(server: SglangStandIn, app: FastAPI) -> Any:
    """The app, with its calls noted and the failures that tests ask for."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        answer: Any = app
        if scope["type"] == "http":
            server.calls.append(scope["path"])
            if server.death is not None:
                answer = PlainTextResponse(f"the scheduler died: {server.death}", 500)
            elif scope["path"] in server.fail_next:
                answer = _failed(server.fail_next.pop(scope["path"]))
        await answer(scope, receive, send)

    return call


def app_of(server: SglangStandIn) -> FastAPI:
    app = FastAPI()

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return server.settings

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "toy", "max_model_len": MAX_CONTEXT}]}

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {"model_path": "toy", "weight_version": server.version}

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        return {"loads": [{"num_running_reqs": len(server.running), "num_waiting_reqs": server.waiting}]}

    @app.post("/generate")
    async def generate(body: Generate, raw: Request) -> Any:
        if not body.input_ids or max(body.input_ids) >= VOCABULARY:
            return JSONResponse({"error": {"message": f"a token id is not below {VOCABULARY}"}}, 400)
        if len(body.input_ids) + body.sampling_params["max_new_tokens"] > MAX_CONTEXT:
            return JSONResponse({"error": {"message": f"that is more than {MAX_CONTEXT}, the context"}}, 400)
        if body.lora_path is not None and body.lora_path not in server.adapters:
            return JSONResponse({"error": {"message": f"adapter {body.lora_path} is not loaded"}}, 400)
        server.waiting += 1
        try:
            while server.paused is not None:
                await asyncio.sleep(TICK)
        finally:
            server.waiting -= 1
        request = Running(body.rid or f"unnamed-{len(server.calls)}", list(body.input_ids))
        server.running.append(request)
        worker = asyncio.create_task(server.work(request, body.sampling_params))
        try:
            while not worker.done():
                await asyncio.wait({worker}, timeout=0.02)
                if await raw.is_disconnected():
                    request.is_aborted = True
            return _answer(server, request, body, worker.result())
        finally:
            server.running.remove(request)

    @app.post("/abort_request")
    async def abort_request(body: Abort) -> Response:
        for request in server.running:
            request.is_aborted |= body.abort_all or request.rid == body.rid
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(body: Pause) -> dict[str, str]:
        server.paused = body.mode
        while body.mode == "abort" and server.running:
            for request in server.running:
                request.is_aborted = True
            await asyncio.sleep(TICK)
        return {"status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation(torch_empty_cache: bool = Body(True, embed=True)) -> dict[str, str]:
        server.paused = None
        return {"status": "ok"}

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        if server.flushed():
            return PlainTextResponse("Cache flushed.")
        return PlainTextResponse("Flush cache failed.", 400)

    @app.post("/release_memory_occupation")
    async def release(body: Tags) -> None:
        if not server.settings["enable_memory_saver"]:
            server.die("there is no memory saver")
        if server.running:
            server.die("release_memory_occupation should be called only when server is idle")
        server.released |= set(body.tags or TAGS)
        if "weights" in server.released and not server.settings["enable_weights_cpu_backup"]:
            server.weights = dict.fromkeys(server.weights, 10**6)  # whatever is in that memory later
        if "kv_cache" in server.released:
            server.cache_of = None

    @app.post("/resume_memory_occupation")
    async def resume(body: Tags) -> None:
        tags = set(body.tags or TAGS)
        if not tags <= server.released:
            server.die(f"{sorted(tags - server.released)} was not released")
        server.released -= tags

    @app.post("/init_weights_update_group")
    async def init_group(body: Group) -> Response:
        if server.group is not None:
            return _failed("a group is open")
        server.group = body.group_name
        return _done()

    @app.post("/destroy_weights_update_group")
    async def destroy_group(group_name: str = Body(embed=True)) -> Response:
        if server.group != group_name:
            return _failed(f"there is no group {group_name}")
        server.group = None
        return _done()

    @app.post("/begin_weight_update")
    async def begin(body: Begin) -> Response:
        if server.session is not None:
            return _failed("a weight-update session is already open")
        server.session = body.selector
        return _done()

    @app.post("/end_weight_update")
    async def end(body: dict[str, Any] = Body()) -> Response:
        if server.session is None:
            return _failed("no weight-update session is open")
        server.session = None
        return _done()

    @app.post("/update_weights_from_tensor")
    async def from_tensor(body: FromTensor) -> Response:
        named = read_payload(body.serialized_named_tensors[0])
        return server.take({name: int(arguments[0]) for name, arguments in named.items()}, body)

    @app.post("/update_weights_from_distributed")
    async def from_distributed(body: FromDistributed) -> Response:
        if server.group != body.group_name:
            return _failed(f"this engine is in no group {body.group_name}")
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            return _failed("names, dtypes and shapes differ in number")
        while len(server.broadcast) < len(body.names):
            await asyncio.sleep(TICK)
        return server.take({name: server.broadcast.popleft() for name in body.names}, body)

    @app.post("/update_weights_from_disk")
    async def from_disk(body: FromDisk) -> Response:
        file = Path(body.model_path) / "weights.json"
        if not file.exists():
            return _failed(f"{body.model_path} holds no weights")
        server.weights = json.loads(file.read_text())
        if body.weight_version is not None:
            server.version_is(body.weight_version)
        if body.flush_cache and not server.flushed():
            return _failed("Weights were updated, but the cache was not flushed")
        return _done(num_paused_requests=0)

    @app.post("/update_weight_version")
    async def update_weight_version(body: Version) -> Response:
        if body.abort_all_requests:
            for request in server.running:
                request.is_aborted = True
        server.version_is(body.new_version)
        return _done(new_version=body.new_version)

    @app.post("/weights_checker")
    async def weights_checker(action: str = Body("checksum", embed=True)) -> Response:
        digests = {name: hashlib.sha256(str(value).encode()).hexdigest() for name, value in server.weights.items()}
        return _done(ranks=[{"checksums": digests}])

    @app.post("/load_lora_adapter")
    async def load_adapter(body: Adapter) -> Response:
        if body.lora_name in server.adapters:
            return JSONResponse({"success": False, "error_message": f"{body.lora_name} is already loaded"}, 400)
        server.adapters[body.lora_name] = body.lora_path
        return _done()

    @app.post("/unload_lora_adapter")
    async def unload_adapter(body: Adapter) -> Response:
        if server.adapters.pop(body.lora_name, None) is None:
            return JSONResponse({"success": False, "error_message": f"{body.lora_name} is not loaded"}, 400)
        return _done()

    return app


def _answer(server: SglangStandIn, request: Running, body: Generate, reason: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": {"type": reason},
        "weight_version": server.version,
    }
    if server.reports_versions:
        described["weight_versions"] = server.spans(request)
    if body.return_logprob:
        pairs = zip(request.logprobs, request.generated, strict=True)
        described["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if body.logprob_start_len == 0:
        scores = [None, *(logprob_of(server.weight, token) for token in request.prompt[1:])]
        described["input_token_logprobs"] = [[score, t, None] for score, t in zip(scores, request.prompt, strict=True)]
    return {"text": "", "output_ids": request.generated, "meta_info": described}


@contextlib.contextmanager
def running_standin(**settings: Any) -> Iterator[tuple[str, SglangStandIn]]:
    """A stand-in: its address, and its state."""
    state = SglangStandIn(**settings)
    with serving(watched(state, app_of(state)), at_end=state.let_go) as url:
        yield url, state
