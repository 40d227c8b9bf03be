"""Settings that ROLL's notation spells otherwise than by one key, and ROLL's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roost.config.findings import shown
from roost.config.job import DeviceList, Job
from roost.config.notations.algorithm import NORMALISED, estimator_of_train
from roost.config.notations.reward_keys import ROLL_FILTERS, ROLL_KEYS, roll_filters, roll_rewards
from roost.config.notations.roll import (
    METHODS,
    PROMPT_LENGTH,
    SCOPES,
    holds_role,
    is_agentic,
    is_distilled_alone,
    normalisation,
    recomputes_of,
    scope_words,
    teacher_role,
)
from roost.config.notations.roll_data import (
    DERIVED_FROM as GAME_DERIVED_FROM,
    data_settings,
    distillation_columns,
    game_settings,
    max_tokens_of_turns,
    sft_columns,
    supervised_data,
)
from roost.config.notations.roll_loss import DERIVED_FROM as LOSS_DERIVED_FROM, loss_settings
from roost.config.notations.words import (
    DIVERGENCES,
    ESTIMATORS,
    MEGATRON_ARGUMENTS,
    MEGATRON_WSD_ARGUMENTS,
    OPTIMIZERS,
    OTHER_ARGUMENTS,
    TRANSFORMERS_SCHEDULES,
    WSD_ARGUMENTS,
    compute_dtype,
    engine_of,
    fraction,
    interval,
    lora_rank,
    megatron_schedule,
    named,
    note_padding,
    transformers_schedule,
    warn_resume,
    whole_number,
)
from roost.config.source import Section
from roost.config.train import (
    ROLL_LEARNERS,
    AdvantageEstimator,
    AdvantageLevel,
    DiscountLevel,
    LossAggregation,
    LrSchedulerType,
    Objective,
    RewardScope,
    Whitening,
)
from roost.config.train_choices import Divergence

ADV_ESTIMATORS = {
    **ESTIMATORS,
    **dict.fromkeys(("reinforce", "step_reinforce", "agentic_reinforce"), AdvantageEstimator.REWARD),
    "gigpo": AdvantageEstimator.GIGPO,
}
KL_PENALTIES = {word: DIVERGENCES[word] for word in ("kl", "abs", "mse", "k3")}
ERROR_TOKENS = 9999999999  # ROLL's default: no limit
STEP_GAMMA = 0.95
KL_COEF = 0.2


def advantage_settings(root: Section) -> dict[str, Any]:
    """Settings of advantages that the config gives."""
    estimator = named(root, "adv_estimator", ADV_ESTIMATORS)
    is_taught = is_distilled_alone(root)
    if is_taught:
        found = _distillation_advantages(root)
    else:
        found = _agentic_advantages(root, estimator) if is_agentic(root) else _domain_advantages(root, estimator)
    whitens = root.flag("whiten_advantages") if root.get("whiten_advantages") is not None else None
    if root.values.get("adv_estimator") == "gae" and not is_taught:
        note_padding(root, "adv_estimator", "ROLL")
    if whitens is not None:
        found["whiten_advantages"] = Whitening.TOKENS if whitens else Whitening.NONE
    return found if is_taught else found | _kl_penalty(root)


def _distillation_advantages(root: Section) -> dict[str, Any]:
    """Advantages of pure on-policy distillation: ROLL ignores the estimator and the KL from a reference there."""
    found: dict[str, Any] = {"advantage_estimator": AdvantageEstimator.TEACHER}
    if is_agentic(root):
        return found | {"advantage_level": AdvantageLevel.SAMPLE}
    return found | _masks(root) | ({"whiten_by_tag": True} if len(root.below("rewards").values) > 1 else {})


def _teachers(root: Section) -> dict[str, Any]:
    """`teacher` in train: the coefficient and the tags of each teacher, in their role."""
    role = teacher_role(root)
    if role is None:
        return {}
    coef = root.number("opd_kl_coef")
    shared = {"coef": 1.0 if coef is None else coef}
    estimator = named(root, "kl_penalty", KL_PENALTIES)
    if estimator is not None:
        shared |= {"estimator": estimator}
    section = root.below(role)
    names = [] if holds_role(section.values) else [name for name, each in section.values.items() if holds_role(each)]
    if not names:
        return {"teacher": shared | _teacher(section)}
    return {"teacher": shared | {name: _teacher(section.below(name)) for name in names}}


def _teacher(section: Section) -> dict[str, Any]:
    coef, tags = section.number("opd_kl_coef"), section.values.get("tag_included")
    found = {} if coef is None else {"coef": coef}
    return found | ({"tags": [str(tag) for tag in tags] if isinstance(tags, list | tuple) else tags} if tags else {})


def _agentic_advantages(root: Section, estimator: AdvantageEstimator | None) -> dict[str, Any]:
    """Advantages in the agentic pipeline, where each sample, an episode or one step of it, has its own reward.

    grpo and reinforce mean the same there: `reward_normalization` says what is normalised.
    """
    written = root.values.get("adv_estimator")
    found = {"advantage_level": AdvantageLevel.SAMPLE, **_normalised(root, estimator)}
    if written in ("gigpo", "step_reinforce"):
        gamma = root.number("step_reward_gamma")
        found["step_gamma"] = STEP_GAMMA if gamma is None else gamma
    if written == "gigpo":
        method = str(root.below("reward_normalization").values.get("method"))
        found["state_normalization"] = {(True, False): "mean", (True, True): "mean_std"}.get(
            METHODS.get(method, (False, False)), "none"
        )
        found["state_scope"] = "batch"
    if written == "agentic_reinforce":
        found["discount_level"] = DiscountLevel.TURN
    return found


def _domain_advantages(root: Section, estimator: AdvantageEstimator | None) -> dict[str, Any]:
    """Advantages without environments: each domain of rewards is normalised and whitened alone."""
    written = root.values.get("adv_estimator")
    has_domains = len(root.below("rewards").values) > 1
    if written == "agentic_reinforce":
        root.error("RST-T013", "adv_estimator", f"{written} is for environments", fix="write adv_estimator: reinforce")
    found = _normalised(root, estimator)
    return found | ({"whiten_by_tag": True} if has_domains else {}) | _masks(root)


def _normalised(root: Section, estimator: AdvantageEstimator | None) -> dict[str, Any]:
    """The estimator that stands for ROLL's estimator with its normalisation of rewards."""
    for key, word in zip(("norm_mean_type", "norm_std_type"), scope_words(root), strict=True):
        _check_scope(root, "reward_normalization" if is_agentic(root) else key, key, word)
    shared, scopes = normalisation(root)
    if shared in NORMALISED.values():
        estimator = AdvantageEstimator(str(estimator_of_train(shared)))
    return {"advantage_estimator": estimator, **scopes}


