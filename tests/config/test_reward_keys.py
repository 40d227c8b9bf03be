"""Rewards of RLinf and ROLL as train.rewards."""

from dataclasses import replace

import pytest
import yaml

from roost.config.compose import load
from roost.config.findings import Findings, Where
from roost.config.notations.reward_keys import rlinf_rewards, roll_filters, roll_rewards
from roost.config.source import Section
from roost.rollout.rewards.config import make_rewards

REWARDS = "roost.rollout.rewards"


def translated(read, text):
    findings = Findings()
    source = load(yaml.safe_load(text), (), findings)
    found = read(Section.root(replace(source), findings))
    return found, [(finding.code, finding.where.key_path) for finding in findings.collected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "reward: {reward_type: math, reward_scale: 5.0, use_reward_model: false}",
            {"math": {"_target_": f"{REWARDS}.math_answer.RlinfMath", "scale": 5.0, "min_val": -1.0, "max_val": 1.0}},
        ),
        (
            "reward: {reward_type: vqa, reward_weights: {qa_accuracy: 1, think_format: 0, answer_format: 0.5}}",
            {
                "vqa": {
                    "_target_": f"{REWARDS}.rules.VqaAnswer",
                    "weights": {"qa_accuracy": 1.0, "think_format": 0.0, "answer_format": 0.5},
                }
            },
        ),
        ("reward: {reward_type: searchr1}", {"searchr1": {"_target_": f"{REWARDS}.rules.SearchAnswer"}}),
        (
            "reward: {reward_type: rstar2, compute_score_timeout: 3}",
            {
                "rstar2": {
                    "_target_": f"{REWARDS}.math_answer.Rstar2Math",
                    "scale": 1.0,
                    "limit_s": 3.0,
                    "on_timeout": 0.0,
                }
            },
        ),
        (
            "reward: {reward_type: code_offline, use_prompt: true, reward_scale: 2}",
            {"code_offline": {"_target_": f"{REWARDS}.judge.CompletionJudge", "scale": 2.0, "cache": True}},
        ),
        (
            "reward: {use_reward_model: true, model: {model_path: org/rm}}",
            {"model": {"_target_": f"{REWARDS}.reward_model.RewardModel", "model": "org/rm"}},
        ),
        ("{runner: {task_type: embodied}, reward: {reward_type: other}}", None),
        ("reward: {use_reward_model: false}", None),
    ],
)
def test_rlinf(text, expected):
    assert translated(rlinf_rewards, text) == (expected, [])


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("reward: {reward_type: maths}", ("RST-A026", "reward.reward_type")),
        ("reward: {reward_type: vqa}", ("RST-A026", "reward.reward_weights")),
        ("reward: {reward_type: code_offline}", ("RST-A026", "reward.use_prompt")),
        ("reward: {use_reward_model: true}", ("RST-A026", "reward.use_reward_model")),
        ("{reward: {reward_type: math}, train: {task: {_target_: a.B}}}", ("RST-A027", "reward")),
        ("{reward: {reward_type: math}, train: {rewards: {a: {}}}}", ("RST-A027", "reward")),
    ],
)
def test_rlinf_s_findings(text, finding):
    assert translated(rlinf_rewards, text)[1] == [finding]


ROLL = """
reward_pretrain: org/small
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [deepmath_103k, aime]
  code_sandbox:
    worker_cls: roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker
    tag_included: [KodCode]
    use_local: true
  crossthinkqa:
    worker_cls: roll.pipeline.rlvr.rewards.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker
    tag_included: [crossthinkqa]
    reward_type: soft
    response_length_penalty_coef: 0.0
  ifeval:
    worker_cls: roll.pipeline.rlvr.rewards.ifeval_rule_reward_worker.GeneralRuleRewardWorker
    tag_included: [ifeval]
    reward_type: soft
  llm_judge:
    worker_cls: roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker
    tag_included: [RLVR]
    judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt
    judge_model_type: inference
    generating_args: {max_new_tokens: 100, top_p: 0.8, top_k: 50, temperature: 0.8, num_return_sequences: 1}
    model_args: {model_name_or_path: org/judge}
    strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, max_model_len: 8000}}
"""


