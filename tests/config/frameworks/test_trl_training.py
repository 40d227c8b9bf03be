"""Training settings of TRL's commands: each argument is followed, or named at its line."""

import json
import re

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.config.train import value_of
from tests.cli.terminal import run
from tests.grid import grid

WSD = "--lr_scheduler_type warmup_stable_decay --learning_rate 1e-5 --lr_scheduler_kwargs"
SMALL = "--model_name_or_path /models/small --dataset_name train.jsonl --reward_funcs accuracy_reward"


def script(folder, arguments="", processes=1, trainer="grpo"):
    file = folder / "run.sh"
    words = f" {SMALL} {arguments}".replace(" --", " \\\n  --")
    file.write_text(f"#!/bin/bash\ntrl {trainer} --num_processes {processes}{words}\n")
    return file


def job_of(file):
    findings = Findings()
    job = read_job(load(file, (), findings), findings, trains=True)
    assert not findings.errors, [str(finding) for finding in findings.errors]
    return job, findings


def test_arguments_of_a_schedule_that_roost_lacks_are_named(tmp_path):
    arguments = '{"num_decay_steps": 9, "num_stable_steps": 3, "warmup_type": "linear"}'
    _, findings = job_of(script(tmp_path, f"{WSD} '{arguments}'"))
    named = [finding for finding in findings.warnings if "lr_scheduler" in finding.where.key_path]
    assert [(finding.what, finding.where.line) for finding in named] == [("num_stable_steps is not followed", 8)]


