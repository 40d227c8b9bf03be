"""Whole jobs on a real GPU: engines and learner on one device, with the built-in engine and with vLLM."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

import torch

import roost
from roost import Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.runtime.ray_connection import connect
from tests.local_ray import MACHINE, MARK, end_ray
from tests.trainer.live.jobs import OFFLOADS, config, learnt_groups, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"))]
MOST_APART = 0.05  # log-probs of engine and learner, in bfloat16
KILLED = "ROOST_TEST_KILLED"


@pytest.fixture(scope="module", autouse=True)
def machine():
    """A Ray that sees the machine as it is."""
    end_ray()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", *MACHINE):
            patch.delenv(name, raising=False)
        patch.setenv(MARK, MACHINE[MARK])
        connection = connect("local")
        yield
        connection.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that every engine can run: vLLM's kernels need heads of at least 32 numbers."""
    return write_arithmetic_model(
        tmp_path_factory.mktemp("models") / "arithmetic", hidden_size=256, intermediate_size=512
    )


def job(model, engine, actor=None, **train):
    """A job with engine and learner on the first device."""
    eager = {"args": ["--enforce-eager"]} if engine == "vllm" else {}
    keys = {
        "engine": engine,
        "engine_options": {"max_context": 64, "memory_fraction": 0.3, **eager},
        "compute_dtype": "bfloat16",
        "compile": False,  # takes longer than these runs
        "rollout_logprobs": "all",
        **train,
    }
    values = config(model, {"actor,rollout": 0}, actor=actor, **keys)
    values["cluster"]["num_gpus_per_node"] = 1
    return values


def metrics_of(outcome):
    return list(outcome.run.metrics)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decision", ["keep", "sleep", "restart"])
def test_engine_and_learner_share_a_device(model, tmp_path, engine, decision):
    """Updates reach the engine: its log-probs stay close to the learner's while the weights change."""
    notes = []
    values = job(model, engine, actor={} if decision == "keep" else OFFLOADS)
    if decision == "restart":
        values["rollout"] = {"enable_sleep_mode": False}
        values["train"]["max_steps"] = 2  # vLLM takes more than a minute to start again
    [held] = roost.plan(values).residency.classes
    assert held.decision == decision
    rows = metrics_of(trained(values, tmp_path / "run", notes=notes))
    assert [row["step"] for row in rows] == list(range(1, values["train"]["max_steps"] + 1))
    assert all(row["mismatch/logprob_mean"] < MOST_APART for row in rows)
    assert not [note for note in notes if "by disk" in note or "not take" in note]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_synced(model, tmp_path, engine):
    values = job(model, engine, actor=OFFLOADS, lora_rank=8, learning_rate=1e-2)
    rows = metrics_of(trained(values, tmp_path / "run"))
    assert all(row["mismatch/logprob_mean"] < MOST_APART for row in rows)


def test_a_resumed_run_goes_on(model, tmp_path):
    values = job(model, "torch", actor=OFFLOADS, checkpoint_every=1, max_steps=2)
    trained(values, tmp_path / "run")
    values["train"]["max_steps"] = 3
    outcome = trained(values, tmp_path / "run", resumes=True)
    assert [row["step"] for row in metrics_of(outcome)] == [1, 2, 3]


class Killing(Arithmetic):
    """Kills the engine in the middle of the second step."""

    _episodes = 0

    async def run_episode(self, task, transcript):
        self._episodes += 1
        marker = Path(os.environ[KILLED])
        if self._episodes > 20 and not marker.exists():
            marker.touch()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    is_own = process.environ().get(MARK) == os.environ[MARK]
                    if is_own and "roost.torch_engine" in process.cmdline():
                        process.kill()
        return await super().run_episode(task, transcript)


def test_a_killed_engine_is_replaced(model, tmp_path, monkeypatch):
    monkeypatch.setenv(KILLED, str(tmp_path / "killed"))
    task = {"_target_": f"{Killing.__module__}.Killing"}
    outcome = trained(job(model, "torch", actor=OFFLOADS, task=task), tmp_path / "run")
    assert (tmp_path / "killed").exists()
    assert {step: len(groups) for step, groups in learnt_groups(outcome.run).items()} == {1: 4, 2: 4, 3: 4}


class Seer(Worker):
    """Reports the devices it sees."""

    def seen(self):
        return torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_workers_see_their_devices_alone(tmp_path):
    """A process that is placed on a node sees all devices of the node, as in RLinf."""
    with Cluster(num_nodes=1, log_dir=str(tmp_path)) as cluster:
        on_device = Seer.create_group().launch(
            cluster, name="on_device", placement_strategy=PackedPlacementStrategy(0, 0)
        )
        on_node = Seer.create_group().launch(cluster, name="on_node", placement_strategy=NodePlacementStrategy([0]))
        assert on_device.seen().wait() == [(1, "0")]
        assert on_node.seen().wait() == [(1, "0")]


@pytest.mark.parametrize(("mask", "devices"), [("0", 1), ("", 0)])
def test_detection_obeys_the_mask_of_the_shell(mask, devices):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": mask}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "roost", "inventory", "--json", "--address", "local"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    [node] = json.loads(done.stdout)["nodes"]
    assert node["accelerators"] == devices
