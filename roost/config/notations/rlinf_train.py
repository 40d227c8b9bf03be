"""Settings that RLinf's notation spells otherwise than by one key, and RLinf's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roost.config.findings import shown
from roost.config.job import Job, first_number
from roost.config.notations.reward_keys import RLINF_KEYS, rlinf_rewards
from roost.config.notations.rlinf import MEGATRON, adapter_rank, recomputes_of
from roost.config.notations.rlinf_agents import DERIVED_FROM as AGENT_DERIVED_FROM, tool_task
from roost.config.notations.words import (
    AGGREGATIONS,
    DECAY_STYLES,
    DIVERGENCES,
    ESTIMATORS,
    OPTIMIZERS,
    SCHEDULES,
    clip_ranges,
    compute_dtype,
    engine_of,
    fraction,
    interval,
    lora_rank,
    named,
    note_padding,
    warn_resume,
    whole_number,
)
from roost.config.source import Section
from roost.config.train import (
    AdvantageEstimator,
    AdvantageLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    Objective,
    OldLogprobs,
    RolloutSettings,
    Whitening,
    WsdDecayStyle,
)

ADV_TYPES = {
    **ESTIMATORS,
    "raw": AdvantageEstimator.REWARD,
    "reinpp": AdvantageEstimator.REWARD,
    "grpo_dynamic": AdvantageEstimator.GRPO,
}
LEVELS = {"turn": AdvantageLevel.SAMPLE, "trajectory": AdvantageLevel.EPISODE}
STEP_PER_EPOCH = ("embodied", "coding_online_rl")  # task types without a data set: an epoch is one step
DECOUPLED = "decoupled_actor_critic"
SFT = "sft"  # the task type of supervised training
FSDP = "fsdp"
FSDP_DUAL_CLIP = 3.0
ALL_SCALES = ("group_level", "agent_level", "turn_level")

DOWN_SAMPLING = "algorithm.down_sampling.down_sampling_config"
DOWN_SAMPLED = {
    "keep_generations": "down_sample_to_n",
    "keep_positive": "min_non_zero_reward_trace_num",
    "keep_others": "min_zero_reward_trace_num",
    "keep_by_tool_errors": "roc_error_ratio",
    "drop_equal_groups": "reject_equal_reward",
}

DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "rewards": tuple(RLINF_KEYS.split()),
    "max_steps": ("runner.max_steps", "runner.max_epochs"),
    "max_epochs": ("runner.max_epochs",),
    "objective": ("runner.task_type",),
    "advantage_estimator": ("algorithm.adv_type", "algorithm.use_reinpp_baseline"),
    "whiten_advantages": ("algorithm.normalize_advantages", "algorithm.adv_type"),
    "advantage_level": ("algorithm.advantage_mode", "algorithm.adv_type"),
    "step_gamma": ("algorithm.adv_type",),
    "kl_penalty_coef": ("algorithm.reinpp_kl_beta",),
    "kl_penalty_estimator": ("algorithm.kl_penalty_type",),
    "gamma": ("algorithm.gamma",),
    "gae_lambda": ("algorithm.gae_lambda",),
    "loss_aggregation": (
        "algorithm.loss_agg_func",
        "algorithm.loss_scales",
        "algorithm.training_batch_size_per_gpu",
        "algorithm.use_valid_token_scale",
    ),
    "micro_batch_tokens": ("runner.max_tokens_per_mbs", "runner.enable_dynamic_batch_size"),
    **{name: (f"{DOWN_SAMPLING}.{key}",) for name, key in DOWN_SAMPLED.items()},
    "clip_range": ("algorithm.clip_ratio_low", "algorithm.ratio_clip_eps"),
    "clip_range_high": ("algorithm.clip_ratio_high", "algorithm.ratio_clip_eps"),
    "log_ratio_clip": ("algorithm.clip_log_ratio_min",),
    "max_mean_ratio": ("algorithm.early_stop_imp_ratio",),
    "old_logprobs": ("algorithm.recompute_logprobs", "algorithm.importance_sampling_fix", "algorithm.loss_type"),
    "importance_weight_cap": ("algorithm.importance_sampling_clip", "algorithm.loss_type"),
    "rollout_rejection": ("algorithm.behave_weight_threshold",),
    "kl_estimator": ("algorithm.kl_penalty_type",),
    "entropy_coef": ("algorithm.entropy_bonus", "algorithm.calculate_entropy"),
    "optimizer": ("actor.optim.optimizer",),
    "lr_scheduler_type": ("actor.optim.lr_scheduler", "actor.lr_sched.lr_decay_style"),
    "wsd_decay_steps": ("actor.lr_sched.lr_wsd_decay_iters",),
    "wsd_decay_style": ("actor.lr_sched.lr_wsd_decay_style",),
    "warmup_steps": ("actor.optim.lr_warmup_steps", "actor.lr_sched.lr_warmup_iters"),
    "warmup_ratio": ("actor.optim.lr_warmup_steps_ratio", "actor.lr_sched.lr_warmup_fraction"),
    "decay_steps": ("actor.optim.total_training_steps", "actor.lr_sched.lr_decay_iters"),
    "min_learning_rate": ("actor.optim.min_lr", "actor.optim.min_lr_rate", "actor.lr_sched.min_lr"),
    "minibatch_size": ("algorithm.n_minibatches", "actor.global_batch_size"),
    "model": ("actor.model.model_path", "rollout.model.model_path"),
    "lora_rank": ("actor.model.is_lora", "actor.model.lora_rank"),
    "compute_dtype": ("actor.model.precision",),
    "activation_checkpointing": ("actor.fsdp_config.gradient_checkpointing", "actor.model.recompute_granularity"),
    "engine": ("rollout.rollout_backend",),
    "eval_every": ("runner.val_check_interval",),
    "checkpoint_every": ("runner.save_interval",),
    "task": AGENT_DERIVED_FROM,
    "data": (
        "data.train_data_paths",
        "data.val_data_paths",
        "data.prompt_key",
        "data.answer_key",
        "data.apply_chat_template",
        "data.apply_chat_template_kwargs",
        "data.max_prompt_length",
        "data.filter_prompt_by_length",
        "data.data_size",
        "data.shuffle",
        "data.seed",
        "data.type",
        "data.image_keys",
        "data.dataset_name",
        "data.system_prompt",
        "rollout.custom_chat_template",
    ),
}
TEXT_DATA = ("math", "reasoning", "wideseek_r1", "rstar2")  # data types whose rows are text
IMAGE_DATA = "vlm"  # the data type whose rows have images
CHOICES, PLAIN = "robo2vlm", "base"  # the data sets with images that are for reinforcement learning
CHOICES_PROMPT = (
    "Look at the images and answer the question. First write your reasoning between <think> and </think>. Then write "
    "the letter and the text of one choice between <answer> and </answer>, such as <answer>A. Yes</answer>."
)
DATA_SEED = 1


def derived(root: Section, job: Job) -> dict[str, Any]:
    algorithm, actor, runner = root.below("algorithm"), root.below("actor"), root.below("runner")
    epsilon = algorithm.number("ratio_clip_eps")
    low, high = algorithm.number("clip_ratio_low"), algorithm.number("clip_ratio_high")
    count = algorithm.whole_number("n_minibatches", 1)
    _refuse_evaluation(runner)
    warn_resume(runner, "resume_dir", root)
    return {
        "rewards": rlinf_rewards(root),
        **_run_length(runner, root.below("train").values.get("max_steps") is not None),
        "objective": Objective.SFT if runner.values.get("task_type") == SFT else None,
        **_advantages(algorithm, any(part.name == "critic" for part in job.components)),
        "loss_aggregation": _aggregation(algorithm, actor, runner),
        "micro_batch_tokens": _micro_batch(runner, actor),
        **_down_sampling(algorithm),
        **clip_ranges(low if low is not None else epsilon, high if high is not None else epsilon),
        "log_ratio_clip": _log_ratio_clip(algorithm),
        "max_mean_ratio": None if is_fsdp(actor) else algorithm.number("early_stop_imp_ratio"),
        **_old_logprobs(algorithm),
        "kl_estimator": _kl_estimator(algorithm, actor),
        "entropy_coef": _entropy(algorithm),
        "optimizer": named(actor.below("optim"), "optimizer", OPTIMIZERS, "optimizer"),
        **_schedule(actor, _steps_per_step(root, count)),
        "minibatches": count,
        "minibatch_size": actor.whole_number("global_batch_size", 1) if count is None else None,
        "lora_rank": adapter_rank(root, lora_rank(job)),
        "compute_dtype": compute_dtype(actor.below("model").values.get("precision")),
        "activation_checkpointing": recomputes_of(actor),
        "eval_every": interval(runner, "val_check_interval"),
        "checkpoint_every": interval(runner, "save_interval"),
    }


def is_fsdp(actor: Section) -> bool:
    """Return True for RLinf's FSDP actor, which does not read some keys that the Megatron actor reads."""
    return actor.values.get("training_backend") == FSDP


