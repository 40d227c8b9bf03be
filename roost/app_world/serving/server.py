"""Routes of the server: AppWorld's, with an additional `episode` field."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from roost.app_world.serving.command_line import ServingLimits
from roost.app_world.serving.replies import Refused, report_reply, task_reply
from roost.app_world.serving.worlds import ServedWorld, Worlds, known_task
from roost.net.errors import SizeLimited, error_summary
from roost.net.server import BACKLOG, GRACE_S, KEEP_ALIVE_S, LoopServer, bound_socket, url_of

NAME = "roost app world"
BYTES_OF_A_CHARACTER = 12  # upper bound in JSON
ROOM_FOR_FIELDS = 1 << 20
LONGEST_SWEEP_S = 30.0

Output = dict[str, Any]


class TaskRequest(BaseModel):
    """Fields of requests; AppWorld's other fields are accepted and ignored."""

    task_id: str
    episode: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    @property
    def key(self) -> str:
        return self.episode or self.task_id


class ExecuteRequest(TaskRequest):
    code: str


class StateRequest(TaskRequest):
    state_id: Annotated[str, Field(max_length=200)]


def app_world_app(worlds: Worlds) -> FastAPI:
    """Create the FastAPI app; its shutdown closes all worlds."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(worlds))
        try:
            yield
        finally:
            sweeping.cancel()
            await worlds.close_all()

    app = FastAPI(title="Roost's app world", lifespan=lifespan)
    limit = worlds.limits.code_chars * BYTES_OF_A_CHARACTER + ROOM_FOR_FIELDS
    app.add_middleware(SizeLimited, most_bytes=limit)
    _add_error_handlers(app)
    _add_lifecycle_routes(app, worlds)
    _add_episode_routes(app, worlds)
    return app


def _add_lifecycle_routes(app: FastAPI, worlds: Worlds) -> None:
    @app.get("/")
    async def about() -> Output:
        return {"name": NAME, "episodes": True, "worlds": worlds.limits.worlds}

    @app.get("/tasks/{task_id}")
    async def show_task(task_id: str) -> Output:
        return {"output": task_reply(known_task(task_id))}

    @app.post("/initialize")
    async def initialize(request: TaskRequest) -> Output:
        world = await worlds.begin(request.key, request.task_id)
        return {"output": task_reply(world.task)}

    @app.post("/close")
    async def close(request: TaskRequest) -> Output:
        await worlds.close(request.key)
        return {"output": None}

    @app.post("/close_all")
    async def close_all() -> Output:
        await worlds.close_all()
        return {"output": None}


def _add_episode_routes(app: FastAPI, worlds: Worlds) -> None:
    def world_of(request: TaskRequest) -> ServedWorld:
        return worlds.find(request.key, request.task_id)

    @app.post("/execute")
    async def execute(request: ExecuteRequest) -> Output:
        return {"output": await world_of(request).execute(request.code)}

    @app.post("/task_completed")
    async def task_completed(request: TaskRequest) -> Output:
        return {"output": world_of(request).is_completed}

    @app.post("/evaluate")
    async def evaluate(request: TaskRequest) -> Output:
        world = world_of(request)
        return {"output": report_reply(world.task, world.evaluate())}

    @app.post("/save_state")
    async def save_state(request: StateRequest) -> Output:
        world_of(request).save_state(request.state_id)
        return {"output": request.state_id}

    @app.post("/load_state")
    async def load_state(request: StateRequest) -> Output:
        await world_of(request).load_state(request.state_id)
        return {"output": None}

    @app.post("/save_logs")
    async def save_logs(request: TaskRequest) -> Output:
        world_of(request)  # nothing is saved: clients record their own episodes
        return {"output": None}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without the input, which may not be valid text.
        return JSONResponse({"detail": error_summary(error.errors())}, 422)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)


async def _sweep(worlds: Worlds) -> None:
    while True:
        await asyncio.sleep(min(worlds.limits.idle_s / 4, LONGEST_SWEEP_S))
        await worlds.close_idle()


def ready_line(url: str, limits: ServingLimits) -> str:
    """Line printed when the server is ready.

    >>> ready_line("http://127.0.0.1:8000", ServingLimits(worlds=8))
    'app world ready for 8 worlds at http://127.0.0.1:8000'
    """
    return f"app world ready for {limits.worlds} worlds at {url}"


@contextlib.asynccontextmanager
async def serving(limits: ServingLimits | None = None, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve in the running event loop and yield the URL."""
    server = LoopServer(app_world_app(Worlds(limits or ServingLimits())), host, port, in_order=True)
    try:
        yield server.url
    finally:
        await server.stop()


def run(limits: ServingLimits, host: str, port: int) -> None:
    """Serve until the process is signalled; the first line printed has the URL."""
    bound = bound_socket(host, port)
    _Server(app_world_app(Worlds(limits)), ready_line(url_of(bound), limits)).run([bound])


class _Server(uvicorn.Server):
    def __init__(self, app: FastAPI, ready: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, flush=True)
