"""ROLL's agentic configs as tasks."""

import inspect

import pytest

from roost.config.compose import load
from roost.config.data import AGENTS
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.config.notations.roll_data import AGENT, ENVIRONMENT, FIELDS, GAMES, TASKS
from roost.rollout.agents.templated import Templates
from roost.rollout.environments import text_games
from roost.rollout.environments.environment import Observation
from roost.rollout.environments.text_games import TextGame

LAKE = {
    "env_type": "frozen_lake",
    "env_manager_cls": "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager",
    "max_steps": 10,
    "max_tokens_per_step": 64,
    "use_thread_lock": True,
    "agent_system_template": "You play.",
    "agent_template": "Turn {turn_idx}:\n{observation}",
    "env_config": {"is_slippery": False, "format_penalty": -0.01, "max_steps": 10},
}
BOXES = {
    **LAKE,
    "env_type": "sokoban",
    "env_manager_cls": "StepEnvManager",
    "max_steps": 12,
    "history_length": 5,
    "agent_template": "{history} {current_observation}",
    "env_config": {"dim_room": [6, 6], "num_boxes": 1, "grid_lookup": {0: "W", 1: "."}},
}
JOB = {
    "pretrain": "Qwen/Qwen2.5-0.5B-Instruct",
    "actor_train": {"device_mapping": [0]},
    "actor_infer": {"device_mapping": [1], "generating_args": {"max_new_tokens": 128, "temperature": 0.99}},
    "adv_estimator": "grpo",
    "sequence_length": 4096,
    "rollout_batch_size": 32,
    "val_batch_size": 16,
    "train_env_manager": {
        "num_env_groups": 8,
        "group_size": 4,
        "tags": ["Lake", "Boxes"],
        "num_groups_partition": [6, 2],
    },
    "val_env_manager": {"num_env_groups": 4, "group_size": 2, "tags": ["Boxes", "Lake"]},
    "custom_envs": {"Lake": LAKE, "Boxes": BOXES},
}


def changed(path, value):
    """JOB with one key changed, or removed with None."""
    *above, last = path.split(".")
    job = inner = dict(JOB)
    for key in above:
        inner[key] = inner = dict(inner[key])
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return job


def read(config):
    findings = Findings()
    return read_job(load(config, (), findings), findings, trains=True), findings


def test_an_agentic_config_is_a_task_without_a_section_train():
    job, findings = read(JOB)
    assert not findings.has_errors, findings.errors
    task, settings = job.training.task, job.training
    assert task["_target_"] == AGENTS
    assert task["tasks"] == {
        "_target_": TASKS,
        "train": {"Lake": 6, "Boxes": 2},
        "evaluation": {"Boxes": 4, "Lake": 4},
        "seed": 42,
    }
    games = task["environment"]["games"]
    assert task["environment"]["_target_"] == ENVIRONMENT
    assert games["Lake"] == {"env_type": "frozen_lake", "is_slippery": False, "format_penalty": -0.01, "max_steps": 10}
    assert games["Boxes"]["grid_lookup"] == {0: "W", 1: "."}
    assert task["agent"]["_target_"] == AGENT
    assert task["agent"]["tags"]["Lake"] == {
        "agent_template": LAKE["agent_template"],
        "agent_system_template": "You play.",
        "history": "trajectory",
        "max_steps": 10,
        "max_tokens_per_step": 64,
    }
    assert task["agent"]["tags"]["Boxes"]["history"] == "step"
    assert task["agent"]["tags"]["Boxes"]["history_length"] == 5
    assert (task["max_turns"], task["max_sequence_length"]) == (12, 4096)
    assert (settings.evaluation.eval_tasks, settings.evaluation.eval_samples) == (8, 2)
    assert (settings.rollout.prompts_per_step, settings.rollout.num_generations) == (8, 4)


def test_a_plan_without_a_section_train_only_places():
    findings = Findings()
    job = read_job(load(JOB, (), findings), findings)
    assert job.training is None
    assert not findings.warnings


def test_turns_bound_new_tokens_where_nothing_else_does():
    job, _ = read(changed("actor_infer.generating_args", None))
    assert job.training.sampling.max_new_tokens == 64


def test_templates_before_and_after_the_state():
    envs = {
        "Lake": {**LAKE, "pre_step_template": "State:\n", "next_step_template": "\n{actions_left} left."},
        "Boxes": BOXES,
    }
    del envs["Lake"]["agent_template"]
    job, findings = read({**JOB, "custom_envs": envs})
    assert not findings.has_errors
    assert job.training.task["agent"]["tags"]["Lake"]["agent_template"] == "State:\n{observation}\n{actions_left} left."


