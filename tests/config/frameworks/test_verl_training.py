"""Training settings of verl's scripts: each key is followed, or named at its line."""

import json
import math
import subprocess
import sys

import pytest

from roost.config.compose import load
from roost.config.data import DataSource
from roost.config.findings import Findings, Where
from roost.config.job import Origin
from roost.config.notations.notation import read_job
from roost.config.train import value_of
from roost.placement.planner import try_plan
from roost.rollout.data.prompts import check_columns
from roost.rollout.data.tables import DataError
from tests.cli.terminal import run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward_model.overlong_buffer"
SMALL = (
    "algorithm.adv_estimator=grpo data.train_files=train.jsonl actor_rollout_ref.model.path=/models/small "
    f"{ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.name=hf trainer.n_gpus_per_node=1"
)


def script(folder, arguments=""):
    file = folder / "run.sh"
    words = "".join(f" \\\n  {word}" for word in f"{SMALL} {arguments}".split())
    file.write_text(f"#!/bin/bash\npython3 -m verl.trainer.main_ppo{words}\n")
    return file


def job_of(folder, arguments=""):
    findings = Findings()
    job = read_job(load(script(folder, arguments), (), findings), findings, trains=True)
    assert not findings.errors, [str(finding) for finding in findings.errors]
    return job, findings


def rejection(rules, thresholds):
    key = f"{CORRECTION}.rollout_rs"
    return f"{key}=\\'{rules}\\' {key}_threshold=\\'{thresholds}\\'"


def setting(folder, arguments, name):
    job, _ = job_of(folder, arguments)
    return job.training.minibatches if name == "minibatches" else value_of(job.training, name)


def test_a_rejection_that_roost_has_no_bounds_for_is_named(tmp_path):
    job, findings = job_of(tmp_path, rejection("token_k1,seq_max_k2", "0.6_1.6,2.5"))
    assert value_of(job.training, "rollout_rejection") == {"token": [1 / 1.6, 1 / 0.6]}  # k1 is of engine to learner
    assert [finding.why for finding in findings.warnings if "rollout_rs" in finding.where.key_path] == [
        "seq_max_k2 with the threshold 2.5 is none of Roost's bounds, which are of ratios by level"
    ]


@pytest.mark.parametrize(
    ("name", "is_of_verl"), [("trtllm", True), ("vlm", False), ("foo", False)], ids=["trtllm", "misspelt", "unknown"]
)
def test_an_engine_that_roost_does_not_have_is_not_replaced(name, is_of_verl, tmp_path):
    file, findings = script(tmp_path, f"{ROLLOUT}.name={name}"), Findings()
    read_job(load(file, (), findings), findings, trains=True)
    (error,) = findings.errors
    assert (error.code, error.where.key_path) == ("RST-T013", f"{ROLLOUT}.name")
    assert error.why == "of these words Roost knows vllm, sglang, hf"
    warned = [finding for finding in findings.warnings if finding.where.key_path == f"{ROLLOUT}.name"]
    assert [finding.code for finding in warned] == ([] if is_of_verl else ["RST-N068"])
    job, _ = job_of(tmp_path, f"{ROLLOUT}.name={name} +train.engine=vllm")
    assert job.training.engine == "vllm"


@pytest.mark.parametrize(
    "arguments",
    [
        f"{ACTOR}.router_replay.mode=R2",
        f"{ROLLOUT}.enable_rollout_routing_replay=True",
        f"{ROLLOUT}.dtype=float32",
        f"{ACTOR}.fsdp_config.dtype=float16",
        f"{ACTOR}.fsdp_config.model_dtype=float16",
        f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_c=3.0",
    ],
)
def test_a_key_that_is_not_followed_has_the_reason_of_its_warning(arguments, tmp_path):
    job, findings = job_of(tmp_path, arguments)
    key = arguments.split()[-1].partition("=")[0]
    (warning,) = [finding for finding in findings.warnings if finding.where.key_path == key]
    (use,) = [use for use in job.keys if use.where.key_path == key]
    assert warning.code == "RST-T014"
    assert (use.known.effect.value, use.known.reason) == ("not followed", warning.why)


