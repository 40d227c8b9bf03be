"""A judge's engine, from its config."""

import pytest

from roost.config.findings import Findings, Where
from roost.engines.command import EngineKind, ServerSpec
from roost.rollout.rewards.judge import Judge
from roost.rollout.rewards.judge_server import OPTIONS, server_of

TORCH, VLLM = {"kind": "torch"}, {"kind": "vllm"}


def found(config):
    findings = Findings()
    Judge.check_config(config, Where(path=("judge",)), findings)
    return [str(finding) for finding in findings.found]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param({}, "judge: has neither base_url nor engine", id="neither"),
        pytest.param({"base_url": "http://h/v1", "engine": TORCH}, "judge: has both base_url and engine", id="both"),
        pytest.param({"engine": TORCH, "api_key_env": "KEY"}, "judge.api_key_env: has no effect", id="key"),
        pytest.param({"engine": "vllm"}, "judge.engine: is not a mapping", id="a word"),
        pytest.param({"engine": {}}, "judge.engine.kind: names no engine\n  why: it is missing", id="no kind"),
        pytest.param({"engine": {"kind": "sglan"}}, "fix: did you mean sglang?", id="a kind that is not known"),
        pytest.param({"engine": {**TORCH, "dtpye": "x"}}, "fix: did you mean dtype?", id="a key that is not known"),
        pytest.param({"engine": {**TORCH, "model": "m"}}, "fix: write model beside engine", id="the model inside"),
        pytest.param({"engine": {**VLLM, "sleeps": True}}, "engine.sleeps: is not a key", id="for trained models"),
        pytest.param({"engine": {**VLLM, "tensor": 0}}, "engine.tensor: is not a whole number above 0", id="tensor"),
        pytest.param({"engine": {**VLLM, "tensor": True}}, "engine.tensor: is not a whole number", id="true"),
        pytest.param({"engine": {**VLLM, "memory_fraction": 90}}, "engine.memory_fraction: is not", id="per cent"),
        pytest.param({"engine": {**VLLM, "args": "--eager"}}, "engine.args: is not a list", id="args"),
        pytest.param({"engine": {**VLLM, "env": ["A=1"]}}, "engine.env: is not a mapping", id="env"),
        pytest.param({"engine": {**VLLM, "seed": "x"}}, "engine.seed: is not a whole number", id="seed"),
        pytest.param({"engine": {**VLLM, "dtype": 16}}, "engine.dtype: is not a text", id="dtype"),
        pytest.param({"engine": VLLM, "model": None}, "judge.model: names no model", id="no model"),
    ],
)
def test_findings(keys, message):
    config = {"model": "m", **keys}
    (finding,) = found(config)
    assert message in finding
    with pytest.raises(ValueError, match="error RST-A"):  # made in Python, nobody has looked before
        Judge(**config)


def test_what_is_right():
    every = {"kind": "vllm", "tensor": 2, "pipeline": 1, "dtype": "bfloat16", "max_context": 8192, "seed": 3}
    every |= {"memory_fraction": 0.9, "python": "/opt/vllm/bin/python", "env": {"A": 1}, "args": ["--x", 1]}
    assert set(every) == set(OPTIONS)
    assert found({"model": "m", "engine": every}) == found({"model": "m", "base_url": "http://h/v1"}) == []
    assert server_of(every, "m", "judge-0", devices=2) == ServerSpec(
        EngineKind.VLLM,
        "m",
        "judge-0",
        served_name="m",
        tensor=2,
        dtype="bfloat16",
        max_context=8192,
        memory_fraction=0.9,
        seed=3,
        python="/opt/vllm/bin/python",
        env={"A": "1"},
        args=("--x", "1"),
    )


@pytest.mark.parametrize(
    ("engine", "devices", "expected"),
    [
        pytest.param(TORCH, 0, ("cpu", 1, 1), id="no accelerator"),
        pytest.param(TORCH, 1, ("auto", 1, 1), id="one"),
        pytest.param(VLLM, 4, ("auto", 4, 1), id="all that there are"),
        pytest.param({**VLLM, "pipeline": 2}, 8, ("auto", 4, 2), id="what the pipeline leaves"),
        pytest.param({**VLLM, "tensor": None}, 2, ("auto", 2, 1), id="null is left out"),
    ],
)
def test_devices(engine, devices, expected):
    server = server_of(engine, "m", "judge-0", devices)
    assert (server.device, server.tensor, server.pipeline) == expected


@pytest.mark.parametrize(
    ("engine", "devices", "message"),
    [
        pytest.param(TORCH, 2, "one accelerator; each process has 2", id="the built-in one on two"),
        pytest.param({**TORCH, "tensor": 2}, 0, "tensor x pipeline is 2", id="the built-in one cut"),
        pytest.param({**VLLM, "tensor": 2}, 4, "tensor 2 x pipeline 1 is 2, but each process has 4", id="some idle"),
        pytest.param({**VLLM, "pipeline": 3}, 4, "tensor 1 x pipeline 3 is 3, but each process has 4", id="uneven"),
    ],
)
def test_devices_that_do_not_fit(engine, devices, message):
    with pytest.raises(ValueError, match=message):
        server_of(engine, "m", "judge-0", devices)
