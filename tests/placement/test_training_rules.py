"""Rules about training, each once broken and once kept."""

import copy
import functools
import json
import re
from pathlib import Path

import pytest
import yaml

from roost.config.compose import load
from roost.config.findings import Findings, Severity, shown
from roost.config.job import ParallelSizes
from roost.config.notations.notation import read_job
from roost.placement.planner import try_plan
from tests.docs.memory_page import MODELS
from tests.grid import grid

TRAIN = {"task": {"_target_": "my_tasks.Sums"}, "model": "some/model"}
WITH_CRITIC = {"actor": "0-3", "rollout": "4-7", "critic": "0-3"}
APART = {"actor": "0-3", "rollout": "4-7"}
WITH_REFERENCE = {**APART, "reference": "0-3"}
WITH_TEACHER = {**APART, "teacher": "0-3"}
CUT = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}}
WIDE = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}}


def rlinf(placement=APART, **train):
    cluster = {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": placement}
    return {"cluster": cluster, "train": TRAIN | train}


def gae(**train):
    return rlinf(WITH_CRITIC, advantage_estimator="gae", **train)


def distilled(**teacher):
    return rlinf({"actor": "0-3", "teacher": "4"}, objective="sft", teacher={"model": "m/m", **teacher})


ALL_TOKENS = {"top_p": 1, "top_k": -1}


def roll(strategy, learner=None, **train):
    return {
        "num_gpus_per_node": 8,
        "actor_train": {"device_mapping": "list(range(0,4))", "strategy_args": learner or {}},
        "actor_infer": {"device_mapping": "list(range(4,8))", "strategy_args": strategy, "generating_args": ALL_TOKENS},
        "adv_estimator": "reinforce",
        "train": TRAIN | train,
    }


def found(config):
    findings = Findings()
    plan = try_plan(config, findings)
    assert (plan is None) == findings.has_errors
    return findings.found


BROKEN = {
    "no-learner": (rlinf({"rollout": "0-7"}), "train.task", "needs actor, a learner, which is not placed"),
    "no-engine": (rlinf({"actor": "0-7"}), "train.task", "needs rollout, an engine, which is not placed"),
    "no-critic": (rlinf(advantage_estimator="gae"), "train.advantage_estimator", "is gae, but there is no critic"),
    "no-reference": (
        roll({"strategy_name": "vllm"}, kl_coef=0.1),
        "train.kl_coef",
        "needs a reference, which is not placed",
    ),
    "no-teacher": (rlinf(teacher={"model": "m/m"}), "train.teacher", "needs teacher, which is not placed"),
    "teacher-without-a-model": (rlinf(WITH_TEACHER, teacher={"coef": 1}), "train.teacher", "teacher has no model"),
    "nothing-to-learn-from": (
        rlinf(advantage_estimator="teacher"),
        "train.advantage_estimator",
        "is teacher, but there is none",
    ),
    "teacher-that-counts-for-nothing": (
        rlinf(WITH_TEACHER, advantage_estimator="teacher", teacher={"model": "m/m", "coef": 0}),
        "train.advantage_estimator",
        "is teacher, but its coef is 0",
    ),
    "key-of-a-teacher": (
        rlinf(WITH_TEACHER, teacher={"model": "m/m", "coeff": 1}),
        "train.teacher.coeff",
        "is not a key of teacher",
    ),
    "value-of-a-teacher": (
        rlinf(WITH_TEACHER, teacher={"model": "m/m", "coef": "high"}),
        "train.teacher.coef",
        "is 'high'; it must be a number",
    ),
    "estimator-of-a-teacher": (
        rlinf(WITH_TEACHER, teacher={"model": "m/m", "estimator": "k4"}),
        "train.teacher.estimator",
        "is 'k4'",
    ),
    "one-model-for-two": (
        rlinf(
            {**APART, "teacher.a,teacher.b": "0-3"},
            teacher={"model": "m/m", "a": {"model": "m/a"}, "b": {"model": "m/b"}},
        ),
        "train.teacher.model",
        "is one model for several teachers",
    ),
    "distillation-over-one-token": (
        distilled(top_k=1),
        "train.teacher.top_k",
        "is 1; it must be 0, or 2 or more",
    ),
    "few-samples": (
        rlinf(prompts_per_step=1, num_generations=3),
        "train.minibatch_size",
        "a minibatch of 3 samples cannot be spread over 4 learners",
    ),
    "small-minibatches": (
        rlinf(prompts_per_step=4, num_generations=4, minibatch_size=2),
        "train.minibatch_size",
        "a minibatch of 2 samples cannot be spread over 4 learners",
    ),
    "groups-of-one": (
        rlinf(num_generations=1, advantage_estimator="grpo"),
        "train.num_generations",
        "is 1, but grpo compares samples of one prompt",
    ),
    "states-of-groups-of-one": (
        rlinf(num_generations=1, advantage_estimator="gigpo"),
        "train.num_generations",
        "is 1, but gigpo compares samples of one prompt",
    ),
    "no-chance": (rlinf(temperature=0), "train.temperature", "is 0, so that all samples of a prompt are alike"),
    "engine-too-small": (
        roll(WIDE, engine="torch"),
        "train.engine",
        "is torch, which runs on one device, but rollout is split over several",
    ),
    "lag": (
        rlinf(max_staleness=1, old_logprobs="recompute"),
        "train.old_logprobs",
        "is recompute, but samples may be of an older policy",
    ),
    "dual-clip": (rlinf(dual_clip=1), "train.dual_clip", "is 1; it must be above 1"),
    "no-advantages": (rlinf(advantage_clip=0), "train.advantage_clip", "is 0, which clips all advantages to 0"),
    "no-rewards": (rlinf(reward_clip=0), "train.reward_clip", "is 0, which clips all rewards to 0"),
    "no-group": (
        rlinf(min_group_reward=0.5, max_group_reward=0.5),
        "train.min_group_reward",
        "is 0.5, but max_group_reward is 0.5",
    ),
    "no-low-ratios": (rlinf(log_ratio_clip=0), "train.log_ratio_clip", "is 0, with which no ratio is below 1"),
    "no-high-ratios": (
        rlinf(log_ratio_clip_high=0),
        "train.log_ratio_clip_high",
        "is 0, with which no ratio is above 1",
    ),
    "float16": (rlinf(compute_dtype="float16"), "train.compute_dtype", "is float16, whose losses Roost does not scale"),
    "small-weights": (
        rlinf(weight_dtype="bfloat16"),
        "train.weight_dtype",
        "is bfloat16, but compute_dtype is float32",
    ),
    "hold-in-sglang": (
        rlinf(in_flight="hold", engine="sglang", lora_rank=8),
        "train.in_flight",
        "is hold, which sglang cannot do",
    ),
    "hold-with-an-adapter": (
        rlinf(in_flight="hold", lora_rank=8),
        "train.in_flight",
        "is hold, but an adapter is trained",
    ),
    "wsd-that-decays-from-its-warm-up": (
        rlinf(lr_scheduler_type="wsd", wsd_decay_steps=95, warmup_steps=10, max_steps=100),
        "train.wsd_decay_steps",
        "is 95 optimizer steps, but 90 follow the warm-up",
    ),
    "critic-that-learns-nothing": (
        rlinf(WITH_CRITIC, advantage_estimator="gae", critic_learning_rate=0),
        "train.critic_learning_rate",
        "is 0, with which the critic learns nothing",
    ),
    "critic-schedule-that-rises": (
        gae(learning_rate=1e-5, critic_learning_rate=1e-6, lr_scheduler_type="cosine", min_learning_rate=5e-6),
        "train.min_learning_rate",
        "is 5e-06, but critic_learning_rate is 1e-06",
    ),
    "critic-warm-up-beyond-the-schedule": (
        gae(lr_scheduler_type="cosine", critic_lr_warmup_steps=20, decay_steps=10),
        "train.decay_steps",
        "is 10 optimizer steps, of which the first 20 are warm-up",
    ),
    "schedule-of-both-that-rises": (
        gae(lr_scheduler_type="linear", learning_rate=1e-6, min_learning_rate=5e-6, critic_lr_warmup_steps=5),
        "train.min_learning_rate",
        "is 5e-06, but learning_rate is 1e-06",
    ),
    "one-sample-kept": (
        rlinf(keep_generations=1),
        "train.keep_generations",
        "is 1, but leave_one_out compares samples of one prompt",
    ),
    "reference-of-an-adapter": (
        rlinf(kl_coef=0.1, lora_rank=8, reference_sync_steps=5),
        "train.reference_sync_steps",
        "needs a reference of its own",
    ),
    "masks-of-sglang": (
        rlinf(top_p=0.9, sampling_mask_replay=True, engine="sglang"),
        "train.sampling_mask_replay",
        "needs an engine whose sampling masks Roost reads",
    ),
    "experts-of-sglang": (
        rlinf(router_replay=True, engine="sglang"),
        "train.router_replay",
        "needs an engine whose routed experts Roost reads",
    ),
    "masks-of-vllm": (
        rlinf(top_p=0.9, top_k=512, sampling_mask_replay=True, engine="vllm"),
        "train.sampling_mask_replay",
        "needs an engine whose sampling masks Roost reads",
    ),
    "more-tokens-than-there-are": (
        rlinf(max_new_tokens=32, min_new_tokens=64),
        "train.min_new_tokens",
        "is 64, but max_new_tokens is 32",
    ),
    "mean-ratio-of-one": (rlinf(max_mean_ratio=1), "train.max_mean_ratio", "is 1; it must be above 1"),
    "target-of-no-kl": (
        rlinf(WITH_REFERENCE, kl_penalty_coef=0.1, kl_penalty_target=0),
        "train.kl_penalty_target",
        "is 0; it must be above 0",
    ),
    "equal-ratios-rejected": (
        rlinf(rollout_rejection={"sequence": [1.01, 2.0]}),
        "train.rollout_rejection",
        "rejects every sequence with a ratio of 1",
    ),
    "equal-probabilities-rejected": (
        rlinf(rollout_rejection={"token": {"difference": [-0.2, -0.1]}}),
        "train.rollout_rejection",
        "rejects every token with a difference of 0",
    ),
    "rejection-by-another-name": (
        rlinf(rollout_rejection={"token": {"diff": [-0.2, 0.2]}}),
        "train.rollout_rejection.token.diff",
        "is not what a rule bounds",
    ),
    "no-token-is-left": (rlinf(top_p=0, sampling_mask_replay=True), "train.top_p", "is 0; it must be above 0"),
    "one-token-is-left": (
        rlinf(min_p=1, sampling_mask_replay=True),
        "train.min_p",
        "is 1, so that all samples of a prompt are alike",
    ),
    "penalty-of-nothing": (rlinf(repetition_penalty=0), "train.repetition_penalty", "is 0; it must be above 0"),
    "more-kept-than-there-is-room": (
        rlinf(keep_generations=4, keep_positive=3, keep_others=2),
        "train.keep_generations",
        "is 4, but keep_positive and keep_others are 5 together",
    ),
}


@pytest.mark.parametrize(("config", "where", "what"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_an_error(config, where, what):
    (finding,) = found(config)
    assert finding.severity is Severity.ERROR
    assert (".".join(finding.where.path), finding.what) == (where, what)
    assert finding.fix


KEPT = {
    "plain": rlinf(),
    "critic": rlinf(WITH_CRITIC, advantage_estimator="gae"),
    "critic-learns": rlinf(WITH_CRITIC, advantage_estimator="gae", critic_learning_rate=1e-5),
    "reference": rlinf({"actor": "0-3", "rollout": "4-7", "reference": "0-3"}, kl_coef=0.1),
    "moving-reference": rlinf(
        {"actor": "0-3", "rollout": "4-7", "reference": "0-3"}, kl_coef=0.1, reference_sync_steps=5
    ),
    "adapter-is-its-own-reference": rlinf(kl_coef=0.1, lora_rank=8),
    "teacher": rlinf(WITH_TEACHER, teacher={"model": "m/m"}),
    "teacher-alone": rlinf(WITH_TEACHER, teacher={"model": "m/m"}, advantage_estimator="teacher", num_generations=1),
    "two-teachers": rlinf(
        {**APART, "teacher.a,teacher.b": "0-3"}, teacher={"a": {"model": "m/a", "tags": ["x"]}, "b": {"model": "m/b"}}
    ),
    "a-sample-for-each": rlinf(prompts_per_step=1, num_generations=4),
    "groups-of-one": rlinf(num_generations=1, advantage_estimator="reinforce++"),
    "states-of-the-step": rlinf(num_generations=1, advantage_estimator="gigpo", state_scope="batch"),
    "all-tokens": rlinf(top_p=1.0, top_k=1_000_000),
    "part-and-engine": rlinf(top_p=0.9, old_logprobs="rollout", sampling_mask_replay=True),
    "replayed": rlinf(top_p=0.9, sampling_mask_replay=True),
    "processed": rlinf(repetition_penalty=1.2, min_new_tokens=4, engine="vllm"),
    "engine-of-the-notation": roll(WIDE),
    "engine-on-one-device": roll({"strategy_name": "vllm"}, engine="torch"),
    "lag": rlinf(max_staleness=1),
    "lag-and-engine": rlinf(max_staleness=2, old_logprobs="rollout"),
    "mean-ratio": rlinf(max_mean_ratio=5),
    "kl-target": rlinf(WITH_REFERENCE, kl_penalty_coef=0.1, kl_penalty_target=0.1),
    "rejection": rlinf(rollout_rejection={"token": [0.5, None], "turn": {"difference": [None, 0.2]}}),
    "gspo": rlinf(importance_sampling_level="sequence", rollout_is="sequence", clip_range=3e-4),
    "gspo-of-tokens": gae(importance_sampling_level="sequence", rollout_is="token", clip_range=3e-4),
    "turns-by-turn": rlinf(importance_sampling_level="turn_mean", rollout_is="turn", clip_range=0.01),
    "lag-and-weights": rlinf(
        max_staleness=1, old_logprobs="rollout", importance_sampling_level="none", rollout_is="token"
    ),
    "critic-warm-up": gae(critic_warmup_steps=5, max_steps=6),
    "clip": rlinf(clip_range=1, clip_range_high=1),
    "dual-clip": rlinf(dual_clip=1.3),
    "mixed": rlinf(compute_dtype="bfloat16"),
    "small-adapter": rlinf(compute_dtype="bfloat16", weight_dtype="bfloat16", lora_rank=8),
    "hold": rlinf(in_flight="hold", max_staleness=1),
    "drop-with-an-adapter": rlinf(in_flight="drop", lora_rank=8),
    "drain-in-vllm": rlinf(in_flight="drain", engine="vllm"),
    "distillation-over-two-tokens": distilled(top_k=2),
    "warm-up-within-the-run": rlinf(warmup_steps=99, max_steps=100),
    "warm-up-of-one-step": rlinf(warmup_ratio=0.1, max_steps=1),
    "decay-steps-of-a-warm-up-ratio": rlinf(warmup_ratio=0.1, decay_steps=50),
    "one-sample-kept": rlinf(keep_generations=1, advantage_estimator="reinforce++"),
    "down-sampling": rlinf(keep_generations=4, keep_positive=2, keep_others=2, keep_by_tool_errors=True),
    "whole-copies": roll({"strategy_name": "vllm"}, learner={**CUT, "strategy_config": {}}),
}


def loop(**train):
    return {"rl": {"gpu_allocation": {"learning_gpus": [0, 1], "inference_gpus": [2]}}, "train": TRAIN | train}


def followed(config, fix):
    """The config with what a fix says first: `write KEY: VALUE`, at the top or in a section."""
    text, _, section = fix.removeprefix("write ").split(", or ")[0].partition(" in ")
    [(key, value)] = yaml.safe_load(text).items()
    *outer, last = [*section.split("."), key] if section else key.split(".")
    changed = copy.deepcopy(config)
    functools.reduce(lambda inner, name: inner[name], outer, changed)[last] = value
    return changed


@grid(
    ("config", "code", "fix"),
    [
        (rlinf({"actor": "0-3"}), "RST-T023", "write rollout: 0-3 in cluster.component_placement"),
        (rlinf({"rollout": "4-7"}), "RST-T023", "write actor: 4-7 in cluster.component_placement"),
        (rlinf(advantage_estimator="gae"), "RST-T024", "write critic: 0-3 in cluster.component_placement, or another"),
        (rlinf(teacher={"model": "m/m", "coef": 1}), "RST-T072", "write teacher: 0-3 in cluster.component_placement"),
        (
            rlinf(lora_rank=8, kl_coef=0.1, reference_sync_steps=5),
            "RST-T110",
            "write reference: 0-3 in cluster.component_placement, or remove it",
        ),
        (
            roll({"strategy_name": "vllm"}, kl_coef=0.1),
            "RST-T025",
            'write reference: {device_mapping: "list(range(0,4))"}, or train.lora_rank: 16, or kl_coef: 0',
        ),
        (
            roll({"strategy_name": "vllm"}, teacher={"a": {"model": "m/m", "coef": 1}}),
            "RST-T072",
            'write teacher: {a: {device_mapping: "list(range(0,4))"}}',
        ),
        (loop(kl_coef=0.1), "RST-T025", "write train.lora_rank: 16, or kl_coef: 0"),
    ],
)
def test_what_is_not_placed_is_placed_as_the_fix_says(config, code, fix):
    """In the notation of the config; ml-loop's places no reference, so that its fix is another."""
    [finding] = [finding for finding in found(config) if finding.code == code]
    assert finding.fix.startswith(fix)
    assert code not in {each.code for each in found(followed(config, finding.fix))}


@pytest.mark.parametrize("config", KEPT.values(), ids=KEPT)
def test_a_kept_rule_is_silent(config):
    assert found(config) == ()


@pytest.mark.parametrize(
    ("placement", "expected"),
    [(APART, [0, 1, 2, 3]), ({"actor": "0-3", "rollout": "4-6", "inference": "7"}, [7])],
    ids=["actor", "inference"],
)
def test_rlinf_computes_the_kl_where_its_log_probs_are(placement, expected):
    config = rlinf(placement) | {"algorithm": {"adv_type": "reinpp", "reinpp_kl_beta": 0.1}}
    plan = try_plan(config, Findings())
    assert sorted(rank for row in plan["reference"].table for rank in row.local_hardware_ranks) == expected


@grid(
    ("rules", "why"),
    [
        ({"token": {"diff": [-0.2, 0.2]}}, "did you mean difference?"),
        ({"token": {"rate": [0.5, 2.0]}}, "did you mean ratio?"),
        ({"token": [2.0, 0.5]}, ""),
        ({"token": {"ratio": 2.0}}, ""),
        ({"token": None}, "null is not a bound"),
        ({"token": [None, "high"]}, "null is not a bound"),
    ],
)
def test_a_rejection_that_cannot_be_read_is_hinted_at(rules, why):
    [finding] = [each for each in found(rlinf(rollout_rejection=rules)) if each.code == "RST-T093"]
    assert finding.why == why


def test_a_rejection_of_whole_samples_is_answered_with_both_levels():
    [finding] = [each for each in found(rlinf(rollout_rejection={"seq": [0.5, 2.0]})) if each.code == "RST-T093"]
    assert finding.fix.startswith("write rollout_rejection: trajectory for the product over a sample")


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (rlinf(num_generations=1), "write 2 or more, or advantage_estimator: reinforce++"),
        (rlinf() | {"algorithm": {"adv_type": "grpo", "group_size": 1}}, "write 2 or more, or adv_type: reinpp"),
        (roll({"strategy_name": "vllm"}, num_generations=1) | {"adv_estimator": "grpo"}, "write 2 or more"),
    ],
)
def test_the_fix_of_a_group_of_one_is_the_key_that_the_job_has(config, fix):
    [finding] = [each for each in found(config) if each.code == "RST-T028"]
    assert finding.fix == fix
    if "reinpp" in fix:
        assert not [
            each for each in found(config | {"algorithm": {"adv_type": "reinpp", "group_size": 1}}) if each.code
        ]


@pytest.mark.parametrize(
    "train",
    [
        {"rollout_rejection": {"sequence": [0.99, 1.01], "trajectory": [0.5, 2.0], "turn": [0.2, 5.0]}},
        {"rollout_rejection": {"sequence": [None, 1.01], "trajectory": [None, 1.05], "token": [0.5, 5.0]}},
        {"rollout_rejection": {"sequence": {"difference": [-0.5, 0.5]}, "trajectory": {"difference": [-0.01, 0.01]}}},
        {"importance_sampling_level": "sequence", "loss_type": "sapo"},
        {"importance_sampling_level": "trajectory"},
        {"rollout_is": "trajectory", "max_staleness": 4},
        {"rollout_is": "sequence"},
    ],
)
def test_ranges_and_bounds_that_suit_their_level_have_no_finding(train):
    assert not [each for each in found(rlinf(**train)) if each.code == "RST-T127"]


@pytest.mark.parametrize(
    ("config", "name", "what"),
    [
        (rlinf(min_learning_rate=1e-7), "min_learning_rate", "has no effect"),
        (
            rlinf(repetition_penalty=1.1, engine="sglang"),
            "repetition_penalty",
            "does not mean the same to SGLang and to the learner",
        ),
        (
            rlinf(rollout_is="token", importance_weight_cap=0.5),
            "importance_weight_cap",
            "is 0.5, which scales down the loss of every token",
        ),
        (
            rlinf(max_staleness=1, old_logprobs="decoupled", rollout_is="none"),
            "rollout_is",
            "is none, so nothing corrects for samples of an older policy",
        ),
        (
            rlinf(max_staleness=1, old_logprobs="rollout", importance_sampling_level="none"),
            "importance_sampling_level",
            "is none, so nothing corrects for samples of an older policy",
        ),
        (rlinf(importance_sampling_level="sequence"), "clip_range", "is 0.2, with which almost no ratio is clipped"),
        (
            rlinf(importance_sampling_level="sequence", loss_type="cispo"),
            "clip_range",
            "is 0.2, with which almost no ratio is clipped",
        ),
        (
            rlinf(rollout_rejection={"sequence": [0.5, 2.0]}),
            "rollout_rejection",
            "has sequence: [0.5, 2], which rejects almost nothing",
        ),
        (
            rlinf(rollout_rejection={"trajectory": [0.99, 1.01]}),
            "rollout_rejection",
            "has trajectory: [0.99, 1.01], which rejects almost every sample of many tokens",
        ),
        (
            rlinf(max_staleness=4, rollout_is="sequence"),
            "rollout_is",
            "is sequence, whose weights hardly correct for samples of an older policy",
        ),
        (rlinf(decay_steps=50), "decay_steps", "has no effect"),
        (rlinf(keep_generations=10), "keep_generations", "is 10, but groups have 8 samples"),
        (
            rlinf(WITH_REFERENCE, kl_penalty_coef=0.1, kl_penalty_horizon=100),
            "kl_penalty_horizon",
            "has no effect",
        ),
        (
            rlinf(eval_samples=8),
            "eval_samples",
            "is 8, but eval_temperature is 0, so that the samples of a prompt are alike",
        ),
        (rlinf(muon_momentum=0.9), "muon_momentum", "has no effect"),
        (rlinf(lr_scheduler_type="cosine", wsd_decay_steps=5), "wsd_decay_steps", "has no effect"),
        (
            rlinf(warmup_steps=200, max_steps=100),
            "warmup_steps",
            "makes 200 optimizer steps of warm-up, but the run has 100",
        ),
        (
            rlinf(lr_scheduler_type="linear", warmup_ratio=1.0),
            "warmup_ratio",
            "makes 100 optimizer steps of warm-up, but the run has 100",
        ),
        (
            gae(critic_lr_warmup_steps=200, ppo_epochs=2),
            "critic_lr_warmup_steps",
            "makes 200 optimizer steps of warm-up, but the run has 200",
        ),
        (rlinf(keep_positive=1), "keep_positive", "has no effect"),
        (
            gae(critic_warmup_steps=5, max_steps=5),
            "critic_warmup_steps",
            "is 5, but the run has 5 steps",
        ),
        (gae(discount_level="turn"), "discount_level", "has no effect"),
        (rlinf(overlong_buffer_tokens=8, overlong_penalty=0), "overlong_buffer_tokens", "has no effect"),
        (
            rlinf(WITH_REFERENCE, kl_coef=0.1, reference_sync_steps=5, max_steps=5),
            "reference_sync_steps",
            "has no effect",
        ),
        (rlinf(reference_sync_steps=5), "reference_sync_steps", "has no effect"),
        (rlinf(sampling_mask_replay=True), "sampling_mask_replay", "has no effect"),
        (rlinf(keep_others=1), "keep_others", "has no effect"),
        (rlinf(keep_by_tool_errors=True), "keep_by_tool_errors", "has no effect"),
    ],
)
def test_what_has_no_effect_is_a_warning(config, name, what):
    (finding,) = found(config)
    assert (finding.severity, finding.where.path, finding.what) == (Severity.WARNING, ("train", name), what)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def test_distillation_over_the_whole_vocabulary_is_a_warning_with_its_size(tmp_path):
    (finding,) = found(distilled(top_k=0))
    assert (finding.code, finding.severity) == ("RST-T088", Severity.WARNING)
    assert (
        finding.why == "4 bytes x the size of the vocabulary, which is not known here, go through the driver for each"
    )
    (tmp_path / "config.json").write_text(
        json.dumps(SIZES | {"model_type": "qwen2", "hidden_size": 32, "vocab_size": 152_000})
    )
    (finding,) = found(distilled(top_k=0, model=str(tmp_path)))
    assert finding.why.startswith("4 bytes x 152,000 tokens = 608 KB")


def test_the_decay_of_a_constant_schedule_in_the_notation_is_a_note():
    (finding,) = found(rlinf() | {"actor": {"optim": {"lr": 1e-6, "min_lr": 1e-7}}})
    assert (finding.code, finding.severity) == ("RST-T084", Severity.NOTE)
    assert finding.where.path == ("actor", "optim", "min_lr")


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout", "decoupled"])
def test_drawing_from_a_part_is_a_warning(name, old_logprobs):
    (finding,) = found(rlinf(**{name: 50 if name == "top_k" else 0.5}, old_logprobs=old_logprobs))
    assert finding.severity is Severity.WARNING
    assert finding.where.path == ("train", name)


@pytest.mark.parametrize("name", ["learning_rate", "critic_learning_rate"])
def test_a_learning_rate_far_above_the_usual_is_a_warning(name):
    (finding,) = found(rlinf(WITH_CRITIC, advantage_estimator="gae", **{name: 1e10}))
    assert (finding.severity, finding.where.path) == (Severity.WARNING, ("train", name))
    assert finding.what == "is 1e+10, where 1e-07 to 0.001 is usual"
    assert found(rlinf(WITH_CRITIC, advantage_estimator="gae", **{name: 0.1})) == ()


@pytest.mark.parametrize(
    ("rewards", "why"),
    [({}, "train.rewards is empty, so it is not started"), ({"a": {}, "b": {}}, "train.rewards has a, b")],
)
def test_a_reward_that_is_placed_and_not_used_is_a_warning(rewards, why):
    (finding,) = found(rlinf({**APART, "reward": "0"}, rewards=rewards))
    assert (finding.severity, finding.where.path) == (Severity.WARNING, ("train", "rewards"))
    assert finding.what == "reward is placed, but has nothing to do" and finding.why.startswith(why)


SMALL = {"compute_dtype": "bfloat16", "weight_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(rlinf(**SMALL), id="bfloat16"),
        pytest.param(rlinf(**SMALL | {"weight_dtype": "float16"}), id="float16"),
        pytest.param(
            rlinf(WITH_CRITIC, **SMALL, advantage_estimator="gae", lora_rank=8), id="critic-beside-an-adapter"
        ),
    ],
)
def test_weights_of_16_bits_are_a_warning(config):
    (finding,) = found(config)
    assert finding.severity is Severity.WARNING
    assert finding.where.path == ("train", "weight_dtype")
    assert finding.what.endswith("in which steps of usual learning rates are rounded away")