def _check_scope(root: Section, place: str, key: str, word: Any) -> None:
    if word == "running":
        root.findings.warn(
            "RST-T048",
            root.where(place),
            f"{key} is running; Roost takes the statistics of the step alone",
            "ROLL fails with a KeyError unless the domain is called domain",
            f"write {key}: batch",
        )
    elif not isinstance(word, str | None) or word not in SCOPES:
        known = ", ".join(str(each) for each in SCOPES if each not in (None, "running"))
        root.error(
            "RST-T018", place, f"takes statistics over {shown(word)}", f"Roost has {known}", "write one of these"
        )


def _masks(root: Section) -> dict[str, Any]:
    """Settings that leave samples out of the loss; the agentic pipeline does not read their keys."""
    found: dict[str, Any] = {"mask_truncated": True} if root.values.get("max_len_mask") is True else {}
    if root.values.get("difficulty_mask") is True:
        low, high = (root.number(f"difficulty_{end}_threshold") for end in ("low", "high"))
        found |= {"min_group_reward": low or 0.0, "max_group_reward": 1.0 if high is None else high}
    if root.values.get("error_max_len_clip") is True:
        most = root.whole_number("error_max_len_threshold", 1)
        found["max_error_tokens"] = ERROR_TOKENS if most is None else most
    return found


def _kl_penalty(root: Section) -> dict[str, Any]:
    """The KL penalty in the rewards; without `add_token_level_kl` the other keys do nothing to them."""
    if root.values.get("add_token_level_kl") is not True:
        return {}
    coef = root.number("init_kl_coef")
    return {
        "kl_penalty_coef": KL_COEF if coef is None else coef,
        "kl_penalty_estimator": named(root, "kl_penalty", KL_PENALTIES),
        "kl_penalty_target": root.number("target_kl"),
        "kl_penalty_horizon": root.whole_number("kl_horizon", 1),
    }


