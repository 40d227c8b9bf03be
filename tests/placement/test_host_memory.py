"""Host memory of nodes: figures of plans against the bytes that a real learner has there."""

import json

import numpy as np
import pytest

import roost
from roost.config.train import OptimizerSettings, OptimizerType
from roost.engines.tiny_model import write_tiny_model
from roost.learner import checkpoint, model as learner_model
from roost.learner.checkpoint import state_bytes
from roost.learner.learner import Learner
from roost.learner.residence import plain_tensors
from roost.placement.memory.host import host_uses
from roost.placement.memory.phases import Phase
from tests.learner.random_samples import CPU, random_samples, settings_of, trained

GIB = 2**30
OFFLOADS = {f"offload_{part}": True for part in ("weight", "grad", "optimizer")}
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048}


def job(model, placement, nodes=1, per_node=1, actor=OFFLOADS, **train):
    return {
        "cluster": {"num_nodes": nodes, "num_gpus_per_node": per_node, "component_placement": placement},
        "actor": {"model": {"model_path": str(model)}, **actor},
        "train": {"task": {"_target_": "my_tasks.Sums"}, "compute_dtype": "bfloat16", **train},
    }


def machines(nodes, per_node, **fields):
    return {"nodes": [{"count": nodes, "accelerators": per_node, "memory_gb": 80, **fields}]}


def uses(plan):
    """Bytes by moment and part, on each node."""
    found = {}
    for use in host_uses(plan.components, plan.residency, plan.inventory):
        found[use.moment] = {}
        for name, size in use.parts:
            found[use.moment][name] = found[use.moment].get(name, 0) + size * GIB
    return found


@pytest.mark.parametrize("kind", list(OptimizerType))
def test_a_plan_counts_the_bytes_of_a_real_learner(kind, tmp_path, monkeypatch):
    if kind is OptimizerType.ADAMW_8BIT:
        pytest.importorskip("torchao")
    folder = write_tiny_model(tmp_path / "model", **SIZES)
    found = uses(roost.plan(job(folder, {"actor,rollout": "0"}, optimizer=kind.value), machines(1, 1)))
    learning = found["the phase learn"]

    copied, exported = [], []
    write, gather = checkpoint.save, learner_model._on_first_rank
    monkeypatch.setattr(
        checkpoint, "save", lambda state, **options: copied.append(state_bytes(state)) or write(state, **options)
    )

    def gathered(*arguments):
        weights = gather(*arguments)
        exported.append(sum(each.nbytes for each in weights.values()))
        return weights

    monkeypatch.setattr(learner_model, "_on_first_rank", gathered)
    optimizer = OptimizerSettings(learning_rate=1e-3, optimizer=kind)
    one = Learner(settings_of(str(folder), optimizer=optimizer, compute_dtype="bfloat16"), CPU)
    trained(one, random_samples(12, 9))
    numbers = [
        part.nbytes
        for weight, state in one._optimizer.saved().items()
        for name, each in state.items()
        if each is not one._optimizer.state[weight][name]
        for part in plain_tensors(each)
    ]
    one.save(tmp_path / "step")
    one.wait_saved()
    one.export(tmp_path / "policy")
    one.offload()
    buffers = sum(each.content.nbytes for away in one._residence._away.values() for each in away)

    near = {"rel": 0.01, "abs": 1}
    assert learning["actor"] == pytest.approx(buffers, **near)
    assert learning["checkpoint of actor"] == pytest.approx(copied, **near)
    assert learning["8-bit moments of actor"] == pytest.approx(sum(numbers), **near)
    assert bool(numbers) is (kind is OptimizerType.ADAMW_8BIT)
    assert found["the export of the policy"]["export of actor"] == pytest.approx(exported, **near)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    described = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder


COUNT = 7_615_616_512  # parameters of Qwen2.5-7B


def test_processes_of_a_node_are_added_up_and_the_first_rank_exports(qwen):
    """Six learner processes: four on the first node, two on the second."""
    plan = roost.plan(job(qwen, {"actor,rollout": "0-5"}, 2, 4), machines(2, 4))
    found = uses(plan)
    processes = np.array([4, 2])
    for phase in Phase:
        now = found[f"the phase {phase.value}"]
        assert now["actor"] == pytest.approx(COUNT * 12 / 6 * processes), "the buffers stay"
        assert now["checkpoint of actor"] == pytest.approx(COUNT * 12 / 6 * processes)
        assert now["rollout"] == pytest.approx(COUNT * 2 * processes * (phase is Phase.LEARN or phase is Phase.INFER))
    end = found["the export of the policy"]
    assert end["export of actor"] == pytest.approx([COUNT * 2, 0])
    assert "checkpoint of actor" not in end


@pytest.mark.parametrize(
    ("actor", "train", "buffers", "copy"),
    [
        pytest.param({}, {}, 0, 12, id="nothing leaves the device"),
        pytest.param({}, {"optimizer_cpu_offload": True}, 8, 12, id="state on the host"),
        pytest.param({}, {"weight_dtype": "bfloat16"}, 0, 6, id="16 bits"),
    ],
)
def test_what_a_learner_of_its_own_has_on_the_host(qwen, actor, train, buffers, copy):
    config = job(qwen, {"actor": "0-3", "rollout": "4-7"}, 1, 8, actor, **train)
    now = uses(roost.plan(config, machines(1, 8)))["the phase generate"]
    assert now["actor"] == pytest.approx(COUNT * buffers)
    assert now["checkpoint of actor"] == pytest.approx(COUNT * copy)


def test_a_job_that_roost_does_not_train_has_neither_buffers_nor_checkpoints(qwen):
    config = job(qwen, {"actor,rollout": "0-3"}, 1, 4)
    del config["train"]
    found = uses(roost.plan(config, machines(1, 4)))
    assert found["the phase generate"]["actor"] > 0 == found["the phase learn"]["actor"]
    assert not found["the phase learn"]["checkpoint of actor"].any()


def test_a_checkpoint_may_be_what_does_not_fit(qwen):
    with pytest.raises(
        roost.ConfigError, match=r"node 0: needs 1\d\d\.\d GiB of host memory in the phase generate"
    ) as caught:
        roost.plan(job(qwen, {"actor,rollout": "0-7"}, 1, 8), machines(1, 8, host_memory_gb=100))
    assert "checkpoint of actor 85.1" in caught.value.findings[0].why