def test_a_learner_with_a_tensor_size_is_accepted():
    assert not found(roll({"strategy_name": "vllm"}, learner=CUT))


@pytest.mark.parametrize("devices", [3, 4])
def test_a_learner_with_pipeline_stages_is_an_error(devices):
    """And no other: devices that stages do not divide would do without them."""
    stages = {"strategy_name": "megatron_train", "strategy_config": {"pipeline_model_parallel_size": 2}}
    config = roll({"strategy_name": "vllm"}, learner=stages)
    config["actor_train"]["device_mapping"] = f"list(range(0,{devices}))"
    (finding,) = found(config)
    assert finding.severity is Severity.ERROR
    assert finding.what == "pipeline size 2, but Roost's learner has no pipeline stages"
    instead = "; tensor size 2 divides layers over as many ranks" if devices == 4 else ""
    assert finding.fix == f"write pipeline size 1{instead}"


@pytest.mark.parametrize(("stages", "fitting"), [(2, "2"), (3, "2 or 4"), (16, "2 or 4")])
def test_stages_are_replaced_by_a_tensor_size_that_divides_the_model(stages, fitting, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))

    def of(**sizes):
        job = rlinf({"actor": "0-7", "rollout": "0-7"}, model=str(tmp_path))
        return job | {"actor": {"training_backend": "fsdp", "model": {"model_path": str(tmp_path), **sizes}}}

    fixes = [finding.fix for finding in found(of(pipeline_model_parallel_size=stages)) if finding.code == "RST-T034"]
    assert fixes == [f"write pipeline size 1; tensor size {fitting} divides layers over as many ranks"]
    for size in fitting.split(" or "):
        assert not [each for each in found(of(tensor_model_parallel_size=int(size))) if each.severity is Severity.ERROR]