@pytest.mark.parametrize(("lower", "code"), [("0", "RST-T093"), ("-1", "RST-C026")])
def test_a_lower_bound_of_ratios_is_above_zero(lower, code, tmp_path):
    findings = Findings()
    words = f"{rejection('token_k1', '2.0')} +{CORRECTION}.rollout_rs_threshold_lower={lower}"
    read_job(load(script(tmp_path, words), (), findings), findings, trains=True)
    assert [(finding.code, finding.where.path[-1]) for finding in findings.errors] == [
        (code, "rollout_rs_threshold_lower")
    ]


def test_two_bounds_of_weights_reject_what_is_outside(tmp_path):
    words = f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0.5_5.0"
    job, findings = job_of(tmp_path, words)
    named = ("rollout_is", "importance_weight_cap", "rollout_rejection")
    assert [value_of(job.training, name) for name in named] == ["trajectory", 0.0, {"trajectory": [0.5, 5.0]}]
    assert [str(finding.what) for finding in findings.notes if "threshold" in finding.where.key_path] == [
        "leaves tokens with weights outside 0.5 to 5 out of the loss"
    ]
    both, _ = job_of(tmp_path, f"{words} {rejection('seq_sum_k1', '0.25_1.0')}")
    assert value_of(both.training, "rollout_rejection") == {"trajectory": [1.0, 4.0]}


BYPASS = f"{CORRECTION}.bypass_mode=True {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5_5.0"


def test_weights_do_nothing_beside_a_ratio_against_the_engine(tmp_path):
    """As in verl, which passes none to ppo_clip; its loss reinforce alone is another one."""
    job, findings = job_of(tmp_path, f"{BYPASS} {CORRECTION}.loss_type=ppo_clip")
    assert value_of(job.training, "old_logprobs") == "rollout"
    assert value_of(job.training, "rollout_is") is None and not value_of(job.training, "rollout_rejection")
    assert [finding.code for finding in findings.found if "rollout_correction" in finding.where.key_path] == [
        "RST-N068"
    ]
    _, findings = job_of(tmp_path, f"{BYPASS} {CORRECTION}.loss_type=reinforce")
    assert [finding.where.path[-1] for finding in findings.warnings if finding.code == "RST-T014"] == ["loss_type"]


