"""Real processes of servers: how they start, how they end, and that nothing is left of them."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.protocol import EngineError
from roost.engines.server_process import STARTS, PortInUse, ServerProcess, start_ready, wait_ready
from roost.procs.child import left_keepers
from roost.procs.server_keeper import Ending
from tests.limits import HANG_S

PROGRAMS = Path(__file__).parent / "programs"
HELPERS = {"plain-helper", "stubborn-helper", "stray-helper"}

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def python(tmp_path):
    """An interpreter that runs the stand-in, whatever module it is told to run."""
    script, program = tmp_path / "python", PROGRAMS / "stand_in.py"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program))} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def spec(python, tmp_path):
    def made(words="", **fields):
        env = {"STAND_IN": words, "STAND_IN_FOLDER": str(tmp_path)}
        return ServerSpec(EngineKind.TORCH, "none", python=python, env=env, **fields)

    return made


def living(folder):
    """The processes of a stand-in that are there, by their part in it."""
    return {path.stem for path in folder.glob("*.pid") if is_living(int(path.read_text()))}


def is_living(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def keeper_of(process):
    return psutil.Process(process.pid).parent()


@pytest.mark.parametrize(
    ("words", "grace", "expected"),
    [
        pytest.param("", HANG_S, Ending.ASKED, id="a good server"),
        pytest.param("plain-helper", 1.0, Ending.TERMINATED, id="it leaves a child behind"),
        pytest.param("ignores-sigterm", 0.2, Ending.KILLED, id="it ignores SIGTERM"),
        pytest.param("stubborn-helper", 0.2, Ending.KILLED, id="its child ignores SIGTERM"),
        pytest.param("stray-helper", 0.2, Ending.KILLED, id="its grandchild has left session and parent"),
    ],
)
async def test_nothing_is_left_of_a_stopped_server(spec, tmp_path, words, grace, expected):
    process = await start_ready(spec(words), tmp_path, HANG_S)
    keeper = keeper_of(process)
    assert process.alive
    assert living(tmp_path) == {"server"} | HELPERS & set(words.split())
    stopped = await process.stop(grace)
    assert stopped.ending is expected
    assert living(tmp_path) == set()
    assert not process.alive
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", process.port)) != 0
    assert until(lambda: not keeper.is_running())
    assert await process.stop() == stopped, "stopping again changes nothing"


@pytest.mark.parametrize("how", ["plain", "forked"])
def test_a_server_ends_with_a_killed_owner(python, tmp_path, how):
    words = "ignores-sigterm stubborn-helper stray-helper"
    owner = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "owner.py"), how, python, str(tmp_path), words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout.readline() == "ready\n"
        assert living(tmp_path) == {"server", "stubborn-helper", "stray-helper"}
        owner.kill()
        owner.wait()
        assert until(lambda: not living(tmp_path))
    finally:
        os.killpg(owner.pid, signal.SIGKILL) if how == "forked" else owner.kill()
        owner.stdout.close()


@pytest.mark.long
def test_a_server_ends_with_an_actor_that_ray_kills(python, tmp_path):
    """Ray ends the children of its workers itself, and knows nothing of their children."""
    pytest.importorskip("ray")
    driver = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "owner.py"), "actor", python, str(tmp_path), "ignores-sigterm stray-helper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout.readline() == "ready\n"
        assert living(tmp_path) == {"server", "stray-helper"}
        print("go on", file=driver.stdin, flush=True)
        assert driver.stdout.readline() == "killed\n"
        assert until(lambda: not living(tmp_path))
    finally:
        driver.terminate()
        driver.communicate()


async def test_servers_of_one_name_are_told_apart_by_their_folders(spec, tmp_path):
    """Every run has a rollout-0: one must not wait for the server of another run on the same machine."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    process = await start_ready(spec(""), theirs, HANG_S)
    name = process.spec.name
    assert left_keepers(name, ours) == []
    assert len(left_keepers(name, theirs)) == 1
    await process.stop()
    assert until(lambda: not left_keepers(name, theirs))


async def test_a_server_ends_when_its_process_object_is_let_go(spec, tmp_path):
    process = await start_ready(spec(), tmp_path, HANG_S)
    assert living(tmp_path) == {"server"}
    del process
    assert until(lambda: not living(tmp_path))