def test_roll():
    found, findings = translated(roll_rewards, ROLL)
    assert findings == []
    assert found["math_rule"] == {
        "_target_": f"{REWARDS}.math_answer.RollMath",
        "tags": ["deepmath_103k", "aime"],
        "domain": "math_rule",
        "fallback": True,
    }
    assert found["code_sandbox"] == {
        "_target_": f"{REWARDS}.code_tests.RollCode",
        "tags": ["KodCode"],
        "domain": "code_sandbox",
    }
    assert found["crossthinkqa"]["reward_type"] == "soft"
    assert found["ifeval"]["_target_"] == f"{REWARDS}.instructions.InstructionFollowing"
    judge = found["llm_judge"]
    assert judge["engine"] == {"kind": "vllm", "max_context": 8000, "memory_fraction": 0.8}
    assert judge["sampling"] == {"temperature": 0.8, "top_p": 0.8, "top_k": 50}
    assert (judge["model"], judge["max_tokens"], judge["word"]) == ("org/judge", 100, "yes")


def test_rewards_of_roll_can_be_made():
    found, _ = translated(roll_rewards, ROLL)
    findings = Findings()
    made = make_rewards(found, Where(), findings)
    assert not findings.found
    assert [route.name for route in made.routing.of("unheard_of")] == ["math_rule"]
    assert [route.name for route in made.routing.of("ifeval", "math_rule")] == ["math_rule"]
    assert [route.name for route in made.routing.of("ifeval")] == ["ifeval"]


@pytest.mark.parametrize(
    ("keys", "finding"),
    [
        ("worker_cls: a.DetectionRewardWorker", ("RST-A026", "rewards.r.worker_cls")),
        ("tag_included: [a]", ("RST-A026", "rewards.r.worker_cls")),
        ("worker_cls: a.CrossThinkQARuleRewardWorker", ("RST-A026", "rewards.r.reward_type")),
        (
            "{worker_cls: a.CrossThinkQARuleRewardWorker, reward_type: loose, response_length_penalty_coef: 1.0}",
            ("RST-A028", "rewards.r.response_length_penalty_coef"),
        ),
        (
            "{worker_cls: a.CodeSandboxRewardWorker, use_local: false, code_url: 'http://x'}",
            ("RST-A028", "rewards.r.code_url"),
        ),
        (
            "{worker_cls: a.LLMJudgeRewardWorker, judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt, "
            "judge_model_type: cluster}",
            ("RST-A026", "rewards.r.judge_model_type"),
        ),
        (
            "{worker_cls: a.LLMJudgeRewardWorker, judge_prompt: other, judge_model_type: api, "
            "judge_api_url: 'http://x/v1', judge_model_name: m}",
            ("RST-A028", "rewards.r.judge_prompt"),
        ),
    ],
)
def test_roll_s_findings(keys, finding):
    text = yaml.safe_dump({"rewards": {"r": yaml.safe_load(keys)}})
    assert translated(roll_rewards, text)[1] == [finding]


def test_roll_s_reward_model():
    found, findings = translated(roll_rewards, "{reward_pretrain: org/rm, reward: {device_mapping: [0]}}")
    assert (found, findings) == ({"model": {"_target_": f"{REWARDS}.reward_model.RewardModel", "model": "org/rm"}}, [])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{type: no_filter}", (None, [])),
        ("{type: mean_filter, filter_args: {threshold_down: 0, threshold_up: 1}}", (True, [])),
        ("{type: std_filter, filter_args: {std_threshold: 0}}", (True, [])),
        (
            "{type: std_filter, filter_args: {std_threshold: 0.2}}",
            (True, [("RST-A028", "rewards.math_rule.query_filter_config")]),
        ),
    ],
)
def test_roll_s_filters(config, expected):
    text = yaml.safe_dump({"rewards": {"math_rule": {"query_filter_config": yaml.safe_load(config)}}})
    assert translated(roll_filters, text) == expected