@pytest.mark.parametrize(("extra", "word"), [("", "rollout"), (f"{CORRECTION}.bypass_mode=False", "decoupled")])
def test_the_fully_asynchronous_trainer_compares_with_the_engine(extra, word, tmp_path):
    file = script(tmp_path, f"rollout.nnodes=1 rollout.n_gpus_per_node=1 {CORRECTION}.rollout_is=token {extra}")
    program = "verl.experimental.fully_async_policy.fully_async_main"
    file.write_text(file.read_text().replace("verl.trainer.main_ppo", program))
    findings = Findings()
    job = read_job(load(file, (), findings), findings, trains=True)
    assert value_of(job.training, "old_logprobs") == word
    assert value_of(job.training, "rollout_is") == (None if word == "rollout" else "token")


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("", "model", "/models/small"),
        ("", "prompts_per_step", 1024),
        ("", "minibatches", 4),
        ("", "max_new_tokens", 512),
        ("", "max_epochs", 30),
        ("", "learning_rate", 1e-6),
        ("", "clip_range", 0.2),
        ("", "dual_clip", 3.0),
        ("", "loss_aggregation", "token-mean"),
        ("", "advantage_estimator", "grpo"),
        ("", "kl_coef", 0.0),
        ("", "engine", "torch"),
        ("data.train_batch_size=64 data.max_response_length=99", "prompts_per_step", 64),
        ("data.train_batch_size=64 data.max_response_length=99", "max_new_tokens", 99),
        (f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=16", "minibatches", 4),
        (f"{ROLLOUT}.n=8", "num_generations", 8),
        (f"{ROLLOUT}.temperature=0.7", "temperature", 0.7),
        (f"{ROLLOUT}.name=vllm", "engine", "vllm"),
        (f"{ACTOR}.optim.lr=3e-6", "learning_rate", 3e-6),
        (f"{ACTOR}.clip_ratio_low=0.1 {ACTOR}.clip_ratio_high=0.28", "clip_range", 0.1),
        (f"{ACTOR}.clip_ratio_low=0.1 {ACTOR}.clip_ratio_high=0.28", "clip_range_high", 0.28),
        (f"{ACTOR}.use_kl_loss=True", "kl_coef", 0.001),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=kl", "kl_estimator", "k1"),
        (f"{ACTOR}.kl_loss_coef=0.01", "kl_coef", 0.0),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05", "kl_penalty_coef", 0.05),
        ("algorithm.adv_estimator=rloo", "advantage_estimator", "leave_one_out"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "advantage_estimator", "group_mean"),
        ("trainer.total_training_steps=7", "max_steps", 7),
        (f"{ACTOR}.router_replay.mode=R3 {ROLLOUT}.enable_rollout_routing_replay=True", "router_replay", True),
        (f"{ACTOR}.router_replay.mode=disabled", "router_replay", False),
        ("", "compute_dtype", "bfloat16"),
        (f"{ACTOR}.fsdp_config.dtype=float32", "compute_dtype", "float32"),
        (f"{ACTOR}.fsdp_config.dtype=bfloat16 {ROLLOUT}.dtype=bf16", "compute_dtype", "bfloat16"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", "weight_dtype", "bfloat16"),
        (f"{OVERLONG}.enable=True {OVERLONG}.len=64 {OVERLONG}.penalty_factor=0.5", "overlong_buffer_tokens", 64),
        (f"{OVERLONG}.enable=True {OVERLONG}.len=64 {OVERLONG}.penalty_factor=0.5", "overlong_penalty", 0.5),
        (f"{OVERLONG}.enable=False {OVERLONG}.len=64", "overlong_buffer_tokens", 0),
        ("trainer.test_freq=5 trainer.save_freq=-1", "eval_every", 5),
        ("trainer.test_freq=5 trainer.save_freq=-1", "checkpoint_every", 0),
        ("actor_rollout_ref.model.lora_rank=32", "lora_rank", 32),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc", "dynamic_sampling", True),
        ("algorithm.rollout_correction.rollout_is=token", "rollout_is", "token"),
        ("algorithm.rollout_correction.rollout_is=sequence", "rollout_is", "trajectory"),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0",
            "importance_weight_cap",
            3.0,
        ),
        ("algorithm.rollout_correction.bypass_mode=True", "old_logprobs", "rollout"),
        (rejection("token_k1", "0.5_2.0"), "rollout_rejection", {"token": [0.5, 2.0]}),
        (rejection("seq_sum_k1", "4.0"), "rollout_rejection", {"trajectory": [0.25, 4.0]}),
        (rejection("seq_mean_k1", "0.99_1.02"), "rollout_rejection", {"sequence": [1 / 1.02, 1 / 0.99]}),
        (rejection("geometric", "0.99_1.02"), "rollout_rejection", {"sequence": [0.99, 1.02]}),
        (rejection("geometric", "1.25"), "rollout_rejection", {"sequence": [0.8, 1.25]}),
        (rejection("token_k2", "0.5"), "rollout_rejection", {"token": [math.exp(-1), math.exp(1)]}),
        (
            rejection("token_k1,seq_mean_k1", "0.6_1.6,0.9_1.1"),
            "rollout_rejection",
            {"token": [1 / 1.6, 1 / 0.6], "sequence": [1 / 1.1, 1 / 0.9]},
        ),
        (rejection("token_k1,token_k2", "0.5_10.0,0.5"), "rollout_rejection", {"token": [math.exp(-1), 2.0]}),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "importance_sampling_level", "sequence"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "loss_aggregation", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "dual_clip", None),
        ("+train.importance_sampling_level=sequence", "dual_clip", 3.0),
        (f"{ACTOR}.policy_loss.loss_mode=sapo", "loss_aggregation", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.loss_agg_mode=token-mean", "loss_aggregation", "token-mean"),
        ("", "shuffle_minibatches", False),
        (f"{ACTOR}.shuffle=True", "shuffle_minibatches", True),
        (f"{ACTOR}.policy_loss.loss_mode=vanilla", "importance_sampling_level", "token"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo", "loss_type", "cispo"),
        (f"{ACTOR}.optim.betas=[0.9,0.95]", "adam_beta2", 0.95),
        ("", "adam_beta2", 0.999),
        (f"{ACTOR}.optim.lr=0.5 {ACTOR}.optim.min_lr_ratio=0.5", "min_learning_rate", 0.25),
        (f"{ACTOR}.optim.clip_grad=0.5", "max_grad_norm", 0.5),
        (f"{ACTOR}.optim.optimizer=AdamW {ACTOR}.optim.optimizer_impl=torch.optim", "optimizer", "adamw"),
        (f"{ACTOR}.optim.optimizer=AdamW8bit {ACTOR}.optim.optimizer_impl=torchao.optim", "optimizer", "adamw_8bit"),
        (f"{ACTOR}.optim.optimizer=muon", "optimizer", "muon"),
        ("", "critic_learning_rate", 1e-5),
        ("", "value_clip", 0.5),
        ("critic.cliprange_value=0.3", "value_clip", 0.3),
        ("trainer.critic_warmup=4", "critic_warmup_steps", 4),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64",
            "overlong_buffer_tokens",
            64,
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2",
            "kl_penalty_target",
            0.2,
        ),
        (f"{ROLLOUT}.val_kwargs.top_p=0.7", "eval_top_p", 0.7),
        (
            f"data.train_batch_size=0 async_training.require_batches=2 {ACTOR}.ppo_mini_batch_size=16",
            "prompts_per_step",
            32,
        ),
    ],
)
def test_a_key_and_its_setting(arguments, name, value, tmp_path):
    assert setting(tmp_path, arguments, name) == value


