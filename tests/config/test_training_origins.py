"""Every training setting has its value and its origin, in the plan, in its JSON and in words."""

import json

import pytest

import roost
from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.job import Origin
from roost.config.notations.notation import read_job
from roost.config.train import SETTINGS
from tests.cli.terminal import run, write

RLINF = """
cluster: {num_nodes: 1, num_gpus_per_node: 2, component_placement: {actor: 0, rollout: 1}}
actor:
  optim:
    lr: 2.0e-5
  model: {model_path: some/model}
algorithm:
  ratio_clip_eps: 0.3
runner:
  max_steps: 7
train:
  task: {_target_: my.Task}
  num_generations: 4
"""
LOOP = """
rl:
  gpu_allocation: {learning_gpus: [0], inference_gpus: [1]}
train:
  task: {_target_: my.Task}
  model: some/model
"""


def origins(text, folder, *overrides):
    plan = roost.plan(write(folder, text), overrides=overrides)
    return {setting.name: setting for setting in plan.training}, plan


def test_every_setting_is_in_the_plan(tmp_path):
    found, _ = origins(RLINF, tmp_path)
    assert list(found) == list(SETTINGS)


@pytest.fixture(scope="module")
def overridden(tmp_path_factory):
    found, _ = origins(RLINF, tmp_path_factory.mktemp("job"), "runner.max_steps=3", "+train.top_p=0.5")
    return found


@pytest.mark.parametrize(
    ("name", "value", "origin", "key", "line"),
    [
        ("num_generations", 4, Origin.CONFIG, "train.num_generations", 13),
        ("learning_rate", 2e-5, Origin.CONFIG, "actor.optim.lr", 5),
        ("clip_range", 0.3, Origin.CONFIG, "algorithm.ratio_clip_eps", 8),
        ("model", "some/model", Origin.CONFIG, "actor.model.model_path", 6),
        ("max_steps", 3, Origin.OVERRIDE, "runner.max_steps", None),
        ("top_p", 0.5, Origin.OVERRIDE, "train.top_p", None),
        ("episode_attempts", 3, Origin.ROOST, None, None),
    ],
)
def test_a_settings_origin(name, value, origin, key, line, overridden):
    setting = overridden[name]
    assert setting.value == pytest.approx(value)
    assert setting.origin is origin
    assert [(place.key_path, place.line) for place in setting.keys] == ([(key, line)] if key else [])


def test_a_notations_default_is_told_from_roosts(tmp_path):
    found, _ = origins(LOOP, tmp_path)
    assert (found["clip_range_high"].value, found["clip_range_high"].origin, found["clip_range_high"].keys) == (
        0.1,
        Origin.NOTATION,
        (),
    )
    assert found["episode_attempts"].origin is Origin.ROOST


def test_a_plan_keeps_its_settings_through_json(tmp_path):
    _, plan = origins(RLINF, tmp_path, "runner.max_steps=3")
    again = roost.Plan.from_json(plan.to_json())
    assert again.training == plan.training
    assert again.to_dict() == plan.to_dict()
    described = json.loads(run("plan", write(tmp_path, RLINF), "--json").stdout)["training"]
    assert described["learning_rate"]["value"] == 2e-5
    (key,) = described["learning_rate"]["keys"]
    assert (key["path"], key["line"]) == (["actor", "optim", "lr"], 5)


def test_a_plan_of_an_older_version_is_read(tmp_path):
    _, plan = origins(RLINF, tmp_path)
    older = {key: value for key, value in plan.to_dict().items() if key != "training"}
    assert roost.Plan.from_dict(older).training == ()