async def test_nothing_is_left_of_a_start_that_was_cancelled(spec, tmp_path):
    starting = asyncio.create_task(ServerProcess.start(spec(), tmp_path))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert len(list(tmp_path.glob("*.log"))) == 1, "it was started all the same"
    assert until(lambda: not left_keepers("engine", tmp_path) and not living(tmp_path))


async def test_a_server_ends_with_a_killed_keeper_and_stop_still_finds_its_children(spec, tmp_path):
    process = await start_ready(spec("stubborn-helper"), tmp_path, HANG_S)
    keeper_of(process).kill()
    assert until(lambda: not process.alive)
    assert (await process.stop(grace=1.0)).ending is Ending.KILLED
    assert living(tmp_path) == set()


async def test_children_of_a_server_that_died_are_ended(spec, tmp_path):
    process = await start_ready(spec("stubborn-helper"), tmp_path, HANG_S)
    os.kill(process.pid, signal.SIGKILL)
    assert until(lambda: not process.alive)
    assert process.exit_code == -signal.SIGKILL
    assert until(lambda: not living(tmp_path))
    assert (await process.stop()).exit_code == -signal.SIGKILL


async def test_a_server_that_dies_at_start_tells_why(spec, tmp_path):
    with pytest.raises(EngineError, match=r"engine ended with exit code 1 .*(?s:.*)no such model: the folder is empty"):
        await start_ready(spec("fails"), tmp_path, HANG_S)


async def test_a_server_that_is_never_ready_is_waited_for_so_long_and_ended(spec, tmp_path):
    with pytest.raises(EngineError, match=r"not ready within 2 s.*engine-1\.log(?s:.*)loading a model"):
        await start_ready(spec("never-ready"), tmp_path, limit=2.0)
    assert living(tmp_path) == set()


async def test_a_server_that_is_killed_while_it_starts_is_started_again(spec, tmp_path):
    started = []

    async def killed(spec, folder):
        process = await ServerProcess.start(spec, folder)
        started.append(process.pid)
        if len(started) == 1:
            os.kill(process.pid, signal.SIGKILL)
        return process

    process = await start_ready(spec(), tmp_path, HANG_S, start=killed)
    assert process.pid == started[1] and process.alive
    await process.stop()
    assert living(tmp_path) == set()


@pytest.mark.parametrize("crash", [signal.SIGABRT, signal.SIGSEGV])
async def test_a_server_that_crashes_while_it_starts_is_not_started_again(spec, tmp_path, crash):
    async def crashed(spec, folder):
        process = await ServerProcess.start(spec, folder)
        os.kill(process.pid, crash)
        return process

    with pytest.raises(EngineError, match=f"engine ended with exit code -{crash:d} after"):
        await start_ready(spec("never-ready"), tmp_path, HANG_S, start=crashed)
    assert len(list(tmp_path.glob("*.log"))) == 1