def test_another_optimizer_is_refused_with_the_setting_to_write(tmp_path):
    findings = Findings()
    read_job(load(script(tmp_path, f"{ACTOR}.optim.optimizer=SGD"), (), findings), findings, trains=True)
    (found,) = findings.errors
    assert (found.code, found.fix) == ("RST-T013", "use one of them, or remove it and write +train.optimizer=VALUE")


def test_the_fix_of_an_unknown_word_is_one_that_a_script_can_take(tmp_path):
    findings = Findings()
    file = script(tmp_path, f"{ACTOR}.policy_loss.loss_mode=clip_cov")
    read_job(load(file, (), findings), findings, trains=True)
    (found,) = findings.errors
    assert (found.code, found.fix) == ("RST-T013", "use one of them, or remove it and write +train.SETTING=VALUE")
    assert setting(tmp_path, "+train.loss_type=cispo", "loss_type") == "cispo"


def test_data_of_several_files(tmp_path):
    data = setting(
        tmp_path, "data.train_files=[a.parquet,b.parquet] data.val_files=c.parquet data.shuffle=False", "data"
    )
    assert (data["path"], data["eval"], data["shuffle"]) == (["a.parquet", "b.parquet"], ["c.parquet"], False)


def test_origins_are_the_lines_of_the_script(tmp_path):
    job, _ = job_of(tmp_path, f"{ACTOR}.optim.lr=3e-6")
    found = {one.name: one for one in job.resolved}
    (key,) = found["learning_rate"].keys
    assert (key.line, key.key_path) == (9, "actor_rollout_ref.actor.optim.lr")
    assert found["dual_clip"].origin is Origin.NOTATION


def test_what_is_ignored_is_named_at_its_line(tmp_path):
    ignored = f"{ACTOR}.policy_loss.clip_cov_ratio=0.1 {ACTOR}.clip_ratio=0.3 trainer.logger=console"
    _, findings = job_of(tmp_path, ignored)
    named = {finding.where.key_path: finding for finding in findings.warnings if finding.code == "RST-T014"}
    assert {name: finding.where.line for name, finding in named.items()} == {
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 9,
        "actor_rollout_ref.actor.clip_ratio": 10,
    }
    assert "clip_ratio_low" in named["actor_rollout_ref.actor.clip_ratio"].why
    assert any("trainer.logger" in note.what for note in findings.notes if note.code == "RST-T041")


@pytest.mark.parametrize(
    ("estimator", "gamma", "unfollowed"),
    [
        ("gae", 0.95, set()),
        ("reinforce_plus_plus", 0.95, {"algorithm.lam"}),
        ("grpo", 1.0, {"algorithm.gamma", "algorithm.lam"}),
    ],
)
def test_a_discount_is_followed_where_verl_uses_it(estimator, gamma, unfollowed, tmp_path):
    given = f"algorithm.adv_estimator={estimator} algorithm.gamma=0.95 algorithm.lam=0.9"
    assert setting(tmp_path, given, "gamma") == gamma
    _, findings = job_of(tmp_path, given)
    assert {one.where.key_path for one in findings.warnings if one.code == "RST-T014"} == unfollowed


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("reinforce_plus_plus", ("reward", "tokens")),
        ("reinforce_plus_plus_baseline", ("reinforce++_baseline", "tokens")),
        ("grpo", ("grpo", "none")),
    ],
)
def test_returns_are_whitened_over_tokens_as_in_verl(estimator, expected, tmp_path):
    given = f"algorithm.adv_estimator={estimator}"
    assert tuple(setting(tmp_path, given, name) for name in ("advantage_estimator", "whiten_advantages")) == expected


