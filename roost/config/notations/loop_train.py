"""Settings that ml-loop's notation spells otherwise than by one key, and ml-loop's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roost.config.findings import shown
from roost.config.job import DeviceList, Job
from roost.config.notations.words import ESTIMATORS, OPTIMIZER_CLASSES, actor_of, compute_dtype, lora_rank, named
from roost.config.source import Section
from roost.config.train import ImportanceSamplingLevel, LrSchedulerType, OldLogprobs

LEVELS = {
    "pg_per_token": ImportanceSamplingLevel.TOKEN,
    "pg_per_turn": ImportanceSamplingLevel.TURN,
    "pg_per_trajectory": ImportanceSamplingLevel.TRAJECTORY,
}
SCHEDULES = {
    "get_const_lr": LrSchedulerType.CONSTANT,
    "get_constant_schedule": LrSchedulerType.CONSTANT,
    "get_constant_schedule_with_warmup": LrSchedulerType.CONSTANT,
    "get_linear_schedule_with_warmup": LrSchedulerType.LINEAR,
    "get_cosine_schedule_with_warmup": LrSchedulerType.COSINE,
}
EPSILON = 0.1
MINIBATCH = 32
DEFAULTS: Mapping[str, Any] = {
    "max_steps": 200,
    "prompts_per_step": 40,
    "num_generations": 6,
    "ppo_epochs": 2,
    "learning_rate": 5e-5,
    "weight_decay": 0.01,
    "max_grad_norm": 0.1,
    "min_abs_advantage": 0.01,
    "early_stop_kl": 20.0,
    "max_new_tokens": 1500,
    "checkpoint_every": 1,
    "keep_checkpoints": 10,
}

DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "task": ("rl.scenario_runner",),
    "max_staleness": ("rl.async_rollouts",),
    "minibatch_size": ("rl.params.strictly_on_policy",),
    "max_concurrent_episodes": ("rl.num_scenario_runners",),
    "advantage_estimator": ("rl.params.baseline",),
    "importance_sampling_level": ("rl.params.loss_type", "rl.params.do_ppo_clipping"),
    "clip_range": ("rl.params.ppo_epsilon",),
    "clip_range_high": ("rl.params.ppo_epsilon",),
    "old_logprobs": ("rl.recompute_rollout_probs",),
    "early_stop_kl": ("rl.params.high_kl_threshold",),
    "max_logprob_mismatch": ("rl.abs_log_prob_diff_threshold",),
    "max_learn_tokens": ("rl.learning_max_seq_len",),
    "optimizer": ("rl.optimization.optimizer._target_",),
    "adam_beta1": ("rl.optimization.optimizer.betas",),
    "adam_beta2": ("rl.optimization.optimizer.betas",),
    "lr_scheduler_type": ("rl.optimization.lr_scheduler._target_",),
    "warmup_ratio": ("rl.optimization.lr_scheduler.num_warmup_steps",),
    "model": ("llm.base_model_path",),
    "lora_rank": ("llm.lora_rank",),
    "compute_dtype": ("rl.dtype",),
    "engine": ("llm.inference_server_class", "llm.vllm_server"),
    "engine_options": ("llm.vllm_server.max_model_len",),
    "eval_every": ("rl.eval.eval_every_n_iterations", "rl.eval.enable"),
    "eval_samples": ("rl.eval.overrides.rl.params.rollouts_per_scenario",),
    "eval_temperature": ("rl.eval.overrides.llm.temperature",),
}


def derived(root: Section, job: Job) -> dict[str, Any]:
    rl, params, optimization = root.below("rl"), root.below("rl", "params"), root.below("rl", "optimization")
    epsilon = params.number("ppo_epsilon")
    clips = params.values.get("do_ppo_clipping") is not False
    _check_supported(root)
    return {
        "advantage_estimator": named(params, "baseline", ESTIMATORS),
        "importance_sampling_level": named(params, "loss_type", LEVELS) if clips else ImportanceSamplingLevel.NONE,
        **({} if epsilon is None else _clip(epsilon)),
        "early_stop_kl": _limit(params, "high_kl_threshold"),
        "max_logprob_mismatch": _limit(rl, "abs_log_prob_diff_threshold"),
        "max_learn_tokens": rl.whole_number("learning_max_seq_len", 0) or None,  # null and 0: the model's own length
        "old_logprobs": OldLogprobs.ROLLOUT if rl.values.get("recompute_rollout_probs") is False else None,
        "max_staleness": 1 if job.settings.get("async_rollouts") is True else None,
        "minibatches": 1 if params.values.get("strictly_on_policy") is True else None,
        "max_concurrent_episodes": _concurrency(rl, job),
        "optimizer": OPTIMIZER_CLASSES.get((optimization.below("optimizer").text("_target_") or "").rsplit(".", 1)[-1]),
        **_betas(optimization.below("optimizer").values.get("betas")),
        **_schedule(optimization.below("lr_scheduler"), params),
        "lora_rank": lora_rank(job),
        "compute_dtype": compute_dtype(rl.values.get("dtype")),
        **_evaluation(root),
    }


def defaults(root: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    """ml-loop's defaults."""
    found: dict[str, Any] = dict(DEFAULTS) | _task(root)
    if "clip_range" not in values:
        found |= _clip(EPSILON)
    if "minibatches" not in values and "minibatch_size" not in values:
        prompts, generations = (values.get(name, DEFAULTS[name]) for name in ("prompts_per_step", "num_generations"))
        samples = prompts * generations
        found["minibatches"] = math.ceil(samples / MINIBATCH)
    found |= _engine(root)
    if values.get("engine", found.get("engine")) == "vllm":
        found["engine_options"] = _server_options(root.below("llm", "vllm_server"))
    return found