def test_an_expert_size_of_a_dense_model_is_told_that_it_has_no_experts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    job = rlinf({"actor": "0-7", "rollout": "0-7"}, model=str(tmp_path))
    job["actor"] = {"training_backend": "fsdp", "model": {"model_path": str(tmp_path), "expert_model_parallel_size": 3}}
    (finding,) = (each for each in found(job) if each.severity is Severity.ERROR)
    assert (finding.code, finding.fix) == ("RST-T123", "write expert size 1")
    assert finding.what == "expert size 3, but a model of type qwen2 has no experts"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("expert_model_parallel_size", "expert size 2, but Roost does not divide a model that reads images"),
        ("pipeline_model_parallel_size", "write pipeline size 1; FSDP alone shards a model that reads images"),
    ],
)
def test_a_model_that_reads_images_is_not_divided(tmp_path, size, text):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}}))
    config = rlinf({"actor": "0-3", "rollout": "4"}, model=str(tmp_path))
    config["actor"] = {"training_backend": "fsdp", "model": {"model_path": str(tmp_path), size: 2}}
    assert text in [part for finding in found(config) for part in (finding.what, finding.fix)]


JUDGED = {"actor": "0-1", "rollout": "2-3", "reward.polite": "4-7:0-1"}


def judged(placement=JUDGED, target="roost.rollout.rewards.judge.Judge", **keys):
    return rlinf(placement, rewards={"polite": {"_target_": target, "model": "org/judge", **keys}})