def test_gae_is_as_in_verl(tmp_path):
    """verl's runs over the tokens of the response mask alone, and whitens with n - 1."""
    job, findings = job_of(tmp_path, "algorithm.adv_estimator=gae algorithm.gamma=0.9 algorithm.lam=0.8")
    advantage = job.training.advantage
    assert (advantage.gamma, advantage.gae_lambda, advantage.whiten_advantages) == (0.9, 0.8, "tokens")
    assert "RST-T048" not in {finding.code for finding in findings.found}


@pytest.mark.parametrize(
    ("estimator", "is_named"), [("gae", False), ("reinforce_plus_plus", False), ("grpo", True), ("rloo", True)]
)
def test_a_kl_in_rewards_that_groups_compare_in_verl_is_named(estimator, is_named, tmp_path):
    given = f"algorithm.adv_estimator={estimator} algorithm.use_kl_in_reward=True"
    _, findings = job_of(tmp_path, given)
    named = {one.where.key_path for one in findings.warnings if one.code == "RST-T048"}
    assert ("algorithm.use_kl_in_reward" in named) == is_named


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ("gspo", set()),
        (f"gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean", set()),
        (f"gspo {ACTOR}.loss_agg_mode=token-mean {ACTOR}.clip_ratio_c=3.0", {"loss_agg_mode", "clip_ratio_c"}),
        (f"sapo {ACTOR}.loss_agg_mode=token-mean", {"loss_agg_mode"}),
        (f"cispo {ACTOR}.loss_agg_mode=token-mean", set()),
    ],
)
def test_keys_that_a_loss_of_verl_does_not_read_are_named(arguments, keys, tmp_path):
    _, findings = job_of(tmp_path, f"{ACTOR}.policy_loss.loss_mode={arguments}")
    named = {finding.where.key_path for finding in findings.warnings if finding.code == "RST-T014"}
    assert named == {f"{ACTOR}.{key}" for key in keys}


def test_agent_loops_are_warned_of(tmp_path):
    given = f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.agent.agent_loop_config_path=loops.yaml"
    _, findings = job_of(tmp_path, f"{given} {ROLLOUT}.agent.num_workers=4")
    named = {finding.where.path[-1] for finding in findings.warnings if finding.code == "RST-T014"}
    assert named == {"default_agent_loop", "agent_loop_config_path"}
    _, findings = job_of(tmp_path, f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent")
    assert "RST-T014" not in {finding.code for finding in findings.warnings}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("trainer.val_only=True", "roost eval"), ("algorithm.adv_estimator=remax", "train")],
    ids=["val_only", "remax"],
)
def test_a_job_that_cannot_train_gets_one_error(arguments, said, tmp_path):
    findings = Findings()
    read_job(load(script(tmp_path, arguments), (), findings), findings, trains=True)
    (error,) = findings.errors
    assert said in error.fix
    assert "RST-T048" not in {note.code for note in findings.notes}


def test_the_reward_is_said(tmp_path):
    _, findings = job_of(tmp_path)
    assert any("data_source" in note.why for note in findings.notes if note.code == "RST-T061")
    _, findings = job_of(tmp_path, "+train.rewards.mine._target_=roost.rollout.rewards.math_answer.MathAnswer")
    assert "RST-T061" not in {note.code for note in findings.notes}


def test_what_is_switched_off_is_followed_or_named(tmp_path):
    off = "data.apply_chat_template_kwargs.enable_thinking=False actor_rollout_ref.rollout.do_sample=False"
    job, findings = job_of(tmp_path, f"{off} {ROLLOUT}.ignore_eos=False {ACTOR}.shuffle=True")
    assert job.training.data["template_arguments"] == {"enable_thinking": False}
    assert job.training.shuffle_minibatches
    assert {one.where.key_path for one in findings.warnings if one.code == "RST-T014"} == {f"{ROLLOUT}.do_sample"}
    job, _ = job_of(tmp_path, f"{ACTOR}.shuffle=False")
    assert not job.training.shuffle_minibatches


def test_a_plan_alone_reads_no_settings(tmp_path):
    findings = Findings()
    job = read_job(load(script(tmp_path), (), findings), findings)
    assert job.training is None
    assert {note.code for note in findings.notes} == {"RST-T042"}


