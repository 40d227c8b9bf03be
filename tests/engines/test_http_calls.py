"""Calls to a real socket whose other side follows a script: answer, drop the connection, or say nothing."""

import asyncio
import contextlib
import json
import socket

import pytest

from roost.engines.errors import EngineLost, EngineRefused
from roost.engines.http_calls import HttpCalls, RetryRule, ServerFailed, server_message

DROP = "the connection is closed without an answer"
HANG = "no answer comes"
WAIT_LIMIT = 20.0  # seconds until a test that hangs is given up


class ScriptedServer:
    """Answers each request with the next line of its script, and the last line for ever after."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked = []  # the first line of each request
        self.closed_by_client = asyncio.Event()
        self.hanging = asyncio.Semaphore(0)

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-l")), 0)
                await reader.readexactly(length)
                self.asked.append(head.splitlines()[0])
                line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                if line == DROP:
                    break
                if line == HANG:
                    self.hanging.release()
                    await reader.read()  # returns when the client closes the connection
                    self.closed_by_client.set()
                    break
                status, body = line
                writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                await writer.drain()
        writer.close()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()


@contextlib.asynccontextmanager
async def calls_to(port, **options):
    """Calls that note how long they would have waited instead of waiting."""
    waits = []

    async def note(seconds):
        waits.append(seconds)

    calls = HttpCalls(f"http://127.0.0.1:{port}", sleep=options.pop("sleep", note), chance=lambda: 1.0, **options)
    try:
        yield calls, waits
    finally:
        await calls.close()


def bounded(scenario):
    async def body():
        async with asyncio.timeout(WAIT_LIMIT):
            return await scenario

    return asyncio.run(body())


OK = (200, '{"is": "fine"}')
BUSY = (503, "{}")
TRIES = [
    pytest.param([OK], True, None, 1, id="answered"),
    pytest.param([BUSY, OK], True, None, 2, id="busy-then-answered"),
    pytest.param([BUSY, OK], False, ServerFailed, 1, id="busy-not-repeated"),
    pytest.param([DROP, OK], True, None, 2, id="dropped-then-answered"),
    pytest.param([DROP, OK], False, EngineLost, 1, id="dropped-not-repeated"),
    pytest.param([(502, ""), (503, ""), (504, ""), (429, ""), OK], True, ServerFailed, 4, id="busy-too-often"),
    pytest.param([DROP, DROP, DROP, DROP, OK], True, EngineLost, 4, id="dropped-too-often"),
    pytest.param([(500, ""), OK], True, ServerFailed, 1, id="broken-not-repeated"),
    pytest.param([(400, ""), OK], True, EngineRefused, 1, id="refused-not-repeated"),
    pytest.param([(404, ""), OK], True, EngineRefused, 1, id="unknown-not-repeated"),
]


@pytest.mark.parametrize(("script", "may_repeat", "error", "tries"), TRIES)
def test_only_what_may_pass_is_tried_again_and_only_if_that_is_safe(script, may_repeat, error, tries):
    async def scenario():
        async with ScriptedServer(*script) as server, calls_to(server.port) as (calls, waits):
            outcome = contextlib.nullcontext() if error is None else pytest.raises(error)
            with outcome as raised:
                assert await calls.post("/order", {}, limit_s=5.0, may_repeat=may_repeat) == {"is": "fine"}
            if raised is not None:
                assert raised.type is error
            assert server.asked == ["POST /order HTTP/1.1"] * tries
            assert len(waits) == tries - 1

    bounded(scenario())


def test_each_wait_is_twice_the_last_up_to_a_limit_and_half_of_it_is_chance():
    rule = RetryRule(first_wait_s=1.0, longest_wait_s=3.0)
    assert [rule.wait_s(failures, chance=1.0) for failures in (1, 2, 3, 9)] == [1.0, 2.0, 3.0, 3.0]
    assert [rule.wait_s(failures, chance=0.0) for failures in (1, 2, 3, 9)] == [0.5, 1.0, 1.5, 1.5]


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_order_is_repeated_when_the_connection_was_refused_before_anything_was_sent(free_port):
    async def scenario():
        async with ScriptedServer(OK) as server:
            started = []

            async def server_comes_up(_):
                if not started:
                    started.append(await asyncio.start_server(server._serve, "127.0.0.1", free_port))

            async with calls_to(free_port, sleep=server_comes_up) as (calls, _):
                assert await calls.post("/sleep", limit_s=5.0) == {"is": "fine"}
            assert server.asked == ["POST /sleep HTTP/1.1"]
            started[0].close()

    bounded(scenario())


def test_nobody_there_is_a_lost_engine_after_a_few_tries(free_port):
    async def scenario():
        async with calls_to(free_port) as (calls, waits):
            with pytest.raises(EngineLost, match=rf"POST http://127.0.0.1:{free_port}/pause: ConnectError"):
                await calls.post("/pause", limit_s=5.0)
            assert waits == [0.2, 0.4, 0.8]
            assert await calls.status("GET", "/health", limit_s=5.0) is None

    bounded(scenario())


def test_closed_connections_give_no_status_and_an_order_on_them_is_a_lost_engine():
    async def scenario():
        async with ScriptedServer(OK) as server, calls_to(server.port) as (calls, _):
            await calls.close()
            assert await calls.status("GET", "/health", limit_s=5.0) is None
            with pytest.raises(EngineLost, match="connections to this server were closed"):
                await calls.get("/version", limit_s=5.0)
            assert not server.asked

    bounded(scenario())


def test_no_answer_in_time_is_a_lost_engine_and_the_server_sees_that_nobody_waits():
    async def scenario():
        async with ScriptedServer(HANG) as server, calls_to(server.port) as (calls, _):
            with pytest.raises(EngineLost, match=r"/generate \(3 tokens\): no answer within 0.05 s"):
                await calls.post("/generate", {}, limit_s=0.05, may_repeat=True, about="3 tokens")
            await server.closed_by_client.wait()
            assert len(server.asked) == 1

    bounded(scenario())


def test_cancelling_a_call_closes_its_connection():
    async def scenario():
        async with ScriptedServer(HANG) as server, calls_to(server.port) as (calls, _):
            call = asyncio.create_task(calls.post("/generate", {}, limit_s=60.0, may_repeat=True))
            await server.hanging.acquire()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.closed_by_client.wait()

    bounded(scenario())


def test_hundreds_of_held_calls_leave_a_connection_for_an_order():
    held = 300

    async def scenario():
        async with ScriptedServer(*[HANG] * held, OK) as server, calls_to(server.port) as (calls, _):
            generations = [asyncio.create_task(calls.post("/generate", {}, limit_s=60.0)) for _ in range(held)]
            for _ in range(held):
                await server.hanging.acquire()
            assert await calls.post("/resume", limit_s=5.0) == {"is": "fine"}
            for call in generations:
                call.cancel()
            await asyncio.gather(*generations, return_exceptions=True)

    bounded(scenario())


def test_a_proxy_of_the_users_shell_is_not_asked(monkeypatch, free_port):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")

    async def scenario():
        async with ScriptedServer(OK) as server, calls_to(server.port) as (calls, _):
            assert await calls.get("/version", limit_s=5.0) == {"is": "fine"}

    bounded(scenario())


CONTENTS = [
    pytest.param('{"a": 1}', {"a": 1}, id="json"),
    pytest.param("null", None, id="null"),
    pytest.param("", None, id="nothing"),
    pytest.param("Cache flushed.", "Cache flushed.", id="text"),
]


@pytest.mark.parametrize(("sent", "read"), CONTENTS)
def test_an_answer_is_what_the_server_sent(sent, read):
    async def scenario():
        async with ScriptedServer((200, sent)) as server, calls_to(server.port) as (calls, _):
            assert await calls.post("/order", limit_s=5.0) == read

    bounded(scenario())


MESSAGES = [
    pytest.param({"error": {"message": "too long", "code": 400}}, "too long", id="openai"),
    pytest.param({"error": "not now"}, "not now", id="error-text"),
    pytest.param({"object": "error", "message": "no such model"}, "no such model", id="old-vllm"),
    pytest.param({"success": False, "message": "no session"}, "no session", id="sglang"),
    pytest.param({"success": False, "error_message": "no adapter"}, "no adapter", id="sglang-adapters"),
    pytest.param({"detail": "Not Found"}, "Not Found", id="starlette"),
    pytest.param({"detail": [{"loc": ["body", "tags"], "msg": "missing"}]}, "body.tags: missing", id="pydantic"),
]


@pytest.mark.parametrize(("said", "message"), MESSAGES)
def test_the_servers_own_words_are_in_the_error(said, message):
    assert server_message(json.dumps(said)) == message

    async def scenario():
        async with ScriptedServer((400, json.dumps(said))) as server, calls_to(server.port) as (calls, _):
            with pytest.raises(EngineRefused) as raised:
                await calls.post("/v1/completions", {}, limit_s=5.0, about="a prompt of 9 tokens")
            where = f"POST http://127.0.0.1:{server.port}/v1/completions (a prompt of 9 tokens)"
            assert str(raised.value) == f"{where}: 400, {message}"

    bounded(scenario())


def test_a_message_is_cut_and_text_is_taken_as_it_is():
    assert len(server_message("x" * 10_000)) == 2000
    assert server_message("<h1>Bad Gateway</h1>\n") == "<h1>Bad Gateway</h1>"


def test_the_key_is_sent():
    async def scenario():
        keys = []

        async def serve(reader, writer):
            keys.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"HTTP/1.1 200 -\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with calls_to(server.sockets[0].getsockname()[1], api_key="s3cret") as (calls, _):
            await calls.get("/version", limit_s=5.0)
        server.close()
        assert "authorization: bearer s3cret" in keys[0].lower()

    bounded(scenario())
