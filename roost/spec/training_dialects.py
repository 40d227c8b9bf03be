"""Settings that a notation spells otherwise than by one key: clip ranges, names of algorithms, batches, the lag."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roost.spec.job import Component, DeviceList, Job, Notation
from roost.spec.section import Section
from roost.spec.training import Behaviour, Estimator, KlEstimator, Mean, RatioLevel, Schedule

ESTIMATORS = {
    "grpo": Estimator.GRPO,
    "gae": Estimator.GAE,
    "reinforce": Estimator.REINFORCE,
    "reinforce++": Estimator.REINFORCE,
    "reinforce_pp": Estimator.REINFORCE,
    "rloo": Estimator.LEAVE_ONE_OUT,
    "leave_one_out": Estimator.LEAVE_ONE_OUT,
    "leave_none_out": Estimator.GROUP_MEAN,
}
MEANS = {
    "token-mean": Mean.TOKENS,
    "seq-mean-token-mean": Mean.SEQUENCES,
    "seq-mean-token-sum": Mean.CONSTANT,
    "seq-mean-token-sum-norm": Mean.CONSTANT,
}
DIVERGENCES = {"kl": KlEstimator.K1, "mse": KlEstimator.K2, "low_var_kl": KlEstimator.K3}
SCHEDULES = {
    "constant": Schedule.CONSTANT,
    "constant_with_warmup": Schedule.CONSTANT,
    "torch_constant": Schedule.CONSTANT,
    "linear": Schedule.LINEAR,
    "cosine": Schedule.COSINE,
}
LOOP_LEVELS = {
    "pg_per_token": RatioLevel.TOKEN,
    "pg_per_turn": RatioLevel.TURN,
    "pg_per_trajectory": RatioLevel.TRAJECTORY,
}
# Those that scale a loss of 16 bits have no match here: `training_unlike` says so.
COMPUTE_TYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "32": "float32"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "torch", "huggingface": "torch"}
LOOP_EPSILON = 0.1
ROLL_CLIP = 0.2
ROLL_GAE_LAMBDA = 0.95
ROLL_VALUE_CLIP = 0.0  # none

# Which keys each setting is made of, for people: where a finding points to, and docs/training-settings.md.
MADE_OF: Mapping[Notation, Mapping[str, tuple[str, ...]]] = {
    Notation.RLINF: {
        "estimator": ("algorithm.adv_type",),
        "mean": ("algorithm.loss_agg_func",),
        "clip_low": ("algorithm.clip_ratio_low", "algorithm.ratio_clip_eps"),
        "clip_high": ("algorithm.clip_ratio_high", "algorithm.ratio_clip_eps"),
        "behaviour": ("algorithm.recompute_logprobs",),
        "kl_estimator": ("algorithm.kl_penalty_type",),
        "schedule": ("actor.optim.lr_scheduler", "actor.lr_sched.lr_decay_style"),
        "minibatch_size": ("algorithm.n_minibatches", "actor.global_batch_size"),
        "model": ("actor.model.model_path", "rollout.model.model_path"),
        "adapter_rank": ("actor.model.lora_rank",),
        "compute_type": ("actor.model.precision",),
        "engine": ("rollout.rollout_backend",),
    },
    Notation.ROLL: {
        "groups": ("rollout_batch_size",),
        "group_size": ("num_return_sequences_in_group", "train_env_manager.group_size"),
        "minibatch_size": (
            "actor_train.training_args.per_device_train_batch_size",
            "actor_train.training_args.gradient_accumulation_steps",
        ),
        "max_policy_lag": ("async_generation_ratio",),
        "estimator": ("adv_estimator",),
        "mean": ("loss_agg_mode",),
        "clip_low": ("pg_clip", "pg_clip_low"),
        "clip_high": ("pg_clip", "pg_clip_high"),
        "dual_clip": ("dual_clip_loss",),
        "ratio": ("actor_train.pg_variant",),
        "kl_coefficient": ("kl_loss_coef", "use_kl_loss"),
        "schedule": ("actor_train.training_args.lr_scheduler_type",),
        "keep_checkpoints": ("max_ckpt_to_keep",),
        "model": ("pretrain",),
        "adapter_rank": ("actor_train.model_args.lora_rank",),
        "compute_type": ("actor_train.model_args.dtype",),
        "engine": ("actor_infer.strategy_args.strategy_name",),
    },
    Notation.LOOP: {
        "task": ("rl.scenario_runner",),
        "max_policy_lag": ("rl.async_rollouts",),
        "minibatch_size": ("rl.strictly_on_policy",),
        "estimator": ("rl.baseline", "rl.adv_normalization"),
        "ratio": ("rl.loss_type", "rl.do_ppo_clipping"),
        "clip_low": ("rl.ppo_epsilon",),
        "clip_high": ("rl.ppo_epsilon",),
        "behaviour": ("rl.recompute_rollout_probs",),
        "beta1": ("rl.optimizer.betas",),
        "beta2": ("rl.optimizer.betas",),
        "model": ("llm.model_path",),
        "adapter_rank": ("llm.lora.r",),
    },
}


def derived(root: Section, job: Job) -> dict[str, Any]:
    """What the notation's own keys amount to, in Roost's names; what is not given is left out.

    `minibatches` is there where a notation counts them rather than their samples.
    """
    read = {Notation.RLINF: _rlinf, Notation.ROLL: _roll, Notation.LOOP: _loop}[job.notation]
    return {name: value for name, value in read(root, job).items() if value is not None}


def defaults(root: Section, notation: Notation, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a notation does where nothing else is said, and Roost would do otherwise."""
    if notation is Notation.LOOP:
        return _loop_clip(LOOP_EPSILON) | _loop_task(root)
    backend = (
        root.below("rollout").values.get("rollout_backend")
        if notation is Notation.RLINF
        else root.below("actor_infer", "strategy_args").values.get("strategy_name")
    )
    engine = ENGINES.get(backend) if isinstance(backend, str) else None
    found: dict[str, Any] = {} if engine is None else {"engine": engine}
    if notation is Notation.ROLL and values.get("estimator") is Estimator.GAE:
        found |= {"gae_lambda": ROLL_GAE_LAMBDA, "value_clip": ROLL_VALUE_CLIP}
    return found