def test_check_says_that_a_script_can_train(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    result = run("check", "--train", script(tmp_path, f"{ROLLOUT}.n=2"), width=300)
    assert result.exit_code == 0, result.output
    assert "can train" in result.stdout


def test_planning_does_not_wait_for_training(tmp_path):
    """Importing the settings takes a tenth of the time of a plan."""
    code = f"import sys, roost; roost.plan({str(script(tmp_path))!r}); print('roost.config.train' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    "argument",
    [
        f"{ACTOR}.optim.lr_decay_style=constant",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        "trainer.val_before_train=True",
        "data.image_key=images",
    ],
)
def test_what_roost_does_the_same_is_not_reported(argument, tmp_path):
    _, findings = job_of(tmp_path, argument)
    key = argument.partition("=")[0]
    assert not [str(found) for found in findings.found if key.rpartition(".")[2] in str(found)]


def test_another_schedule_is_not_followed(tmp_path):
    _, findings = job_of(tmp_path, f"{ACTOR}.optim.lr_decay_style=cosine")
    assert [found.what for found in findings.warnings if "lr_decay_style" in str(found.where)] == ["is not followed"]


def test_an_evaluation_before_training_is_not_logging(tmp_path):
    job, _ = job_of(tmp_path, "trainer.val_before_train=False")
    (use,) = (use for use in job.keys if use.where.key_path == "trainer.val_before_train")
    assert use.is_set and use.known.reason == "Roost evaluates before the first step wherever eval_every is above 0"


@pytest.mark.parametrize(("size", "expected"), [("1", 4096), ("4", 16384)])
def test_tokens_of_a_micro_batch_are_those_of_a_context_group(size, expected, tmp_path):
    words = f"{ACTOR}.ppo_max_token_len_per_gpu=4096 {ACTOR}.ulysses_sequence_parallel_size={size}"
    words += " trainer.n_gpus_per_node=4"
    assert setting(tmp_path, words, "micro_batch_tokens") == expected


def test_a_column_of_images_is_followed(tmp_path):
    job, findings = job_of(tmp_path, "data.image_key=pictures")
    assert value_of(job.training, "data")["images"] == "pictures"
    assert not [found for found in findings.found if "image_key" in str(found)]


@pytest.mark.parametrize(
    ("engine", "model_type", "column", "codes"),
    [
        ("sglang", "qwen2_5_vl", "data.image_key=images", ["RST-T160"]),
        ("sglang", "qwen2_5_vl", "", []),
        ("sglang", "qwen2", "data.image_key=images", []),
        ("vllm", "qwen2_5_vl", "data.image_key=images", []),
    ],
)
def test_images_need_an_engine_that_takes_them(engine, model_type, column, codes, tmp_path):
    vision = {"vision_config": {}} if model_type == "qwen2_5_vl" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **vision}))
    file = script(tmp_path, f"{ROLLOUT}.name={engine} actor_rollout_ref.model.path={tmp_path} {column}")
    done = run("check", "--train", "--json", file)
    (found,) = json.loads(done.output).values()
    assert [each["code"] for each in found["findings"] if each["code"] == "RST-T160"] == codes


def test_check_does_not_point_at_itself(tmp_path):
    file = script(tmp_path, "trainer.logger=console")
    assert "roost check --train" not in run("check", "--train", file).output
    assert "roost check --train" not in run("check", "--train", "--json", file).output
    _, findings = job_of(tmp_path, "trainer.logger=console")
    assert any(found.fix.startswith("roost check --train") for found in findings.notes), "as roost train prints it"


def test_staleness_is_from_the_keys_of_the_asynchronous_trainer(tmp_path):
    file = script(tmp_path, "rollout.nnodes=1 rollout.n_gpus_per_node=1 async_training.staleness_threshold=5")
    program = "verl.experimental.fully_async_policy.fully_async_main"
    file.write_text(file.read_text().replace("verl.trainer.main_ppo", program))
    shown = run("explain", file, "train.max_staleness")
    assert "async_training.staleness_threshold" in shown.output, shown.output


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (f"{ACTOR}.clip_ratio_hihg", "did you mean clip_ratio_high?"),
        (f"{ACTOR}.optim.weight_deca", "did you mean weight_decay?"),
        (f"{ACTOR}.something_else", "Roost has nothing for it"),
    ],
)
def test_a_slip_of_a_known_key_is_named(key, why, tmp_path):
    _, findings = job_of(tmp_path, f"{key}=0.3")
    assert [finding.why for finding in findings.warnings if finding.where.key_path == key] == [why]