@pytest.mark.parametrize(
    ("config", "key", "severity", "what"),
    [
        pytest.param(
            judged(base_url="http://h/v1"), "base_url", Severity.WARNING, "uses an external server", id="external"
        ),
        pytest.param(judged(engine={"kind": "torch"}), "engine", Severity.ERROR, "does not fit", id="built-in-on-two"),
        pytest.param(
            judged(target="roost.rollout.rewards.reward_model.RewardModel", engine={"kind": "vllm", "tensor": 4}),
            "engine",
            Severity.ERROR,
            "does not fit",
            id="a-reward-model",
        ),
        pytest.param(
            judged(engine={"kind": "vllm", "tensor": 4}), "engine", Severity.ERROR, "does not fit", id="cut-in-four"
        ),
        pytest.param(
            judged({**JUDGED, "reward.polite": "4"}, engine={"kind": "sglang", "pipeline": 2}),
            "engine",
            Severity.ERROR,
            "does not fit the accelerators of reward.polite",
            id="cut-for-one",
        ),
        pytest.param(
            judged({"actor": "0-1", "rollout": "2-3", "reward": "4"}, base_url="http://h/v1"),
            "base_url",
            Severity.WARNING,
            "uses an external server, so reward does not use",
            id="the-only-reward",
        ),
    ],
)
def test_accelerators_of_a_judge(config, key, severity, what):
    (finding,) = found(config)
    assert finding.severity is severity
    assert finding.where.path == ("train", "rewards", "polite", key)
    assert what in finding.what


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(judged(engine={"kind": "vllm"}), id="all-its-accelerators"),
        pytest.param(judged(engine={"kind": "vllm", "tensor": 2}), id="as-written"),
        pytest.param(judged({**JUDGED, "reward.polite": "4-7"}, engine={"kind": "torch"}), id="one-each"),
        pytest.param(judged(APART, base_url="http://h/v1"), id="not-placed"),
        pytest.param(judged(target="my_rewards.Judge", base_url="http://h/v1"), id="another-class"),
        pytest.param(judged(engine={"kind": "vllm", "tensor": "2"}), id="a-value-that-the-judge-tells-of"),
        pytest.param(judged(engine="vllm"), id="an-engine-that-the-judge-tells-of"),
    ],
)
def test_a_judge_that_uses_its_accelerators_is_silent(config):
    assert found(config) == ()


