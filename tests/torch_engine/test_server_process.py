"""Start and end of a server, its keys, and a server without a tokenizer."""

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
from typing import Annotated

import httpx
import pytest
from fastapi import Body, FastAPI

from roost.engines.tiny_model import write_tiny_model
from roost.net.errors import SizeLimited, answer_errors
from roost.net.server import bound_socket
from tests.limits import HANG_S
from tests.torch_engine.running_server import eventually, launch, running_server

KEY = "a secret"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LONG = {"token_ids": [1], "sampling_params": {"max_tokens": 400, "ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def silent(folder, tmp_path_factory):
    """The same model without a tokenizer."""
    copy = tmp_path_factory.mktemp("copies") / "silent"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*TOKENIZER_FILES))
    return copy


@pytest.fixture(scope="module")
def server(silent):
    """Only those with the key are served, and only with tokens; it ends with the process it was started for.

    The end is checked after the last test of the server: one more server would take seconds to start.
    """
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner,
        running_server(silent, "--api-key", KEY, "--parent-pid", str(owner.pid)) as server,
    ):
        yield server
        owner.kill()  # and not waited for: a process that is dead but still counted has ended, too
        assert server.process.wait(HANG_S) == 0


KEYS = {
    "health is for everybody": ("/health", None, 200),
    "the key": ("/load", KEY, 200),
    "no key": ("/load", None, 401),
    "a wrong key": ("/load", "a guess", 401),
    "the beginning of the key": ("/load", KEY[:-1], 401),
    "no key for the list of routes": ("/openapi.json", None, 401),
    "no key for what is not there": ("/nothing", None, 401),
}


@pytest.mark.parametrize(("route", "key", "status"), KEYS.values(), ids=KEYS.keys())
def test_the_key(server, route, key, status):
    with server.client(key) as http:
        answer = http.get(route)
    assert answer.status_code == status
    if status == 401:
        assert "Authorization: Bearer" in answer.json()["error"]["message"]


def test_token_routes_work_without_a_tokenizer(server):
    with server.client(KEY) as http:
        answer = http.post("/inference/v1/generate", json=LONG)
    assert len(answer.json()["choices"][0]["token_ids"]) == 400


TEXT = {
    "completions": ("/v1/completions", {"prompt": [1]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "text of the token route": ("/inference/v1/generate", {**LONG, "output_mode": "text"}),
    "stop strings": ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": "x"}}),
}


@pytest.mark.parametrize(("route", "body"), TEXT.values(), ids=TEXT.keys())
def test_text_routes_say_why_they_do_not(server, route, body):
    with server.client(KEY) as http:
        answer = http.post(route, json=body)
    assert answer.status_code == 400
    assert "has no tokenizer" in answer.json()["error"]["message"]


def test_a_server_that_is_told_to_end_ends_its_requests_and_itself(folder):
    with running_server(folder) as server, server.client() as http:
        http.post("/pause?mode=keep").raise_for_status()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(http.post("/inference/v1/generate", json=LONG)))
        asking.start()
        with server.client() as other:
            eventually(lambda: other.get("/load").json()["waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG_S) == 0
        asking.join()
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
        assert server.process.stderr.read() == ""


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        process = launch(tmp_path, "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "Address already in use" in errors
    assert "Traceback" not in errors


WRONG = {
    "no such model": (["--model", "no/such/folder"], "no/such/folder"),
    "no such process": (["--parent-pid", "999999999"], "there is no process 999999999"),
    "a setting that makes no sense": (["--max-num-seqs", "0"], "max_sequences is 0"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_start_that_fails_says_why_in_a_line(folder, options, message):
    process = launch(folder, *options)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert message in errors
    assert "Traceback" not in errors


SIZES = {
    "as large as it may be": (b'"' + b"x" * 98 + b'"', 200),
    "announced too large": (b'"' + b"x" * 99 + b'"', 413),
    "in pieces, too large together": ((b'"' + b"x" * 59, b"x" * 40 + b'"'), 413),
    "in pieces, as large as it may be": ((b'"' + b"x" * 59, b"x" * 39 + b'"'), 200),
}


@pytest.mark.parametrize(("content", "status"), SIZES.values(), ids=SIZES.keys())
def test_bodies_that_are_too_large_are_refused(content, status):
    app = FastAPI()
    answer_errors(app)
    app.add_middleware(SizeLimited, most_bytes=100)

    @app.post("/read")
    async def read(text: Annotated[str, Body()]) -> int:
        return len(text)

    async def send():
        async def pieces():
            for piece in content:
                yield piece

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = content if isinstance(content, bytes) else pieces()
            return await client.post("/read", content=body, headers={"content-type": "application/json"})

    answer = asyncio.run(send())
    assert answer.status_code == status
    if status == 413:
        assert "larger than 100 bytes" in answer.json()["error"]["message"]
