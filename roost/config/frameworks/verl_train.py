"""Training settings of verl's keys, and verl's defaults where Roost's differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roost.config.findings import shown
from roost.config.frameworks.arguments import typed
from roost.config.frameworks.verl_correction import correction
from roost.config.job import Job, read_model_config
from roost.config.known_keys.tables import NOT_FOLLOWED as NOT_FOLLOWED
from roost.config.known_keys.verl import ACTOR, CLIP_RATIO, CORRECTION, GROUPS, ROLLOUT, TABLE as TABLE
from roost.config.notations.words import (
    AGGREGATIONS,
    DIVERGENCES,
    ENGINES,
    ESTIMATORS,
    OPTIMIZER_CLASSES,
    OPTIMIZERS,
    SCHEDULES,
    compute_dtype,
    engine_of,
    interval,
    lora_rank,
    named,
    whole_number,
)
from roost.config.source import Section
from roost.config.train import (
    AdvantageEstimator,
    ImportanceSamplingLevel,
    PolicyLoss,
    Whitening,
)

_MODEL = "actor_rollout_ref.model"
_IS_THRESHOLD = f"{CORRECTION}.rollout_is_threshold"
_OVERLONG = (  # sections that have had DAPO's overlong shaping, the newest first
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
_REPLAYS = ("router_replay", "megatron.router_replay", "veomni.router_replay")
_COMPUTED = ("fsdp_config.dtype", "fsdp_config.mixed_precision.param_dtype", "megatron.dtype", "veomni.dtype")


def _overlong(*names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in _OVERLONG for name in names)


ADV_ESTIMATORS = {
    **{word: ESTIMATORS[word] for word in ("grpo", "gae", "rloo")},
    "reinforce_plus_plus": AdvantageEstimator.REWARD,  # and its returns are whitened over tokens
    "reinforce_plus_plus_baseline": AdvantageEstimator.REINFORCE_BASELINE,
}
GROUND_TRUTH = "reward_model.ground_truth"  # the column of verl's data sets
REWARD_CLASS = "roost.rollout.rewards.math_answer.ExactAnswer"
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
    "critic_learning_rate": 1e-5,
    "value_clip": 0.5,
    "adam_beta2": 0.999,
    "compute_dtype": "bfloat16",  # of FSDP, Megatron and VeOmni; master weights are in float32
    "shuffle_minibatches": False,
    "checkpoint_every": 0,
    "eval_every": 0,
    "eval_temperature": 0.0,
}
MINIBATCH, KL_COEF, LONGEST_PROMPT, TARGET_KL = 256, 0.001, 512, 0.1
# Losses by verl's loss_mode: the settings that they stand for.
_OF_SEQUENCES = "seq-mean-token-mean"
LOSS_MODES: Mapping[str, Mapping[str, Any]] = {
    "vanilla": {},
    "gspo": {
        "importance_sampling_level": ImportanceSamplingLevel.SEQUENCE,
        "loss_aggregation": AGGREGATIONS[_OF_SEQUENCES],
    },
    "cispo": {"loss_type": PolicyLoss.CISPO},
    "sapo": {"loss_type": PolicyLoss.SAPO, "loss_aggregation": AGGREGATIONS[_OF_SEQUENCES]},
}
DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "model": (f"{_MODEL}.path",),
    "lora_rank": (f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank"),
    "lora_alpha": (f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.alpha"),
    "data": tuple(
        f"data.{key}"
        for key in (
            *("train_files", "val_files", "prompt_key", "max_prompt_length", "shuffle", "seed", "image_key"),
            *("filter_overlong_prompts", "truncation", "train_max_samples", "apply_chat_template_kwargs"),
        )
    ),
    "prompts_per_step": ("data.train_batch_size", "async_training.require_batches"),
    "max_new_tokens": ("data.max_response_length",),
    "num_generations": (f"{ROLLOUT}.n",),
    "temperature": (f"{ROLLOUT}.temperature",),
    "top_p": (f"{ROLLOUT}.top_p",),
    "top_k": (f"{ROLLOUT}.top_k",),
    "engine": (f"{ROLLOUT}.name",),
    "minibatch_size": (f"{ACTOR}.ppo_mini_batch_size",),
    "shuffle_minibatches": (f"{ACTOR}.shuffle",),
    "ppo_epochs": (f"{ACTOR}.ppo_epochs",),
    "micro_batch_tokens": (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    "learning_rate": (f"{ACTOR}.optim.lr",),
    "weight_decay": (f"{ACTOR}.optim.weight_decay",),
    "optimizer": (f"{ACTOR}.optim.optimizer",),
    "warmup_steps": (f"{ACTOR}.optim.lr_warmup_steps",),
    "warmup_ratio": (f"{ACTOR}.optim.lr_warmup_steps_ratio",),
    "lr_scheduler_type": (f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.warmup_style"),
    "min_learning_rate": (f"{ACTOR}.optim.min_lr_ratio",),
    "adam_beta1": (f"{ACTOR}.optim.betas",),
    "adam_beta2": (f"{ACTOR}.optim.betas",),
    "max_grad_norm": (f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad"),
    "loss_type": (f"{ACTOR}.policy_loss.loss_mode",),
    "importance_sampling_level": (f"{ACTOR}.policy_loss.loss_mode",),
    "sapo_temperature_pos": (f"{ACTOR}.tau_pos",),
    "sapo_temperature_neg": (f"{ACTOR}.tau_neg",),
    "dynamic_sampling": (f"{GROUPS}.enable",),
    "rollout_is": (f"{CORRECTION}.rollout_is",),
    "importance_weight_cap": (_IS_THRESHOLD,),
    "rollout_is_batch_normalize": (f"{CORRECTION}.rollout_is_batch_normalize",),
    "rollout_rejection": (
        *(f"{CORRECTION}.rollout_rs{end}" for end in ("", "_threshold", "_threshold_lower")),
        _IS_THRESHOLD,
    ),
    "old_logprobs": (f"{CORRECTION}.bypass_mode",),
    "max_staleness": ("async_training.staleness_threshold", "async_training.trigger_parameter_sync_step"),
    "router_replay": (*(f"{ACTOR}.{section}.mode" for section in _REPLAYS), f"{ROLLOUT}.enable_rollout_routing_replay"),
    "compute_dtype": tuple(f"{ACTOR}.{key}" for key in _COMPUTED),
    "weight_dtype": (f"{ACTOR}.fsdp_config.model_dtype",),
    "overlong_buffer_tokens": _overlong("enable", "len"),
    "overlong_penalty": _overlong("penalty_factor"),
    "kl_penalty_target": ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl"),
    "kl_penalty_horizon": ("algorithm.kl_ctrl.horizon",),
    "value_clip": ("critic.cliprange_value",),
    "critic_warmup_steps": ("trainer.critic_warmup",),
    "critic_lr_warmup_steps": ("critic.optim.lr_warmup_steps",),
    "eval_top_p": (f"{ROLLOUT}.val_kwargs.top_p",),
    "eval_top_k": (f"{ROLLOUT}.val_kwargs.top_k",),
    "repetition_penalty": (f"{ROLLOUT}.repetition_penalty",),
    "clip_range": (f"{ACTOR}.clip_ratio_low",),
    "clip_range_high": (f"{ACTOR}.clip_ratio_high",),
    "dual_clip": (f"{ACTOR}.clip_ratio_c",),
    "loss_aggregation": (f"{ACTOR}.loss_agg_mode",),
    "entropy_coef": (f"{ACTOR}.entropy_coeff",),
    "kl_coef": (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
    "kl_estimator": (f"{ACTOR}.kl_loss_type",),
    "kl_penalty_coef": ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    "kl_penalty_estimator": ("algorithm.kl_penalty",),
    "advantage_estimator": ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
    "gamma": ("algorithm.gamma",),
    "gae_lambda": ("algorithm.lam",),
    "critic_learning_rate": ("critic.optim.lr",),
    "max_steps": ("trainer.total_training_steps",),
    "max_epochs": ("trainer.total_epochs",),
    "eval_every": ("trainer.test_freq",),
    "eval_samples": (f"{ROLLOUT}.val_kwargs.n",),
    "eval_temperature": (f"{ROLLOUT}.val_kwargs.temperature",),
    "checkpoint_every": ("trainer.save_freq",),
    "keep_checkpoints": ("trainer.max_actor_ckpt_to_keep",),
}


def derived(root: Section, job: Job) -> dict[str, Any]:
    """Settings of the keys that are written."""
    actor, rollout = (root.below("actor_rollout_ref", name) for name in ("actor", "rollout"))
    trainer, algorithm, optim = root.below("trainer"), root.below("algorithm"), actor.below("optim")
    model, val = root.below("actor_rollout_ref", "model"), rollout.below("val_kwargs")
    _refuse_evaluation(trainer)
    warmup = whole_number(optim, "lr_warmup_steps", 0)
    prompts = _prompts(root, actor)
    return {
        "lora_rank": lora_rank(job),
        "lora_alpha": model.number("lora_alpha"),
        "prompts_per_step": prompts,
        "max_new_tokens": root.below("data").whole_number("max_response_length", 1),
        "num_generations": rollout.whole_number("n", 1),
        **{name: rollout.number(name) for name in ("temperature", "top_p")},
        "top_k": whole_number(rollout, "top_k", 0),
        "minibatches": _minibatches(actor, prompts),
        "shuffle_minibatches": actor.flag("shuffle") if "shuffle" in actor else None,
        "ppo_epochs": actor.whole_number("ppo_epochs", 1),
        "micro_batch_tokens": _micro_batch(actor, job),
        "learning_rate": optim.number("lr"),
        "weight_decay": optim.number("weight_decay"),
        "optimizer": named(optim, "optimizer", {**OPTIMIZER_CLASSES, **OPTIMIZERS}, "optimizer"),
        "warmup_steps": warmup,
        "warmup_ratio": None if warmup else optim.number("lr_warmup_steps_ratio"),
        "lr_scheduler_type": named(optim, "lr_scheduler_type", SCHEDULES) or named(optim, "warmup_style", SCHEDULES),
        "min_learning_rate": _lowest_rate(optim),
        **_betas(optim),
        "max_grad_norm": actor.number("grad_clip") if "grad_clip" in actor else optim.number("clip_grad"),
        **{f"sapo_temperature_{sign}": actor.number(f"tau_{sign}") for sign in ("pos", "neg")},
        "dynamic_sampling": algorithm.below("filter_groups").flag("enable") or None,
        **correction(algorithm.below("rollout_correction"), _is_fully_async(root)),
        **_overlong_shaping(root),
        "router_replay": _router_replay(actor, rollout),
        **_data_types(actor, rollout),
        "value_clip": root.below("critic").number("cliprange_value"),
        "critic_warmup_steps": whole_number(trainer, "critic_warmup", 0),
        "critic_lr_warmup_steps": whole_number(root.below("critic", "optim"), "lr_warmup_steps", 0),
        "repetition_penalty": rollout.number("repetition_penalty"),
        "clip_range": actor.number("clip_ratio_low"),
        "clip_range_high": actor.number("clip_ratio_high"),
        **_loss(actor),
        "entropy_coef": actor.number("entropy_coeff"),
        **_divergences(actor, algorithm),
        **_advantages(algorithm),
        "critic_learning_rate": root.below("critic", "optim").number("lr"),
        "max_steps": whole_number(trainer, "total_training_steps", 1),
        "max_epochs": trainer.whole_number("total_epochs", 1),
        "eval_every": interval(trainer, "test_freq"),
        "eval_samples": val.whole_number("n", 1),
        "eval_temperature": val.number("temperature"),
        "eval_top_p": val.number("top_p"),
        "eval_top_k": whole_number(val, "top_k", 0),
        "checkpoint_every": interval(trainer, "save_freq"),
        "keep_checkpoints": whole_number(trainer, "max_actor_ckpt_to_keep", 1),
        "max_staleness": _staleness(job),
    }


def _micro_batch(actor: Section, job: Job) -> int | None:
    """Tokens of a whole context group: verl counts those of one of its GPUs."""
    tokens = actor.whole_number("ppo_max_token_len_per_gpu", 1)
    context = next((part.parallel.context for part in job.components if part.name == "actor"), 1)
    return tokens and tokens * context


def _staleness(job: Job) -> int | None:
    """Whole steps that samples may be behind."""
    if job.settings.get("async_rollouts") is not True:
        return None
    ahead = job.settings.get("async_generation_ratio")
    return max(math.ceil(ahead), 1) if isinstance(ahead, int | float) else 1


def defaults(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """verl's defaults, where Roost's differ."""
    found = dict(DEFAULTS) | _engine(root)
    if "max_steps" in values:
        del found["max_epochs"]
    if root.below("actor_rollout_ref", "actor", "policy_loss").values.get("loss_mode") == "gspo":
        del found["dual_clip"]  # verl's gspo has none
    estimator = values.get("advantage_estimator", DEFAULTS["advantage_estimator"])
    is_whitened = root.below("algorithm").values.get("adv_estimator") == "reinforce_plus_plus"
    if estimator is AdvantageEstimator.GAE or (is_whitened and estimator is AdvantageEstimator.REWARD):
        found["whiten_advantages"] = Whitening.TOKENS
    if "minibatches" not in values and "minibatch_size" not in values:
        found["minibatches"] = math.ceil(values.get("prompts_per_step", DEFAULTS["prompts_per_step"]) / MINIBATCH)
    data = _data(root.below("data"))
    if data:
        if found.get("engine") == "sglang" and _has_images(root):
            data["images"] = root.below("data").text("image_key")  # named, so that the check refuses them
        found |= {"data": data, "rewards": {"answer": {"_target_": REWARD_CLASS}}}
        if "rewards" not in values:
            _note_reward(root.below("data"))
        if "eval" in data:
            found["eval_tasks"] = 0  # all
    return found


def _engine(root: Section) -> dict[str, Any]:
    """The engine by verl's word for it, which is checked unless the job has Roost's own."""
    rollout = root.below("actor_rollout_ref", "rollout")
    if root.below("train").values.get("engine") is None:
        named(rollout, "name", {word: ENGINES[word] for word in ("vllm", "sglang", "hf")}, "engine")
    return engine_of(rollout, "name")


def _note_reward(data: Section) -> None:
    what = f"answers are compared with the right one by {REWARD_CLASS.rpartition('.')[2]}"
    why = "verl chooses a reward by the data_source of each row, which Roost does not read"
    fix = "write +train.rewards.NAME._target_=package.module.Class for another one"
    data.findings.note("RST-T061", data.where("train_files"), what, why, fix)


def _refuse_evaluation(trainer: Section) -> None:
    if trainer.flag("val_only"):
        why = "verl then evaluates and ends"
        fix = "run roost eval MODEL --data FILE with a file of data.val_files, or remove it to train"
        trainer.error("RST-T013", "val_only", "is true, and roost train trains", why, fix)


def _loss(actor: Section) -> dict[str, Any]:
    """The loss, its aggregation and its dual clip; some losses of verl ignore the keys of the last two."""
    policy = actor.below("policy_loss")
    found = dict(named(policy, "loss_mode", LOSS_MODES) or {})
    word = policy.values.get("loss_mode")
    if "loss_aggregation" not in found:
        found["loss_aggregation"] = named(actor, "loss_agg_mode", AGGREGATIONS)
    elif actor.values.get("loss_agg_mode") not in (None, _OF_SEQUENCES):
        _warn_unread(actor, "loss_agg_mode", f"verl's {word} always takes {_OF_SEQUENCES}")
    if word != "gspo":
        found["dual_clip"] = actor.number("clip_ratio_c")
    elif "clip_ratio_c" in actor:
        _warn_unread(actor, "clip_ratio_c", f"verl's {word} has no dual clip")
    return found


def _warn_unread(section: Section, key: str, why: str) -> None:
    section.findings.warn("RST-T014", section.where(key), "is not followed", why, "remove it")


def _prompts(root: Section, actor: Section) -> int | None:
    """Prompts of a step; the asynchronous trainer has a batch size of 0, and takes require_batches minibatches."""
    data, training = root.below("data"), root.below("async_training")
    if data.values.get("train_batch_size") == 0 and training.values:
        batches = training.whole_number("require_batches", 1, 1) or 1
        return batches * (actor.whole_number("ppo_mini_batch_size", 1) or MINIBATCH)
    return data.whole_number("train_batch_size", 1)


def _lowest_rate(optim: Section) -> float | None:
    ratio = optim.number("min_lr_ratio")
    rate = optim.number("lr")
    return None if ratio is None else ratio * (DEFAULTS["learning_rate"] if rate is None else rate)


def _betas(optim: Section) -> dict[str, Any]:
    """Betas of Adam, from a list or Hydra's text of one."""
    written = optim.get("betas")
    if isinstance(written, str):
        written = [typed(part.strip()) for part in written.strip("[]()").split(",")]
    pair = written if isinstance(written, list | tuple) and len(written) == 2 else (None, None)
    return {name: part for name, part in zip(("adam_beta1", "adam_beta2"), pair, strict=True) if part is not None}


