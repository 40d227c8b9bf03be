"""A judge that serves its model itself: in the driver, and in a worker on an accelerator."""

import asyncio
import os
import signal

import psutil
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from roost import Cluster, PackedPlacementStrategy
from roost.engines.members import RestartLimit
from roost.engines.tiny_model import write_tiny_model
from roost.rollout.episode import Task
from roost.rollout.rewards.config import Route, Routing
from roost.rollout.rewards.judge import Judge
from roost.rollout.rewards.judge_server import OwnServer
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.rollout.rewards.scoring import Rewards, RewardWorker
from tests.limits import HANG_S
from tests.local_ray import end_ray

ANSWER = Answer(Task("t"), "It is 4.")


class WorkerWithNumber(RewardWorker):
    async def pid(self):
        return os.getpid()


@pytest.fixture(scope="module")
def sevens(tmp_path_factory):
    """A model that says nothing but 7."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "sevens")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (seven,) = AutoTokenizer.from_pretrained(folder).encode("7")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[seven] = 1.0
    model.save_pretrained(folder)
    return str(folder)


def keys_of(model):
    return {
        "model": model,
        "engine": {"kind": "torch", "dtype": "float32", "env": {"OMP_NUM_THREADS": 1}},
        "template": "{answer}",
        "pattern": r"(\d)",
        "max_tokens": 8,
        "sampling": {"stop": ["7"], "include_stop_str_in_output": True},
    }


def servers_of(model):
    """The servers of a model, whoever started them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "roost.torch_engine" in words and model in words:
            found.append(process)
    return found


async def until_gone(processes):
    """Wait until processes have ended; those whom nobody waited for count as ended."""
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, timeout=HANG_S)
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"still there after {HANG_S:g} s: {left}"


@pytest.mark.long
def test_in_the_driver(sevens):
    async def run():
        judge = Judge(**keys_of(sevens))
        try:
            scores = await asyncio.gather(*(judge.score(ANSWER) for _ in range(3)))
            (server,) = servers_of(sevens)
            words = server.cmdline()
            server.send_signal(signal.SIGKILL)
            scores.append(await judge.score(ANSWER))
            (second,) = servers_of(sevens)
        finally:
            await judge.close()
        await until_gone([server, second])
        with pytest.raises(RewardFailed, match="was closed"):
            await judge.score(ANSWER)
        return scores, words, judge.counts

    scores, words, counts = asyncio.run(run())
    assert scores == [0.7] * 4
    assert words[words.index("--device") + 1] == "cpu"
    assert counts == {"malformed": 0, "failed": 1, "restarts": 1}


def test_an_engine_that_does_not_start_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run():
        server = OwnServer({"kind": "torch", "python": str(tmp_path / "python")}, "sevens", RestartLimit(most=1))
        errors = []
        for _ in range(3):
            with pytest.raises(RewardFailed) as raised:
                await server.calls()
            errors.append(str(raised.value))
        logs = [path.parent for path in tmp_path.glob("roost-judge-*/*.log")]
        await server.close()
        return errors, logs

    (first, second, third), logs = asyncio.run(run())
    assert logs and not list(tmp_path.glob("roost-judge-*")), "its logs go with it"
    assert "does not start: judge could not be started with" in first and "does not start" in second
    assert "was started again 1 times in the last 600 s" in third


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("ROOST_FAKE_ACCELERATORS", "1")
        end_ray()
        with Cluster(num_nodes=1, address="local") as cluster:
            yield cluster


@pytest.mark.long
def test_in_a_worker_on_an_accelerator(cluster, sevens):
    keys = {"_target_": "roost.rollout.rewards.judge.Judge", **keys_of(sevens)}
    group = WorkerWithNumber.create_group("judge", keys)
    group = group.launch(cluster, name="reward.judge", placement_strategy=PackedPlacementStrategy(0, 0), restarts=1)
    group.wait_ready(timeout=HANG_S)

    async def run():
        rewards = Rewards(Routing((Route("judge"),)), {}, {"judge": group})
        await rewards.prepare()
        (server,) = servers_of(sevens)
        words, rank = server.cmdline(), server.environ().get("RANK")
        scores = [(await rewards.score(ANSWER)).reward]
        os.kill((await group.pid())[0], signal.SIGKILL)
        await until_gone([server])
        scores.append((await rewards.score(ANSWER)).reward)  # by the worker that came after it
        (second,) = servers_of(sevens)
        await rewards.close()
        await until_gone([second])
        return scores, words, rank

    try:
        scores, words, rank = asyncio.run(run())
    finally:
        group.close()
    assert scores == [0.7, 0.7]
    assert words[words.index("--device") + 1] == "auto"
    assert rank is None, "a server must not take its worker's rank for its own"