def test_a_judge_on_nodes_has_no_accelerators():
    config = judged(base_url="http://h/v1")
    placement = {"actor": "0-1", "rollout": "2-3", "reward.polite": {"node_group": "node", "placement": "0"}}
    config["cluster"] = config["cluster"] | {"component_placement": placement}
    assert found(config) == ()


def test_a_model_folder_must_hold_a_checkpoint(tmp_path):
    (finding,) = found(rlinf(model=str(tmp_path)))
    assert finding.what == f"{shown(str(tmp_path))} has no config.json"
    (tmp_path / "config.json").write_text("{}")
    assert found(rlinf(model=str(tmp_path))) == ()


def test_a_job_without_training_has_no_such_rules():
    config = rlinf({"rollout": "0-7"})
    del config["train"]
    assert found(config) == ()


@pytest.mark.parametrize(
    "train",
    [
        {"min_group_reward": 0.1, "max_group_reward": 0.9},
        {"min_group_reward": 0.5},
        {"max_group_reward": 0.5},
    ],
    ids=str,
)
def test_bounds_that_leave_groups_are_silent(train):
    assert found(rlinf(**train)) == ()


BY_RATIO = {"kl_importance_sampling": True, "log_ratio_clip": 5.0}
IDLE = [
    *((name, {"loss_type": kind}) for kind in ("sapo", "topr", "kimi15") for name in ("clip_range", "dual_clip")),
    ("clip_range_high", {"loss_type": "topr"}),
    ("dual_clip", {"loss_type": "cispo"}),
    ("clip_range", {"importance_sampling_level": "none"}),
    ("dual_clip", {"importance_sampling_level": "none"}),
    ("importance_sampling_level", {"loss_type": "kimi15"}),
    *((name, {"loss_type": "kimi15"}) for name in ("log_ratio_clip", "log_ratio_clip_high")),
    ("log_ratio_clip", {"importance_sampling_level": "none"}),
    ("importance_weight_cap", {}),
    ("old_logprobs", {"rollout_is": "none"}),
    ("step_reward_weight", {}),
    ("kl_penalty_target", {}),
    *((name, {}) for name in ("value_huber_delta", "gae_lambda", "value_clip", "critic_learning_rate")),
    *((name, {}) for name in ("value_loss_aggregation", "critic_lr_warmup_steps")),
    ("critic_lr_warmup_steps", {"lr_scheduler_type": "cosine", "decay_steps": 1}),  # its schedule is not checked
    *(("early_stop_kl", {"old_logprobs": old}) for old in ("recompute", "decoupled")),
    ("kl_penalty_estimator", {}),
    ("kl_estimator", {}),
    ("whiten_by_tag", {}),
]
WRITTEN = {
    "kl_penalty_estimator": "k2",
    "kl_estimator": "k2",
    "whiten_by_tag": True,
    "critic_learning_rate": 1e-5,
    "critic_lr_warmup_steps": 5,
    "value_loss_aggregation": "token-mean",
    "importance_sampling_level": "sequence",
    "old_logprobs": "decoupled",
    "dual_clip": 3.0,
}


@pytest.mark.parametrize(("name", "beside"), IDLE, ids=lambda value: value if isinstance(value, str) else str(value))
def test_a_setting_that_another_leaves_without_effect(name, beside):
    (finding,) = found(rlinf(**beside, **{name: WRITTEN.get(name, 0.5)}))
    assert (finding.code, finding.severity, finding.where.path) == ("RST-T094", Severity.WARNING, ("train", name))


@pytest.mark.parametrize(
    "config",
    [
        rlinf(loss_type="cispo", clip_range=0.1),
        rlinf(old_logprobs="decoupled", importance_weight_cap=3.0),
        rlinf(loss_type="kimi15", importance_sampling_level="turn"),  # the mean of a sample is over its turns
        rlinf(loss_type="kimi15", max_mean_ratio=2.0, log_ratio_clip=5.0, ppo_epochs=2),
        rlinf(importance_sampling_level="none", max_mean_ratio=2.0, log_ratio_clip=5.0, ppo_epochs=2),
        rlinf(WITH_REFERENCE, loss_type="kimi15", kl_coef=0.1, **BY_RATIO, importance_sampling_level="sequence"),
        rlinf(loss_type="sapo") | {"algorithm": {"clip_ratio_high": 0.3, "clip_ratio_low": 0.2}},
        gae(value_huber_delta=1.0, gae_lambda=0.9, value_clip=0.2),
        rlinf(WITH_REFERENCE, kl_penalty_coef=0.1, kl_estimator="k2", kl_penalty_estimator="k2"),
        rlinf(whiten_by_tag=True, whiten_advantages="tokens"),
        gae(value_loss_aggregation="token-mean", critic_lr_warmup_steps=5),
        rlinf(early_stop_kl=20, ppo_epochs=2),
        rlinf(early_stop_kl=20, prompts_per_step=8, minibatch_size=32),
        rlinf(early_stop_kl=20, old_logprobs="rollout"),
        rlinf(early_stop_kl=0),
    ],
    ids=[
        *(
            "cispo clips",
            "capped weights",
            "turns",
            "limit of kimi15",
            "limit without level",
            "kl of kimi15",
            "keys of the notation",
            "critic",
            "reference",
            "whitening",
        ),
        *("critic beside", "epochs", "minibatches", "against the engine", "never"),
    ],
)
def test_settings_with_an_effect_are_not_reported(config):
    assert "RST-T094" not in {finding.code for finding in found(config)}