@grid(
    ("arguments", "name", "value"),
    [
        ("", "model", "/models/small"),
        ("", "num_generations", 8),
        ("", "prompts_per_step", 1),
        ("", "max_epochs", 3),
        ("", "learning_rate", 1e-6),
        ("", "clip_range", 0.2),
        ("", "clip_range_high", 0.2),
        ("", "loss_aggregation", "token-mean"),
        ("", "advantage_estimator", "grpo"),
        ("", "kl_coef", 0.0),
        ("", "engine", "torch"),
        ("", "lr_scheduler_type", "linear"),
        (f"{WSD} '{{}}'", "lr_scheduler_type", "wsd"),
        (f"{WSD} '{{}}'", "wsd_decay_style", "cosine"),  # the default of transformers
        (f"""{WSD} '{{"num_decay_steps": 9, "decay_type": "1-sqrt"}}'""", "wsd_decay_steps", 9),
        (f"""{WSD} '{{"num_decay_steps": 9, "decay_type": "1-sqrt"}}'""", "wsd_decay_style", "minus_sqrt"),
        (f"""{WSD} '{{"min_lr_ratio": 0.5}}'""", "min_learning_rate", 5e-6),
        (
            """--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 1e-7}'""",
            "min_learning_rate",
            1e-7,
        ),
        (f"""{WSD} '{{"num_decay_steps": 9, "min_lr_rate": 0.5}}'""", "min_learning_rate", 0.0),  # not of wsd
        ("""--lr_scheduler_type cosine --lr_scheduler_kwargs '{"num_decay_steps": 9}'""", "wsd_decay_steps", None),
        ("--use_vllm", "engine", "vllm"),
        ("--num_generations 4", "prompts_per_step", 2),
        ("--per_device_train_batch_size 4 --gradient_accumulation_steps 8", "prompts_per_step", 4),
        ("--per_device_train_batch_size 4 --gradient_accumulation_steps 8", "minibatches", 1),
        ("--per_device_train_batch_size 8 --steps_per_generation 4", "minibatches", 4),
        ("--generation_batch_size 64", "prompts_per_step", 8),
        ("--steps_per_generation 4 --num_iterations 2 --max_steps 16", "max_steps", 2),
        ("--max_steps 7", "max_steps", 7),
        ("--max_steps -1", "max_epochs", 3),
        ("--max-completion-length 99", "max_new_tokens", 99),
        ("--temperature 0.7", "temperature", 0.7),
        ("--learning_rate 3e-6", "learning_rate", 3e-6),
        ("--epsilon 0.1 --epsilon_high 0.28", "clip_range", 0.1),
        ("--epsilon 0.1 --epsilon_high 0.28", "clip_range_high", 0.28),
        ("--epsilon 0.1", "clip_range_high", 0.1),
        ("--delta 3.0", "dual_clip", 3.0),
        ("--beta 0.04", "kl_coef", 0.04),
        ("--beta 0.04", "kl_estimator", "k3"),
        ("--beta 0.04", "kl_importance_sampling", True),
        ("--beta 0.04 --use_bias_correction_kl false", "kl_importance_sampling", False),
        ("--beta 0.04 --use_bias_correction_kl true", "kl_importance_sampling", True),
        ("", "kl_importance_sampling", False),
        ("--loss_type grpo", "loss_aggregation", "seq-mean-token-mean"),
        ("--loss_type dr_grpo", "loss_aggregation", "seq-mean-token-sum-norm"),
        ("--loss_type cispo", "loss_type", "cispo"),
        ("--loss_type cispo --epsilon_high 5.0", "clip_range", 1.0),
        ("--loss_type cispo --epsilon_high 5.0", "clip_range_high", 4.0),
        ("--loss_type cispo", "clip_range_high", 0.0),
        ("--loss_type sapo --sapo_temperature_pos 1.5", "sapo_temperature_pos", 1.5),
        ("--loss_type sapo --sapo_temperature_neg 2.0", "sapo_temperature_neg", 2.0),
        ("--loss_type sapo", "sapo_temperature_neg", 1.05),
        ("--scale_rewards none", "advantage_estimator", "group_mean"),
        ("--scale_rewards False", "advantage_estimator", "group_mean"),
        ("--scale_rewards batch", "advantage_estimator", "reward"),
        ("--scale_rewards batch", "reward_baseline", "group"),
        ("--scale_rewards batch", "reward_std", "batch"),
        ("--loss_type luspo --importance_sampling_level sequence", "loss_aggregation", "seq-mean-token-sum"),
        ("", "max_new_tokens", 512),
        ("--importance_sampling_level sequence", "importance_sampling_level", "sequence"),
        ("--importance_sampling_level sequence_token", "importance_sampling_level", "sequence"),
        ("--mask_truncated_completions", "mask_truncated", True),
        ("--gradient_checkpointing False", "activation_checkpointing", False),
        ("--num_iterations 2", "ppo_epochs", 2),
        ("--use_peft --lora_r 8", "lora_rank", 8),
        ("--save_steps 20", "checkpoint_every", 20),
        ("--save_strategy no", "checkpoint_every", 0),
        ("--eval_strategy steps --eval_steps 5", "eval_every", 5),
        ("--eval_strategy steps", "eval_every", 10),
        ("--eval_strategy steps --logging_steps 4", "eval_every", 4),
        ("--steps_per_generation 4", "checkpoint_every", 125),
        ("--save_strategy epoch --num_train_epochs 1", "checkpoint_every", 0),
        ("--save_steps 0.1 --max_steps 200", "checkpoint_every", 20),
        ("--save_steps 20.0", "checkpoint_every", 20),
        ("--num_train_epochs 1.0", "max_epochs", 1),
        ("--num_train_epochs 1.5 --max_steps 7", "max_steps", 7),
        ("--warmup_steps 0.1", "warmup_ratio", 0.1),
        ("--warmup_steps 5", "warmup_steps", 5),
        ("--use_peft --lora_r 8", "lora_alpha", 32.0),
        ("--num_generations 4", "eval_samples", 4),
        ("--temperature 0.7", "eval_temperature", 0.7),
        ("", "eval_temperature", 1.0),
        ("--beta 0.04 --sync_ref_model --ref_model_mixup_alpha 1.0", "reference_sync_steps", 512),
        ("--beta 0.04 --sync_ref_model --ref_model_sync_steps 8 --steps_per_generation 4", "reference_sync_steps", 2),
        ("--use_vllm", "rollout_is", "trajectory"),
        ("--use_vllm", "rollout_rejection", {"trajectory": [None, 3.0]}),
        ("--use_vllm --vllm_importance_sampling_correction false", "rollout_is", None),
        ("--use_vllm --vllm_importance_sampling_mode token_truncate", "rollout_is", "token"),
        ("--use_vllm --vllm_importance_sampling_mode token_truncate", "rollout_rejection", {}),
        ("--use_vllm --vllm_importance_sampling_cap 2.5", "importance_weight_cap", 2.5),
        ("", "rollout_is", None),
        ("--optim paged_adamw_8bit", "optimizer", "adamw_8bit"),
    ],
)
def test_an_argument_and_its_setting(arguments, name, value, tmp_path):
    job, _ = job_of(script(tmp_path, arguments))
    assert (job.training.minibatches if name == "minibatches" else value_of(job.training, name)) == value