async def test_a_server_that_is_suspended_while_it_starts_is_not_waited_for(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("roost.engines.server_process.SUSPENDED_LIMIT", 0.2)

    async def suspended(spec, folder):
        process = await ServerProcess.start(spec, folder)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    with pytest.raises(EngineError, match=r"engine has been suspended by a signal \(SIGSTOP\)"):
        await start_ready(spec("never-ready"), tmp_path, limit=HANG_S, start=suspended)
    assert living(tmp_path) == set()


async def test_while_a_server_starts_the_end_of_its_log_is_reported(spec, tmp_path):
    process = await ServerProcess.start(spec("never-ready"), tmp_path)
    reported = []
    waiting = asyncio.create_task(wait_ready(process, HANG_S, reported.append, report_every=0.1))
    while not any("loading a model" in line for line in reported) and not waiting.done():
        await asyncio.sleep(0.05)
    waiting.cancel()
    await process.stop()
    assert "engine: starting for" in reported[0]


async def test_an_interpreter_that_is_not_there(tmp_path):
    with pytest.raises(EngineError, match=r"could not be started with /no/python: .*No such file"):
        await ServerProcess.start(ServerSpec(EngineKind.TORCH, "none", python="/no/python"), tmp_path)


@pytest.fixture
def taken_port():
    """A port that another program has, which even looks like a ready server."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class AlwaysFine(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), AlwaysFine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


async def test_another_port_is_tried_where_one_is_taken(spec, tmp_path, taken_port):
    ports = [taken_port, None]
    process = await start_ready(
        spec(), tmp_path, HANG_S, start=lambda spec, folder: ServerProcess.start(spec, folder, ports.pop(0))
    )
    assert process.port != taken_port
    assert process.alive
    await process.stop()


async def test_ports_are_not_tried_for_ever(spec, tmp_path, taken_port):
    with pytest.raises(PortInUse, match=f"port {taken_port} was taken"):
        await start_ready(
            spec(), tmp_path, HANG_S, start=lambda spec, folder: ServerProcess.start(spec, folder, taken_port)
        )
    assert len(list(tmp_path.glob("*.log"))) == STARTS


async def test_a_port_that_stays_taken_is_told(spec, tmp_path, taken_port):
    process = await start_ready(spec(), tmp_path, HANG_S)
    process.port = taken_port  # as if a process out of sight had kept the server's port
    with pytest.raises(EngineError, match=rf"its port {taken_port} is still in use; end processes \[{os.getpid()}\]"):
        await process.stop()


async def test_the_environment_that_a_server_gets(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("RAY_JOB_ID", "01")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    process = await start_ready(spec(), tmp_path, HANG_S)
    env = httpx.get(f"{process.url}/env", timeout=HANG_S, trust_env=False).json()["env"]
    await process.stop()
    assert {"RANK", "RAY_JOB_ID"} & set(env) == set()
    assert (env["CUDA_VISIBLE_DEVICES"], env["PYTHONUNBUFFERED"]) == ("1", "1")


async def test_every_start_has_a_log_of_its_own(spec, tmp_path):
    for name in ("actor/0", "actor/0", "critic"):
        process = await ServerProcess.start(spec("never-ready", name=name, api_key="secret"), tmp_path / "logs")
        assert until(lambda log=process.log_path: "loading a model" in log.read_text())
        await process.stop()
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {"actor_0-1.log", "actor_0-2.log", "critic-1.log"}
    assert all(text.startswith("$ ") and "secret" not in text for text in logs.values())


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("localhost", "http://localhost:")],
)
async def test_where_a_server_is_reached(spec, tmp_path, host, url):
    process = await start_ready(spec(host=host), tmp_path, HANG_S)
    await process.stop()
    assert process.url == f"{url}{process.port}"


@pytest.mark.long
async def test_the_built_in_engine(tmp_path):
    from roost.engines.tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "model")
    spec = ServerSpec(EngineKind.TORCH, str(model), device="cpu", lora_rank=4, api_key="secret", max_context=64)
    process = await start_ready(spec, tmp_path, limit=HANG_S)
    answers = [
        httpx.get(f"{process.url}/v1/models", headers=headers, timeout=HANG_S, trust_env=False).status_code
        for headers in ({}, {"Authorization": "Bearer secret"})
    ]
    stopped = await process.stop(HANG_S)
    assert answers == [401, 200]
    assert (stopped.ending, stopped.exit_code) == (Ending.ASKED, 0)


async def test_the_built_in_engine_on_a_model_that_is_not_there(tmp_path):
    spec = ServerSpec(EngineKind.TORCH, str(tmp_path / "nothing"), device="cpu")
    with pytest.raises(EngineError, match=r"before it was ready(?s:.*)nothing"):
        await start_ready(spec, tmp_path, limit=HANG_S)


@pytest.mark.vllm
async def test_vllm(vllm_python, tmp_path):
    from roost.engines.tiny_model import write_tiny_model

    # Its kernels for CPUs know no smaller heads.
    model = write_tiny_model(tmp_path / "model", hidden_size=128, num_attention_heads=4, head_dim=32)
    spec = ServerSpec(
        EngineKind.VLLM,
        str(model),
        name="vllm",
        dtype="float32",
        max_context=64,
        sleeps=True,
        lora_rank=4,
        api_key="secret",
        python=vllm_python,
        args=("--enforce-eager",),
    )
    process = await start_ready(spec, tmp_path, limit=HANG_S)
    try:
        parts = psutil.Process(process.pid).children(recursive=True)
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}}
        key = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=process.url, trust_env=False, timeout=HANG_S) as client:
            answers = [await client.post("/inference/v1/generate", json=body, headers=headers) for headers in ({}, key)]
    finally:
        stopped = await process.stop(HANG_S)
    assert [answer.status_code for answer in answers] == [401, 200]
    assert len(answers[1].json()["choices"][0]["token_ids"]) == 4
    assert stopped.ending is Ending.ASKED
    assert parts and not any(is_living(part.pid) for part in parts)