def _is_fully_async(root: Section) -> bool:
    launch = root.source.launch
    has_sections = "async_training" in root and "rollout" in root
    return has_sections or (launch is not None and "fully_async" in launch.program)


def _overlong_shaping(root: Section) -> dict[str, Any]:
    for path in _OVERLONG:
        section = root.below(*path.split("."))
        if section.flag("enable"):
            return {
                "overlong_buffer_tokens": section.whole_number("len", 1),
                "overlong_penalty": section.number("penalty_factor"),
            }
    return {}


def _router_replay(actor: Section, rollout: Section) -> bool | None:
    """R3 replays the experts that the engine chose."""
    returned = "enable_rollout_routing_replay"
    for path in _REPLAYS:
        section = actor.below(*path.split("."))
        mode = section.text("mode") if "mode" in section else None
        if mode == "R3":
            return True
        if mode not in (None, "disabled"):
            why = f"{mode} is no replay of the engine's experts; Roost has that of R3 alone"
            fix = f"write R3 and {rollout.where(returned).key_path}=true, which is train.router_replay, or disabled"
            section.findings.warn("RST-T014", section.where("mode"), "is not followed", why, fix)
    if rollout.flag(returned):
        why = "verl replays the engine's experts with router_replay.mode=R3 alone, and so does Roost"
        rollout.findings.warn(
            "RST-T014", rollout.where(returned), "has no effect", why, "write train.router_replay=true, or remove it"
        )
    return None