@grid(
    ("arguments", "name", "value"),
    [
        ("", "advantage_estimator", "leave_one_out"),
        ("", "importance_sampling_level", "trajectory"),
        ("", "loss_aggregation", "seq-mean-token-mean"),
        ("", "num_generations", 2),
        ("", "prompts_per_step", 4),
        ("", "kl_penalty_coef", 0.05),
        ("", "kl_penalty_estimator", "k1"),
        ("", "kl_coef", 0.0),
        ("--beta 0.1", "kl_penalty_coef", 0.1),
        ("--beta 0", "kl_penalty_coef", 0.0),
        ("--num_generations 4", "num_generations", 4),
        ("--use_vllm", "rollout_is", None),
    ],
)
def test_an_argument_of_rloo_and_its_setting(arguments, name, value, tmp_path):
    assert value_of(job_of(script(tmp_path, arguments, trainer="rloo"))[0].training, name) == value


@grid(("arguments", "named"), [("", ["beta"]), ("--beta 0.1", ["--beta"]), ("--beta 0", [])])
def test_the_kl_of_rloo_is_warned_of(arguments, named, tmp_path):
    """TRL subtracts it before samples of a prompt are compared."""
    _, findings = job_of(script(tmp_path, arguments, trainer="rloo"))
    assert [one.where.key_path for one in findings.warnings if one.code == "RST-T048"] == named


@grid(
    ("program", "text", "estimator"),
    [
        ("rloo.py", "", "leave_one_out"),
        ("train.py", "from trl import RLOOConfig\n", "leave_one_out"),
        ("rloo.py", "from trl import GRPOConfig\n", "grpo"),
        ("train_grpo.py", "", "grpo"),
    ],
)
def test_a_script_names_its_trainer(program, text, estimator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / program).write_text(f"from trl import TrlParser\n{text}")
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\naccelerate launch --num_processes 1 {program} {SMALL} --use_vllm\n")
    assert job_of(tmp_path / "run.sh")[0].training.advantage.advantage_estimator == estimator


@grid(("word", "named"), [("adafactor", True), ("adamw_bnb_8bit", False), ("adamw_torch_fused", False)])
def test_another_optimizer_is_named(word, named, tmp_path):
    _, findings = job_of(script(tmp_path, f"--optim {word}"))
    assert named is ("--optim" in {one.where.key_path for one in findings.warnings if one.code == "RST-T014"})


def test_processes_multiply_the_batch(tmp_path):
    job, _ = job_of(script(tmp_path, "--per_device_train_batch_size 8", processes=4))
    assert job.training.rollout.prompts_per_step == 4