@grid(
    ("strategy", "sizes", "arguments", "expected"),
    [
        *(
            (name, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "fsdp_size": 4}, {}, expected)
            for name, expected in (
                ("fsdp2_train", ParallelSizes(tensor=2, expert=4, shard=4)),
                ("megatron_train", ParallelSizes(tensor=2, expert=4)),
            )
        ),
        ("fsdp2_infer", {"tensor_parallel_size": 2}, {}, ParallelSizes(tensor=2)),
        ("fsdp2_train", {"pipeline_model_parallel_size": 2}, {}, ParallelSizes(pipeline=2)),
        ("fsdp2_train", {"context_parallel_size": 2}, {}, ParallelSizes(context=2)),
        ("fsdp2_train", {}, {"ulysses_size": 2}, ParallelSizes(context=2)),
        ("deepspeed_train", {}, {"ulysses_size": 2}, ParallelSizes(context=2)),
        ("megatron_train", {"context_parallel_size": 2}, {"ulysses_size": 2}, ParallelSizes(context=2)),
    ],
)
def test_learners_of_roll_have_the_sizes_that_are_written(strategy, sizes, arguments, expected):
    learner = {"strategy_name": strategy, "strategy_config": sizes}
    config = roll({"strategy_name": "vllm"}, learner)
    config["actor_train"]["model_args"] = arguments
    findings = Findings()
    job = read_job(load(config, [], findings), findings)
    assert {part.name: part.parallel for part in job.components}["actor"] == expected
    assert not [finding for finding in findings.found if "ulysses_size" in str(finding)]


