"""Training settings of verl's keys, and verl's defaults where Roost's differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roost.config.frameworks.arguments import typed
from roost.config.job import Job
from roost.config.known_keys.reasons import DATA, FILES, LOGGING, REWARD, START
from roost.config.known_keys.tables import Effect, Entry, Known
from roost.config.notations.words import (
    AGGREGATIONS,
    DIVERGENCES,
    ESTIMATORS,
    SCHEDULES,
    engine_of,
    interval,
    lora_rank,
    named,
    note_padding,
    whole_number,
)
from roost.config.section import Section
from roost.config.train import AdvantageEstimator

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
ADV_ESTIMATORS = {
    **{word: ESTIMATORS[word] for word in ("grpo", "gae", "rloo")},
    "reinforce_plus_plus": AdvantageEstimator.REINFORCE,
    "reinforce_plus_plus_baseline": AdvantageEstimator.REINFORCE_BASELINE,
}
GROUND_TRUTH = "reward_model.ground_truth"  # the column of verl's data sets
REWARD_CLASS = "roost.rollout.rewards.math_answer.ExactAnswer"
CLIP_RATIO = 0.2
# Defaults of verl's own configs (the version is in verl.py).
DEFAULTS: Mapping[str, Any] = {
    "prompts_per_step": 1024,
    "num_generations": 1,
    "max_new_tokens": 512,
    "max_epochs": 30,
    "learning_rate": 1e-6,
    "weight_decay": 0.01,
    "clip_range": CLIP_RATIO,
    "clip_range_high": CLIP_RATIO,
    "dual_clip": 3.0,
    "loss_aggregation": AGGREGATIONS["token-mean"],
    "advantage_estimator": AdvantageEstimator.GAE,
    "checkpoint_every": 0,
    "eval_every": 0,
    "eval_temperature": 0.0,
}
MINIBATCH, KL_COEF, LONGEST_PROMPT = 256, 0.001, 512
DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "model": (f"{_MODEL}.path",),
    "lora_rank": (f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank"),
    "lora_alpha": (f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.alpha"),
    "data": tuple(
        f"data.{key}"
        for key in (
            *("train_files", "val_files", "prompt_key", "max_prompt_length", "shuffle", "seed"),
            *("filter_overlong_prompts", "truncation", "train_max_samples"),
        )
    ),
    "prompts_per_step": ("data.train_batch_size",),
    "max_new_tokens": ("data.max_response_length",),
    "num_generations": (f"{_ROLLOUT}.n",),
    "temperature": (f"{_ROLLOUT}.temperature",),
    "top_p": (f"{_ROLLOUT}.top_p",),
    "top_k": (f"{_ROLLOUT}.top_k",),
    "engine": (f"{_ROLLOUT}.name",),
    "minibatch_size": (f"{_ACTOR}.ppo_mini_batch_size",),
    "ppo_epochs": (f"{_ACTOR}.ppo_epochs",),
    "micro_batch_tokens": (f"{_ACTOR}.ppo_max_token_len_per_gpu",),
    "learning_rate": (f"{_ACTOR}.optim.lr",),
    "weight_decay": (f"{_ACTOR}.optim.weight_decay",),
    "warmup_steps": (f"{_ACTOR}.optim.lr_warmup_steps",),
    "warmup_ratio": (f"{_ACTOR}.optim.lr_warmup_steps_ratio",),
    "lr_scheduler_type": (f"{_ACTOR}.optim.lr_scheduler_type", f"{_ACTOR}.optim.warmup_style"),
    "max_grad_norm": (f"{_ACTOR}.grad_clip",),
    "clip_range": (f"{_ACTOR}.clip_ratio_low",),
    "clip_range_high": (f"{_ACTOR}.clip_ratio_high",),
    "dual_clip": (f"{_ACTOR}.clip_ratio_c",),
    "loss_aggregation": (f"{_ACTOR}.loss_agg_mode",),
    "entropy_coef": (f"{_ACTOR}.entropy_coeff",),
    "kl_coef": (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"),
    "kl_estimator": (f"{_ACTOR}.kl_loss_type",),
    "kl_penalty_coef": ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    "kl_penalty_estimator": ("algorithm.kl_penalty",),
    "advantage_estimator": ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
    "gamma": ("algorithm.gamma",),
    "gae_lambda": ("algorithm.lam",),
    "critic_learning_rate": ("critic.optim.lr",),
    "max_steps": ("trainer.total_training_steps",),
    "max_epochs": ("trainer.total_epochs",),
    "eval_every": ("trainer.test_freq",),
    "eval_samples": (f"{_ROLLOUT}.val_kwargs.n",),
    "eval_temperature": (f"{_ROLLOUT}.val_kwargs.temperature",),
    "checkpoint_every": ("trainer.save_freq",),
    "keep_checkpoints": ("trainer.max_actor_ckpt_to_keep",),
}
_SPEED = Known(Effect.SPEED, "speed or memory of verl's workers")
_BACKEND = Known(Effect.BACKEND, "a backend of verl's")
_OTHER_CLIP = Known(
    Effect.TRAINING,
    "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 where they are left out",
    "write clip_ratio_low and clip_ratio_high",
    (None, CLIP_RATIO),
)
NOT_FOLLOWED = Known(Effect.TRAINING, "Roost has nothing for it", "remove it, if the run is to be without it")
TABLE = (
    Entry(LOGGING, "trainer.{logger,project_name,experiment_name,log_val_generations,rollout_data_dir}"),
    Entry(LOGGING, "trainer.{validation_data_dir,val_before_train,val_only} *.disable_log_stats"),
    Entry(FILES, "trainer.{default_local_dir,default_hdfs_dir,del_local_ckpt_after_load} *.checkpoint.*"),
    Entry(START, "trainer.{resume_mode,resume_from_path}"),
    Entry(
        _SPEED,
        """*micro_batch_size* *use_dynamic_bsz *max_token_len_per_gpu *.enable_gradient_checkpointing
        *.enable_activation_offload *.use_remove_padding *.use_torch_compile *.enforce_eager *.enable_chunked_prefill
        *.enable_prefix_caching *.max_num_batched_tokens *.max_num_seqs *.max_model_len *.load_format *.layered_summon
        *.use_shm trainer.balance_batch data.{filter_overlong_prompts_workers,dataloader_num_workers}
        *.log_prob_* *.update_weights_bucket_megabytes *.free_cache_engine *.forward_prefetch *.fsdp_size""",
    ),
    Entry(_BACKEND, "*fsdp_config.* *.megatron.* ray_kwargs.* *.engine_kwargs.* *.mode *.agent.* *.override_config.*"),
    Entry(_BACKEND, "actor_rollout_ref.ref.* *.profiler.* *.trust_remote_code data.{return_raw_chat,tokenizer}"),
    Entry(_OTHER_CLIP, f"{_ACTOR}.clip_ratio"),
    Entry(REWARD, "reward.* reward_model.* custom_reward_function.*"),
    Entry(DATA, "data.*"),
)


def derived(root: Section, job: Job) -> dict[str, Any]:
    """Settings of the keys that are written."""
    actor, rollout = (root.below("actor_rollout_ref", name) for name in ("actor", "rollout"))
    trainer, algorithm, optim = root.below("trainer"), root.below("algorithm"), actor.below("optim")
    model, val = root.below("actor_rollout_ref", "model"), rollout.below("val_kwargs")
    warmup = whole_number(optim, "lr_warmup_steps", 0)
    prompts = root.below("data").whole_number("train_batch_size", 1)
    return {
        "lora_rank": lora_rank(job),
        "lora_alpha": model.number("lora_alpha"),
        "prompts_per_step": prompts,
        "max_new_tokens": root.below("data").whole_number("max_response_length", 1),
        "num_generations": rollout.whole_number("n", 1),
        **{name: rollout.number(name) for name in ("temperature", "top_p")},
        "top_k": whole_number(rollout, "top_k", 0),
        "minibatches": _minibatches(actor, prompts),
        "ppo_epochs": actor.whole_number("ppo_epochs", 1),
        "micro_batch_tokens": actor.whole_number("ppo_max_token_len_per_gpu", 1),
        "learning_rate": optim.number("lr"),
        "weight_decay": optim.number("weight_decay"),
        "warmup_steps": warmup,
        "warmup_ratio": None if warmup else optim.number("lr_warmup_steps_ratio"),
        "lr_scheduler_type": named(optim, "lr_scheduler_type", SCHEDULES) or named(optim, "warmup_style", SCHEDULES),
        "max_grad_norm": actor.number("grad_clip"),
        "clip_range": actor.number("clip_ratio_low"),
        "clip_range_high": actor.number("clip_ratio_high"),
        "dual_clip": actor.number("clip_ratio_c"),
        "loss_aggregation": named(actor, "loss_agg_mode", AGGREGATIONS),
        "entropy_coef": actor.number("entropy_coeff"),
        **_divergences(actor, algorithm),
        **_advantages(algorithm),
        "critic_learning_rate": root.below("critic", "optim").number("lr"),
        "max_steps": whole_number(trainer, "total_training_steps", 1),
        "max_epochs": trainer.whole_number("total_epochs", 1),
        "eval_every": interval(trainer, "test_freq"),
        "eval_samples": val.whole_number("n", 1),
        "eval_temperature": val.number("temperature"),
        "checkpoint_every": interval(trainer, "save_freq"),
        "keep_checkpoints": whole_number(trainer, "max_actor_ckpt_to_keep", 1),
        "max_staleness": 1 if job.settings.get("async_rollouts") is True else None,
    }


def defaults(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """verl's defaults, where Roost's differ."""
    found = dict(DEFAULTS) | engine_of(root.below("actor_rollout_ref", "rollout"), "name")
    if "max_steps" in values:
        del found["max_epochs"]
    if "minibatches" not in values and "minibatch_size" not in values:
        found["minibatches"] = math.ceil(values.get("prompts_per_step", DEFAULTS["prompts_per_step"]) / MINIBATCH)
    data = _data(root.below("data"))
    if data:
        found |= {"data": data, "rewards": {"answer": {"_target_": REWARD_CLASS}}}
        if "rewards" not in values:
            _note_reward(root.below("data"))
        if "eval" in data:
            found["eval_tasks"] = 0  # all
    return found


def _note_reward(data: Section) -> None:
    what = f"answers are compared with the right one by {REWARD_CLASS.rpartition('.')[2]}"
    why = "verl chooses a reward by the data_source of each row, which Roost does not read"
    fix = "write +train.rewards.NAME._target_=package.module.Class for another one"
    data.findings.note("RST-T061", data.where("train_files"), what, why, fix)


def _minibatches(actor: Section, prompts: int | None) -> int | None:
    """verl counts the prompts of a minibatch."""
    size = actor.whole_number("ppo_mini_batch_size", 1)
    return None if size is None else math.ceil((prompts or DEFAULTS["prompts_per_step"]) / size)


def _divergences(actor: Section, algorithm: Section) -> dict[str, Any]:
    """The KL of the loss and that of the reward, each with a switch of its own."""
    found: dict[str, Any] = {}
    if actor.flag("use_kl_loss"):
        coef = actor.number("kl_loss_coef")
        found["kl_coef"] = KL_COEF if coef is None else coef
        found["kl_estimator"] = named(actor, "kl_loss_type", DIVERGENCES)
    if algorithm.flag("use_kl_in_reward"):
        coef = algorithm.below("kl_ctrl").number("kl_coef")
        found["kl_penalty_coef"] = KL_COEF if coef is None else coef
        found["kl_penalty_estimator"] = named(algorithm, "kl_penalty", DIVERGENCES)
    return found


def _advantages(algorithm: Section) -> dict[str, Any]:
    estimator = named(algorithm, "adv_estimator", ADV_ESTIMATORS)
    if estimator is AdvantageEstimator.GRPO and algorithm.values.get("norm_adv_by_std_in_grpo") is False:
        estimator = AdvantageEstimator.GROUP_MEAN
    found: dict[str, Any] = {"advantage_estimator": estimator}
    if estimator in (None, AdvantageEstimator.GAE):
        note_padding(algorithm, "adv_estimator", "verl")
        return found | {"gamma": algorithm.number("gamma"), "gae_lambda": algorithm.number("lam")}
    if estimator is AdvantageEstimator.REINFORCE:
        found["gamma"] = algorithm.number("gamma")
    else:
        _warn_unused(algorithm, "gamma", "gae and reinforce_plus_plus")
    _warn_unused(algorithm, "lam", "gae")
    return found


def _warn_unused(algorithm: Section, key: str, estimators: str) -> None:
    if algorithm.values.get(key) not in (None, 1):
        why = f"verl uses it with {estimators} only"
        algorithm.findings.warn("RST-T014", algorithm.where(key), "is not followed", why, "remove it")


def _data(section: Section) -> dict[str, Any]:
    """verl's files: prompts are messages, and the answer is in a nested column or in `answer`."""
    files = _files(section.get("train_files"))
    if not files:
        return {}
    filters = section.flag("filter_overlong_prompts")
    cuts = section.values.get("truncation") in ("left", "right", "middle")
    found = {
        "path": files,
        "prompt": section.text("prompt_key") or "prompt",
        "optional_answer": GROUND_TRUTH,
        "chat_template": None,
        "max_prompt_tokens": section.whole_number("max_prompt_length", 1, LONGEST_PROMPT),
        "overlong": "filter" if filters else "truncate" if cuts else "error",
        "limit": whole_number(section, "train_max_samples", 1),
        "shuffle": section.flag("shuffle", default=True),
        "seed": section.whole_number("seed", 0),
        "drop_last": True,
        "eval": _files(section.get("val_files")) or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _files(written: Any) -> list[str]:
    """A file, or several in a list as Hydra writes it.

    >>> _files("a.parquet"), _files("['a.parquet', b.parquet]")
    (['a.parquet'], ['a.parquet', 'b.parquet'])
    """
    if isinstance(written, str):
        parts = written[1:-1].split(",") if written.startswith("[") and written.endswith("]") else [written]
        written = [typed(part.strip()) for part in parts]
    return [str(file) for file in written or () if file] if isinstance(written, list | tuple) else []
