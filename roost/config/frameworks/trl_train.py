"""Training settings of TRL's GRPOConfig and RLOOConfig, and TRL's defaults where Roost's differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from roost.config.findings import Where, counted, remainder, shown
from roost.config.job import Component, Job, ModelUse, Role, known_count
from roost.config.known_keys.tables import DATA, FILES, LOGGING, NOT_FOLLOWED, OFF, REWARD, START, Effect, Entry, Known
from roost.config.notations.words import IS_LEVELS, TRANSFORMERS_SCHEDULES, lora_rank, named, transformers_schedule
from roost.config.source import Section
from roost.config.train import (
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    OptimizerType,
    PolicyLoss,
    RewardScope,
)

EPSILON, BATCH, GENERATIONS = 0.2, 8, 8
SAVE_STEPS, LOGGING_STEPS, SYNC_STEPS, MIXUP, LORA_ALPHA = 500, 10, 512, 0.6, 32.0
ANSWER = "solution"  # the column that accuracy_reward compares with
REWARDS = {"accuracy_reward": "roost.rollout.rewards.math_answer.MathAnswer"}
# The loss and the reduction of token losses that each loss_type stands for.
LOSSES: Mapping[str, tuple[PolicyLoss, LossAggregation]] = {
    "grpo": (PolicyLoss.PPO, LossAggregation.SEQ_MEAN),
    "dapo": (PolicyLoss.PPO, LossAggregation.TOKEN_MEAN),
    "bnpo": (PolicyLoss.PPO, LossAggregation.TOKEN_MEAN),
    "dr_grpo": (PolicyLoss.PPO, LossAggregation.SEQ_SUM_NORM),
    "cispo": (PolicyLoss.CISPO, LossAggregation.TOKEN_MEAN),
    "sapo": (PolicyLoss.SAPO, LossAggregation.SEQ_MEAN),
    "luspo": (PolicyLoss.PPO, LossAggregation.SEQ_SUM),
}
SCALES = {
    **dict.fromkeys(("true", "group"), AdvantageEstimator.GRPO),
    **dict.fromkeys(("false", "none"), AdvantageEstimator.GROUP_MEAN),
    "batch": AdvantageEstimator.REWARD,  # less the group's mean, divided by the batch's standard deviation
}
LEVELS = {
    **{level.value: level for level in (ImportanceSamplingLevel.TOKEN, ImportanceSamplingLevel.SEQUENCE)},
    "sequence_token": ImportanceSamplingLevel.SEQUENCE,  # of its experimental trainer for GSPO-token
}
# Defaults of GRPOConfig (the version is in trl.py).
DEFAULTS: Mapping[str, Any] = {
    "num_generations": GENERATIONS,
    "max_new_tokens": 512,  # since 1.10; 256 before
    "max_epochs": 3,
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "lr_scheduler_type": LrSchedulerType.LINEAR,
    "clip_range": EPSILON,
    "loss_aggregation": LOSSES["dapo"][1],
    "advantage_estimator": AdvantageEstimator.GRPO,
    "kl_estimator": KlEstimator.K3,
    "adam_beta2": 0.999,
    "seed": 42,
    "eval_every": 0,
}
# Those of AsyncGRPOConfig, where they differ.
ASYNC: Mapping[str, Any] = {
    "max_staleness": 4,
    "max_new_tokens": 2048,
    "lr_scheduler_type": LrSchedulerType.CONSTANT,
}
# Those of RLOOConfig, where they differ: ratios and clips are of whole samples, and the KL lowers rewards.
RLOO, RLOO_GENERATIONS, RLOO_BETA = "rloo", 2, 0.05  # the key that says that a job is of RLOO, and two defaults
RLOO_SETTINGS: Mapping[str, Any] = {
    "num_generations": RLOO_GENERATIONS,
    "loss_aggregation": LossAggregation.SEQ_MEAN,
    "advantage_estimator": AdvantageEstimator.LEAVE_ONE_OUT,
    "importance_sampling_level": ImportanceSamplingLevel.TRAJECTORY,
    "kl_penalty_estimator": KlEstimator.K1,
}
# Importance sampling of vLLM's log-probs: the default cap, and the modes.
IS_CAP = 3.0
IS_MODES = {
    f"{word}_{kind}": (level, kind == "mask") for word, level in IS_LEVELS.items() for kind in ("mask", "truncate")
}
BIAS_CORRECTION = "use_bias_correction_kl"  # multiplies the KL by the ratio; on by default since 1.10
_IS_KEYS = tuple(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap"))
_BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
# Settings with the same meaning and unit, by their names in TRL.
_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "warmup_ratio": "warmup_ratio",
    "clip_range": "epsilon",
    "clip_range_high": "epsilon_high",
    "dual_clip": "delta",
    "kl_coef": "beta",
    "sapo_temperature_pos": "sapo_temperature_pos",
    "sapo_temperature_neg": "sapo_temperature_neg",
    "lora_alpha": "lora_alpha",
}
_COUNTS = {
    "num_generations": "num_generations",
    "max_new_tokens": "max_completion_length",
    "ppo_epochs": "num_iterations",
    "seed": "seed",
    "top_k": "top_k",
    "keep_checkpoints": "save_total_limit",
    "max_staleness": "max_staleness",
    "eval_samples": "num_generations_eval",
}
_FROM_ZERO = ("seed", "top_k", "max_staleness")
_KEYS: Mapping[str, tuple[str, ...]] = {
    **{name: (key,) for name, key in (*_NUMBERS.items(), *_COUNTS.items())},
    "kl_penalty_coef": ("beta",),  # of RLOO
    "model": ("model_name_or_path", "model"),
    "lora_rank": ("lora_r", "use_peft"),
    "data": (
        *("dataset_name", "dataset_config", "dataset_train_split", "max_prompt_length", "shuffle_dataset"),
        "chat_template_kwargs",
    ),
    "rewards": ("reward_funcs",),
    "prompts_per_step": ("generation_batch_size", *_BATCH_KEYS),
    "minibatch_size": ("generation_batch_size", *_BATCH_KEYS),
    "max_steps": ("max_steps",),
    "max_epochs": ("num_train_epochs",),
    "warmup_steps": ("warmup_steps",),
    "reference_sync_steps": ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
    "rollout_is": _IS_KEYS,
    "importance_weight_cap": _IS_KEYS,
    "rollout_rejection": _IS_KEYS,
    "optimizer": ("optim",),
    "lr_scheduler_type": ("lr_scheduler_type",),
    "min_learning_rate": ("lr_scheduler_kwargs",),
    "wsd_decay_steps": ("lr_scheduler_kwargs",),
    "wsd_decay_style": ("lr_scheduler_kwargs",),
    "loss_type": ("loss_type",),
    "loss_aggregation": ("loss_type",),
    **dict.fromkeys(("advantage_estimator", "reward_baseline", "reward_std"), ("scale_rewards",)),
    "importance_sampling_level": ("importance_sampling_level",),
    "mask_truncated": ("mask_truncated_completions",),
    "kl_importance_sampling": (BIAS_CORRECTION,),
    "activation_checkpointing": ("gradient_checkpointing",),
    "engine": ("use_vllm",),
    "eval_every": ("eval_strategy", "eval_steps"),
    "checkpoint_every": ("save_strategy", "save_steps"),
}
DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    name: tuple(f"{dashes}{key}" for key in keys for dashes in ("--", "")) for name, keys in _KEYS.items()
}
_SPEED = Known(Effect.SPEED, "it tunes TRL's processes, which Roost does not run")
_BACKEND = Known(Effect.BACKEND, "it sets up parts of TRL that Roost does not run")
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit")
_OPTIMIZERS = {
    **dict.fromkeys(_ADAM, OptimizerType.ADAMW),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), OptimizerType.ADAMW_8BIT),
}


def _entry(known: Known, names: str) -> Entry:
    return Entry(known, " ".join(f"{{--,}}{name}" for name in names.split()))


TABLE = (
    _entry(LOGGING, "{report_to,run_name,logging_*,log_*,num_completions_to_print,disable_tqdm}"),
    _entry(FILES, "{output_dir,overwrite_output_dir,push_to_hub,hub_*,save_*}"),
    _entry(START, "resume_from_checkpoint"),
    _entry(_SPEED, "{bf16,tf32,dtype,torch_dtype,attn_implementation,dataloader_*,per_device_eval_batch_size}"),
    _entry(_SPEED, "{gradient_checkpointing_kwargs,use_liger_kernel,torch_compile,ddp_*,ds3_*,vllm_max_*}"),
    _entry(_BACKEND, "{vllm_server_*,vllm_group_port,vllm_model_impl,trust_remote_code,main_process_port,rdzv_*}"),
    _entry(_BACKEND, "{compute_environment,debug,downcast_bf16,main_training_function,mixed_precision,rdzv_backend}"),
    _entry(_BACKEND, "{same_network,tpu_*,use_cpu,remove_unused_columns,deepspeed,machine_rank}"),
    _entry(
        replace(NOT_FOLLOWED, harmless=OFF),  # off in TRL too
        """{disable_dropout,cast_lm_head_to_fp32,use_adaptive_entropy,entropy_coef,entropy_coef_min,lora_dropout}
        {use_transformers_*,fp16,full_determinism,do_train,do_eval,do_predict,eval_on_start,load_best_model_at_end}
        {load_in_8bit,load_in_4bit,use_dora,use_rslora,ignore_data_skip,group_by_length,auto_find_batch_size,fsdp}
        {label_smoothing_factor,batch_eval_metrics,include_for_metrics,eval_delay}
        {restore_callback_states_from_checkpoint,jit_mode_eval,use_ipex,prediction_loss_only,skip_memory_metrics}""",
    ),
    _entry(replace(DATA, harmless=OFF), "dataset_streaming"),
    _entry(REWARD, "{reward_weights,reward_model_name_or_path}"),
    _entry(DATA, "dataset_*"),
)


class _Keys:
    """The arguments of a job, each as a flag or as a key of a file."""

    def __init__(self, root: Section) -> None:
        self.root = root

    def key(self, name: str) -> str:
        return f"--{name}" if f"--{name}" in self.root else name

    def number(self, name: str) -> float | None:
        return self.root.number(self.key(name))

    def count(self, name: str, minimum: int = 1) -> int | None:
        """A whole number; TRL also writes -1 for: not given."""
        key = self.key(name)
        written = self.root.get(key)
        if isinstance(written, float) and written.is_integer():  # TRL takes 3.0 for 3
            return replace(self.root, values={**self.root.values, key: int(written)}).whole_number(key, minimum)
        return None if written == -1 else self.root.whole_number(key, minimum)

    def steps(self, name: str, total: int | None, of: str = "the steps of the run") -> int | None:
        """A number of steps; TRL takes one between 0 and 1 for a fraction of the run's."""
        written = self.root.get(self.key(name))
        if not isinstance(written, float) or not 0 < written < 1:
            return self.count(name)
        if total is not None:
            return math.ceil(total * written)
        what, why = f"is {written:g}, a fraction of {of}", "how many there are is not known before the data are read"
        self.root.error("RST-T150", self.key(name), what, why, "write a whole number, or write max_steps")
        return None

    def is_written(self, name: str) -> bool:
        return self.root.values.get(self.key(name)) is not None

    def named(self, name: str, meanings: Mapping[str, Any]) -> Any:
        return named(self.root, self.key(name), meanings)

    def text(self, name: str) -> str | None:
        return self.root.text(self.key(name)) if self.key(name) in self.root else None

    def flag(self, name: str, default: bool = False) -> bool:
        return self.root.flag(self.key(name), default)

    def where(self, name: str) -> Where:
        return self.root.where(self.key(name))