def test_a_config_that_only_places_has_no_settings():
    cluster = {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor": 0}}
    assert roost.plan({"cluster": cluster}).training == ()


def test_a_mapping_that_overrides_wrote(tmp_path):
    found, _ = origins(RLINF, tmp_path, "+train.engine_options.max_context=64")
    setting = found["engine_options"]
    assert (setting.origin, str(setting.keys[0])) == (
        Origin.OVERRIDE,
        "command line train.engine_options.max_context",
    )


def test_explain_says_it_in_words(tmp_path):
    job = write(tmp_path, RLINF)
    words = run("explain", job, "train.learning_rate", width=300)
    assert words.exit_code == 0
    assert words.stdout.startswith(f"learning_rate is 2e-05, from {job}:5:5 actor.optim.lr.\n")
    overridden = run("explain", job, "train.learning_rate", "actor.optim.lr=1e-4", width=300).stdout
    assert overridden.startswith("learning_rate is 0.0001, from command line actor.optim.lr.\n")
    default = run("explain", job, "train.episode_attempts", width=300).stdout
    assert default.startswith("episode_attempts is 3, from Roost's default.\n")
    assert "ml-loop's default" in run("explain", write(tmp_path, LOOP), "train.clip_range").stdout


def test_explain_lists_all_of_them(tmp_path):
    lines = run("explain", write(tmp_path, RLINF), "train", width=200).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SETTINGS)
    assert "actor.optim.lr, line 5" in next(line for line in lines if line.startswith("learning_rate"))


def test_explain_of_no_setting(tmp_path):
    result = run("explain", write(tmp_path, RLINF), "train.lerning_rate")
    assert result.exit_code == 1
    assert "did you mean learning_rate?" in result.stderr


def test_diff_shows_settings_that_change(tmp_path):
    job = write(tmp_path, RLINF)
    result = run("diff", job, job, "--after", "actor.optim.lr=1e-4")
    assert result.stdout.splitlines() == ["train.learning_rate: 2e-05 -> 0.0001", "1 change"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("none", "drain", "seq-mean-token-mean")),
        (("+train.max_staleness=1",), ("token", "hold", "seq-mean-token-mean")),
        (("+train.max_staleness=1", "+train.importance_sampling_level=sequence"), ("token", "hold", None)),
        (("+train.max_staleness=1", "+train.importance_sampling_level=trajectory"), ("trajectory", "hold", None)),
        (("+train.max_staleness=1", "+train.engine=vllm"), ("token", "drop", None)),
        (("+train.max_staleness=1", "+train.lora_rank=8"), ("token", "drop", None)),
        (("+train.rollout_is=turn", "+train.in_flight=drop"), ("turn", "drop", None)),
        (("+train.loss_aggregation=token-mean",), ("none", "drain", "token-mean")),
    ],
)
def test_defaults_that_follow_from_other_settings_are_shown(overrides, expected, tmp_path):
    found, _ = origins(RLINF, tmp_path, *overrides)
    shown = tuple(found[name].value for name in ("rollout_is", "in_flight", "value_loss_aggregation"))
    assert shown == (*expected[:2], expected[2] or "seq-mean-token-mean")
    job = read_job(load(write(tmp_path, RLINF), overrides, Findings()), Findings(), trains=True)
    assert job.training.in_flight_mode == shown[1]


@pytest.mark.parametrize(
    ("overrides", "name", "value", "key"),
    [
        (("~algorithm.ratio_clip_eps", "+train.clip_range=0.1"), "clip_range_high", 0.1, "train.clip_range"),
        (("+algorithm.importance_sampling_fix=true",), "rollout_is", "token", "algorithm.importance_sampling_fix"),
        (("+actor.training_backend=fsdp", "+algorithm.clip_ratio_c=null"), "dual_clip", None, "algorithm.clip_ratio_c"),
        (
            ("+train.loss_aggregation=token-mean",),
            "value_loss_aggregation",
            "token-mean",
            "train.loss_aggregation",
        ),
    ],
)
def test_a_default_that_a_key_decides_has_that_key(overrides, name, value, key, tmp_path):
    found, _ = origins(RLINF, tmp_path, *overrides)
    setting = found[name]
    assert (setting.value, [where.key_path for where in setting.keys]) == (value, [key])
    assert setting.origin is Origin.OVERRIDE
    plain, _ = origins(RLINF, tmp_path, "~algorithm.ratio_clip_eps")
    assert plain[name].origin is Origin.ROOST


def test_the_header_shows_how_advantages_are_whitened(tmp_path):
    job = write(tmp_path, RLINF)
    whitened = ("+algorithm.adv_type=rloo", "+algorithm.normalize_advantages=true")
    words = run("plan", job, *whitened, width=300).stdout
    assert "whiten_advantages=tokens_biased" in words
    assert "whiten_advantages=True" not in words