def _loop_task(root: Section) -> dict[str, Any]:
    """The scenario runner is what plays, where the section `train` names nobody else."""
    runner = root.below("rl").values.get("scenario_runner")
    is_named = isinstance(runner, Mapping) and isinstance(runner.get("_target_"), str)
    return {"task": runner} if is_named else {}


def _rlinf(root: Section, job: Job) -> dict[str, Any]:
    algorithm, actor = root.below("algorithm"), root.below("actor")
    epsilon = algorithm.number("ratio_clip_eps")
    low, high = algorithm.number("clip_ratio_low"), algorithm.number("clip_ratio_high")
    count = algorithm.whole_number("n_minibatches", 1)
    return {
        "estimator": _named(algorithm, "adv_type", ESTIMATORS),
        "mean": _named(algorithm, "loss_agg_func", MEANS),
        **_bounds(low if low is not None else epsilon, high if high is not None else epsilon),
        # Where they are recomputed, the lag decides against what.
        "behaviour": Behaviour.ENGINE if algorithm.values.get("recompute_logprobs") is False else None,
        "kl_estimator": _named(algorithm, "kl_penalty_type", DIVERGENCES) if algorithm.number("kl_beta") else None,
        "schedule": _named(actor.below("optim"), "lr_scheduler", SCHEDULES)
        or _named(actor.below("lr_sched"), "lr_decay_style", SCHEDULES),
        "minibatches": count,
        "minibatch_size": actor.whole_number("global_batch_size", 1) if count is None else None,
        "adapter_rank": _adapter_rank(job),
        "compute_type": _compute_type(actor.below("model").values.get("precision")),
    }


def _roll(root: Section, job: Job) -> dict[str, Any]:
    clip, is_range = root.number("pg_clip"), root.values.get("use_pg_clip_range") is True
    low, high = (root.number("pg_clip_low"), root.number("pg_clip_high")) if is_range else (clip, clip)
    ratio = job.settings.get("async_generation_ratio")
    around = 1 + 2 * (ROLL_CLIP if clip is None else clip)
    learner = root.below("actor_train")
    return {
        **_roll_groups(root),
        "minibatch_size": _roll_minibatch(learner.below("training_args"), job),
        "estimator": _named(root, "adv_estimator", ESTIMATORS),
        "mean": _named(root, "loss_agg_mode", MEANS),
        **_bounds(low, high),
        "ratio": RatioLevel.NONE if _is_vanilla(learner) else None,
        "dual_clip": around if root.values.get("dual_clip_loss") is True else None,
        "kl_coefficient": root.number("kl_loss_coef") if root.values.get("use_kl_loss") is True else None,
        "schedule": _named(learner.below("training_args"), "lr_scheduler_type", SCHEDULES),
        "max_policy_lag": math.ceil(ratio) if isinstance(ratio, int | float) else None,
        "keep_checkpoints": root.whole_number("max_ckpt_to_keep", 0) or None,
        "adapter_rank": _adapter_rank(job),
        "compute_type": _compute_type(learner.below("model_args").values.get("dtype")),
    }


