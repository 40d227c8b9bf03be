"""Calls to a real socket whose other side follows a script: answer, drop the connection, or say nothing."""

import asyncio
import contextlib
import gc
import json
import socket

import pytest

from roost.engines.http_calls import HttpCalls, RetryRule, ServerFailed
from roost.engines.protocol import EngineLost, EngineRefused
from roost.net.http_client import GONE_AFTER_S, proxy_for, server_message, watched_socket
from tests.engines.scripted_server import DROP, HANG, OK, ScriptedServer, bounded
from tests.limits import HANG_S


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


def test_connections_notice_a_machine_that_is_gone():
    """It closes none of them, and a weight sync would wait for the time limit of its call."""
    with watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        idle, every, count, unanswered = (made.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
    assert idle + every * count == GONE_AFTER_S and unanswered == GONE_AFTER_S * 1000

    async def scenario():
        async with ScriptedServer(OK) as server, calls_to(server.port) as (calls, _):
            await calls.get("/", limit_s=HANG_S)
            clients = (calls._persistent, calls._new)
            return {each.connector._socket_factory for client in clients for each in client._sessions.values()}

    assert bounded(scenario()) == {watched_socket}


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


@pytest.mark.parametrize(("script", "is_idempotent", "error", "tries"), TRIES)
def test_only_what_may_pass_is_tried_again_and_only_if_that_is_safe(script, is_idempotent, error, tries):
    async def scenario():
        async with ScriptedServer(*script) as server, calls_to(server.port) as (calls, waits):
            outcome = contextlib.nullcontext() if error is None else pytest.raises(error)
            with outcome as raised:
                assert await calls.post("/order", {}, limit_s=HANG_S, is_idempotent=is_idempotent) == {"is": "fine"}
            if raised is not None:
                assert raised.type is error
            assert server.asked == ["POST /order HTTP/1.1"] * tries
            assert len(waits) == tries - 1

    bounded(scenario())


def test_each_wait_is_twice_the_last_up_to_a_limit_and_half_of_it_is_chance():
    rule = RetryRule(first_wait_s=1.0, longest_wait_s=3.0)
    assert [rule.wait_s(failures, chance=1.0) for failures in (1, 2, 3, 9)] == [1.0, 2.0, 3.0, 3.0]
    assert [rule.wait_s(failures, chance=0.0) for failures in (1, 2, 3, 9)] == [0.5, 1.0, 1.5, 1.5]


def test_a_server_that_says_when_to_come_back_is_obeyed():
    rule = RetryRule(first_wait_s=1.0, longest_wait_s=3.0, longest_retry_after_s=10.0)
    described = (None, "0", "7", "600", "Fri, 31 Dec 1999 23:59:59 GMT")
    assert [rule.wait_s(1, chance=1.0, retry_after=each) for each in described] == [1.0, 1.0, 8.0, 11.0, 1.0]

    async def scenario():
        come_back = [(429, "", "Retry-After: 3"), (503, "", "Retry-After: 4"), OK]
        async with ScriptedServer(*come_back) as server, calls_to(server.port) as (calls, waits):
            assert await calls.get("/version", limit_s=HANG_S) == {"is": "fine"}
            assert waits == [3.2, 4.4]

    bounded(scenario())


def test_a_server_that_asks_for_more_time_than_there_is_has_answered():
    async def scenario():
        too_late = [(503, "being mended", "Retry-After: 30"), OK]
        async with ScriptedServer(*too_late) as server, calls_to(server.port) as (calls, waits):
            with pytest.raises(ServerFailed, match="503, being mended"):
                await calls.get("/version", limit_s=5.0)
            assert not waits

    bounded(scenario())


LOOKS = [
    pytest.param([OK], 200, id="answered"),
    pytest.param([DROP, OK], 200, id="dropped-once"),
    pytest.param([HANG, OK], 200, id="silent-once"),
    pytest.param([BUSY, OK], 503, id="an-answer-is-an-answer"),
    pytest.param([DROP], None, id="always-dropped"),
    pytest.param([HANG, HANG, OK], None, id="silent-twice"),
]


@pytest.mark.parametrize(("script", "status"), LOOKS)
def test_silence_is_looked_at_twice(script, status):
    async def scenario():
        async with ScriptedServer(*script) as server, calls_to(server.port) as (calls, _):
            assert await calls.status("GET", "/health", limit_s=1.5 if HANG in script else HANG_S) == status

    bounded(scenario())


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
                assert await calls.post("/sleep", limit_s=HANG_S) == {"is": "fine"}
            assert server.asked == ["POST /sleep HTTP/1.1"]
            started[0].close()

    bounded(scenario())


def test_nobody_there_is_a_lost_engine_after_a_few_tries(free_port):
    async def scenario():
        async with calls_to(free_port) as (calls, waits):
            with pytest.raises(EngineLost, match=rf"POST http://127.0.0.1:{free_port}/pause: no connection, .*failed"):
                await calls.post("/pause", limit_s=HANG_S)
            assert waits == [0.2, 0.4, 0.8]
            assert await calls.status("GET", "/health", limit_s=HANG_S) is None

    bounded(scenario())


def test_closed_connections_give_no_status_and_an_order_on_them_is_a_lost_engine():
    async def scenario():
        async with ScriptedServer(OK) as server, calls_to(server.port) as (calls, _):
            await calls.close()
            assert await calls.status("GET", "/health", limit_s=HANG_S) is None
            with pytest.raises(EngineLost, match="connections to this server were closed"):
                await calls.get("/version", limit_s=HANG_S)
            assert not server.asked

    bounded(scenario())


def test_no_answer_in_time_is_a_lost_engine_and_the_server_sees_that_nobody_waits():
    async def scenario():
        async with ScriptedServer(HANG) as server, calls_to(server.port) as (calls, _):
            with pytest.raises(EngineLost, match=r"/generate \(3 tokens\): no answer within 1 s"):
                await calls.post("/generate", {}, limit_s=1.0, is_idempotent=True, about="3 tokens")
            await server.closed_by_client.wait()
            assert len(server.asked) == 1

    bounded(scenario())


def test_cancelling_a_call_closes_its_connection():
    async def scenario():
        async with ScriptedServer(HANG) as server, calls_to(server.port) as (calls, _):
            call = asyncio.create_task(calls.post("/generate", {}, limit_s=HANG_S, is_idempotent=True))
            await server.hanging.acquire()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.closed_by_client.wait()

    bounded(scenario())


def test_what_may_be_repeated_keeps_its_connection_and_what_may_not_gets_a_new_one():
    async def scenario():
        async with ScriptedServer(OK) as server, calls_to(server.port) as (calls, _):
            for _ in range(3):
                await calls.get("/version", limit_s=HANG_S)
            assert server.connections == 1
            for _ in range(2):
                await calls.post("/pause", limit_s=HANG_S)
            assert server.connections == 3

    bounded(scenario())


def test_a_connection_that_was_closed_while_nobody_used_it_is_no_lost_engine():
    async def scenario():
        async with ScriptedServer(OK, OK, DROP, OK) as server, calls_to(server.port) as (calls, waits):
            for _ in range(3):  # the last one finds its connection closed, and is asked again on a new one
                assert await calls.get("/version", limit_s=HANG_S) == {"is": "fine"}
            assert server.connections == 2
            assert len(server.asked) == 4
            assert len(waits) <= 1

    bounded(scenario())


def test_a_call_under_way_is_told_when_its_connections_are_closed():
    async def scenario():
        async with ScriptedServer(HANG) as server, calls_to(server.port) as (calls, _):
            asked = [
                calls.get("/version", limit_s=HANG_S),
                calls.post("/generate", {}, limit_s=HANG_S, is_idempotent=True),
            ]
            asked = [asyncio.create_task(call) for call in [*asked, calls.post("/pause", limit_s=HANG_S)]]
            for _ in asked:
                await server.hanging.acquire()
            await calls.close()
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(outcome, EngineLost)
                assert "were closed" in str(outcome)

    bounded(scenario())


def test_calls_from_several_event_loops_leave_nothing_open(caplog):
    calls = []

    async def ask(closes=False):
        async with ScriptedServer(OK) as server:
            if not calls:
                calls.append(HttpCalls(f"http://127.0.0.1:{server.port}"))
                await calls[0].get("/version", limit_s=HANG_S)
        if closes:
            await calls[0].close()

    with asyncio.Runner() as still_open:
        still_open.run(ask())
        asyncio.run(ask())
        asyncio.run(ask(closes=True))
        still_open.run(asyncio.sleep(0))
        calls.clear()
        gc.collect()
    assert not [record.message for record in caplog.records if "Unclosed" in record.message]


def test_a_close_that_is_cancelled_leaves_nothing_open(caplog):
    async def scenario():
        async with ScriptedServer(OK) as server:
            calls = HttpCalls(f"http://127.0.0.1:{server.port}")
            await calls.get("/version", limit_s=HANG_S)
            assert await calls.status("GET", "/health", limit_s=HANG_S) == 200
            closing = asyncio.create_task(calls.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled(), "it was still under way"

    bounded(scenario())
    gc.collect()
    assert not [record.message for record in caplog.records if "Unclosed" in record.message]


def test_hundreds_of_held_calls_leave_a_connection_for_an_order():
    held = 300

    async def scenario():
        async with ScriptedServer(*[HANG] * held, OK) as server, calls_to(server.port) as (calls, _):
            generations = [asyncio.create_task(calls.post("/generate", {}, limit_s=HANG_S)) for _ in range(held)]
            for _ in range(held):
                await server.hanging.acquire()
            assert await calls.post("/resume", limit_s=HANG_S) == {"is": "fine"}
            for call in generations:
                call.cancel()
            await asyncio.gather(*generations, return_exceptions=True)

    bounded(scenario())


def test_a_proxy_of_the_users_shell_is_not_asked(monkeypatch, free_port):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")

    async def scenario():
        async with ScriptedServer(OK) as server, calls_to(server.port) as (calls, _):
            assert await calls.get("/version", limit_s=HANG_S) == {"is": "fine"}

    bounded(scenario())


PROXY = "http://proxy.test:3128"
PROXIES = [
    pytest.param("http://judge.test/v1", PROXY, id="outside"),
    pytest.param("https://judge.test/v1", None, id="another-scheme"),
    pytest.param("http://models.here.test:8000", None, id="told-not-to"),
    pytest.param("http://127.0.0.1:8000", None, id="loopback"),
    pytest.param("http://localhost:8000", None, id="localhost"),
    pytest.param("http://10.0.0.7:8000", None, id="cluster"),
    pytest.param("http://[fd00::7]:8000", None, id="cluster-ipv6"),
    pytest.param("http://8.8.8.8:8000", PROXY, id="outside-address"),
]


@pytest.mark.parametrize(("url", "proxy"), PROXIES)
def test_a_proxy_is_for_servers_outside(monkeypatch, url, proxy):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "REQUEST_METHOD", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("no_proxy", "here.test")
    assert proxy_for(url) == proxy


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
            assert await calls.post("/order", limit_s=HANG_S) == read

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


@pytest.mark.parametrize(("reported", "message"), MESSAGES)
def test_the_servers_own_words_are_in_the_error(reported, message):
    assert server_message(json.dumps(reported)) == message

    async def scenario():
        async with ScriptedServer((400, json.dumps(reported))) as server, calls_to(server.port) as (calls, _):
            with pytest.raises(EngineRefused) as raised:
                await calls.post("/v1/completions", {}, limit_s=HANG_S, about="a prompt of 9 tokens")
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
            await calls.get("/version", limit_s=HANG_S)
        server.close()
        assert "authorization: bearer s3cret" in keys[0].lower()

    bounded(scenario())
