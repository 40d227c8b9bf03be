"""Decisions of a run's setup: the sleep level of engines, and the devices of models."""

import pytest

import roost
from roost.config.train import AdapterSettings, LearnerSettings, TrainSettings
from roost.trainer.setup import has_gpus, sleep_level_of

LEVELS = [
    pytest.param(None, 2, id="all-weights-come-anew"),
    pytest.param(AdapterSettings(), 1, id="only-an-adapter-comes"),
]


@pytest.mark.parametrize(("adapter", "level"), LEVELS)
def test_weights_are_kept_where_only_an_adapter_comes(adapter, level):
    assert sleep_level_of(TrainSettings(LearnerSettings("model", adapter=adapter), name="")) == level


@pytest.mark.parametrize(("kind", "expected"), [("NV_GPU", True), ("AMD_GPU", True), ("SIMULATED", False)])
def test_models_run_on_gpus(kind, expected):
    assert has_gpus(plan_on(kind)) is expected


def test_accelerators_that_models_cannot_run_on_are_refused():
    with pytest.raises(ValueError, match="models run on NV_GPU, AMD_GPU and simulated accelerators, not on NPU"):
        has_gpus(plan_on("NPU"))


def plan_on(kind):
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "all"}}}
    return roost.plan(config, {"nodes": [{"accelerators": 2, "accelerator_type": kind}]})