def test_steps_by_epochs_come_from_the_key_of_epochs(tmp_path):
    def origin(arguments):
        job, _ = job_of(tmp_path, arguments)
        (steps,) = [setting for setting in job.resolved if setting.name == "max_steps"]
        return steps.value, steps.origin, [place.key_path for place in steps.keys]

    assert origin("trainer.total_epochs=2") == (None, Origin.CONFIG, ["trainer.total_epochs"])
    assert origin("") == (None, Origin.NOTATION, [])
    assert origin("trainer.total_training_steps=7") == (7, Origin.CONFIG, ["trainer.total_training_steps"])


def test_explained_keys_say_what_training_follows(tmp_path):
    file = script(tmp_path, f"{ACTOR}.optim.lr=1e-5 {ACTOR}.router_replay.mode=R2 trainer.logger=console")
    shown = " ".join(run("explain", str(file), "keys").output.split())
    assert "followed: by training alone, as learning_rate in train" in shown
    assert "not followed: R2 is no replay of the engine's experts" in shown
    assert "files or logging: logging" in shown
    assert "trainer.n_gpus_per_node" not in shown  # it places


@pytest.mark.parametrize(
    ("arguments", "code", "path", "fix"),
    [
        (
            "~actor_rollout_ref.model.path",
            "RST-T004",
            MODEL,
            f"write {MODEL}=FOLDER, that of a Hugging Face checkpoint",
        ),
        (
            "",
            "RST-T028",
            f"{ROLLOUT}.n",
            "write 2 or more, or algorithm.adv_estimator=reinforce_plus_plus",
        ),
        (
            f"{ACTOR}.fsdp_config.model_dtype=bf16 {ACTOR}.fsdp_config.dtype=fp32",
            "RST-T038",
            f"{ACTOR}.fsdp_config.model_dtype",
            f"write {ACTOR}.fsdp_config.model_dtype=float32",
        ),
        (
            f"{ROLLOUT}.tensor_model_parallel_size=2 trainer.n_gpus_per_node=2",
            "RST-E001",
            f"{ROLLOUT}.name",
            f"write {ROLLOUT}.name=vllm or sglang, or give each engine one device",
        ),
    ],
    ids=["model", "groups", "types", "engine"],
)
def test_a_fix_is_an_override_of_verls_key(arguments, code, path, fix, tmp_path):
    findings = Findings()
    job = read_job(load(script(tmp_path, arguments), (), findings), findings, trains=True)
    if job is not None:
        try_plan(job, findings)
    (found,) = [finding for finding in findings.found if finding.code == code]
    assert (found.where.key_path, found.fix) == (path, fix)


def test_fixes_for_columns_of_verls_data_are_overrides():
    place, findings = Where("run.sh", 2, 1, ("data", "train_files")), Findings()
    with pytest.raises(DataError) as raised:
        check_columns(DataSource(path=("train.jsonl",), prompt="prompt"), ["messages", "label"])
    raised.value.report(place, findings)
    (found,) = findings.found
    assert (found.code, found.fix) == ("RST-T064", "write data.prompt_key=COLUMN, with one of these")


def test_the_column_of_answers_is_named_by_an_override(tmp_path):
    file = script(tmp_path, f"{ROLLOUT}.n=2 data.train_files={tmp_path}/train.jsonl")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    assert (
        "name the column of the answers: +train.data.answer="
        in run("check", "--train", "--imports", file, width=300).output
    )


def test_a_batch_of_generation_is_no_key_of_the_data(tmp_path):
    _, findings = job_of(tmp_path, f"{ROLLOUT}.n=2 data.gen_batch_size=512")
    (found,) = [finding for finding in findings.warnings if finding.where.key_path == "data.gen_batch_size"]
    assert found.code == "RST-T014"
    assert found.fix == "remove it, or write the number of prompts as data.train_batch_size"


def test_data_at_an_unset_variable_has_one_error(tmp_path):
    """The key was also said to be missing."""
    findings = Findings()
    file = script(tmp_path, "data.train_files=$FOLDER_OF_DATA/train.parquet")
    read_job(load(file, (), findings), findings, trains=True)
    assert [(each.code, each.where.key_path) for each in findings.errors] == [("RST-C022", "data.train_files")]
