"""A server that behaves as AppWorld's: one world in a process, and no field that it does not know."""

import argparse
import contextlib
import io
import traceback

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict

from roost.app_world.evaluate import evaluate
from roost.app_world.proxy import Apis
from roost.app_world.serving.server import report_reply, task_reply
from roost.app_world.tasks.task_set import make_task


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    task_id: str


class Initialize(Strict):
    experiment_name: str = "default"
    max_interactions: int = 1000
    remote_docker: bool = False


class Execute(Strict):
    code: str


class Evaluate(Strict):
    suppress_errors: bool = True
    report: bool = False


class Held:
    """The world of the process."""

    def __init__(self):
        self.task = self.world = self.names = None
        self.overlaps = 0
        self.experiments = []


def standin_app():
    app, held = FastAPI(), Held()
    app.state.held = held

    def check(asked):
        if held.task is None:
            raise HTTPException(400, "nothing is initialized")
        if held.task.id != asked.task_id:
            raise HTTPException(400, f"the world is that of {held.task.id}, not of {asked.task_id}")

    @app.get("/")
    async def about():
        return {"message": "a stand-in for AppWorld"}

    @app.post("/initialize")
    async def initialize(asked: Initialize):
        held.overlaps += held.task is not None
        held.experiments.append((asked.experiment_name, asked.max_interactions))
        held.task = make_task(asked.task_id)
        held.world = held.task.open_world()
        held.names = {"apis": Apis(held.world.call)}
        return {"output": task_reply(held.task)}

    @app.post("/execute")
    async def execute(asked: Execute):
        check(asked)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(asked.code, held.names)
            except Exception:
                print(traceback.format_exc())
        return {"output": printed.getvalue()}

    @app.post("/task_completed")
    async def task_completed(asked: Strict):
        check(asked)
        return {"output": held.world.is_completed}

    @app.post("/evaluate")
    async def evaluated(asked: Evaluate):
        check(asked)
        return {"output": report_reply(held.task, evaluate(held.task, held.world))}

    @app.post("/close")
    async def close(asked: Strict):
        check(asked)
        held.task = None
        return {"output": None}

    return app


def main():
    """As `python -m appworld.cli serve environment` does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs=2)
    parser.add_argument("--root", required=True)
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(standin_app(), port=parser.parse_args().port, log_level="warning")