def test_data_and_reward(tmp_path):
    job, findings = job_of(script(tmp_path, "--dataset_train_split test --max_prompt_length 64"))
    data = job.training.data
    assert (data["path"], data["split"], data["max_prompt_tokens"]) == ("train.jsonl", "test", 64)
    assert job.training.rewards["reward"]["_target_"].endswith("MathAnswer")
    assert "RST-T061" not in {note.code for note in findings.notes}
    _, findings = job_of(script(tmp_path, "--reward_funcs think_format_reward"))
    assert any("think_format_reward" in note.why for note in findings.notes if note.code == "RST-T061")


def test_what_is_ignored_is_named_at_its_line(tmp_path):
    _, findings = job_of(script(tmp_path, "--top_entropy_quantile 0.2 --logging_steps 1"))
    named = {one.where.key_path: one.where.line for one in findings.warnings if one.code == "RST-T014"}
    assert named == {"--top_entropy_quantile": 6}
    assert any("--logging_steps" in note.what for note in findings.notes if note.code == "RST-T041")


def test_what_is_switched_off_is_followed_or_named(tmp_path):
    _, findings = job_of(script(tmp_path, "--ddp_fp8 0 --top_entropy_quantile 0 --use_dora false --lora_dropout 0.0"))
    named = [one.where.key_path for one in findings.warnings if one.code == "RST-T014"]
    assert named == ["--top_entropy_quantile"]


@grid(
    ("arguments", "written"),
    [
        ("""--chat_template_kwargs '{"enable_thinking": false}'""", {"enable_thinking": False}),
        ("--chat_template_kwargs null", None),
    ],
)
def test_arguments_of_the_chat_template(arguments, written, tmp_path):
    job, _ = job_of(script(tmp_path, arguments))
    assert job.training.data.get("template_arguments") == written


@grid(
    ("arguments", "key"),
    [
        ("--loss_type cispo", "--loss_type"),
        ("--loss_type cispo --epsilon 0.3", "--epsilon"),
        ("--loss_type cispo --epsilon_high 0.28", "--epsilon_high"),
        ("--loss_type cispo --epsilon_high 5.0", None),
    ],
)
def test_a_cap_of_cispo_below_1_is_a_warning(arguments, key, tmp_path):
    _, findings = job_of(script(tmp_path, arguments))
    named = [one.where.key_path for one in findings.warnings if "caps the ratio" in one.what]
    assert named == ([] if key is None else [key])


@grid(
    ("arguments", "key"),
    [
        ("--beta 0.04 --sync_ref_model", "--sync_ref_model"),
        ("--beta 0.04 --sync_ref_model --ref_model_mixup_alpha 0.5", "--ref_model_mixup_alpha"),
        ("--save_strategy epoch", "--save_strategy"),
        ("--eval_strategy epoch", "--eval_strategy"),
        ("--loss_type luspo", "--loss_type"),
        ("--loss_type luspo --importance_sampling_level token", "--loss_type"),
        ("--loss_type luspo --importance_sampling_level sequence --beta 0.04", "--beta"),
    ],
)
def test_what_is_followed_in_part_is_a_warning(arguments, key, tmp_path):
    _, findings = job_of(script(tmp_path, arguments))
    assert [one.where.key_path for one in findings.warnings if one.code == "RST-T014"] == [key]


def test_luspo_by_sequence_is_followed(tmp_path):
    _, findings = job_of(script(tmp_path, "--loss_type luspo --importance_sampling_level sequence --beta 0.0"))
    assert not [one for one in findings.warnings if one.code == "RST-T014"]


@grid(
    ("arguments", "words"),
    [
        ("--save_steps 0.1", "a fraction of the steps of the run"),
        ("--num_train_epochs 0.5", "ends within a pass"),
    ],
)
def test_a_fraction_of_a_run_of_unknown_length_is_an_error(arguments, words, tmp_path):
    findings = Findings()
    read_job(load(script(tmp_path, arguments), (), findings), findings, trains=True)
    assert [words in one.what for one in findings.errors] == [True]


