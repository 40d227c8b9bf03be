"""HTTP server of the built-in engine: the app with all routes, startup and shutdown."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field

import roost
from roost.engines.guarded.roost_key_guard import KeyGuard
from roost.engines.protocol import EngineError, InFlight, Part
from roost.engines.weights.carriers import WeightGroup
from roost.engines.weights.payload import TensorInfo, announced
from roost.engines.weights.probe import Fingerprints
from roost.net.errors import Refused, SizeLimited, answer_errors, error_response, refusing
from roost.torch_engine.engine import TorchEngine
from roost.torch_engine.generate_api import generate_router
from roost.torch_engine.openai_api import adapters_router, chat_router, completions_router, models_router
from roost.torch_engine.requests import EngineApp, InFlightRequests, ModelNames, engine_lost
from roost.torch_engine.text import TextCodec
from roost.torch_engine.update import OpenUpdate, checkpoint_files, join, named_tensors

Mode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache", "scheduling"]
MODES: dict[Mode, InFlight] = {"abort": InFlight.DROP, "wait": InFlight.DRAIN, "keep": InFlight.HOLD}

HUNG_STEP_S = 300  # steps take milliseconds, or minutes with a large model on a CPU


class AbortBody(BaseModel):
    request_ids: list[str] | None = None


class VersionBody(BaseModel):
    new_version: str


def health_router(served: EngineApp, takes_adapters: bool) -> APIRouter:
    """Routes that also work after the engine has died."""
    router = APIRouter()
    # Capabilities that the routes do not show, beside the version that vLLM's clients expect.
    abilities = {"sleeps": True, "adapters": takes_adapters, "spans": True, "shared_memory": True, "undo": True}

    @router.get("/health")
    async def health() -> Response:
        if served.engine.failure is not None:
            return error_response(str(engine_lost(served.engine)), 503)
        step_seconds = served.engine.step_seconds
        if step_seconds is not None and step_seconds > HUNG_STEP_S:
            return error_response(f"a step has run for {step_seconds:.0f} s", 503)
        return Response()

    @router.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": roost.__version__, "roost": abilities}

    return router


def control_router(served: EngineApp) -> APIRouter:
    router = APIRouter()
    engine = served.engine

    @router.post("/pause")
    def pause(mode: Mode = "abort", clear_cache: bool = True) -> dict[str, str]:
        with refusing():
            engine.pause(MODES[mode])
        if clear_cache and mode != "keep":  # held requests still need their cache
            engine.reset_prefix_cache()
        return {"status": "paused"}

    @router.post("/resume")
    def resume() -> dict[str, str]:
        with refusing():
            engine.resume()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": engine.is_paused}

    @router.post("/sleep")
    def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort") -> dict[str, Any]:
        with refusing():
            engine.pause(MODES[mode])
            engine.sleep(level)
        return {"status": "sleeping", "level": level}

    @router.post("/wake_up")
    def wake_up(tags: Annotated[list[Tag] | None, Query()] = None) -> dict[str, Any]:
        with refusing():
            engine.wake(None if tags is None else {Part(tag) for tag in tags if tag != "scheduling"})
        return {"status": "sleeping" if engine.sleeping else "awake", "tags": tags}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": bool(engine.sleeping) or engine.is_paused}  # as vLLM has it

    @router.post("/reset_prefix_cache")
    def reset_prefix_cache() -> dict[str, bool]:
        return {"success": engine.reset_prefix_cache()}

    @router.get("/load")
    async def load() -> dict[str, int]:
        now = engine.load
        return {
            "running": now.running,
            "waiting": now.waiting,
            "free_blocks": now.free_blocks,
            "num_blocks": now.num_blocks,
        }

    @router.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": 1}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        return {"weight_version": str(engine.version), "has_weights": engine.has_weights}

    @router.post("/update_weight_version")
    def update_weight_version(body: VersionBody) -> dict[str, Any]:
        engine.set_version(parse_version("new_version", body.new_version))
        return {"success": True, "new_version": body.new_version}

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody) -> dict[str, Any]:
        aborted = await served.in_flight.abort(body.request_ids or None)
        return {"status": "aborted", "aborted": aborted}

    @router.post("/inference/v1/abort_requests")
    async def abort_named_requests(body: AbortBody) -> Response:
        if body.request_ids is None:
            raise Refused("request_ids is missing; to abort all requests, use /abort_requests", field="request_ids")
        await served.in_flight.abort(body.request_ids)
        return Response()

    return router


def parse_version(field: str, text: str) -> int:
    """Parse a policy version, which is a string in requests.

    >>> parse_version("new_version", "12")
    12
    """
    if not text.isdecimal():
        raise Refused(f"{field} is {text!r}; versions are whole numbers in strings", field=field)
    return int(text)


T = TypeVar("T")


class StartBody(BaseModel):
    """`manifest` is not in vLLM; without it, tensors are checked as they arrive."""

    is_checkpoint_format: bool = True
    manifest: dict[str, Any] | None = None


class InitBody(BaseModel):
    init_info: dict[str, Any] = Field(default_factory=dict)


class UpdateBody(BaseModel):
    update_info: dict[str, Any]


class FinishBody(BaseModel):
    weight_version: str | None = None


class RpcBody(BaseModel):
    method: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CheckBody(BaseModel):
    action: str = "checksum"


class WeightUpdater:
    """Applies weight updates from the routes to the engine, and holds the group for broadcasts."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._group: WeightGroup | None = None

    def join(self, init_info: dict[str, Any]) -> None:
        if "master_address" not in init_info:
            return  # shared memory and handles need no group
        self.leave()
        self._group = join(init_info, self._engine.model.device)

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def start(self, manifest: dict[str, Any] | None) -> None:
        if self._engine.takes_steps:
            raise ValueError("the engine is running; pause it before a weight update")
        self._start(manifest)

    def _start(self, manifest: dict[str, Any] | None) -> None:
        self._engine.abandon_update()  # one that its sender did not finish
        if Part.WEIGHTS in self._engine.sleeping:
            raise ValueError("the weights are asleep; wake them first (tags=weights)")
        tensors = (
            [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in manifest["tensors"]] if manifest else None
        )
        host_buffer = self._engine.host_buffer if self._engine.has_weights else None
        self._engine.open_update = OpenUpdate(self._engine.named_weights(), tensors, host_buffer)

    def take(self, info: dict[str, Any]) -> None:
        update = self._open()
        self._undo_on_failure(lambda: update.take(named_tensors(info, self._group, self._engine.model.device)))

    def finish(self, version: str | None) -> None:
        update = self._open()

        def checked() -> int:
            update.check_complete()
            return self._engine.version + 1 if version is None else parse_version("weight_version", version)

        self._engine.weights_replaced(self._undo_on_failure(checked))

    def abandon(self) -> bool:
        return self._engine.abandon_update()

    def reload(self, folder: str) -> None:
        """Replace all weights by those of a checkpoint. The version stays: vLLM's clients set it afterwards."""
        files = checkpoint_files(folder)
        # All of this happens between two steps, so the engine need not be paused.
        self._start({"tensors": [(info.name, info.dtype, info.shape) for infos in files.values() for info in infos]})
        for path, infos in files.items():
            self.take({**announced(infos), "path": path})
        self.finish(str(self._engine.version))

    def checksums(self) -> dict[str, str]:
        found = Fingerprints()
        for name, weight in self._engine.named_weights().items():
            found.add(name, weight)
        return found.read()

    def _open(self) -> OpenUpdate:
        update = self._engine.open_update
        if update is None:
            raise ValueError("no update is open; start one first")
        return update

    def _undo_on_failure(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except Exception as error:
            before = self._engine.version
            state = f"back on version {before}" if self.abandon() else "without usable weights until an update succeeds"
            raise ValueError(f"{error}; the update was abandoned, and the engine is {state}") from error


def update_router(engine: TorchEngine) -> APIRouter:
    """Routes for weight updates."""
    router = APIRouter()
    updater = WeightUpdater(engine)

    async def between_steps(action: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(engine.between_steps, action)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise HTTPException(400, str(error)) from error

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitBody) -> dict[str, str]:
        # Joining waits for the sender, so it must not hold up the engine's steps.
        await asyncio.to_thread(updater.join, body.init_info)
        return {"message": "Weight transfer initialized"}

    @router.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> dict[str, str]:
        await between_steps(updater.leave)
        return {"message": "Weight transfer shut down"}

    @router.post("/start_weight_update")
    async def start_weight_update(body: StartBody | None = None) -> dict[str, str]:
        await between_steps(lambda: updater.start(body.manifest if body else None))
        return {"message": "Weight update started"}

    @router.post("/update_weights")
    async def update_weights(body: UpdateBody) -> dict[str, str]:
        await between_steps(lambda: updater.take(body.update_info))
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish_weight_update(body: FinishBody | None = None) -> dict[str, str]:
        await between_steps(lambda: updater.finish(body.weight_version if body else None))
        return {"message": "Weight update finished"}

    @router.post("/abandon_weight_update")
    async def abandon_weight_update() -> dict[str, bool]:
        return {"is_whole": await between_steps(updater.abandon)}

    @router.post("/collective_rpc")
    async def collective_rpc(body: RpcBody) -> dict[str, list[None]]:
        if body.method != "reload_weights" or set(body.kwargs) != {"weights_path"}:
            raise HTTPException(400, f"{body.method} with {sorted(body.kwargs)} is not offered; use reload_weights")
        await between_steps(lambda: updater.reload(body.kwargs["weights_path"]))
        return {"results": [None]}

    @router.post("/weight_checker")
    async def weight_checker(body: CheckBody) -> dict[str, dict[str, str]]:
        if body.action != "checksum":
            raise HTTPException(400, f"{body.action} is not offered; use checksum")
        return {"checksums": await between_steps(updater.checksums)}

    return router


GRACE_S = 1  # for responses in progress


def served_engine(engine: TorchEngine, name: str | None = None) -> EngineApp:
    """The engine with all that its routes need."""
    folder = engine.settings.model
    return EngineApp(
        engine=engine,
        codec=TextCodec.from_folder(folder),
        names=ModelNames(name or folder),
        in_flight=InFlightRequests(engine),
        folder=folder,
        created=int(time.time()),
    )


def create_app(served: EngineApp, takes_adapters: bool = False, api_key: str | None = None) -> FastAPI:
    """Create the app; clients read its routes to learn its capabilities."""
    app = FastAPI(title="Roost's built-in engine", version=roost.__version__)
    answer_errors(app, EngineError)
    app.add_middleware(SizeLimited)
    if api_key is not None:
        app.add_middleware(KeyGuard, key=api_key)

    async def engine_lives() -> None:
        if served.engine.failure is not None:
            raise engine_lost(served.engine)

    app.include_router(health_router(served, takes_adapters))
    routers = [control_router(served), generate_router(served), models_router(served), completions_router(served)]
    routers += [chat_router(served), update_router(served.engine)]
    if takes_adapters:
        routers.append(adapters_router(served))
    for router in routers:
        app.include_router(router, dependencies=[Depends(engine_lives)])
    return app


class EngineServer(uvicorn.Server):
    """Prints a line when it is ready; on shutdown it aborts running requests."""

    def __init__(self, app: FastAPI, served: EngineApp, ready_line: str, hard_end_s: float | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=60,  # clients keep connections for their next rollout
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._served = served
        self._ready_line = ready_line
        self._hard_end_s = hard_end_s  # seconds from the stop signal until the process is forced to exit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready_line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._hard_end_s is not None:
            end_process_after(self._hard_end_s)
        self._served.in_flight.closing = True
        if self._served.engine.failure is None:
            aborting = asyncio.create_task(self._served.in_flight.abort())
            await asyncio.wait((aborting,), timeout=GRACE_S)  # a long step must not delay shutdown
        await super().shutdown(sockets)


def end_process_after(seconds: float) -> None:
    """Force the process to exit if it has not done so by itself."""
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