def _data_types(actor: Section, rollout: Section) -> dict[str, Any]:
    """Data types of the learner, in which engines compute too."""
    computed = next((found for key in _COMPUTED if (found := _data_type(actor, key)) is not None), None)
    own = actor.source.values.get("train")
    chosen = (own.get("compute_dtype") if isinstance(own, Mapping) else None) or computed or DEFAULTS["compute_dtype"]
    served = rollout.values.get("dtype")
    wanted = compute_dtype(served)
    if served not in (None, "auto") and wanted != chosen:
        rollout.findings.warn(
            "RST-T014",
            rollout.where("dtype"),
            f"is {shown(served)}, but engines compute in {chosen}",
            "engines have the learner's compute_dtype, so that both give tokens the same probability",
            f"write +train.compute_dtype={wanted}, or remove it" if wanted else "remove it",
        )
    return {"compute_dtype": computed, "weight_dtype": _data_type(actor, "fsdp_config.model_dtype")}


def _data_type(actor: Section, path: str) -> str | None:
    *above, key = path.split(".")
    section = actor.below(*above)
    word = section.values.get(key)
    found = compute_dtype(word)
    if word is not None and found is None:
        why = "the learner has float32 and bfloat16; losses of float16 would have to be scaled"
        fix = f"write {section.where(key).key_path}=bfloat16"
        section.findings.warn("RST-T014", section.where(key), f"is {shown(word)}, which is not followed", why, fix)
    return found


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
        control = algorithm.below("kl_ctrl")
        if control.values.get("type") == "adaptive":
            target = control.number("target_kl")
            found["kl_penalty_target"] = TARGET_KL if target is None else target
            found["kl_penalty_horizon"] = control.whole_number("horizon", 1)
    return found


