"""Episodes in a server that speaks OpenEnv's protocol: a real one on loopback."""

import asyncio
import contextlib
import json

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from roost.rollout.environments.openenv import OpenEnvEnvironments, OpenEnvRefused
from roost.rollout.episode import Task
from tests.limits import HANG_S
from tests.rollout.script import ran

GUESS = Task("guess", {"reset": {"most": 9}})


class Guessing:
    """The environment: a number is to be guessed, which follows from the seed."""

    def reset(self, seed=0, most=100):
        self._wanted, self._tries = seed % most, 0
        return {"observation": {"text": f"below {most}", "metadata": {}}, "reward": None, "done": False}

    def step(self, guess):
        self._tries += 1
        done = guess == self._wanted
        reported = "right" if done else "higher" if guess < self._wanted else "lower"
        answer = {"observation": {"text": reported}, "reward": 1.0 if done else -0.25, "done": done}
        return {**answer, "metadata": {"tries": self._tries}}


def server(most_sessions=8):
    """An application with the routes and messages of OpenEnv's server."""
    app, sessions = FastAPI(), set()

    def error(message, code):
        return {"type": "error", "data": {"message": message, "code": code}}

    def answer(world, message):
        data = message.get("data", {})
        if message["type"] == "reset":
            return {"type": "observation", "data": world.reset(**data)}
        if message["type"] == "step":
            if set(data) != {"guess"}:
                return error("Invalid message", "VALIDATION_ERROR")
            return {"type": "observation", "data": world.step(int(data["guess"]))}
        return {"type": "state", "data": {"step_count": getattr(world, "_tries", 0)}}

    @app.websocket("/ws")
    async def session(socket: WebSocket):
        await socket.accept()
        if len(sessions) >= most_sessions:
            await socket.send_text(json.dumps(error("no session is left", "CAPACITY_REACHED")))
            await socket.close()
            return
        world = Guessing()
        sessions.add(world)
        try:
            while (message := json.loads(await socket.receive_text()))["type"] != "close":
                if message.get("data", {}).get("guess") == "hang up":
                    break
                if message.get("data", {}).get("guess") == "be silent":
                    continue
                try:
                    answered = answer(world, message)
                except ValueError as wrong:
                    answered = error(str(wrong), "EXECUTION_ERROR")
                await socket.send_text(json.dumps(answered))
            await socket.close()
        except WebSocketDisconnect:
            pass
        finally:
            sessions.discard(world)

    return app


@contextlib.asynccontextmanager
async def served(app):
    serving = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    serving.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(serving.serve())
    while not serving.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{serving.servers[0].sockets[0].getsockname()[1]}"
    finally:
        serving.should_exit = True
        await task


@contextlib.asynccontextmanager
async def opened(app=None, **keys):
    keys = {"action_field": "guess", "observation_field": "text", **keys}
    async with served(app or server()) as url:
        environments = OpenEnvEnvironments(url, **keys)
        try:
            yield environments
        finally:
            await environments.close()


async def played(environments, seed):
    environment = await environments.open()
    try:
        seen = [await environment.reset(GUESS, seed)]
        guess = 0
        while not seen[-1].is_over:
            seen.append(await environment.step(guess))
            guess += 1
        return [each.content for each in seen], await environment.score(), seen[-1].info
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("slots", "sessions"),
    [
        pytest.param(8, 8, id="side by side"),
        pytest.param(1, 8, id="one after another"),
        pytest.param(3, 1, id="as the server has room"),
    ],
)
def test_episodes_are_sessions_of_their_own(slots, sessions):
    async def run():
        async with opened(server(sessions), slots=slots) as environments:
            return await asyncio.gather(*(played(environments, seed) for seed in (2, 0, 4)))

    two, none, four = ran(run())
    assert two == (["below 9", "higher", "higher", "right"], 0.5, {"metadata": {"tries": 3}})
    assert (none[1], four[1]) == (1.0, 0.0)


def test_a_server_that_stays_full_is_told():
    async def run():
        async with opened(server(1), open_limit_s=2.0) as environments:
            await environments.open()
            with pytest.raises(OpenEnvRefused, match="CAPACITY_REACHED: no session is left"):
                await environments.open()

    ran(run())


@pytest.mark.parametrize(
    ("action", "raised", "described"),
    [
        pytest.param({"number": 3}, OpenEnvRefused, "VALIDATION_ERROR: Invalid message", id="a field that it has not"),
        pytest.param("three", OpenEnvRefused, "EXECUTION_ERROR: invalid literal", id="an action that fails"),
        pytest.param("hang up", ConnectionError, "closed the connection at step", id="a server that hangs up"),
        pytest.param("be silent", TimeoutError, "did not answer step in 2 s", id="a server that does not answer"),
    ],
)
def test_what_goes_wrong_is_told(action, raised, described):
    async def run():
        async with opened(answer_limit_s=2.0 if raised is TimeoutError else HANG_S) as environments:
            environment = await environments.open()
            await environment.reset(GUESS, 1)
            with pytest.raises(raised, match=described):
                await environment.step(action)
            if raised is OpenEnvRefused:  # the session goes on
                assert (await environment.step({"guess": 1})).is_over
            await environment.close()

    ran(run())


@pytest.mark.parametrize(
    ("keys", "described"),
    [
        pytest.param({"action_field": None}, "name the field", id="no field for a text"),
        pytest.param({"observation_field": "board"}, "has no 'board' but", id="no such field is observed"),
    ],
)
def test_wrong_fields_are_told(keys, described):
    async def run():
        async with opened(**keys) as environments:
            environment = await environments.open()
            with pytest.raises(ValueError, match=described):
                await environment.reset(GUESS, 1)
                await environment.step("1")

    ran(run())


def test_the_whole_observation_and_the_state_can_be_had():
    async def run():
        async with opened(observation_field=None) as environments:
            environment = await environments.open()
            first = await environment.reset(Task("guess"), 1)
            await environment.step({"guess": 5})
            return first.content, await environment.state()

    assert ran(run()) == ({"text": "below 100", "metadata": {}}, {"step_count": 1})


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "all_proxy"])
def test_a_proxy_for_the_world_outside_is_not_asked_for_a_server_of_this_machine(variable, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens

    async def run():
        async with opened() as environments:
            return await played(environments, 4)

    seen, *_ = ran(run())
    assert seen[-1] == "right"
