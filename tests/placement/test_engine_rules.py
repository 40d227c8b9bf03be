"""Rules about engines and model files, and that no finding depends on an unrelated folder."""

import json
from contextlib import chdir
from dataclasses import fields
from pathlib import Path

import pytest

from roost.config.engine_options import FORMS
from roost.config.findings import Findings, Severity, shown
from roost.config.train import SETTINGS
from roost.engines.command import ServerSpec
from roost.placement.planner import try_plan
from roost.placement.rules.engines import OPTIONS

EXAMPLES = Path(__file__).parents[2] / "examples"
# What a plan or another setting decides; written twice, one of them would be ignored.
DECIDED = {"kind", "model", "name", "device", "tensor", "pipeline", "dtype", "seed", "sleeps", "lora_rank"}


def job(model="org/model", rollout="1", **train):
    return {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor": "0", "rollout": rollout}},
        "train": {"task": {"_target_": "my_tasks.Sums"}, "model": str(model), **train},
    }


def found(config):
    findings = Findings()
    try_plan(config, findings)
    return [(str(each.severity), each.where.path[-1], each.what) for each in findings.found]


def model_of(folder, **config):
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", **config}))
    return folder


def test_options_are_those_of_servers():
    assert set(OPTIONS) == {field.name for field in fields(ServerSpec)} - DECIDED
    assert set(OPTIONS) <= set(FORMS)


@pytest.mark.parametrize(
    ("options", "key", "what"),
    [
        ({"max_contex": 64}, "max_contex", "is not an option of engines"),
        ({"tensor": 2}, "tensor", "is not an option of engines"),
        ({"max_context": "long"}, "max_context", "is 'long'; it must be a whole number above 0"),
        ({"memory_fraction": 90}, "memory_fraction", "is 90; it must be a number above 0, and at most 1"),
        ({"args": "--enforce-eager"}, "args", "is '--enforce-eager'; it must be a list of words of the command line"),
    ],
)
def test_options_that_no_engine_takes(options, key, what):
    assert found(job(engine_options=options)) == [("error", key, what)]


@pytest.mark.parametrize(
    ("config", "train", "is_found"),
    [
        pytest.param({"max_position_embeddings": 64}, {}, True, id="built-in"),
        pytest.param({"max_position_embeddings": 64}, {"engine": "vllm"}, True, id="vllm"),
        pytest.param({"text_config": {"max_position_embeddings": 64}}, {}, True, id="text-of-several-kinds"),
        pytest.param({"max_position_embeddings": 100}, {}, False, id="long-enough"),
        pytest.param({}, {}, False, id="unknown"),
        pytest.param(
            {"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}, {"engine": "vllm"}, False, id="scaled"
        ),
        pytest.param({"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}, {}, True, id="scaled-built-in"),
        pytest.param(
            {"max_position_embeddings": 64},
            {"engine": "vllm", "engine_options": {"max_context": 100, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}},
            False,
            id="allowed",
        ),
    ],
)
def test_a_context_beyond_the_models_positions(tmp_path, config, train, is_found):
    model = model_of(tmp_path, **config)
    expected = [("error", "max_context", "is 100, but the model has 64 positions")]
    train = {"engine_options": {"max_context": 100}, "max_new_tokens": 32, **train}
    assert found(job(model, **train)) == (expected if is_found else [])


@pytest.mark.parametrize(
    ("context", "train", "is_found"),
    [
        pytest.param(64, {}, True, id="less-than-a-completion"),
        pytest.param(256, {}, True, id="a-completion-and-no-prompt"),
        pytest.param(257, {}, False, id="room-for-a-prompt"),
        pytest.param(60, {"max_new_tokens": 32}, False, id="room-for-a-short-completion"),
    ],
)
def test_a_context_without_room_for_a_prompt(context, train, is_found):
    expected = [("warning", "max_context", f"is {context}, but max_new_tokens is 256")]
    assert found(job(engine_options={"max_context": context}, **train)) == (expected if is_found else [])


@pytest.mark.parametrize(
    ("config", "train", "is_found"),
    [
        pytest.param({"max_position_embeddings": 4096}, {}, True, id="built-in"),
        pytest.param({"max_position_embeddings": 4096}, {"engine": "vllm"}, True, id="vllm"),
        pytest.param({"max_position_embeddings": 8192}, {}, False, id="long-enough"),
        pytest.param(
            {"max_position_embeddings": 4096, "rope_scaling": {"factor": 4}}, {"engine": "vllm"}, False, id="scaled"
        ),
        pytest.param({}, {}, False, id="unknown"),
    ],
)
def test_a_completion_beyond_the_models_positions(tmp_path, config, train, is_found):
    model = model_of(tmp_path, **config)
    expected = [("warning", "max_new_tokens", "is 5000, but the model has 4096 positions")]
    assert found(job(model, max_new_tokens=5000, **train)) == (expected if is_found else [])


@pytest.mark.parametrize("model", ["/no/models/sums", "./nowhere", "~no-such-user/m", "x" * 5000])
def test_a_path_that_is_not_here_is_a_warning(model):
    """A plan is for machines that are elsewhere, and may have it."""
    (finding,) = found(job(model))
    assert finding == ("warning", "model", f"{shown(model)} does not exist on this machine")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_findings_of_examples_do_not_depend_on_runs(tmp_path, file):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after / "runs"):
        folder.mkdir(parents=True)
    reports = []
    for folder in (before, after):
        findings = Findings()
        with chdir(folder):
            try_plan(file, findings)
        reports.append(findings.found)
    assert reports[0] == reports[1]
    assert not [each for each in reports[0] if each.severity is Severity.ERROR and "exist" in each.what]


def test_the_settings_page_names_all_options():
    assert all(f"`{name}`" in SETTINGS["engine_options"].description for name in OPTIONS)


@pytest.mark.parametrize("component", ["rollout", "critic"])
def test_a_model_that_is_not_here_is_named_at_its_own_key(component, tmp_path):
    """The finding was at the component's placement."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "cluster: {num_nodes: 1, num_gpus_per_node: 4, component_placement: {'actor,critic': 0-1, rollout: 2-3}}\n"
        "actor: {model: {model_path: /no/such/model}}\n"
        f"{component}: {{model: {{model_path: /no/other/model}}}}\n"
        "train: {task: {_target_: my_tasks.Sums}, advantage_estimator: gae}\n"
    )
    findings = Findings()
    try_plan(file, findings)
    places = [str(each.where) for each in findings.found if each.code == "RST-E003" and "/no/other" in each.what]
    column = len(f"{component}: {{model: {{") + 1
    assert places == [f"{file}:3:{column} {component}.model.model_path"]