def defaults(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """RLinf's defaults, where Roost's differ."""
    found = engine_of(root.below("rollout"), "rollout_backend")
    own = root.below("train").values
    has_own = bool(own.get("data") or own.get("task"))
    data = _data(root.below("data"), root.below("rollout").text("custom_chat_template"), has_own)
    found |= tool_task(root)
    if data:
        found["data"] = data
        if "eval" in data:
            found["eval_tasks"] = 0  # all
    if values.get("advantage_estimator") is AdvantageEstimator.GAE:
        found["value_loss_aggregation"] = _critic_aggregation(root)
    if is_fsdp(root.below("actor")) and "clip_ratio_c" not in root.below("algorithm"):  # null switches it off
        found["dual_clip"] = FSDP_DUAL_CLIP
    return found


def _data(section: Section, own_template: str | None, has_own: bool) -> dict[str, Any]:
    """`data` from the keys of RLinf's data sets; empty if they are not read.

    `has_own`: the section train has data or a task, so that a data set Roost does not read is no error.
    """
    kind = section.values.get("type") or TEXT_DATA[0]
    if not section.values.get("train_data_paths") or kind not in (*TEXT_DATA, IMAGE_DATA):
        return {}
    rows = _image_rows(section, has_own) if kind == IMAGE_DATA else {}
    if rows is None:
        return {}
    longest = section.whole_number("max_prompt_length", 1)
    uses_template = section.flag("apply_chat_template")
    found = {
        "path": section.get("train_data_paths"),
        "prompt": section.text("prompt_key"),
        "answer": section.text("answer_key"),
        "chat_template": own_template if uses_template and own_template and kind == "rstar2" else uses_template,
        "template_arguments": dict(section.below("apply_chat_template_kwargs").values) or None,
        "max_prompt_tokens": longest,
        # RLinf cuts prompts that it does not filter at their end.
        "overlong": "filter" if section.flag("filter_prompt_by_length") else "truncate",
        "limit": whole_number(section, "data_size", 1),
        "shuffle": section.flag("shuffle", default=True),
        "seed": section.whole_number("seed", 0, DATA_SEED),
        "drop_last": True,
        "eval": section.get("val_data_paths") or None,
        **rows,
    }
    return {key: value for key, value in found.items() if value is not None}


def _image_rows(section: Section, has_own: bool) -> dict[str, Any] | None:
    """`data` keys of RLinf's data sets with images; None for others, if train has data or a task of its own."""
    name = (section.text("dataset_name") or "").lower()
    if name not in (CHOICES, PLAIN) and has_own:
        return None
    if name not in (CHOICES, PLAIN):
        what = f"is {shown(name)}: images or videos that Roost does not read"
        why = f"of RLinf's data with images it reads {CHOICES} and {PLAIN}, which are for reinforcement learning"
        section.error("RST-T160", "dataset_name", what, why, f"write dataset_name: {CHOICES}, or data in train")
        return {}
    found: dict[str, Any] = {"images": section.get("image_keys"), "chat_template": True}
    if name == CHOICES:  # its columns have fixed names, and its system prompt cannot be changed in RLinf
        return {
            **found,
            "prompt": "question",
            "choices": "choices",
            "answer": "correct_answer",
            "system_prompt": CHOICES_PROMPT,
        }
    if section.values.get("choice_key"):
        what, why = "adds a column to the prompt", "Roost writes choices of robo2vlm alone"
        fix = "write the choices in the column of prompts, and remove choice_key"
        section.error("RST-T060", "choice_key", what, why, fix)
    return {**found, "system_prompt": section.text("system_prompt")}


def _refuse_evaluation(runner: Section) -> None:
    if runner.get("only_eval"):
        what, why = "is true, but Roost trains", "RLinf would only evaluate the model"
        runner.error("RST-T016", "only_eval", what, why, "write only_eval: false, or remove it")


def _run_length(runner: Section, is_counted: bool) -> dict[str, int]:
    """`max_steps` and `max_epochs`. `max_steps: -1` leaves the end to `max_epochs`, or to `train`.

    `is_counted`: train has `max_steps`.
    """
    is_open = runner.get("max_steps") == -1
    steps = None if is_open else runner.whole_number("max_steps", 1)
    epochs = whole_number(runner, "max_epochs", 1)
    is_supervised = runner.values.get("task_type") == SFT
    if is_supervised and steps is None and epochs is None and not is_counted:
        return {"max_epochs": 1}
    if is_open and not is_counted and runner.get("max_epochs") in (None, -1):
        runner.error(
            "RST-T017",
            "max_steps",
            "is -1, which leaves the end to max_epochs, but that is not given",
            fix="write max_epochs: 1 for one pass over the data, or a number of max_steps",
        )
    given = [number for number in (steps, epochs) if number is not None]
    if runner.values.get("task_type") in STEP_PER_EPOCH:
        return {"max_steps": min(given)} if given else {}
    return ({} if steps is None else {"max_steps": steps}) | ({} if epochs is None else {"max_epochs": epochs})


def _advantages(algorithm: Section, has_critic: bool) -> dict[str, Any]:
    """Settings of advantages. Only GAE with a critic reads `gamma` and `gae_lambda`."""
    kind = algorithm.values.get("adv_type")
    found: dict[str, Any] = {
        "advantage_estimator": named(algorithm, "adv_type", ADV_TYPES, "advantage_estimator"),
        "whiten_advantages": _whitening(algorithm),
    }
    if kind == "gae" and has_critic:
        note_padding(algorithm, "adv_type", "RLinf")
        found |= {name: fraction(algorithm, name) for name in ("gamma", "gae_lambda")}
    elif kind == "gae":
        _warn_no_critic(algorithm)
        found["advantage_estimator"] = AdvantageEstimator.REWARD
        found["whiten_advantages"] = found["whiten_advantages"] or Whitening.TOKENS_UNBIASED
    elif kind == "grpo_dynamic":
        found["advantage_level"] = named(algorithm, "advantage_mode", LEVELS) or AdvantageLevel.SAMPLE
        found["step_gamma"] = 0.0
    elif kind == "reinpp":
        found |= _reinpp(algorithm)
    return found


def _kl_estimator(algorithm: Section, actor: Section) -> KlEstimator | None:
    """The estimator of the KL loss; RLinf's FSDP actor calls it with policy and reference swapped."""
    if not algorithm.number("kl_beta"):
        return None
    found: KlEstimator | None = named(algorithm, "kl_penalty_type", DIVERGENCES)
    if is_fsdp(actor) and found in (KlEstimator.K1, KlEstimator.K3):
        algorithm.findings.warn(
            "RST-T048",
            algorithm.where("kl_penalty_type"),
            f"is {found.value} of the policy from the reference",
            "RLinf's FSDP actor swaps the two: its k1 has the other sign, its k3 is exp(d) - d - 1",
            "nothing to do; RLinf's Megatron actor does the same as Roost",
        )
    return found


def _reinpp(algorithm: Section) -> dict[str, Any]:
    """REINFORCE++ over tokens, with a KL penalty in the rewards, and optionally the group's mean as a baseline."""
    beta = algorithm.number("reinpp_kl_beta")
    found: dict[str, Any] = {"kl_penalty_coef": beta}
    if beta:
        found["kl_penalty_estimator"] = named(algorithm, "kl_penalty_type", DIVERGENCES)
        algorithm.findings.warn(
            "RST-T048",
            algorithm.where("reinpp_kl_beta"),
            "counts the KL of generated tokens, from each token to the last of its sample",
            "RLinf also counts the KL of the padding after it, and places the reward by the mask of another sample",
            "nothing to do: advantages differ from RLinf's where samples differ in length",
        )
    if algorithm.values.get("use_reinpp_baseline") is True:
        found["advantage_estimator"] = AdvantageEstimator.GROUP_MEAN
        algorithm.findings.warn(
            "RST-T048",
            algorithm.where("use_reinpp_baseline"),
            "subtracts the mean reward of the group",
            "RLinf means the same, but fails there with an IndexError",
            "nothing to do",
        )
    return found


def _warn_no_critic(algorithm: Section) -> None:
    algorithm.findings.warn(
        "RST-T048",
        algorithm.where("adv_type"),
        "is gae, but no critic is placed: advantages are rewards, normalised over all tokens of a step",
        "RLinf does the same without a critic",
        "place critic, or write adv_type: raw with normalize_advantages: true",
    )


def _whitening(algorithm: Section) -> Whitening | None:
    """Whitening of advantages, by `normalize_advantages` or by the estimator `reinpp`."""
    if algorithm.values.get("adv_type") == "reinpp":
        return Whitening.TOKENS_CLAMPED
    if algorithm.values.get("normalize_advantages") is True:
        return Whitening.TOKENS_BIASED
    return Whitening.NONE if algorithm.values.get("normalize_advantages") is False else None


def _old_logprobs(algorithm: Section) -> dict[str, Any]:
    """Old log-probs, and how the loss corrects for the engine's.

    `importance_sampling_fix` recomputes old log-probs, and weighs advantages by the capped ratio to the engine's. The
    decoupled loss weighs without a cap, and leaves out tokens with a weight above `behave_weight_threshold`.
    """
    cap = algorithm.number("importance_sampling_clip")
    if algorithm.values.get("loss_type") == DECOUPLED:
        limit = algorithm.number("behave_weight_threshold")
        rejects = {} if limit is None else {"rollout_rejection": {"token": [None, limit]}}
        return {"old_logprobs": OldLogprobs.DECOUPLED, "importance_weight_cap": 0.0, **rejects}
    if algorithm.values.get("importance_sampling_fix") is True:
        return {"old_logprobs": OldLogprobs.DECOUPLED} | ({} if cap is None else {"importance_weight_cap": cap})
    return {"old_logprobs": OldLogprobs.ROLLOUT} if algorithm.values.get("recompute_logprobs") is False else {}


TORCH_COSINE = "torch_cosine"  # a schedule of RLinf's without warm-up
TORCH_COSINE_END = 1e-6  # its last learning rate


def _schedule(actor: Section, optimizer_steps: int) -> dict[str, Any]:
    """The learning-rate schedule: from `lr_sched` for the Megatron actor, from `optim` for the FSDP actor.

    Megatron counts optimizer steps, FSDP training steps. Without a backend either section may have the schedule.
    """
    optim, sched, backend = actor.below("optim"), actor.below("lr_sched"), actor.values.get("training_backend")
    _warn_unread(optim, sched, backend)
    by_optim = backend == FSDP or (backend != MEGATRON and ("lr_scheduler" in optim or not sched.values))
    found = _fsdp_schedule(optim, optimizer_steps if backend == FSDP else 1) if by_optim else _megatron_schedule(sched)
    if backend not in (MEGATRON, FSDP) and found.get("warmup_steps") is None:
        other = (sched, "lr_warmup_iters") if by_optim else (optim, "lr_warmup_steps")
        found["warmup_steps"] = whole_number(*other, 0)
    decays = found["lr_scheduler_type"] not in (None, LrSchedulerType.CONSTANT)
    if decays and found["decay_steps"] is None and backend in (MEGATRON, FSDP):
        section, style, end = (
            (optim, "lr_scheduler", "total_training_steps") if by_optim else (sched, "lr_decay_style", "lr_decay_iters")
        )
        section.findings.warn(
            "RST-T048",
            section.where(style),
            f"decays over all steps of the run, for {end} is not given",
            "RLinf would decay over " + ("0 steps" if by_optim else "100,000 iterations, whatever the run's length"),
            f"nothing to do, or write {end}",
        )
    return found


def _steps_per_step(root: Section, count: int | None) -> int:
    """Optimizer steps of a training step: its minibatches, given by number or by size, times its epochs."""
    if root.below("runner").values.get("task_type") == SFT:
        return 1
    train, usual = root.below("train"), RolloutSettings()
    epochs = int(first_number((train, "ppo_epochs"), (root.below("algorithm"), "update_epoch")) or 1)
    if count is not None:
        return count * epochs
    size = first_number((root.below("actor"), "global_batch_size"), (train, "minibatch_size"))
    prompts = first_number((train, "prompts_per_step"), (root.below("data"), "rollout_batch_size"))
    group = first_number((train, "num_generations"), (root.below("algorithm"), "group_size"))
    samples = (prompts or usual.prompts_per_step) * (group or usual.num_generations)
    return math.ceil(samples / size) * epochs if size else epochs


def _fsdp_schedule(optim: Section, optimizer_steps: int) -> dict[str, Any]:
    """The FSDP actor's schedule; a negative `lr_warmup_steps` leaves the warm-up to its ratio."""
    total, warmup = (whole_number(optim, key, 0) for key in ("total_training_steps", "lr_warmup_steps"))
    share, rate = optim.number("min_lr_rate"), optim.number("lr")
    is_torch = optim.values.get("lr_scheduler") == TORCH_COSINE
    least = optim.number("min_lr") if share is None or rate is None else share * rate
    return {
        "lr_scheduler_type": LrSchedulerType.COSINE if is_torch else named(optim, "lr_scheduler", SCHEDULES),
        "warmup_steps": warmup if warmup is None or is_torch else warmup * optimizer_steps,
        "warmup_ratio": None if warmup or not total or is_torch else fraction(optim, "lr_warmup_steps_ratio"),
        "decay_steps": total * optimizer_steps if total else None,
        "min_learning_rate": TORCH_COSINE_END if is_torch else least,
    }


def _megatron_schedule(sched: Section) -> dict[str, Any]:
    """The Megatron actor's schedule; `lr_warmup_fraction` takes precedence over `lr_warmup_iters`."""
    warmup_ratio, scheduler = fraction(sched, "lr_warmup_fraction"), named(sched, "lr_decay_style", SCHEDULES)
    usual = WsdDecayStyle.EXPONENTIAL if scheduler is LrSchedulerType.WSD else None  # Megatron's
    return {
        "lr_scheduler_type": scheduler,
        "warmup_steps": whole_number(sched, "lr_warmup_iters", 0) if warmup_ratio is None else None,
        "warmup_ratio": warmup_ratio,
        "decay_steps": whole_number(sched, "lr_decay_iters", 1),
        "wsd_decay_steps": whole_number(sched, "lr_wsd_decay_iters", 1),
        "wsd_decay_style": named(sched, "lr_wsd_decay_style", DECAY_STYLES) or usual,
        "min_learning_rate": sched.number("min_lr"),
    }


def _warn_unread(optim: Section, sched: Section, backend: Any) -> None:
    """Warn of a decaying schedule in the section of the other backend."""
    decaying = ("linear", "cosine", TORCH_COSINE, "WSD")
    for section, key, reader, instead in (
        (optim, "lr_scheduler", MEGATRON, "actor.lr_sched.lr_decay_style"),
        (sched, "lr_decay_style", FSDP, "actor.optim.lr_scheduler"),
    ):
        if backend == reader and section.values.get(key) in decaying:
            what, why = f"is not read with training_backend: {reader}", "RLinf does not read it there either"
            section.findings.warn("RST-T014", section.where(key), what, why, f"write {instead}, or remove it")


def _log_ratio_clip(algorithm: Section) -> float | None:
    """`log_ratio_clip`, which RLinf writes as a negative number."""
    written = algorithm.get("clip_log_ratio_min")
    if isinstance(written, int | float) and not isinstance(written, bool) and written <= 0:
        return float(-written)
    if written is not None:
        what = f"is {shown(written)}; it must be a number that is at most 0"
        algorithm.error("RST-T007", "clip_log_ratio_min", what, fix="write clip_log_ratio_min: -20")
    return None


def _scaled(algorithm: Section, found: LossAggregation | None, scales: Any) -> LossAggregation | None:
    """The aggregation with `loss_scales`, which weigh the turns of an episode; in RLinf each turn is a sample.

    All three together give every token of an episode, and every episode, the same weight; in Roost an episode is one
    sequence.
    """
    if found is LossAggregation.TOKEN_MEAN and tuple(scales) == ALL_SCALES:
        return LossAggregation.SEQ_MEAN
    what = f"is {shown(scales)}, which Roost does not follow"
    why, fix = "it has all three together, with token-mean", f"write loss_scales: [{', '.join(ALL_SCALES)}]"
    algorithm.findings.warn("RST-T014", algorithm.where("loss_scales"), what, why, fix)
    return found


def _aggregation(algorithm: Section, actor: Section, runner: Section) -> LossAggregation | None:
    """The loss aggregation.

    RLinf takes `token-mean` over each micro-batch, then the mean over micro-batches, unless `use_valid_token_scale`
    corrects that. If a micro-batch is one sample, that is seq-mean-token-mean.
    """
    found: LossAggregation | None = named(algorithm, "loss_agg_func", AGGREGATIONS)
    if scales := algorithm.get("loss_scales"):
        return _scaled(algorithm, found, scales)
    is_exact = not is_fsdp(actor) and algorithm.values.get("use_valid_token_scale") is True
    size = algorithm.whole_number("training_batch_size_per_gpu", 1)
    is_dynamic = runner.values.get("enable_dynamic_batch_size") is True
    if is_exact and found not in (None, LossAggregation.TOKEN_MEAN):
        algorithm.findings.warn(
            "RST-T048",
            algorithm.where("use_valid_token_scale"),
            f"has no effect with loss_agg_func: {found}",
            "RLinf multiplies the loss of each micro-batch by its share of tokens, also where sequences count",
            "write loss_agg_func: token-mean, for which it is meant",
        )
    if found is not LossAggregation.TOKEN_MEAN or is_exact or (size is None and not is_dynamic):
        return found
    if size == 1 and not is_dynamic:
        algorithm.findings.note(
            "RST-T048",
            algorithm.where("loss_agg_func"),
            "is token-mean over micro-batches of one sample, which is seq-mean-token-mean",
            "training_batch_size_per_gpu is 1, and use_valid_token_scale does not correct it",
            "write use_valid_token_scale: true with Megatron for a mean over all tokens",
        )
        return LossAggregation.SEQ_MEAN
    parts = "micro-batches by tokens" if is_dynamic else f"micro-batches of {size} samples"
    algorithm.findings.warn(
        "RST-T048",
        algorithm.where("loss_agg_func"),
        "is token-mean over all tokens of a minibatch",
        f"RLinf takes it over {parts}, so that tokens of long samples count less in some",
        "nothing to do",
    )
    return found


def _critic_aggregation(root: Section) -> LossAggregation:
    """Aggregation of the critic's loss: `token-mean` over each micro-batch, whatever `loss_agg_func` is."""
    size = root.below("algorithm").whole_number("training_batch_size_per_gpu", 1)
    is_dynamic = root.below("runner").values.get("enable_dynamic_batch_size") is True
    return LossAggregation.SEQ_MEAN if size == 1 and not is_dynamic else LossAggregation.TOKEN_MEAN


FSDP_MICRO_BATCH = 2048


def _micro_batch(runner: Section, actor: Section) -> int | None:
    if runner.values.get("enable_dynamic_batch_size") is not True:
        return None
    return runner.whole_number("max_tokens_per_mbs", 1) or (FSDP_MICRO_BATCH if is_fsdp(actor) else None)


def _down_sampling(algorithm: Section) -> dict[str, Any]:
    block = algorithm.below("down_sampling")
    if block.values.get("do_down_sampling") is not True:
        return {}
    config = block.below("down_sampling_config")
    if config.values.get("reject_equal_reward") is True:
        config.findings.warn(
            "RST-T048",
            config.where("reject_equal_reward"),
            "leaves out groups whose samples all have the same reward",
            "RLinf means the same, but keeps such a group whole, for it never leaves out all samples of one",
            "nothing to do",
        )
    flags = ("keep_by_tool_errors", "drop_equal_groups")
    return {
        name: config.flag(key) if name in flags else whole_number(config, key, 0) for name, key in DOWN_SAMPLED.items()
    }


def _entropy(algorithm: Section) -> float | None:
    """The entropy bonus, which counts only if the entropy is computed."""
    bonus = algorithm.number("entropy_bonus")
    return 0.0 if bonus is not None and algorithm.values.get("calculate_entropy") is False else bonus