ENGINES = ("actor_infer", "student_infer")
SFT_ROLE = "sft_train"  # the learner of ROLL's supervised pipeline
STUDENT = "student"  # that of its distillation on given completions
DEFAULTS: Mapping[str, Any] = {
    "max_steps": 500,
    "prompts_per_step": 128,
    "num_generations": 1,
    "seed": 42,
    "temperature": 0.95,
    "top_p": 0.7,
    "top_k": 50,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": LrSchedulerType.LINEAR,
    "advantage_estimator": AdvantageEstimator.GAE,
    "whiten_advantages": Whitening.NONE,
    "checkpoint_every": 50,
}
GAE_DEFAULTS = {
    "gae_lambda": 0.95,
    "value_clip": 0.0,
    "critic_lr_warmup_steps": 0,
    "value_loss_aggregation": LossAggregation.SEQ_MEAN,
}
EVALUATE_EVERY = 10
SFT_EPOCHS = 1
DISTILLED = {  # keys of `teacher` in train that are numbers
    "weight": "distill_loss_weight",
    "temperature": "kd_temperature",
    "teacher_temperature": "teacher_temperature",
    "adaptive_alpha": "adaptive_kl_alpha",
    "skew": "skew_lambda",
}
SCHEDULE_ARGUMENTS = (*WSD_ARGUMENTS, *OTHER_ARGUMENTS, *MEGATRON_ARGUMENTS, *MEGATRON_WSD_ARGUMENTS)
SFT_DEFAULTS = ("seed", "learning_rate", "weight_decay", "lr_scheduler_type", "checkpoint_every")


def learner_keys(path: str) -> tuple[str, ...]:
    """A key of the learner, in each role that may be one."""
    return tuple(f"{role}.{path}" for role in ROLL_LEARNERS)


def policy_keys(path: str) -> tuple[str, ...]:
    """A key of the learners of reinforcement learning, which supervised training does not read."""
    return tuple(f"{role}.{path}" for role in ROLL_LEARNERS if role not in (SFT_ROLE, STUDENT))


def engine_keys(path: str) -> tuple[str, ...]:
    """A key of the engine, in each role that may be one."""
    return tuple(f"{role}.{path}" for role in ENGINES)


DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "teacher": (
        *("opd_kl_coef", "use_opd", "is_pure_opd", "teacher.opd_kl_coef", "teacher.tag_included", "kl_penalty"),
        *(*DISTILLED.values(), "logits_topk", "kd_objective", "distill_on_prompt"),
    ),
    "rewards": tuple(ROLL_KEYS.split()),
    "dynamic_sampling": ROLL_FILTERS,
    "objective": ("sft_train.device_mapping", "student.device_mapping"),
    "completion": ("answer_key",),
    "max_epochs": ("sft_train.training_args.num_train_epochs", "student.training_args.num_train_epochs"),
    "max_sequence_tokens": ("sequence_length",),
    "prompts_per_step": ("rollout_batch_size",),
    "num_generations": ("num_return_sequences_in_group", "train_env_manager.group_size"),
    "minibatch_size": (
        *learner_keys("training_args.per_device_train_batch_size"),
        *learner_keys("training_args.gradient_accumulation_steps"),
    ),
    "max_staleness": ("async_generation_ratio",),
    "max_new_tokens": ("sequence_length", "response_length", *engine_keys("generating_args.max_new_tokens")),
    "temperature": (*engine_keys("generating_args.temperature"), "train_env_manager.generating_args.temperature"),
    "top_p": (*engine_keys("generating_args.top_p"), "train_env_manager.generating_args.top_p"),
    "top_k": (*engine_keys("generating_args.top_k"), "train_env_manager.generating_args.top_k"),
    "stop_strings": (
        *engine_keys("generating_args.stop_strings"),
        "train_env_manager.generating_args.stop_strings",
    ),
    "repetition_penalty": (
        *engine_keys("generating_args.repetition_penalty"),
        "train_env_manager.generating_args.repetition_penalty",
    ),
    "advantage_estimator": ("adv_estimator", "norm_mean_type", "norm_std_type", "reward_normalization"),
    "advantage_level": ("train_env_manager.group_size",),
    "step_gamma": ("step_reward_gamma",),
    "state_normalization": ("reward_normalization.method",),
    "state_scope": ("adv_estimator",),
    "reward_baseline": ("norm_mean_type", *(f"reward_normalization.{key}" for key in ("grouping", "method"))),
    "reward_std": ("norm_std_type", *(f"reward_normalization.norm_{key}_type" for key in ("mean", "std"))),
    "kl_penalty_coef": ("init_kl_coef", "add_token_level_kl"),
    "kl_penalty_estimator": ("kl_penalty",),
    "kl_penalty_target": ("target_kl",),
    "kl_penalty_horizon": ("kl_horizon",),
    "mask_truncated": ("max_len_mask",),
    "min_group_reward": ("difficulty_low_threshold", "difficulty_mask"),
    "max_group_reward": ("difficulty_high_threshold", "difficulty_mask"),
    "max_error_tokens": ("error_max_len_threshold", "error_max_len_clip"),
    "discount_level": ("adv_estimator",),
    "whiten_advantages": ("whiten_advantages",),
    **LOSS_DERIVED_FROM,
    "clip_range": (
        *("pg_clip", "pg_clip_low"),
        *policy_keys("pg_variant"),
        *policy_keys("cispo_epsilon_low"),
        *policy_keys("tis_lower_bound"),
    ),
    "clip_range_high": (
        *("pg_clip", "pg_clip_high"),
        *policy_keys("pg_variant"),
        *policy_keys("cispo_epsilon_high"),
        *policy_keys("tis_upper_bound"),
    ),
    "loss_type": (*policy_keys("pg_variant"), *policy_keys("worker_cls")),
    "cispo_mask": policy_keys("cispo_use_unified_mask"),
    "kimi15_tau": policy_keys("kimi15_tau"),
    "importance_sampling_level": (*policy_keys("pg_variant"), "importance_sampling", "ratio_type"),
    "optimizer": learner_keys("training_args.optim"),
    "lr_scheduler_type": learner_keys("training_args.lr_scheduler_type"),
    "min_learning_rate": tuple(
        key for end in ("", "_rate", "_ratio") for key in learner_keys(f"training_args.lr_scheduler_kwargs.min_lr{end}")
    ),
    "decay_steps": learner_keys("training_args.lr_scheduler_kwargs.lr_decay_steps"),
    "wsd_decay_steps": (
        *learner_keys("training_args.lr_scheduler_kwargs.num_decay_steps"),
        *learner_keys("training_args.lr_scheduler_kwargs.wsd_decay_steps"),
    ),
    "wsd_decay_style": (
        *learner_keys("training_args.lr_scheduler_kwargs.decay_type"),
        *learner_keys("training_args.lr_scheduler_kwargs.lr_wsd_decay_style"),
    ),
    "keep_checkpoints": ("max_ckpt_to_keep",),
    "eval_every": ("eval_steps",),
    "eval_top_k": ("validation.generating_args.top_k",),
    "checkpoint_every": ("save_steps",),
    "model": ("pretrain", "student_pretrain"),
    "lora_rank": (*policy_keys("model_args.lora_rank"), f"{STUDENT}.model_args.lora_rank"),
    "lora_target_modules": (*policy_keys("model_args.lora_target"), f"{STUDENT}.model_args.lora_target"),
    "compute_dtype": learner_keys("model_args.dtype"),
    "activation_checkpointing": (
        *learner_keys("model_args.disable_gradient_checkpointing"),
        *learner_keys("strategy_args.strategy_config.recompute_granularity"),
    ),
    "engine": engine_keys("strategy_args.strategy_name"),
    **GAME_DERIVED_FROM,
    "data": (
        *learner_keys("data_args.file_name"),
        "validation.data_args.file_name",
        *policy_keys("data_args.messages"),
        *policy_keys("data_args.prompt"),
        *learner_keys("data_args.template"),
        "prompt_key",
        "query_key",
        "question_key",
        "system_key",
        *policy_keys("data_args.tag"),
        *policy_keys("data_args.domain_interleave_probs"),
        "global_template",
        "tag_to_template",
    ),
}


