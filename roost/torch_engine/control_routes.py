"""The routes that steer the engine: is it well, pause, sleep, abort, forget, which version.

Routes that wait for the engine are plain functions, which the web framework runs in threads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel

import roost
from roost.engines.protocol import InFlight, Part
from roost.net.errors import Refused, error_response, refusing
from roost.torch_engine.in_flight import engine_lost
from roost.torch_engine.served import Served

Mode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache", "scheduling"]
MODES: dict[Mode, InFlight] = {"abort": InFlight.DROP, "wait": InFlight.DRAIN, "keep": InFlight.HOLD}

# A step takes milliseconds, or minutes where a CPU runs a large model; what takes longer does not come back.
HUNG_STEP_S = 300


class AbortBody(BaseModel):
    request_ids: list[str] | None = None


class VersionBody(BaseModel):
    new_version: str


def health_router(served: Served, takes_adapters: bool) -> APIRouter:
    """What can be asked of a server whose engine has died."""
    router = APIRouter()
    # What no list of routes tells; clients of vLLM find a plain version.
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


def control_router(served: Served) -> APIRouter:
    router = APIRouter()
    engine = served.engine

    @router.post("/pause")
    def pause(mode: Mode = "abort", clear_cache: bool = True) -> dict[str, str]:
        with refusing():
            engine.pause(MODES[mode])
        if clear_cache and mode != "keep":  # what is kept still needs its cache
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
        engine.set_version(version_number(body.new_version))
        return {"success": True, "new_version": body.new_version}

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody) -> dict[str, Any]:
        aborted = await served.in_flight.abort(body.request_ids or None)
        return {"status": "aborted", "aborted": aborted}

    @router.post("/inference/v1/abort_requests")
    async def abort_named_requests(body: AbortBody) -> Response:
        if body.request_ids is None:
            raise Refused("request_ids is missing; to end all requests, use /abort_requests", field="request_ids")
        await served.in_flight.abort(body.request_ids)
        return Response()

    return router


def version_number(written: str) -> int:
    """A policy version as it is written on the wire.

    >>> version_number("12")
    12
    """
    if not written.isdecimal():
        raise Refused(f"new_version is {written!r}; versions are whole numbers in strings", field="new_version")
    return int(written)
