"""Decisions of a run's setup: the sleep level of engines, the devices of models, and the settings of scorers."""

from dataclasses import replace

import pytest

import roost
from roost.config.train import AdapterSettings, LearnerSettings, TrainSettings
from roost.learner.learner import Learner
from roost.trainer.setup import has_gpus, scorer_group, sleep_level_of
from tests.learner.conftest import models  # noqa: F401
from tests.learner.random_samples import CPU, settings_of

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


SCORERS = [
    pytest.param("reference", "qwen2", 0.0, id="dense-reference"),
    pytest.param("reference", "qwen3_moe", 0.0, id="reference-that-is-not-trained"),
    pytest.param("teacher", "qwen2", 0.0, id="dense-teacher"),
    pytest.param("critic", "qwen2", 0.0, id="dense-critic"),
    pytest.param("critic", "qwen3_moe", 0.1, id="critic-with-routers"),
]


@pytest.mark.parametrize(("name", "family", "coefficient"), SCORERS)
def test_scorers_beside_a_mixture_balance_only_routers_that_they_train(models, name, family, coefficient):  # noqa: F811
    config = {
        "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": 0, name: 1}},
        "actor": {"model": {"model_path": models("qwen3_moe")}},
        name: {"model": {"model_path": models(family)}},
    }
    plan = roost.plan(config, {"nodes": [{"accelerators": 2}]})
    learner = settings_of(models("qwen3_moe"), router_aux_loss_coef=0.1)
    group = scorer_group(plan, name, learner, learner.optimizer, threads=1)
    settings, head, *_ = group.args
    assert settings.router_aux_loss_coef == coefficient
    Learner(replace(settings, parallel=learner.parallel), CPU, head, **group.kwargs)