def _advantages(algorithm: Section) -> dict[str, Any]:
    estimator = named(algorithm, "adv_estimator", ADV_ESTIMATORS)
    if estimator is AdvantageEstimator.GRPO and algorithm.values.get("norm_adv_by_std_in_grpo") is False:
        estimator = AdvantageEstimator.GROUP_MEAN
    found: dict[str, Any] = {"advantage_estimator": estimator}
    if estimator is None and algorithm.values.get("adv_estimator") is not None:
        return found  # an error says that Roost has no such estimator
    if estimator in (None, AdvantageEstimator.GAE):
        return found | {"gamma": algorithm.number("gamma"), "gae_lambda": algorithm.number("lam")}
    if estimator is AdvantageEstimator.REWARD:
        found["gamma"] = algorithm.number("gamma")
    else:
        _warn_unused(algorithm, "gamma", "gae and reinforce_plus_plus")
        if algorithm.flag("use_kl_in_reward"):
            algorithm.findings.warn(
                "RST-T048",
                algorithm.where("use_kl_in_reward"),
                "lowers advantages token by token, by the KL from there on",
                "verl lowers the reward of a sample by its whole KL, before rewards of a group are compared",
                "write actor_rollout_ref.actor.use_kl_loss=true in its place",
            )
    _warn_unused(algorithm, "lam", "gae")
    return found