def _task(root: Section) -> dict[str, Any]:
    """The scenario runner as the task."""
    runner = root.below("rl").values.get("scenario_runner")
    is_named = isinstance(runner, Mapping) and isinstance(runner.get("_target_"), str)
    return {"task": runner} if is_named else {}


def _engine(root: Section) -> dict[str, str]:
    """The engine, if the config has a section for servers; configs written for Roost may leave it out."""
    llm = root.below("llm")
    if not ("vllm_server" in llm or "inference_server_class" in llm):
        return {}
    return {"engine": "sglang" if "sglang" in str(llm.values.get("inference_server_class")).lower() else "vllm"}


def _server_options(server: Section) -> dict[str, Any]:
    context = server.whole_number("max_model_len", 1)
    written = (
        ("--no-enable-prefix-caching", server.values.get("enable_prefix_caching") is False),
        ("--enforce-eager", server.values.get("eager_mode") is True),
    )
    args = tuple(word for word, is_wanted in written if is_wanted)
    return ({} if context is None else {"max_context": context}) | ({"args": args} if args else {})


def _check_supported(root: Section) -> None:
    """Refuse an optimizer that Roost does not have, and an adapter to start from."""
    optimizer = root.below("rl", "optimization", "optimizer")
    target = optimizer.text("_target_")
    if target is not None and target.rsplit(".", 1)[-1] not in OPTIMIZER_CLASSES:
        what = f"is {shown(target)}; the optimizers are {', '.join(OPTIMIZER_CLASSES)}"
        optimizer.error("RST-T011", "_target_", what, fix="write torch.optim.AdamW")
    llm = root.below("llm")
    if llm.get("adapter_path") is not None:
        llm.error(
            "RST-T012",
            "adapter_path",
            "is an adapter to start from, which training does not take",
            "a new adapter is trained on base_model_path; ml-loop refuses it as well",
            "write adapter_path: null, or merge the adapter into base_model_path",
        )


def _schedule(scheduler: Section, params: Section) -> dict[str, Any]:
    """The learning-rate schedule; ml-loop counts warm-up in iterations, so it becomes a fraction."""
    target = scheduler.text("_target_")
    if target is None:
        return {}
    found = SCHEDULES.get(target.rsplit(".", 1)[-1])
    if found is None:
        known = ", ".join(SCHEDULES)
        fix = "write lr_scheduler_type: linear or lr_scheduler_type: cosine in train, and remove it"
        scheduler.error("RST-T013", "_target_", f"{target} is not supported", f"of these Roost knows {known}", fix)
    warmup = scheduler.whole_number("num_warmup_steps", 0)
    total = params.whole_number("total_iterations", 1) or DEFAULTS["max_steps"]
    return {"lr_scheduler_type": found, "warmup_ratio": min(1.0, warmup / total) if warmup else None}


def _concurrency(rl: Section, job: Job) -> int | None:
    """Concurrent episodes; ml-loop counts runners per learner process."""
    runners, actor = rl.whole_number("num_scenario_runners", 1), actor_of(job)
    if runners is None or actor is None or not isinstance(actor.requested, DeviceList):
        return runners
    return runners * len(actor.requested.devices)


def _evaluation(root: Section) -> dict[str, Any]:
    """Evaluation settings: those of training with `rl.eval.overrides` over them, if `rl.eval.enable` is true."""
    evaluation = root.below("rl", "eval")
    if evaluation.values.get("enable") is not True:
        return {}
    over, own = evaluation.below("overrides"), root.below("rl", "params")
    samples = over.below("rl", "params").whole_number("rollouts_per_scenario", 1)
    temperature = over.below("llm").number("temperature")
    return {
        "eval_every": evaluation.whole_number("eval_every_n_iterations", 1) or 1,
        "eval_samples": samples or own.whole_number("rollouts_per_scenario", 1) or DEFAULTS["num_generations"],
        "eval_temperature": root.below("llm").number("temperature") if temperature is None else temperature,
    }


def _limit(section: Section, key: str) -> float | None:
    """A limit; infinity switches it off, which is 0 here."""
    return 0.0 if section.get(key) == math.inf else section.number(key)


def _betas(written: Any) -> dict[str, float]:
    if not isinstance(written, list | tuple) or len(written) != 2:
        return {}
    fits = all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in written)
    return {"adam_beta1": float(written[0]), "adam_beta2": float(written[1])} if fits else {}


def _clip(epsilon: float) -> dict[str, float]:
    """ml-loop clips ratios to [1 / (1 + epsilon), 1 + epsilon]."""
    return {"clip_range": epsilon / (1 + epsilon), "clip_range_high": epsilon}
