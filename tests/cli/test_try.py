"""`roost try`, with an engine of its own, with a server that runs, and with one that gives text alone."""

import json

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from roost.rollout.arithmetic import write_arithmetic_model
from tests.cli.terminal import run, write
from tests.engines.server_thread import serving
from tests.torch_engine.running_server import NAME, forked_server

HERE = "tests.rollout.agents"
SUMS = {"_target_": "roost.rollout.arithmetic.Arithmetic", "largest": 4}
PROGRAM = {
    "_target_": "roost.rollout.agents.scenario.AgentScenario",
    "tasks": {"_target_": f"{HERE}.world.Tasks"},
    "environment": {"_target_": f"{HERE}.world.Worlds"},
    "agent": {"_target_": "roost.rollout.agents.openai_agent.OpenAIAgent", "run": f"{HERE}.programs.fail"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_arithmetic_model(tmp_path_factory.mktemp("model"))


def config(folder, model, task):
    placed = {"actor": 0, "rollout": 1}
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": placed},
        "actor": {"model": {"model_path": str(model)}},
        "train": {"task": task, "engine_options": {"max_context": 64}},
    }
    return write(folder, json.dumps(job))


def test_an_engine_is_started_and_masks_are_shown(tmp_path, model):
    asked = ("try", config(tmp_path, model, SUMS), "-n", 2, "--task", 7, "--temperature", 0, "--max-new-tokens", 2)
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    assert described["unknown"] == [] and [one["task"] for one in described["episodes"]] == ["1+2=", "1+2="]
    for one in described["episodes"]:
        sequence = one["sequences"][0]
        assert sequence["trained"][:4] == [0] * 4 and set(sequence["trained"][4:]) == {1}
        assert [part["turn"] for part in sequence["parts"]] == [None, 0]
        assert len(one["call_seconds"]) == 1 and 0 <= one["reward"] <= 1
    assert described["episodes"][0]["sequences"] == described["episodes"][1]["sequences"], "greedy"


def test_a_server_that_runs_and_code_that_fails(tmp_path, model):
    with forked_server(model) as server:
        at = ("--url", f"{server.url}/v1", "--model", NAME, "-n", 1)
        result = run("try", config(tmp_path, model, SUMS), *at)
        failed = run("try", config(tmp_path, model, PROGRAM), *at, width=300)
    assert result.exit_code == 0, result.output
    assert "masked  4 tokens: '0+0='" in result.stdout and "turn 0" in result.stdout
    assert "would be trained" in result.stdout and "unknown" not in result.stdout
    assert failed.exit_code == 1
    assert "LookupError: mine (programs.py:" in failed.stdout and 'raise LookupError("mine")' in failed.stdout
    assert "roost/rollout" not in failed.stdout, "only the user's frames"
    assert "the episode failed; there is no reward" in failed.stdout and "nan" not in failed.stdout


def test_what_a_server_of_text_does_not_tell_is_said(tmp_path, model):
    app, prompts = FastAPI(), []

    @app.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        prompts.append(body["prompt"])
        if "return_token_ids" in body:
            return JSONResponse({"error": {"message": "return_token_ids is unknown"}}, 400)
        return {"choices": [{"text": "0", "finish_reason": "stop"}]}

    with serving(app) as url:
        result = run("try", config(tmp_path, model, SUMS), "--url", f"{url}/v1", "--model", "any", "-n", 1, width=300)
    assert result.exit_code == 0, result.output
    assert prompts[-1] == "0+0=" and "reward 1" in result.stdout
    assert "does not report it: log-probs" in result.stdout and "does not report it: token IDs" in result.stdout


@pytest.mark.parametrize(
    ("more", "described"),
    [
        pytest.param(("--split", "test"), "write train or evaluation", id="split"),
        pytest.param(("--url", "http://127.0.0.1:1/v1"), "name the model", id="no model"),
        pytest.param(("--url", "http://127.0.0.1:1/v1", "--model", "m", "--task", 99), "has tasks 0 to 24", id="task"),
    ],
)
def test_options_that_make_no_sense(tmp_path, model, more, described):
    result = run("try", config(tmp_path, model, SUMS), *more)
    assert result.exit_code != 0
    assert described in " ".join(result.output.replace("│", " ").split())
