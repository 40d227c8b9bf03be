"""HTTP server of the built-in engine: the app with all routes, startup and shutdown."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import uvicorn
from fastapi import Depends, FastAPI

import roost
from roost.engines.guarded.roost_key_guard import KeyGuard
from roost.engines.protocol import EngineError
from roost.net.errors import SizeLimited, answer_errors
from roost.torch_engine.control_api import control_router, health_router, update_router
from roost.torch_engine.engine import TorchEngine
from roost.torch_engine.generate_api import generate_router
from roost.torch_engine.in_flight import InFlightRequests, ModelNames, Served, engine_lost
from roost.torch_engine.openai_api import adapters_router, chat_router, completions_router, models_router
from roost.torch_engine.text import TextCodec

GRACE_S = 1  # for responses in progress


def served_engine(engine: TorchEngine, name: str | None = None) -> Served:
    """An engine with everything its routes need."""
    folder = engine.settings.model
    return Served(
        engine=engine,
        codec=TextCodec.from_folder(folder),
        names=ModelNames(name or folder),
        in_flight=InFlightRequests(engine),
        folder=folder,
        created=int(time.time()),
    )


def create_app(served: Served, takes_adapters: bool = False, api_key: str | None = None) -> FastAPI:
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

    def __init__(self, app: FastAPI, served: Served, ready_line: str, hard_end_s: float | None = None) -> None:
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
        self._hard_end_s = hard_end_s  # seconds after the stop signal until the process is forced to exit

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