def _is_vanilla(learner: Section) -> bool:
    """Whether the loss is -A * logprob, without a ratio; only ROLL's PG workers read the key."""
    has_variants = "actor_pg_worker" in str(learner.values.get("worker_cls"))
    return has_variants and learner.values.get("pg_variant") == "vanilla"


def _roll_groups(root: Section) -> dict[str, Any]:
    """A batch is counted in prompts, but where environments make them in episodes."""
    batch = root.whole_number("rollout_batch_size", 1)
    if "train_env_manager" not in root:
        return {"groups": batch, "group_size": root.whole_number("num_return_sequences_in_group", 1)}
    size = root.below("train_env_manager").whole_number("group_size", 1)
    return {"groups": None if batch is None else math.ceil(batch / (size or 1)), "group_size": size or 1}


def _roll_minibatch(arguments: Section, job: Job) -> int | None:
    """What each copy of the model learns from between two steps of the optimizer, times the copies."""
    each = arguments.whole_number("per_device_train_batch_size", 1)
    rounds = arguments.whole_number("gradient_accumulation_steps", 1, 1)
    actor = _actor(job)
    if each is None or rounds is None or actor is None or not isinstance(actor.asks, DeviceList):
        return None
    return each * rounds * max(1, len(actor.asks.devices) // actor.parallel.model)


def _loop(root: Section, job: Job) -> dict[str, Any]:
    rl = root.below("rl")
    epsilon = rl.number("ppo_epsilon")
    clips = rl.values.get("do_ppo_clipping") is not False
    is_normalised = rl.values.get("adv_normalization") is True
    return {
        "estimator": Estimator.GRPO if is_normalised else _named(rl, "baseline", ESTIMATORS),
        "ratio": (_named(rl, "loss_type", LOOP_LEVELS) if clips else RatioLevel.NONE),
        **({} if epsilon is None else _loop_clip(epsilon)),
        "behaviour": Behaviour.ENGINE if rl.values.get("recompute_rollout_probs") is False else None,
        "max_policy_lag": 1 if job.settings.get("async_rollouts") is True else None,
        "minibatches": 1 if rl.values.get("strictly_on_policy") is True else None,
        **_betas(rl.below("optimizer").values.get("betas")),
        "adapter_rank": _adapter_rank(job),
    }


def _betas(written: Any) -> dict[str, float]:
    if not isinstance(written, list | tuple) or len(written) != 2:
        return {}
    fits = all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in written)
    return {"beta1": float(written[0]), "beta2": float(written[1])} if fits else {}


def _loop_clip(epsilon: float) -> dict[str, float]:
    """The clip of ml-loop is symmetric in the logarithm."""
    return {"clip_low": 1 / (1 + epsilon), "clip_high": 1 + epsilon}


def _bounds(below: float | None, above: float | None) -> dict[str, float]:
    """The bounds of the ratio, from how far it may be from 1."""
    return ({} if below is None else {"clip_low": 1 - below}) | ({} if above is None else {"clip_high": 1 + above})


def _named(section: Section, key: str, meanings: Mapping[str, Any]) -> Any:
    """What another program's word means here; a word that Roost has no match for is a finding."""
    word = section.text(key) if key in section else None
    if word is None:
        return None
    found = meanings.get(word)
    if found is None:
        why = f"of these words Roost knows {', '.join(meanings)}"
        section.error(key, f"{word} is nothing Roost has", why, "remove it, and say what you want in the section train")
    return found


def _compute_type(precision: Any) -> str | None:
    return COMPUTE_TYPES.get(str(precision).lower().removeprefix("torch."))


def _actor(job: Job) -> Component | None:
    return next((part for part in job.components if part.name == "actor"), None)


def _adapter_rank(job: Job) -> int | None:
    actor = _actor(job)
    return None if actor is None else actor.model.adapter_rank