def is_rloo(root: Section) -> bool:
    """Return True for a job of TRL's trainer of RLOO."""
    return root.values.get(RLOO) is True


def _usual_generations(root: Section) -> int:
    return RLOO_GENERATIONS if is_rloo(root) else GENERATIONS


def check_groups(root: Section, processes: int) -> None:
    """Check that TRL generates whole groups at a time; unknown values are not checked."""
    keys = _Keys(root)
    generations = _usual_generations(root)
    usual = {"num_generations": generations, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1}
    group, each, updates = (known_count(root, keys.key(name), value) for name, value in usual.items())
    steps = known_count(root, keys.key("steps_per_generation"), updates)
    samples = known_count(root, keys.key("generation_batch_size"), processes * each * steps)
    product = f"{counted(processes, 'process')} * {each} * {counted(steps, 'step')}; "
    why = f"{'' if keys.is_written('generation_batch_size') else product}{remainder(samples, group or 1)}"
    if group and samples % group:
        root.findings.error(
            "RST-N088",
            keys.where(next((name for name in usual if keys.is_written(name)), "num_generations")),
            f"makes {counted(samples, 'sample')} at a time, which are not whole groups of {group}",
            f"{why}; TRL ends with a ValueError",
            f"write a batch size for which {group} divides them, or another num_generations",
        )