def derived(root: Section, job: Job) -> dict[str, Any]:
    ratio = job.settings.get("async_generation_ratio")
    warn_resume(root, "resume_from_checkpoint", root)
    role = learner_role(root)
    learner = root.below(role)
    return {
        "rewards": roll_rewards(root),
        "dynamic_sampling": roll_filters(root),
        **_groups(root),
        **(_supervised(root, role) if role in (SFT_ROLE, STUDENT) else _sampling(root)),
        "minibatch_size": _minibatch(learner.below("training_args"), job),
        **advantage_settings(root),
        **loss_settings(root, learner),
        "optimizer": named(learner.below("training_args"), "optim", OPTIMIZERS, "optimizer"),
        **_schedule(learner),
        "max_staleness": math.ceil(ratio) if isinstance(ratio, int | float) else None,
        "keep_checkpoints": root.whole_number("max_ckpt_to_keep", 0) or None,
        "eval_every": interval(root, "eval_steps"),
        "eval_top_k": interval(root.below("validation", "generating_args"), "top_k"),  # -1 and 0: all tokens
        "checkpoint_every": interval(root, "save_steps"),
        "lora_rank": lora_rank(job),
        "lora_target_modules": _adapter_targets(learner.below("model_args")),
        "compute_dtype": compute_dtype(learner.below("model_args").values.get("dtype")),
        "activation_checkpointing": recomputes_of(learner, learner.below("strategy_args").text("strategy_name")),
        **game_settings(root),
    }