@grid(
    ("config", "fix"),
    [
        (
            {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 28,
             "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
            "write 1 or 2",
        ),
        ({}, "write 1, 2, 3 or 6"),
    ],
)  # fmt: skip
def test_the_fix_names_sizes_of_context_groups(config, fix, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = rlinf({"actor": "0-5", "rollout": "6-7"}, model=str(tmp_path))
    job["actor"] = {"model": {"model_path": str(tmp_path), "context_parallel_size": 3 if config else 4}}
    fixes = [finding.fix for finding in found(job) if finding.code == "RST-T120"]
    assert fixes == [fix]


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@grid(
    ("placement", "section", "size"),
    [
        ({"actor,rollout": "0-7"}, "actor", 3),
        ({"actor,rollout": "0-7"}, "rollout", 3),
        ({"actor": "0-6", "rollout": "7"}, "actor", 7),
    ],
)
def test_a_size_that_cannot_divide_heads_is_told_those_that_divide_all(placement, section, size, tmp_path):
    """And nothing of other numbers of accelerators, with which the heads would not be divided either."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))

    def with_size(size):
        job = rlinf(placement, model=str(tmp_path)) | {"actor": {"model": {"model_path": str(tmp_path)}}}
        sizes = job["actor"]["model"] if section == "actor" else job.setdefault("rollout", {})
        sizes["tensor_model_parallel_size" if section == "actor" else "tensor_parallel_size"] = size
        return [finding for finding in found(job) if finding.severity is not Severity.NOTE]

    findings = with_size(size)
    assert {finding.code for finding in findings} == {"RST-P033"}
    (fix,) = {finding.fix for finding in findings}
    count = 7 if "actor" in placement else 8
    fitting = [number for number in (1, 2, 4) if count % number == 0]
    assert fix == f"use a tensor parallel size of {', '.join(map(str, fitting))}".replace(", 4", " or 4")
    assert not [each.code for number in fitting for each in with_size(number) if "-P" in each.code]


def test_sizes_of_a_model_that_reads_images_are_found_at_their_key(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}}))
    actor = {"training_backend": "fsdp", "model": {"model_path": str(tmp_path), "tensor_model_parallel_size": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(rlinf({"actor": "0-3", "rollout": "4"}) | {"actor": actor}))
    findings = Findings()
    try_plan(read_job(load(tmp_path / "job.yaml", [], findings), findings, None, trains=True), findings)
    places = [each.where.key_path for each in findings.errors if each.code == "RST-T160"]
    assert places == ["actor.model.tensor_model_parallel_size"]


def test_the_fix_names_sizes_of_fsdp_groups():
    job = rlinf({"actor": "0-5", "rollout": "6-7"}) | {"actor": {"fsdp_config": {"fsdp_size": 4}}}
    job["actor"]["training_backend"] = "fsdp"
    assert [finding.fix for finding in found(job) if finding.code == "RST-T121"] == [
        "write 1, 2 or 3, or leave it out: 6"
    ]


@grid(
    ("model", "fsdp", "what", "why"),
    [
        (
            {"tensor_model_parallel_size": 8, "context_parallel_size": 2},
            {},
            "8 ranks cannot be divided into context groups of 2 times tensor groups of 8",
            "tensor 8 * context 2 = 16; 8 is less than 16",
        ),
        (
            {"context_parallel_size": 8},
            {"fsdp_size": 4},
            "FSDP groups of 4 ranks cannot be divided into context groups of 8",
            "4 is less than 8; context groups lie within FSDP groups",
        ),
        (
            {"tensor_model_parallel_size": 2},
            {"fsdp_size": 3},
            "8 ranks cannot be divided into FSDP groups of 3 times tensor groups of 2",
            "8 % 6 = 2",
        ),
    ],
)
def test_groups_that_do_not_fit_together_are_named_together(model, fsdp, what, why):
    job = rlinf({"actor": "0-7", "rollout": "0-7"})
    job["actor"] = {"training_backend": "fsdp", "model": model, "fsdp_config": fsdp}
    findings = [finding for finding in found(job) if finding.code == "RST-T121"]
    assert [(finding.what, finding.why) for finding in findings] == [(what, why)]


def test_two_sizes_of_context_groups_are_refused():
    config = roll({"strategy_name": "vllm"}, {"strategy_name": "fsdp2_train", "strategy_config": {}})
    config["actor_train"]["model_args"] = {"ulysses_size": 2}
    config["actor_train"]["strategy_args"]["strategy_config"] = {"context_parallel_size": 4}
    (finding,) = (each for each in found(config) if each.severity is Severity.ERROR)
    assert "RST-T120" in str(finding) and "ulysses_size: is 2, but context_parallel_size is 4" in str(finding)


@grid(
    ("config", "place"),
    [
        (
            rlinf() | {"actor": {"model": {"expert_tensor_parallel_size": 2}, "training_backend": "megatron"}},
            "actor.model.expert_tensor_parallel_size",
        ),
        (
            roll(
                {"strategy_name": "vllm"},
                {"strategy_name": "megatron_train", "strategy_config": {"expert_tensor_parallel_size": 4}},
            ),
            "actor_train.strategy_args.strategy_config.expert_tensor_parallel_size",
        ),
    ],
)
def test_single_experts_are_not_cut(config, place):
    (finding,) = (each for each in found(config) if each.severity is Severity.ERROR)
    assert (finding.code, finding.where.key_path) == ("RST-T123", place)
    assert finding.fix == "write expert_tensor_parallel_size 1"


@grid(
    ("config", "key"),
    [
        (rlinf() | {"actor": {"model": {"freeze_vit": True}}}, "actor.model.freeze_vit"),
        (roll({"strategy_name": "vllm"}), "actor_train.model_args.freeze_module_prefix"),
    ],
)
def test_a_frozen_part_that_roost_trains_is_said_to_be_trained(config, key):
    if "actor_train" in config:
        config["actor_train"]["model_args"] = {"freeze_module_prefix": ["vision_model"]}
    (finding,) = (each for each in found(config) if each.where.key_path == key)
    assert (finding.code, finding.severity) == ("RST-T014", Severity.WARNING)
    assert "Roost trains what this would freeze" in finding.why


@grid(
    ("engine", "fix"),
    [
        ("torch", "write sampling_mask_replay: true, or leave top_p, top_k and min_p out"),
        ("vllm", "leave top_p, top_k and min_p out; masks are replayed with the built-in engine alone"),
    ],
)
def test_the_fix_of_truncated_sampling_works_with_the_engine(engine, fix):
    fixes = [finding.fix for finding in found(rlinf(top_p=0.9, engine=engine)) if finding.code == "RST-T031"]
    assert fixes == [fix]


def test_virtual_pipeline_stages_are_not_taken_for_a_slip():
    config = rlinf() | {"actor": {"model": {"virtual_pipeline_model_parallel_size": 2}}}
    assert not [finding for finding in found(config) if finding.code == "RST-C023"]


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        pytest.param(
            "actor: {model: {expert_model_parallel_size: 4}, training_backend: fsdp}",
            "RST-T123",
            "job.yaml:2:17 actor.model.expert_model_parallel_size",
            id="expert",
        ),
        pytest.param(
            "actor: {model: {pipeline_model_parallel_size: 2}}",
            "RST-T034",
            "job.yaml:2:17 actor.model.pipeline_model_parallel_size",
            id="pipeline",
        ),
        pytest.param(
            "actor: {model: {context_parallel_size: 4}}",
            "RST-T120",
            "job.yaml:2:17 actor.model.context_parallel_size",
            id="context",
        ),
        pytest.param(
            "actor: {model: {tensor_model_parallel_size: 3}}\nrollout: {tensor_parallel_size: 2}",
            "RST-P031",
            "job.yaml:3:11 rollout.tensor_parallel_size",
            id="engine",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_found_at_its_key(text, code, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    placed = "cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {actor: 0-5, rollout: 6-7}}"
    train = "train: {model: some/model, max_steps: 1, task: {_target_: my_tasks.Sums}}"
    Path("job.yaml").write_text(f"{placed}\n{text}\nrunner: {{task_type: embodied}}\n{train}\n")
    findings = Findings()
    source = load(Path("job.yaml"), [], findings)
    try_plan(read_job(source, findings, None, trains=True), findings)
    assert [str(each.where) for each in findings.errors if each.code == code] == [place]


@grid(
    ("config", "how"),
    [
        (rlinf({"actor": "0-7", "rollout": "0-7"}, max_staleness=1), " (max_staleness: 0 in train)"),
        (roll({"strategy_name": "vllm"}) | {"async_generation_ratio": 1}, " (async_generation_ratio: 0)"),
    ],
)
def test_the_fix_of_generation_beside_learning_is_the_key_that_the_job_has(config, how):
    if "cluster" in config:
        config["actor"] = {"training_backend": "fsdp", "offload_weight": True, "offload_optimizer": True}
    else:
        config["actor_infer"]["device_mapping"] = "list(range(0,4))"
    [finding] = [each for each in found(config) if each.code == "RST-P034"]
    assert finding.fix == f"give rollout devices of its own, or generate synchronously{how}"


@pytest.mark.parametrize(
    ("family", "names", "missing"),
    [
        ("qwen3", ["q_prj", "v_proj"], "q_prj"),
        ("qwen3", ["q_proj", "mlp.up_proj", "layers.0.self_attn.k_proj"], None),
        ("qwen3", ["experts"], "experts"),
        ("qwen3_moe", ["q_proj", "experts"], "experts"),
        ("qwen3_moe", ["q_proj", "gate"], "gate"),
        ("qwen3_moe", ["gate_up_proj", "up_proj"], "gate_up_proj, up_proj"),
        ("qwen3_moe", ["q_proj"], None),
        ("unknown", ["q_prj"], None),
    ],
)
def test_an_adapter_names_layers_of_the_model(tmp_path, family, names, missing):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {"model_type": family, "vocab_size": 64, "num_key_value_heads": 2, **sizes, **experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}},
        "actor": {"model": {"model_path": str(tmp_path)}},
        "train": {"task": {"_target_": "my_tasks.Sums"}, "lora_rank": 4, "lora_target_modules": names},
    }
    findings = Findings()
    try_plan(job, findings)
    found = [each.what for each in findings.errors if each.code == "RST-T161"]
    assert found == ([] if missing is None else [f"has {missing}, but no linear layer of the model is called so"])


def test_settings_of_no_adapter_are_idle():
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}},
        "train": {"task": {"_target_": "my_tasks.Sums"}, "model": "org/model", "lora_alpha": 32},
    }
    findings = Findings()
    try_plan(job, findings)
    assert [each.where.path[-1] for each in findings.warnings if each.code == "RST-T094"] == ["lora_alpha"]


@pytest.mark.parametrize(
    ("name", "train"),
    [("teacher", {"teacher": {"coef": 1, "model": "{text}"}}), ("reference", {"kl_coef": 0.1})],
)
def test_models_that_score_samples_with_images_read_them(name, train, tmp_path):
    for folder, config in (("text", QWEN_7B), ("images", {"model_type": "qwen2_5_vl", "vision_config": {}})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))

    def errors(folder, **data):
        settings = {key: dict(value) if isinstance(value, dict) else value for key, value in train.items()}
        if name == "teacher":
            settings["teacher"]["model"] = str(tmp_path / folder)
        job = rlinf(
            {**APART, name: "0-3"}, model=str(tmp_path / "images"), data={"path": "rows.jsonl", **data}, **settings
        )
        job["train"].pop("task")
        job["train"]["rewards"] = {"exact": {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer"}}
        job["actor"] = {"training_backend": "fsdp", "model": {"model_path": str(tmp_path / "images")}}
        job[name] = {"model": {"model_path": str(tmp_path / folder)}}
        return [each.what for each in found(job) if each.severity is Severity.ERROR]

    assert errors("text", images="image") == [f"data has images, but {name} reads text alone"]
    assert not errors("images", images="image") and not errors("text")


def test_a_reference_without_work_is_named_with_a_fix_that_can_be_applied(tmp_path):
    """`write kl_coef` named a key that ROLL does not have, at no line."""
    config = """\
pretrain: some/model
num_gpus_per_node: 2
rollout_batch_size: 8
sequence_length: 256
actor_train: {device_mapping: "[0]", strategy_args: {strategy_name: fsdp2_train}}
actor_infer: {device_mapping: "[1]", strategy_args: {strategy_name: vllm}}
reference: {device_mapping: "[0]", strategy_args: {strategy_name: fsdp2_infer}}
train_env_manager: {num_env_groups: 2, group_size: 4, tags: [Sokoban], num_groups_partition: [2]}
custom_envs:
  Sokoban: {env_type: sokoban, agent_template: "{observation}", max_steps: 4, env_config: {dim_room: [6, 6]}}
"""
    file = tmp_path / "job.yaml"
    file.write_text(config)

    def idle(overrides=()):
        findings = Findings()
        try_plan(file, findings, overrides=overrides, trains=True)
        return [finding for finding in findings.collected if finding.code == "RST-P025"]

    (finding,) = idle()
    assert str(finding.where) == f"{file}:7:13 reference.device_mapping"
    assert finding.fix == "write train.kl_coef: 0.001, or remove reference"
    assert idle(["+train.kl_coef=0.001"]) == []


NARROW_CLIPS = (
    ({}, "write clip_range: 0.0003 and clip_range_high: 0.0004"),
    (
        {"algorithm": {"ratio_clip_eps": 0.2}},
        "write algorithm.clip_ratio_low: 0.0003 and algorithm.clip_ratio_high: 0.0004",
    ),
    (
        {"algorithm": {"clip_ratio_high": 0.2}},
        "write algorithm.clip_ratio_low: 0.0003 and algorithm.clip_ratio_high: 0.0004",
    ),
)


@pytest.mark.parametrize(("keys", "fix"), NARROW_CLIPS)
def test_a_clip_range_is_narrowed_by_the_keys_that_give_it(keys, fix):
    (finding,) = found(rlinf(importance_sampling_level="sequence") | keys)
    assert (finding.code, finding.fix) == ("RST-T127", f"{fix}, as GSPO does")


def test_rolls_clip_range_is_narrowed_by_its_own_keys():
    config = roll({}, importance_sampling_level="sequence") | {"pg_clip": 0.2}
    (finding,) = [one for one in found(config) if one.code == "RST-T127"]
    assert finding.fix.startswith("write use_pg_clip_range: true, pg_clip_low: 0.0003 and pg_clip_high: 0.0004")
    narrow = {"use_pg_clip_range": True, "pg_clip_low": 0.0003, "pg_clip_high": 0.0004}
    assert [one.code for one in found(config | narrow)] == []


DOCS_BOUNDS = {"token": [0.5, 5.0], "sequence": [0.99, 1.01]}


@pytest.mark.parametrize(
    ("bounds", "sampling", "levels"),
    [
        (DOCS_BOUNDS, {"top_p": 0.9}, ["sequence"]),
        (DOCS_BOUNDS, {"top_p": 0.9, "sampling_mask_replay": True}, []),
        (DOCS_BOUNDS, {}, []),
        ({"token": [0.5, 5.0]}, {"top_p": 0.9}, []),
        ({"token": [0.95, 1.05]}, {"top_p": 0.9}, ["token"]),
        ({"trajectory": [0.5, 2.0]}, {"top_p": 0.9}, ["trajectory"]),
    ],
)
def test_bounds_that_reject_what_top_p_makes_are_a_warning(bounds, sampling, levels):
    config = rlinf(rollout_is="token", rollout_rejection=bounds, **sampling)
    named = [one for one in found(config) if one.code == "RST-T095"]
    assert [one.what.split()[2] for one in named] == levels
    assert all(one.severity is Severity.WARNING and one.where.path == ("train", "rollout_rejection") for one in named)


@grid(
    ("config", "size", "code", "what"),
    [
        (
            {"model_type": "qwen3_vl", "vision_config": {"depth": 1}},
            None,
            "RST-T160",
            "models of type qwen3_vl read images in a way that Roost does not support",
        ),
        (
            {"model_type": "gpt2"},
            "tensor",
            "RST-T122",
            "tensor size 2, but Roost does not divide layers of a model of type gpt2",
        ),
        (
            {"model_type": "deepseek_v3"},
            "expert",
            "RST-T123",
            "expert size 2, but Roost does not divide experts of a model of type deepseek_v3",
        ),
    ],
)
def test_a_family_that_cannot_be_trained_so_is_found_before_launch(config, size, code, what, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"model_path": str(tmp_path)} | ({} if size is None else {f"{size}_model_parallel_size": 2})
    job = rlinf(model=str(tmp_path)) | {"actor": {"training_backend": "fsdp", "model": model}}
    assert [(each.code, each.what) for each in found(job) if each.severity is Severity.ERROR] == [(code, what)]


def test_a_family_that_is_not_counted_may_have_a_tensor_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granite"}))
    model = {"model_path": str(tmp_path), "tensor_model_parallel_size": 2}
    job = rlinf(model=str(tmp_path)) | {"actor": {"training_backend": "fsdp", "model": model}}
    assert [each.code for each in found(job) if each.severity is Severity.ERROR] == []


QWEN_30B = MODELS["Qwen3-30B-A3B"]
EXPERT, CONTEXT, TENSOR = (f"{name}_parallel_size" for name in ("expert_model", "context", "tensor_model"))


@grid(
    ("config", "actor", "what", "fix"),
    [
        (
            QWEN_30B,
            {EXPERT: 5},
            "128 experts cannot be split over expert parallel size 5",
            "use an expert parallel size that divides 128",
        ),
        (
            QWEN_30B,
            {EXPERT: 16},
            "8 ranks that hold all experts cannot be split over expert parallel size 16",
            "use an expert parallel size that divides 8",
        ),
        (
            QWEN_30B,
            {"backend": "megatron", TENSOR: 2, EXPERT: 8},
            "4 ranks that hold all experts cannot be split over expert parallel size 8",
            "use an expert parallel size that divides 4",
        ),
        (
            QWEN_7B,
            {EXPERT: 8},
            "expert parallel size 8, but a model of type qwen2 has no experts",
            "use an expert parallel size of 1",
        ),
        (
            QWEN_7B,
            {CONTEXT: 8},
            "28 heads and 4 KV heads cannot be split over context parallel size 8",
            "use a context parallel size of 1, 2 or 4",
        ),
    ],
)
def test_sizes_that_cannot_divide_a_model_that_is_only_planned(config, actor, what, fix, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = dict(actor)
    job = rlinf({"actor,rollout": "0-7"})
    del job["train"]
    job["actor"] = {"training_backend": sizes.pop("backend", "fsdp"), "model": {"model_path": str(tmp_path), **sizes}}
    (finding,) = (each for each in found(job) if each.severity is Severity.ERROR)
    assert (finding.code, finding.what, finding.fix) == ("RST-P033", what, fix)


@grid("actor", [{"backend": "megatron", TENSOR: 2, EXPERT: 4}, {EXPERT: 8}, {CONTEXT: 8}, {TENSOR: 2, EXPERT: 8}])
def test_sizes_that_divide_a_model_that_is_only_planned(actor, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_30B))
    sizes = dict(actor)
    job = rlinf({"actor,rollout": "0-7"})
    del job["train"]
    job["actor"] = {"training_backend": sizes.pop("backend", "fsdp"), "model": {"model_path": str(tmp_path), **sizes}}
    assert [each for each in found(job) if each.code == "RST-P033"] == []


@grid(
    ("sizes", "code", "what", "fix"),
    [
        (
            {EXPERT: 16},
            "RST-T123",
            "FSDP over 3 ranks does not divide the 2048 rows of each expert",
            "write expert size 1",
        ),
        (
            {CONTEXT: 32},
            "RST-T120",
            "48 ranks cannot be divided into context groups of 32",
            "write 1, 2, 4, 8 or 16",
        ),
        (
            {CONTEXT: 5},
            "RST-T120",
            "48 ranks cannot be divided into context groups of 5",
            "write 1, 2, 4, 8 or 16",
        ),
    ],
)
def test_sizes_that_a_fix_names_work(sizes, code, what, fix, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_30B))

    def errors(**written):
        job = rlinf({"actor,rollout": "0-47"}, model=str(tmp_path), prompts_per_step=48)
        job["cluster"]["num_nodes"] = 6
        job["actor"] = {"training_backend": "fsdp", "model": {"model_path": str(tmp_path), **written}}
        return [finding for finding in found(job) if finding.code.startswith("RST-T12")]

    (finding,) = errors(**sizes)
    assert (finding.code, finding.what, finding.fix) == (code, what, fix)
    named = [int(number) for number in re.findall(r"\d+", finding.fix)]
    assert not [each for number in named for each in errors(**dict.fromkeys(sizes, number))]
