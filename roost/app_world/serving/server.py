"""Server of app worlds: one world and sandbox per episode, and AppWorld's routes with an additional field `episode`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from roost.app_world.evaluate import Check, Report, evaluate
from roost.app_world.serving.command_line import ServingLimits
from roost.app_world.state import Json, Snapshot
from roost.app_world.tasks.task import AppTask
from roost.app_world.tasks.task_set import make_task
from roost.app_world.world import World
from roost.net.errors import SizeLimited, error_summary
from roost.net.server import BACKLOG, GRACE_S, KEEP_ALIVE_S, LoopServer, bound_socket, url_of
from roost.sandbox.execution import Execution
from roost.sandbox.sandbox import Sandbox


class Refused(Exception):
    """A request that cannot be served; the message says what to change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


NOTHING_PRINTED = "[Nothing was printed.]"
STATE_IS_KEPT = "[What was done in the apps is kept.]"
GUARD, EARNED = "no_op_pass", "no_op_fail"  # AppWorld's labels: the test's result if the agent does nothing


def task_reply(task: AppTask) -> dict[str, Any]:
    """The part of a task that its agent may see.

    >>> from roost.app_world.tasks.task_set import make_task
    >>> reply = task_reply(make_task("391925b_1"))
    >>> reply["supervisor"]["first_name"], sorted(reply)
    ('Quinn', ['datetime', 'instruction', 'supervisor', 'task_id'])
    """
    profile = task.initial["profile"]
    first, _, last = profile["name"].partition(" ")
    return {
        "task_id": task.id,
        "instruction": task.instruction,
        "supervisor": {
            "first_name": first,
            "last_name": last,
            "email": profile["email"],
            "phone_number": profile["phone"],
        },
        "datetime": f"{task.initial['today']}T00:00:00",
    }


def report_reply(task: AppTask, report: Report) -> dict[str, Any]:
    """The report of a task, for scoring."""
    return {
        "success": report.success,
        "difficulty": task.difficulty,
        "num_tests": len(report.checks),
        "passes": [_check_reply(check) for check in report.passes],
        "failures": [{**_check_reply(check), "trace": check.failure} for check in report.failures],
    }


def execution_text(execution: Execution) -> str:
    """Output of a piece of code as the agent sees it.

    >>> execution_text(Execution("", None, 0.1))
    '[Nothing was printed.]'
    """
    shown = execution.output or NOTHING_PRINTED
    is_fatal = execution.error is not None and execution.error.is_fatal
    return f"{shown}\n{STATE_IS_KEPT}" if is_fatal else shown


def _check_reply(check: Check) -> dict[str, str]:
    return {"requirement": check.name, "label": GUARD if check.is_guard else EARNED}


class ServedWorld:
    """The world of one episode."""

    def __init__(self, task: AppTask, limits: ServingLimits, clock: Callable[[], float]) -> None:
        self.task = task
        self._limits, self._clock = limits, clock
        self._world = task.open_world()
        self._states: dict[str, Snapshot] = {}
        self._turn = asyncio.Lock()
        self._sandbox: Sandbox
        self._used_at = clock()

    @classmethod
    async def start(cls, task: AppTask, limits: ServingLimits, clock: Callable[[], float]) -> ServedWorld:
        """Open a world in the task's initial state, with a sandbox that waits for code."""
        world = cls(task, limits, clock)
        world._sandbox = await Sandbox.start(limits.sandbox, world._call, allows_weak=limits.allows_weak)
        return world

    @property
    def is_completed(self) -> bool:
        return self._world.is_completed

    @property
    def sandbox_pid(self) -> int | None:
        """PID of the process that runs the code; None if there is none until the next execution."""
        return self._sandbox.pid

    def touch(self) -> None:
        """Record the time of a request."""
        self._used_at = self._clock()

    def is_idle(self) -> bool:
        """Return True if there was no request for `idle_s` and nothing is running."""
        return not self._turn.locked() and self._clock() - self._used_at > self._limits.idle_s

    async def execute(self, code: str) -> str:
        """Run code and return its output as the agent sees it. Executions are sequential."""
        if len(code) > self._limits.code_chars:  # the agent's mistake, so no error status
            return f"[The code has {len(code)} characters; {self._limits.code_chars} are allowed. Nothing was run.]"
        async with self._turn:
            try:
                return execution_text(await self._sandbox.execute(code))
            finally:
                self.touch()

    def evaluate(self) -> Report:
        return evaluate(self.task, self._world)

    def save_state(self, name: str) -> None:
        """Save the state of the apps under a name."""
        if name not in self._states and len(self._states) >= self._limits.states:
            raise Refused(
                400, f"{self._limits.states} states are saved already; overwrite one of {sorted(self._states)}"
            )
        self._states[name] = self._world.snapshot()

    async def load_state(self, name: str) -> None:
        """Restore a saved state of the apps; variables of the code are kept."""
        if name not in self._states:
            raise Refused(404, f"no state {name!r} was saved; there are: {', '.join(sorted(self._states)) or 'none'}")
        async with self._turn:
            self._world = World.from_snapshot(self._states[name])

    async def close(self) -> None:
        await self._sandbox.close()

    async def _call(self, app: str, api: str, arguments: dict[str, Any]) -> Json:
        """Answer an API call of the code in the sandbox."""
        return self._world.call(app, api, arguments)