def defaults(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """ROLL's defaults."""
    found: dict[str, Any] = dict(DEFAULTS) | engine_of(root.below(_engine_role(root), "strategy_args"), "strategy_name")
    role = learner_role(root)
    if role in (SFT_ROLE, STUDENT):
        by_epochs = {"max_steps": None, "max_epochs": values.get("max_epochs", SFT_EPOCHS)}
        evaluated = {"eval_every": EVALUATE_EVERY} if "validation" in root else {}
        own = {"completion": "output"} if role == SFT_ROLE else {"completion": "answer", **_distillation(root)}
        rows = supervised_data(root, role, sft_columns(root) if role == SFT_ROLE else distillation_columns(root))
        return {name: found[name] for name in SFT_DEFAULTS} | by_epochs | own | evaluated | rows
    found |= _teachers(root)
    if "train_env_manager" in root:
        found["prompts_per_step"] = math.ceil(DEFAULTS["prompts_per_step"] / values.get("num_generations", 1))
    turn = max_tokens_of_turns(values.get("task") or {})
    if turn is not None:
        found["max_new_tokens"] = turn  # agents bound each turn by their own limit
    estimator = values.get("advantage_estimator", AdvantageEstimator.GAE)
    if estimator is AdvantageEstimator.GAE:
        found |= GAE_DEFAULTS
    if estimator is AdvantageEstimator.REINFORCE_BASELINE:
        del found["whiten_advantages"]  # no estimator of ROLL's: it is whitened by definition
    if root.values.get("adv_estimator") == "gigpo":
        found |= {"reward_baseline": RewardScope.NONE, "reward_std": RewardScope.NONE}
    if "train_env_manager" not in root:
        found |= data_settings(root, learner_role(root))
    if "validation" in root or "val_env_manager" in root:
        found["eval_every"] = EVALUATE_EVERY
        found |= _evaluation_sampling(root, values)
    return found


def _evaluation_sampling(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling of evaluations: as in training with environments, else ROLL's defaults."""
    if "val_env_manager" in root:
        return {"eval_temperature": values.get("temperature", DEFAULTS["temperature"])}
    return {f"eval_{name}": DEFAULTS[name] for name in ("temperature", "top_p", "top_k")}


def learner_role(root: Section) -> str:
    return next((role for role in reversed(ROLL_LEARNERS) if role in root), ROLL_LEARNERS[0])


def _engine_role(root: Section) -> str:
    return next((role for role in reversed(ENGINES) if role in root), ENGINES[0])


def _distillation(root: Section) -> dict[str, Any]:
    """Defaults of distillation on given completions: `teacher` in train, and no gradient-norm clip."""
    found: dict[str, Any] = {name: root.number(key) for name, key in DISTILLED.items()}
    found |= {
        "divergence": named(root, "kd_objective", {each.value: each.value for each in Divergence}),
        "top_k": root.whole_number("logits_topk", 0),
        "on_prompt": root.flag("distill_on_prompt"),
    }
    return {"teacher": {name: value for name, value in found.items() if value is not None}, "max_grad_norm": 0.0}


def _supervised(root: Section, role: str) -> dict[str, Any]:
    """Settings of ROLL's pipelines for given completions, which run by epochs."""
    return {
        "objective": Objective.SFT,
        "completion": root.text("answer_key") if role == STUDENT else None,
        "max_epochs": root.below(role, "training_args").whole_number("num_train_epochs", 1),
        "max_sequence_tokens": whole_number(root, "sequence_length", 1),
    }


def _groups(root: Section) -> dict[str, Any]:
    """Prompts of a step and samples of each; with environments, ROLL counts a batch in episodes."""
    batch = root.whole_number("rollout_batch_size", 1)
    if "train_env_manager" not in root:
        return {"prompts_per_step": batch, "num_generations": root.whole_number("num_return_sequences_in_group", 1)}
    size = root.below("train_env_manager").whole_number("group_size", 1)
    return {"prompts_per_step": None if batch is None else math.ceil(batch / (size or 1)), "num_generations": size}


def _sampling(root: Section) -> dict[str, Any]:
    """Sampling: `actor_infer.generating_args`, or the environments' own where that section is missing."""
    engine = _engine_role(root)
    has_own = "generating_args" in root.below(engine) or "train_env_manager" not in root
    block = root.below(engine if has_own else "train_env_manager", "generating_args")
    return {
        "max_new_tokens": _max_tokens(root, block),
        "temperature": block.number("temperature"),
        "top_p": fraction(block, "top_p"),
        "top_k": interval(block, "top_k"),  # -1 and 0: all tokens
        "repetition_penalty": block.number("repetition_penalty"),
        "stop_strings": _texts(block, "stop_strings"),
    }


def _texts(block: Section, key: str) -> tuple[str, ...] | None:
    written = block.get(key)
    if not written:
        return None
    return tuple(map(str, written)) if isinstance(written, list | tuple) else (str(written),)


def _max_tokens(root: Section, block: Section) -> int | None:
    """Without environments, ROLL replaces `max_new_tokens` by what a sequence has left after its prompt."""
    written = whole_number(block, "max_new_tokens", 1)
    if "train_env_manager" in root:
        return written
    whole, response = whole_number(root, "sequence_length", 1), whole_number(root, "response_length", 1)
    prompt = whole_number(root, "prompt_length", 1) or PROMPT_LENGTH
    if whole is None:
        left, why = response, f"response_length is {response}"
    else:
        left, why = whole - prompt, f"sequence_length {whole} - prompt_length {prompt}"
    if left is None:
        return written
    if left < 1:
        root.error(
            "RST-T021",
            "sequence_length",
            f"leaves {left} tokens for a completion",
            why,
            "write a larger sequence_length",
        )
        return None
    if written not in (None, left):
        what = f"is {shown(written)}, but completions get {left} tokens, as in ROLL"
        root.findings.warn("RST-T022", block.where("max_new_tokens"), what, why, f"write {left}, or leave it out")
    return left


def _schedule(learner: Section) -> dict[str, Any]:
    """The learning-rate schedule; Megatron has other names for its arguments than transformers."""
    arguments = learner.below("training_args")
    rate = arguments.number("learning_rate")
    schedule = named(arguments, "lr_scheduler_type", TRANSFORMERS_SCHEDULES)
    limits = arguments.below("lr_scheduler_kwargs")
    # Arguments that Roost has for no schedule are reported with the other keys that are not followed.
    limits = replace(limits, values={name: limits.values[name] for name in SCHEDULE_ARGUMENTS if name in limits})
    if str(learner.below("strategy_args").text("strategy_name")).startswith("megatron"):
        return megatron_schedule(schedule, limits)
    return transformers_schedule(schedule, limits, DEFAULTS["learning_rate"] if rate is None else rate)


def _adapter_targets(arguments: Section) -> tuple[str, ...] | None:
    """Module names, separated by commas; None for `all-linear`, which is Roost's default."""
    words = arguments.values.get("lora_target")
    if not isinstance(words, str) or words == "all-linear":
        return None
    return tuple(word.strip() for word in words.split(",") if word.strip())


def _minibatch(arguments: Section, job: Job) -> int | None:
    """Samples of an optimizer step: those of one model replica, times the replicas."""
    each = arguments.whole_number("per_device_train_batch_size", 1)
    rounds = arguments.whole_number("gradient_accumulation_steps", 1, 1)
    actor = next((part for part in job.components if part.name in ("actor", SFT_ROLE)), None)
    if each is None or rounds is None or actor is None or not isinstance(actor.requested, DeviceList):
        return None
    return each * rounds * max(1, len(actor.requested.devices) // actor.parallel.model)
