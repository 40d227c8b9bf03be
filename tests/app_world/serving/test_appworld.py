"""The same client on servers that behave as AppWorld's, of which each has one world."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest
import uvicorn

from roost.app_world.serving.client import AppWorldDataTasks
from roost.app_world.serving.connection import ServerLost, ServerRefused
from roost.app_world.serving.tasks import AppWorldTasks
from roost.rollout.episode import Split
from tests.app_world.serving.session import TASK, all_played, opened, played, solution
from tests.app_world.serving.standin import standin_app
from tests.rollout.script import ran

REPOSITORY = Path(__file__).parents[3]


@contextlib.asynccontextmanager
async def served(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


def test_episodes_take_turns_on_servers_of_one_world():
    async def run():
        apps = [standin_app() for _ in range(2)]
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(served(app)) for app in apps]
            environments = await stack.enter_async_context(opened(urls=urls, options={"max_interactions": 7}))
            scores = await all_played(environments, [TASK] * 8)
        return scores, [app.state.held for app in apps]

    scores, held = ran(run())
    assert scores == [1.0] * 8
    assert [each.overlaps for each in held] == [0, 0]
    assert all(len(each.experiments) > 1 for each in held)
    names = [set(each.experiments) for each in held]
    assert [len(each) for each in names] == [1, 1], "what servers write must stay apart, and not grow with episodes"
    assert names[0].isdisjoint(names[1])
    assert {most for each in names for _, most in each} == {7}


def test_what_such_a_server_refuses_is_told():
    async def run():
        async with served(standin_app()) as url, opened(urls=[url], options={"speed": 3}) as environments:
            with pytest.raises(ServerRefused, match=r"answered /initialize with 422: body.speed: Extra inputs"):
                await played(environments, TASK)

    ran(run())


def test_a_server_of_something_else():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    async def run():
        async with served(app) as url, opened(urls=[url]) as environments:
            with pytest.raises(ServerRefused, match="without an output; is it AppWorld's"):
                await played(environments, TASK)

    ran(run())


@pytest.fixture
def installed(tmp_path):
    """An interpreter that has an `appworld`, and data for it."""
    package = tmp_path / "packages" / "appworld"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    lines = ["import sys", f"sys.path.insert(0, {str(REPOSITORY)!r})"]
    lines += ["from tests.app_world.serving.standin import main", "main()"]
    (package / "cli.py").write_text("\n".join(lines))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{package.parent}$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    write_data(tmp_path / "data", TASK.data["task_id"], TASK.data["instruction"])
    return tmp_path


def write_data(folder, task_id, instruction):
    for split, ids in {"train": f"{task_id}\n", "dev": "1111111_1:easy\n1111111_2\n\n", "twice": task_id}.items():
        (folder / "datasets").mkdir(parents=True, exist_ok=True)
        (folder / "datasets" / f"{split}.txt").write_text(ids)
    for name in (task_id, "1111111_1", "1111111_2"):
        (folder / "tasks" / name / "ground_truth").mkdir(parents=True)
        specs = {"instruction": instruction, "canary_string": "not to be told"}
        (folder / "tasks" / name / "specs.json").write_text(json.dumps(specs))
    metadata = {"difficulty": 2, "solution": "secret"}
    (folder / "tasks" / "1111111_1" / "ground_truth" / "metadata.json").write_text(json.dumps(metadata))


def test_processes_of_appworld_are_started_and_started_again(installed):
    keys = {"servers": 2, "appworld_python": str(installed / "python"), "appworld_root": str(installed)}

    async def run():
        async with opened(**keys) as environments:
            scores = await all_played(environments, [TASK] * 4)
            environment = await environments.open()
            await environment.reset(TASK)
            with pytest.raises(ServerLost, match="the episode's world is lost"):
                await environment.step("import os; os._exit(1)")  # there, code runs in the server itself
            await environment.close()
            return scores + await all_played(environments, [TASK] * 2)

    assert ran(run()) == [1.0] * 6


def test_an_interpreter_without_appworld_says_so(installed):
    keys = {"servers": 1, "appworld_python": sys.executable, "appworld_root": str(installed)}

    async def run():
        async with opened(**keys) as environments:
            with pytest.raises(ServerLost, match=r"AppWorld 0 ended with exit code 1; its last output:\n.*appworld"):
                await environments.open()

    ran(run())


def test_tasks_of_appworlds_data(installed, monkeypatch):
    monkeypatch.setenv("APPWORLD_ROOT", str(installed))
    tasks = AppWorldDataTasks()
    assert (tasks.size(Split.TRAIN), tasks.size(Split.EVALUATION)) == (1, 2)
    task = tasks.task(Split.EVALUATION, 0)
    assert (task.name, task.tag) == (f"1111111_1: {TASK.data['instruction']}", "appworld.2")
    assert task.data == {
        "task_id": "1111111_1",
        "instruction": TASK.data["instruction"],
        "difficulty": 2,
        "scenario_id": "1111111",
    }
    assert tasks.task(Split.EVALUATION, 1).tag == "appworld"


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        pytest.param({"split": "trian"}, "no split 'trian'; there are: dev, train, twice", id="no such split"),
        pytest.param({"evaluation_split": "twice"}, "1 tasks in common", id="splits that overlap"),
        pytest.param({"root": "/nowhere"}, "data is not in /nowhere/data; run `appworld download data", id="no data"),
    ],
)
def test_data_that_is_not_there(installed, keys, reported):
    with pytest.raises(ValueError, match=reported):
        AppWorldDataTasks(**{"root": str(installed)} | keys)


def test_tasks_of_our_own():
    tasks = AppWorldTasks(difficulty=2, count=30, evaluation_count=20)
    every = {split: [tasks.task(split, index) for index in range(tasks.size(split))] for split in Split}
    assert {split: len(found) for split, found in every.items()} == {Split.TRAIN: 30, Split.EVALUATION: 20}
    ids = {split: {task.data["task_id"] for task in found} for split, found in every.items()}
    assert ids[Split.TRAIN].isdisjoint(ids[Split.EVALUATION])
    for task in [*every[Split.TRAIN], *every[Split.EVALUATION]]:
        assert set(task.data) == {"task_id", "instruction", "difficulty", "scenario_id"}
        assert task.tag == "app_world.2"
        assert solution(task.data["task_id"]) not in str(task)


def test_tasks_to_be_tried_on_are_no_tasks_to_learn_from():
    with pytest.raises(ValueError, match="evaluation_split is train"):
        AppWorldTasks(evaluation_split="train")
    challenge = AppWorldTasks(kinds=["jot_note"], evaluation_split="test_challenge", evaluation_count=6)
    assert challenge.size(Split.EVALUATION) == 6
