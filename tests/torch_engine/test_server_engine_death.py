"""Answers of a server whose engine thread has died, or does not come back from a step."""

import asyncio
import threading

import httpx
import pytest

from roost.engines.protocol import InFlight, Sampling
from roost.engines.tiny_model import write_tiny_model
from roost.torch_engine.engine import Request, TorchEngine
from roost.torch_engine.server import create_app, served_engine
from roost.torch_engine.settings import EngineSettings

REASON = "the engine stopped working: SystemExit: out of luck"
BODY = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}


@pytest.fixture
def engine(tmp_path):
    engine = TorchEngine(EngineSettings(str(write_tiny_model(tmp_path)), device="cpu", kv_bytes=1_000_000))
    engine.pause(InFlight.HOLD)
    yield engine
    engine.close()


def kill(engine):
    def die():
        raise SystemExit("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        engine.between_steps(die)


async def asked_while_it_dies(engine, body):
    """The answer to a request that is held when the engine dies, and answers to later ones."""
    transport = httpx.ASGITransport(create_app(served_engine(engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        asked = asyncio.create_task(http.post("/inference/v1/generate", json=body))
        while engine.load.waiting == 0:
            await asyncio.sleep(0)
        await asyncio.to_thread(kill, engine)
        answer = await asked
        later = [await http.get(route) for route in ("/health", "/version", "/load")]
        return answer, *later, await http.post("/inference/v1/generate", json=body)


def test_everybody_hears_that_the_engine_died(engine, caplog):
    asked, health, version, load, again = asyncio.run(asked_while_it_dies(engine, BODY))
    for answer in (asked, health, load, again):
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == REASON
    assert version.status_code == 200
    described = [record.getMessage() for record in caplog.records if record.name == "roost.engine"]
    assert described == [
        f"POST /inference/v1/generate: {REASON}",
        f"GET /load: {REASON}",
        f"POST /inference/v1/generate: {REASON}",
    ]


def test_a_stream_ends_with_the_reason(engine):
    asked, *_ = asyncio.run(asked_while_it_dies(engine, {**BODY, "stream": True}))
    assert asked.status_code == 200  # it was sent before the engine died
    *_, error, done = [line for line in asked.text.splitlines() if line]
    assert REASON in error
    assert done == "data: [DONE]"


def test_a_step_that_does_not_end_is_noticed(tmp_path):
    now = [0.0]
    settings = EngineSettings(str(write_tiny_model(tmp_path)), device="cpu", kv_bytes=1_000_000)
    engine = TorchEngine(settings, clock=lambda: now[0])
    stuck, may_go_on = threading.Event(), threading.Event()

    def hang(progress):
        stuck.set()
        may_go_on.wait()

    async def health():
        transport = httpx.ASGITransport(create_app(served_engine(engine)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get("/health")

    try:
        assert engine.step_seconds is None
        engine.submit(Request("stuck", (1, 2), Sampling(max_tokens=1)), hang)
        stuck.wait()
        now[0] = 300.0
        assert asyncio.run(health()).status_code == 200
        now[0] = 301.0
        answer = asyncio.run(health())
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "a step has run for 301 s")
    finally:
        may_go_on.set()
        engine.close()