def derived(root: Section, job: Job) -> dict[str, Any]:
    """Settings of the keys that are written."""
    keys = _Keys(root)
    loss = keys.named("loss_type", LOSSES)
    generations = keys.count("num_generations") or _usual_generations(root)
    samples, per_update = _batches(keys, job)
    per_step = max(1, samples // per_update) * (keys.count("num_iterations") or 1)  # optimizer steps of a step
    is_reported = any(finding.code == "RST-N088" for finding in root.findings.errors)  # by check_groups
    if samples % generations and not is_reported:
        what = f"{samples} samples of a step are not whole groups of {generations}"
        why = "samples are processes x per_device_train_batch_size x steps_per_generation"
        root.findings.error(
            "RST-T150",
            keys.where("num_generations"),
            what,
            why,
            f"write a batch size for which {generations} divides them",
        )
    steps = keys.count("max_steps")
    warmup = keys.root.get(keys.key("warmup_steps"))
    is_share = isinstance(warmup, float) and 0 < warmup < 1
    found = {name: keys.number(key) for name, key in _NUMBERS.items()}
    if loss and loss[0] is PolicyLoss.CISPO:
        found |= _cispo_range(keys)
    _check_luspo(keys)
    if is_rloo(root):
        found |= {"kl_coef": None, "kl_penalty_coef": _penalty(keys)}
    found |= {name: keys.count(key, 0 if name in _FROM_ZERO else 1) for name, key in _COUNTS.items()}
    found |= {"warmup_ratio": warmup} if is_share else {"warmup_steps": keys.count("warmup_steps", 0)}
    return found | {
        "lora_rank": lora_rank(job),
        "prompts_per_step": max(1, samples // generations),
        "minibatches": max(1, samples // per_update),
        "max_steps": math.ceil(steps / per_step) if steps else None,
        "max_epochs": None if steps else _epochs(keys),
        "reference_sync_steps": _reference_sync(keys, per_step),
        **(_correction(keys) if any(keys.is_written(name) for name in _IS_KEYS) else {}),
        "optimizer": _optimizer(keys),
        **_schedule(keys),
        "loss_type": loss[0] if loss else None,
        "loss_aggregation": loss[1] if loss else None,
        **_advantages(keys),
        "importance_sampling_level": keys.named("importance_sampling_level", LEVELS),
        "mask_truncated": keys.flag("mask_truncated_completions") or None,
        "kl_importance_sampling": keys.flag(BIAS_CORRECTION) if keys.is_written(BIAS_CORRECTION) else None,
        "activation_checkpointing": keys.flag("gradient_checkpointing", True),
        "engine": "vllm" if keys.flag("use_vllm") else "torch",
        "eval_every": _interval(keys, "eval", per_step),
        "checkpoint_every": _interval(keys, "save", per_step),
    }


def _schedule(keys: _Keys) -> dict[str, Any]:
    """The schedule and its `lr_scheduler_kwargs`."""
    schedule, rate = keys.named("lr_scheduler_type", TRANSFORMERS_SCHEDULES), keys.number("learning_rate")
    key = keys.key("lr_scheduler_kwargs")
    limits = replace(keys.root.below(key), values=_mapping(keys, "lr_scheduler_kwargs"))
    return transformers_schedule(schedule, limits, DEFAULTS["learning_rate"] if rate is None else rate)


def _optimizer(keys: _Keys) -> OptimizerType | None:
    """The optimizer; warns about one that Roost does not have, for which AdamW takes its place."""
    key = keys.key("optim")
    word = keys.root.text(key) if key in keys.root else None
    if word is not None and word not in _OPTIMIZERS:
        what, why = f"{word} is not followed", "Roost trains with AdamW, 8-bit AdamW or Muon"
        keys.root.findings.warn("RST-T014", keys.root.where(key), what, why, "write train.optimizer, or remove it")
    return _OPTIMIZERS.get(word or "")


def _cispo_range(keys: _Keys) -> dict[str, float | None]:
    """Clip range of cispo: TRL caps the ratio at epsilon_high itself, and has no lower bound."""
    name = next((name for name in ("epsilon_high", "epsilon") if keys.number(name) is not None), "loss_type")
    cap = EPSILON if name == "loss_type" else keys.number(name) or 0.0
    if cap < 1:
        what = f"caps the ratio of cispo at {cap:g}; 1 is used"
        why = "TRL's cap is epsilon_high itself, not 1 + epsilon_high: below 1 it scales the gradient of most tokens"
        fix = "write epsilon_high as the cap, such as 5.0"
        keys.root.findings.warn("RST-T014", keys.where(name), what, why, fix)
    return {"clip_range": 1.0, "clip_range_high": max(cap, 1.0) - 1.0}


def _penalty(keys: _Keys) -> float:
    """Coefficient of the KL in the rewards of RLOO; warns that Roost subtracts it elsewhere."""
    written = keys.number("beta")
    coef = RLOO_BETA if written is None else written
    if coef:
        what = "lowers advantages token by token, by the KL from there on"
        what = what if written is not None else f"is {coef:g} where it is left out, and {what}"
        why = "TRL lowers the reward of a sample by its whole KL, before rewards of a group are compared"
        fix = "write beta 0 and train.kl_coef in its place"
        keys.root.findings.warn("RST-T048", keys.where("beta"), what, why, fix)
    return coef


def _check_luspo(keys: _Keys) -> None:
    """Warn about luspo unless each sequence has one loss: TRL then averages token losses over padding too."""
    if keys.text("loss_type") != "luspo":
        return
    is_by_sequence = keys.text("importance_sampling_level") == ImportanceSamplingLevel.SEQUENCE.value
    if is_by_sequence and not keys.number("beta"):
        return
    name, what, fix = (
        ("beta", "is not followed exactly with loss_type luspo", "write beta 0")
        if is_by_sequence
        else (
            "loss_type",
            "luspo is not followed exactly with importance_sampling_level token",
            "write importance_sampling_level sequence, as TRL advises too",
        )
    )
    why = "TRL averages token losses over the padding of a batch as well; Roost sums those of each sequence"
    keys.root.findings.warn("RST-T014", keys.where(name), what, why, fix)


def _batches(keys: _Keys, job: Job) -> tuple[int, int]:
    """Samples generated at a time, and samples of an optimizer step."""
    actor = next(part for part in job.components if part.name == "actor")
    each = (keys.count("per_device_train_batch_size") or BATCH) * len(getattr(actor.requested, "devices", (0,)))
    accumulated = keys.count("gradient_accumulation_steps") or 1
    written = keys.count("generation_batch_size")
    return written or each * (keys.count("steps_per_generation") or accumulated), each * accumulated


def _epochs(keys: _Keys) -> int | None:
    """Passes over the data, which Roost has whole."""
    written = keys.root.get(keys.key("num_train_epochs"))
    if not isinstance(written, float) or written.is_integer():
        return keys.count("num_train_epochs")
    what = f"is {written:g}, which ends within a pass over the data"
    why = "how many steps a pass has is not known before the data are read"
    keys.root.error("RST-T150", keys.key("num_train_epochs"), what, why, "write max_steps, or a whole number")
    return None


def _interval(keys: _Keys, kind: str, per_step: int) -> int | None:
    """Steps between two evaluations or checkpoints; TRL counts optimizer steps, and `no` switches them off."""
    name = f"{kind}_strategy"
    strategy = keys.root.values.get(keys.key(name))
    if strategy in ("no", False):
        return 0
    total = keys.count("max_steps")
    if strategy not in (None, "steps"):
        if strategy == "epoch" and total is None and keys.root.get(keys.key("num_train_epochs")) == 1:
            return 0  # at the end
        what = f"is {shown(strategy)}, which is not followed"
        why = "Roost counts steps, and does not know how many a pass over the data has"
        setting = "checkpoint_every" if kind == "save" else "eval_every"
        keys.root.findings.warn("RST-T014", keys.where(name), what, why, f"write {kind}_steps, or train.{setting}")
        return None
    if kind == "eval" and strategy is None:
        return None
    steps = keys.steps(f"{kind}_steps", total)
    if steps is None and kind == "eval" and not keys.is_written("eval_steps"):
        steps = keys.steps("logging_steps", total) or LOGGING_STEPS
    return math.ceil(steps / per_step) if steps else None


def _reference_sync(keys: _Keys, per_step: int) -> int | None:
    """Steps between two copies of the policy to the reference; TRL mixes the two instead."""
    if not keys.flag("sync_ref_model"):
        return None
    alpha = keys.number("ref_model_mixup_alpha")
    if alpha != 1:
        is_written = alpha is not None
        what = f"{'is' if is_written else 'mixes with'} {MIXUP if alpha is None else alpha:g}; the policy is copied"
        why = "TRL adds that share of the policy to the rest of the reference; Roost has 1 alone"
        place = keys.where("ref_model_mixup_alpha" if is_written else "sync_ref_model")
        keys.root.findings.warn("RST-T014", place, what, why, "write ref_model_mixup_alpha 1.0")
    return math.ceil((keys.count("ref_model_sync_steps") or SYNC_STEPS) / per_step)


def _correction(keys: _Keys) -> dict[str, Any]:
    """TRL's importance sampling between vLLM's and the learner's log-probs; on by default."""
    if not keys.flag("use_vllm") or not keys.flag("vllm_importance_sampling_correction", True):
        return {}
    level, masks = keys.named("vllm_importance_sampling_mode", IS_MODES) or IS_MODES["sequence_mask"]
    old, name = "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"
    name = old if keys.is_written(old) else name
    high = keys.number(name) if keys.key(name) in keys.root else IS_CAP
    low = keys.number("vllm_importance_sampling_clip_min")
    found: dict[str, Any] = {"rollout_is": level, "importance_weight_cap": high or 0.0}
    if masks and (low is not None or high is not None):
        found["rollout_rejection"] = {level.value: [low, high]}
    elif low is not None:
        what, why = "is not followed", "Roost's weights have an upper bound alone"
        place = keys.where("vllm_importance_sampling_clip_min")
        keys.root.findings.warn("RST-T014", place, what, why, "remove it, or choose sequence_mask or token_mask")
    return found


def _is_async(root: Section) -> bool:
    launch = root.source.launch
    return root.values.get("async") is True or (launch is not None and "async_grpo" in launch.program)


def _advantages(keys: _Keys) -> dict[str, Any]:
    key = keys.key("scale_rewards")
    written = keys.root.values.get(key)
    if isinstance(written, bool) or (key in keys.root and written is None):  # a flag `none` is read as nothing
        return {"advantage_estimator": SCALES[str(written).lower()]}
    found: dict[str, Any] = {"advantage_estimator": keys.named("scale_rewards", SCALES)}
    if found["advantage_estimator"] is SCALES["batch"]:
        found |= {"reward_baseline": RewardScope.GROUP, "reward_std": RewardScope.BATCH}
    return found


def defaults(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's defaults, where Roost's differ."""
    keys = _Keys(root)
    per_step = values.get("minibatches", 1) * values.get("ppo_epochs", 1)
    found = {**DEFAULTS, **(RLOO_SETTINGS if is_rloo(root) else {})}
    found |= {
        "checkpoint_every": math.ceil(SAVE_STEPS / per_step),
        "eval_samples": values.get("num_generations", found["num_generations"]),
        "eval_temperature": values.get("temperature", 1.0),
    }
    if "lora_rank" in values:
        found["lora_alpha"] = LORA_ALPHA
    if _is_async(root):
        found |= ASYNC
    elif "max_new_tokens" not in values:
        what = f"is not written; completions have up to {DEFAULTS['max_new_tokens']} tokens"
        why = "the default of TRL since 1.10 (2026-08-13); before it was 256"
        root.findings.note("RST-N085", keys.where("max_completion_length"), what, why, "write it")
    if not _is_async(root) and not is_rloo(root) and not any(keys.is_written(name) for name in _IS_KEYS):
        found |= _correction(keys)
    if "max_steps" in values:
        del found["max_epochs"]
    if values.get("kl_coef") and not is_rloo(root):
        found["kl_importance_sampling"] = True
    found["clip_range_high"] = values.get("clip_range", EPSILON)
    if "eval_every" in values:
        found["eval_tasks"] = 0  # all
    path = keys.text("dataset_name")
    if path:
        found["data"] = {
            "path": path,
            "prompt": "prompt",
            "optional_answer": ANSWER,
            "split": keys.text("dataset_train_split") or "train",
            "shuffle": keys.flag("shuffle_dataset", True),
            "drop_last": True,
        }
        name, longest = keys.text("dataset_config"), keys.count("max_prompt_length")
        found["data"] |= {"name": name} if name else {}
        found["data"] |= _template_arguments(keys)
        found["data"] |= {"max_prompt_tokens": longest, "overlong": "truncate"} if longest else {}
        if "rewards" not in values:
            found["rewards"] = {"reward": {"_target_": _reward(keys)}}
    return found


def _template_arguments(keys: _Keys) -> dict[str, Any]:
    """Arguments of the chat template."""
    written = _mapping(keys, "chat_template_kwargs")
    return {"template_arguments": written} if written else {}


def _mapping(keys: _Keys, name: str) -> dict[str, Any]:
    """A mapping, or JSON in a flag."""
    key = keys.key(name)
    written = keys.root.get(key)
    if isinstance(written, str):
        with suppress(ValueError):
            written = json.loads(written)
    if written and not isinstance(written, Mapping):
        keys.root.error("RST-C029", key, f"is {shown(written)}; it must be a mapping", fix="write it as JSON")
        return {}
    return dict(written or {})


def _reward(keys: _Keys) -> str:
    """The class for TRL's reward function; notes that MathAnswer takes the place of one that Roost does not have."""
    written = keys.text("reward_funcs")
    if written in REWARDS:
        return REWARDS[str(written)]
    target = REWARDS["accuracy_reward"]
    what = f"answers are compared with the right one by {target.rpartition('.')[2]}"
    why = (
        f"{written} is a function of TRL or of the script" if written else "the script's reward functions are not read"
    )
    fix = "write train.rewards.NAME._target_=package.module.Class for another one"
    keys.root.findings.note("RST-T061", keys.where("reward_funcs" if written else "dataset_name"), what, why, fix)
    return target


def with_rollout(job: Job) -> Job:
    """The job with engines on the learner's devices, where TRL's learner generates by itself."""
    if any(part.name == "rollout" for part in job.components):
        return job
    actor = next(part for part in job.components if part.name == "actor")
    model = ModelUse(actor.model.path, actor.model.config)
    engine = Component("rollout", "use_vllm", actor.where, actor.requested, role=Role.ENGINE, model=model)
    return replace(job, components=(*job.components, engine))