def test_an_asynchronous_job_has_defaults_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "python train.py --model_name_or_path /models/small --dataset_name train.jsonl"
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    found = []
    for words in ("", "max_staleness=2"):
        (tmp_path / "train.py").write_text(f"from trl import TrlParser\nargs = AsyncGRPOConfig({words})\n")
        found.append(job_of(tmp_path / "run.sh")[0].training)
    assert [each.max_staleness for each in found] == [4, 2]
    assert found[0].sampling.max_new_tokens == 2048
    assert found[0].learner.optimizer.lr_scheduler_type == "constant"


def test_a_yaml_and_a_script_of_python_give_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {"num_generations": 4, "epsilon": 0.1, "loss_type": "dr_grpo", "max_steps": 3}
    given = {"model_name_or_path": "/models/small", "dataset_name": "train.jsonl", **keys}
    (tmp_path / "grpo.yaml").write_text(json.dumps({**given, "num_processes": 1}))
    words = ", ".join(f"{key}={value!r}" for key, value in keys.items())
    (tmp_path / "train_grpo.py").write_text(f"from trl import TrlParser\nargs = GRPOConfig({words})\n")
    command = "python train_grpo.py --model_name_or_path /models/small --dataset_name train.jsonl"
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    found = [job_of(tmp_path / name)[0].training for name in ("grpo.yaml", "run.sh")]
    assert found[0].max_steps == found[1].max_steps == 3
    assert found[0].learner.loss == found[1].learner.loss
    assert found[0].learner.loss.clip_range == 0.1


def test_settings_of_roost_beside_flags(tmp_path):
    job, _ = job_of(script(tmp_path, "--reward_funcs accuracy_reward train.max_staleness=2 +train.name=mine"))
    assert (job.training.max_staleness, job.training.name) == (2, "mine")


def test_a_setting_on_the_command_line_overrides_a_flag(tmp_path):
    file = script(tmp_path, '--use_vllm --num_generations 4 "$@"')
    findings = Findings()
    job = read_job(load(file, ("train.engine=torch", "train.minibatch_size=4"), findings), findings, trains=True)
    assert not findings.errors, [str(finding) for finding in findings.errors]
    assert (job.training.engine, job.training.minibatches) == ("torch", 2)
    read_job(load(script(tmp_path, "--use_vllm train.engine=torch"), (), findings), findings, trains=True)
    assert [finding.code for finding in findings.errors] == ["RST-T008"]


def test_check_says_that_a_script_can_train(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "solution": "2"}))
    result = run("check", "--train", script(tmp_path), width=300)
    assert result.exit_code == 0, result.output
    assert "can train" in result.stdout


def test_a_job_without_data_names_the_flag_for_it(tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/bash\ntrl grpo --model_name_or_path /models/small\n")
    findings = Findings()
    read_job(load(tmp_path / "run.sh", (), findings), findings, trains=True)
    (error,) = (finding for finding in findings.errors if finding.code == "RST-T001")
    assert error.where.key_path == "--dataset_name"
    assert error.fix == "write --dataset_name data/train.jsonl, the prompts to train on"


def test_a_script_without_a_parser_is_trained_by_settings_of_roost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("args = GRPOConfig(num_generations=4, max_steps=2)\n")
    file, given = tmp_path / "run.sh", []
    file.write_text('#!/bin/bash\naccelerate launch --num_processes 1 train.py "$@"\n')
    for codes in (["RST-T001"], ["RST-T004", "RST-T061"], []):
        findings = Findings()
        read_job(load(file, tuple(given), findings), findings, trains=True)
        assert sorted(finding.code for finding in findings.errors) == codes
        fixes = [re.fullmatch(r"write (train\.\S+=[^\s,]+).*", finding.fix) for finding in findings.errors]
        given += [fix[1] for fix in fixes]
    assert not findings.warnings