logger = logging.getLogger(__name__)


class Worlds:
    """Opens, finds and closes worlds, up to the limit."""

    def __init__(self, limits: ServingLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._open: dict[str, ServedWorld] = {}
        self._start_tokens: dict[str, object] = {}  # token of each start in progress; removed on close or restart
        self._starting = 0

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, episode: str, task_id: str) -> ServedWorld:
        """Open a new world; close an earlier one of the episode."""
        task = known_task(task_id)
        await self.close(episode)
        if len(self._open) + self._starting >= self.limits.worlds:
            raise Refused(503, f"all {self.limits.worlds} worlds are in use; close some, or allow more with --worlds")
        token = self._start_tokens[episode] = object()
        self._starting += 1
        try:
            world = await ServedWorld.start(task, self.limits, self._clock)
        finally:
            self._starting -= 1
            is_wanted = self._start_tokens.get(episode) is token
            if is_wanted:
                del self._start_tokens[episode]
        if not is_wanted:  # e.g. the client was cancelled meanwhile
            await world.close()
            raise Refused(409, f"episode {episode!r} was closed or restarted while it was starting")
        self._open[episode] = world
        return world

    def find(self, episode: str, task_id: str) -> ServedWorld:
        """Return the world of an episode. Raise Refused if there is none or it has another task."""
        world = self._open.get(episode)
        if world is None:
            why = f"it was closed, not used for {self.limits.idle_s:g} s, or never initialized"
            raise Refused(404, f"episode {episode!r} has no world: {why}; call /initialize first")
        if world.task.id != task_id:
            raise Refused(400, f"episode {episode!r} has task {world.task.id}, not {task_id}")
        world.touch()
        return world

    async def close(self, episode: str) -> None:
        """Close the world of an episode, if there is one."""
        self._start_tokens.pop(episode, None)
        world = self._open.pop(episode, None)
        if world is not None:
            await world.close()

    async def close_all(self) -> None:
        self._start_tokens.clear()
        await self._close_these(list(self._open))

    async def close_idle(self) -> None:
        """Close idle worlds."""
        await self._close_these([episode for episode, world in self._open.items() if world.is_idle()])

    async def _close_these(self, episodes: list[str]) -> None:
        """Close worlds, even if one fails to close."""
        closed = await asyncio.gather(*map(self.close, episodes), return_exceptions=True)
        for episode, outcome in zip(episodes, closed, strict=True):
            if isinstance(outcome, Exception):
                logger.warning("the world of episode %s did not close: %s", episode, outcome)


def known_task(task_id: str) -> AppTask:
    """Return the task with this ID. Raise Refused if there is none."""
    try:
        return make_task(task_id)
    except ValueError as error:
        raise Refused(404, str(error)) from error


NAME = "roost app world"
BYTES_PER_CHARACTER = 12  # upper bound in JSON
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
    limit = worlds.limits.code_chars * BYTES_PER_CHARACTER + ROOM_FOR_FIELDS
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
    server = LoopServer(app_world_app(Worlds(limits or ServingLimits())), host, port, graceful=True)
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
