"""The data keys of the notations, as `train.data`."""

from roost.config.compose import load
from roost.config.data import SCENARIO
from roost.config.findings import Findings
from roost.config.notations.notation import read_job

REWARDS = {"exact": {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer"}}
RLINF = {
    "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}},
    "actor": {"model": {"model_path": "some/model"}},
    "data": {
        "type": "math",
        "train_data_paths": ["a.jsonl", "b.jsonl"],
        "val_data_paths": ["c.jsonl"],
        "prompt_key": "prompt",
        "answer_key": "solutions",
        "apply_chat_template": False,
        "max_prompt_length": 1024,
        "filter_prompt_by_length": True,
        "data_size": 500,
        "shuffle": True,
        "seed": 1234,
        "rollout_batch_size": 16,
    },
}
ROLL = {
    "num_gpus_per_node": 2,
    "pretrain": "some/model",
    "prompt_length": 2048,
    "rollout_batch_size": 64,
    "adv_estimator": "grpo",
    "actor_train": {
        "device_mapping": [0],
        "data_args": {
            "template": "qwen3",
            "file_name": ["a.jsonl"],
            "messages": "messages",
            "domain_interleave_probs": {"math_rule": 0.6, "code_sandbox": 0.4},
        },
    },
    "actor_infer": {"device_mapping": [1]},
    "validation": {"data_args": {"file_name": ["c.jsonl"]}},
    "rewards": {
        "math_rule": {"tag_included": ["aime"], "world_size": 1},
        "code_sandbox": {"tag_included": ["KodCode"], "world_size": 1},
    },
}


def training(config, **train):
    findings = Findings()
    job = read_job(load({**config, "train": train}, (), findings), findings)
    return job.training, findings


def codes(findings):
    return [each.code for each in findings.found]


def test_rlinf_data_are_the_task():
    settings, findings = training(RLINF, rewards=REWARDS)
    assert not findings.errors
    assert settings.data == {
        "path": ["a.jsonl", "b.jsonl"],
        "prompt": "prompt",
        "answer": "solutions",
        "chat_template": False,
        "max_prompt_tokens": 1024,
        "overlong": "filter",
        "limit": 500,
        "shuffle": True,
        "seed": 1234,
        "drop_last": True,
        "eval": ["c.jsonl"],
    }
    assert settings.task == {"_target_": SCENARIO, **settings.data, "batch_size": 16}
    assert settings.evaluation.eval_tasks == 0


def test_rlinf_cuts_prompts_that_it_does_not_filter():
    data = {**RLINF["data"], "filter_prompt_by_length": False, "data_size": -1}
    settings, _ = training({**RLINF, "data": data}, rewards=REWARDS)
    assert settings.data["overlong"] == "truncate" and "limit" not in settings.data
    settings, findings = training({**RLINF, "data": {**data, "type": "vlm"}}, rewards=REWARDS)
    assert "RST-T160" in codes(findings) and "RST-T003" not in codes(findings)


def test_rlinf_data_with_images():
    """Robo2vlm has columns of its own; the base data set has those that are named, and no choices."""
    of_images = {"type": "vlm", "image_keys": ["image"], "use_chat_template": True, "choice_key": "choices"}
    data = {**RLINF["data"], **of_images, "dataset_name": "robo2vlm"}
    settings, findings = training({**RLINF, "data": data}, rewards=REWARDS)
    assert not findings.errors
    found = {key: settings.data[key] for key in ("prompt", "choices", "answer", "images", "chat_template")}
    assert found == {
        "prompt": "question",
        "choices": "choices",
        "answer": "correct_answer",
        "images": ["image"],
        "chat_template": True,
    }
    assert "<answer>" in settings.data["system_prompt"]
    base = {**data, "dataset_name": "base", "system_prompt": "be brief"}
    settings, findings = training({**RLINF, "data": base}, rewards=REWARDS)
    assert "RST-T060" in codes(findings)
    settings, findings = training({**RLINF, "data": {**base, "choice_key": None}}, rewards=REWARDS)
    assert not findings.errors
    assert (settings.data["prompt"], settings.data["system_prompt"]) == ("prompt", "be brief")


def test_roll_data_are_the_task():
    settings, findings = training(ROLL, rewards=REWARDS, task=None)
    assert "RST-T013" not in codes(findings)
    assert settings.data == {
        "path": ["a.jsonl"],
        "prompt": "messages",
        "optional_answer": "ground_truth",
        "chat_template": True,
        "template_arguments": {"enable_thinking": True},
        "max_prompt_tokens": 2048,
        "min_prompt_tokens": 6,
        "optional_tag_column": "tag",
        "domain_column": "domain",
        "domains": {"math_rule": ["aime"], "code_sandbox": ["KodCode"]},
        "default_domain": "math_rule",
        "mix": {"math_rule": 0.6, "code_sandbox": 0.4},
        "eval": ["c.jsonl"],
    }
    assert settings.task["batch_size"] == 64 and settings.evaluation.eval_tasks == 0


def test_roll_prompts_of_the_column_prompt_get_no_template():
    arguments = {"file_name": "a.jsonl", "prompt": "text", "template": "qwen2_5"}
    config = {**ROLL, "actor_train": {"device_mapping": [0], "data_args": arguments}}
    settings, _ = training(config, rewards=REWARDS)
    assert settings.data["prompt"] == "text" and settings.data["chat_template"] is False


def test_templates_of_roll():
    settings, _ = training(
        {**ROLL, "global_template": "chatml", "tag_to_template": {"aime": "native", "math": "qwen3"}}, rewards=REWARDS
    )
    assert settings.data["chat_template"] == "chatml"
    thinking = {"chat_template": True, "template_arguments": {"enable_thinking": True}}
    assert settings.data["tag_templates"] == {"aime": {"chat_template": True}, "math": thinking}
    settings, findings = training({**ROLL, "global_template": "qwen2-vl"}, rewards=REWARDS)
    assert settings.data["chat_template"] is True and "RST-T082" not in codes(findings)
    _, findings = training({**ROLL, "global_template": "longCOT_qwen2.5"}, rewards=REWARDS)
    assert "RST-T013" in codes(findings)


def test_what_train_says_of_the_data_wins_key_by_key():
    settings, findings = training(RLINF, rewards=REWARDS, data={"path": "other.parquet", "limit": 10})
    assert not findings.errors
    assert settings.data["path"] == "other.parquet" and settings.data["answer"] == "solutions"


def test_held_out_rows_and_evaluation_sets_exclude_each_other():
    assert codes(training(RLINF, rewards=REWARDS, data={"held_out": 10})[1]) == ["RST-T060"]


def test_data_need_a_reward_and_no_other_task():
    assert "RST-T061" in codes(training(RLINF)[1])
    settings, findings = training(RLINF, task={"_target_": "my_tasks.Sums"})
    assert "RST-T062" in codes(findings) and settings.task == {"_target_": "my_tasks.Sums"}


def test_agents_take_their_tasks_from_the_data():
    task = {"_target_": "roost.rollout.agents.scenario.AgentScenario", "agent": {}, "environment": {}}
    settings, findings = training(RLINF, task=task)
    assert "RST-T062" not in codes(findings)
    assert settings.task["tasks"]["_target_"] == SCENARIO and settings.task["tasks"]["tokenizer"] == "some/model"
