"""RLinf's is_lora, which switches an adapter on, and its rank."""

import pytest

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.notations.notation import read_job


def read(model, **train):
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}},
        "actor": {"model": {"model_path": "org/model", **model}},
        "train": {"task": {"_target_": "my_tasks.Sums"}, **train},
    }
    findings = Findings()
    job = read_job(load(config, (), findings), findings)
    adapter = job.training.learner.adapter
    return [(each.code, each.where.path) for each in findings.found], adapter and adapter.lora_rank, job


IDLE = ("RST-T014", ("actor", "model", "lora_rank"))
CONTRADICTS = ("RST-T008", ("train", "lora_rank"))


@pytest.mark.parametrize(
    ("model", "train", "expected", "rank"),
    [
        pytest.param({"is_lora": True, "lora_rank": 16}, {}, [], 16, id="switched-on"),
        pytest.param({"is_lora": False, "lora_rank": 16}, {}, [], None, id="switched-off"),
        pytest.param({"lora_rank": 16}, {}, [IDLE], None, id="not-switched-on"),
        pytest.param({"lora_rank": 16}, {"lora_rank": 16}, [], 16, id="of-train-too"),
        pytest.param({"lora_rank": 16}, {"lora_rank": 32}, [CONTRADICTS], 32, id="another-rank"),
        pytest.param({"is_lora": False, "lora_rank": 32}, {"lora_rank": 32}, [CONTRADICTS], 32, id="off-and-on"),
        pytest.param({}, {"lora_rank": 32}, [], 32, id="of-train-alone"),
    ],
)
def test_a_rank_needs_is_lora(model, train, expected, rank):
    found, trained, _ = read(model, **train)
    assert found == expected
    assert trained == rank


def test_a_rank_without_is_lora_counts_as_ignored():
    _, _, job = read({"lora_rank": 16})
    (use,) = (use for use in job.keys if use.where.path == ("actor", "model", "lora_rank"))
    assert use.is_unused(trains=True)
    (setting,) = (setting for setting in job.resolved if setting.name == "lora_rank")
    assert not setting.keys