def test_an_own_task_is_kept_and_said_to_be():
    job, findings = read({**JOB, "train": {"task": {"_target_": "my.Task"}}})
    assert job.training.task == {"_target_": "my.Task"}
    assert next(str(each) for each in findings.warnings if "custom_envs" in str(each)).startswith(
        "warning RST-T014: custom_envs: is not followed: train.task runs the episodes"
    )


@pytest.mark.parametrize(
    ("path", "value", "reported"),
    [
        ("train_env_manager.tags", None, "names no environments"),
        ("train_env_manager.tags", ["Lakes"], "[6, 2], which does not share out 8 groups among 1 tags"),
        ("train_env_manager.num_groups_partition", [6, 1], "does not share out 8 groups among 2 tags"),
        ("custom_envs.Boxes", None, "Boxes is not in custom_envs"),
        ("custom_envs.Lake.env_type", "webshop", "webshop is not an environment that Roost has"),
        ("custom_envs.Lake.env_type", None, "custom_envs.Lake.env_type: is missing"),
        ("custom_envs.Lake.env_config.sizes", 3, "custom_envs.Lake.env_config.sizes: is not a key Roost knows"),
        ("custom_envs.Lake.env_config.action_pattern", "<answer>", "not a regular expression with a group"),
        ("custom_envs.Lake.env_manager_cls", "x.TirEnvManager", "TirEnvManager is not supported"),
        ("custom_envs.Lake.agent_template", None, "agent_template: is missing"),
        ("custom_envs.Lake.agent_template", "{state}", "has the field {state}, which nothing fills"),
        ("custom_envs.Lake.agent_template", "{state", "is not a format string"),
        ("custom_envs.Boxes.agent_template", "{observation}", "has the field {observation}, which nothing fills"),
        ("custom_envs.Lake.max_steps", None, "custom_envs.Lake.max_steps: is missing"),
    ],
)
def test_what_cannot_be_played_is_an_error_at_its_key(path, value, reported):
    _, findings = read(changed(path, value))
    assert any(reported in str(each) for each in findings.errors), findings.found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("custom_envs.Lake.env_manager_cls", "VLTrajEnvManager"),
        ("custom_envs.Lake.env_manager_cls", "ProxyEnvManager"),
        ("custom_envs.Lake.env_config.render_mode", "rgb_array"),
    ],
)
def test_images_and_programs_are_played_as_text_with_a_warning(path, value):
    job, findings = read(changed(path, value))
    assert [each.code for each in findings.warnings if each.where.key_path == path] == ["RST-T047"]
    assert job.training.task["agent"]["tags"]["Lake"]["history"] == "trajectory"


@pytest.mark.parametrize("path", ["tool_wrapper", "agent_runner_cls"])
def test_other_keys_of_an_environment_are_not_followed_in_silence(path):
    _, findings = read(changed(f"custom_envs.Lake.{path}", "some"))
    assert any(path in str(each) for each in findings.warnings)


@pytest.mark.parametrize("env_type", GAMES)
def test_a_game_takes_the_keys_that_its_config_may_have(env_type):
    game = text_games.GAMES[env_type]
    names = {*inspect.signature(game).parameters, *inspect.signature(TextGame).parameters} - {"keys"}
    assert names == set(GAMES[env_type])
    assert set(text_games.GAMES) == set(GAMES)


@pytest.mark.parametrize("history", FIELDS)
def test_the_fields_of_a_template_are_filled(history):
    template = " ".join(f"{{{field}}}" for field in FIELDS[history])
    Templates(template, history=history, max_tokens_per_step=5).messages("rules", [], Observation("map"))


def test_tools_of_an_agent_loop_are_not_used_beside_a_task():
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}},
        "agentloop": {"max_turns": 2, "print_outputs": True},
        "tools": {"search": {"server_addr": "0.0.0.0:8000", "topk": 3}},
        "train": {"model": "m", "task": {"_target_": "my.Task"}},
    }
    _, findings = read(config)
    reported = "\n".join(str(each) for each in findings.warnings)
    assert "agentloop.max_turns: is not followed" in reported
    assert "tools.search.topk: is not followed" in reported
    assert "remove train.task, or the tools" in reported
