"""Every engine requires the job's key, also on loopback, for every route but /health."""

import asyncio
from pathlib import Path

import aiohttp
import psutil
import pytest

from roost.engines.protocol import Sampling
from tests.engines.live.conftest import KEY, SCENARIO_LIMIT
from tests.engines.live.policies import PROMPT

CONTROLS = {
    *("/collective_rpc", "/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/update_weights"),
    *("/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine", "/update_weight_version"),
    *("/v1/completions", "/inference/v1/generate", "/v1/models"),
}


async def _answers(url, key):
    """The status that each listed route answers with, by method and path."""
    async with asyncio.timeout(SCENARIO_LIMIT), aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with session.get(f"{url}/openapi.json", headers=headers) as listed:
            paths = (await listed.json())["paths"]
        found = {}
        for path, methods in paths.items():
            for method in methods:
                own = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.request(method, url + path, headers=own, data=b"{}") as answer:
                    found[method.upper(), path] = answer.status
        async with session.get(f"{url}/openapi.json") as answer:
            found["GET", "/openapi.json"] = answer.status
        return found


@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1]], ids=["none", "wrong", "shorter"])
def test_no_route_answers_without_the_key(running_engine, key):
    found = asyncio.run(_answers(running_engine.url, key))
    assert {path for _, path in found} >= CONTROLS
    open_to_all = {path: status for (_, path), status in found.items() if status != 401}
    assert open_to_all == {"/health": 200}
    made = running_engine.run(lambda engine: engine.generate(PROMPT, Sampling(max_tokens=2)))
    assert len(made.token_ids) == 2, "with the key it works"


def test_the_key_is_in_no_command_line_and_no_log(running_engine):
    server = psutil.Process(running_engine.process.pid)
    lines = [" ".join(process.cmdline()) for process in (server, *server.children(recursive=True))]
    assert not [line for line in lines if KEY in line]
    log = Path(running_engine.process.log_path)
    assert KEY not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