def _warn_unused(algorithm: Section, key: str, estimators: str) -> None:
    if algorithm.values.get(key) not in (None, 1):
        _warn_unread(algorithm, key, f"verl uses it with {estimators} only")


def _has_images(root: Section) -> bool:
    """Return True if the job names a column of images, and its model, if it is on this machine, reads them."""
    config = read_model_config(root.below("actor_rollout_ref", "model").text("path")) or {}
    return "image_key" in root.below("data") and "vision_config" in config


def _data(section: Section) -> dict[str, Any]:
    """verl's files: prompts are messages, and the answer is in a nested column or in `answer`."""
    files = _files(section.get("train_files"))
    if not files:
        return {}
    filters = section.flag("filter_overlong_prompts")
    images = section.text("image_key")
    cuts = section.values.get("truncation") in ("left", "right", "middle")
    found = {
        "path": files,
        "prompt": section.text("prompt_key") or "prompt",
        "images": images if images != "images" else None,  # a column that Roost reads where a row has it
        "optional_answer": GROUND_TRUTH,
        "chat_template": None,
        "max_prompt_tokens": section.whole_number("max_prompt_length", 1, LONGEST_PROMPT),
        "overlong": "filter" if filters else "truncate" if cuts else "error",
        "limit": whole_number(section, "train_max_samples", 1),
        "shuffle": section.flag("shuffle", default=True),
        "seed": section.whole_number("seed", 0),
        "drop_last": True,
        "template_arguments": dict(section.below("apply_chat_template_kwargs").values) or None,
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
