"""The settings of a training run by name, and where each notation has its own key for the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roost.spec.job import Notation
from roost.spec.training import Behaviour, Estimator, KlEstimator, Mean, RatioLevel, Schedule

WHOLE, NUMBER, FLAG, TEXT, MAPPING = "whole", "number", "flag", "text", "mapping"
IN_FLIGHT = ("drop", "drain", "hold")
FLOAT_TYPES = ("float32", "bfloat16", "float16")
ENGINES = ("torch", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its name in the section `train`, its kind, and its key in each notation, where that has one."""

    name: str
    kind: str | type[StrEnum] | tuple[str, ...]
    least: int = 0  # of a whole number
    most: float | None = None
    rlinf: str = ""
    roll: str = ""
    loop: str = ""

    def native(self, notation: Notation) -> tuple[str, ...]:
        """The keys from the root of the config, or none."""
        written = {Notation.RLINF: self.rlinf, Notation.ROLL: self.roll, Notation.LOOP: self.loop}[notation]
        return tuple(written.split(".")) if written else ()


KEYS = (
    Key("name", TEXT, rlinf="runner.logger.experiment_name", roll="exp_name", loop="experiment_name"),
    Key("task", MAPPING, loop="rl.scenario_runner"),
    Key("steps", WHOLE, 1, rlinf="runner.max_steps", roll="max_steps", loop="rl.total_iterations"),
    Key("seed", WHOLE, rlinf="actor.seed", roll="seed", loop="rl.seed"),
    Key(
        "groups",
        WHOLE,
        1,
        rlinf="data.rollout_batch_size",
        roll="rollout_batch_size",
        loop="rl.scenarios_per_iteration",
    ),
    Key(
        "group_size",
        WHOLE,
        1,
        rlinf="algorithm.group_size",
        roll="num_return_sequences_in_group",
        loop="rl.rollouts_per_scenario",
    ),
    Key("epochs", WHOLE, 1, rlinf="algorithm.update_epoch", roll="ppo_epochs", loop="rl.epochs_per_iteration"),
    Key("minibatch_size", WHOLE, 1, rlinf="actor.global_batch_size", loop="rl.minibatch_size"),
    Key("max_policy_lag", WHOLE, 0, 1000),
    Key("in_flight", IN_FLIGHT),
    # What is drawn
    Key(
        "max_tokens",
        WHOLE,
        1,
        rlinf="algorithm.sampling_params.max_new_tokens",
        roll="actor_infer.generating_args.max_new_tokens",
        loop="llm.max_new_tokens",
    ),
    Key(
        "temperature",
        NUMBER,
        rlinf="algorithm.sampling_params.temperature",
        roll="actor_infer.generating_args.temperature",
        loop="llm.temperature",
    ),
    Key("top_p", NUMBER, 0, 1, rlinf="algorithm.sampling_params.top_p", roll="actor_infer.generating_args.top_p"),
    Key("top_k", WHOLE, rlinf="algorithm.sampling_params.top_k", roll="actor_infer.generating_args.top_k"),
    Key("min_p", NUMBER, 0, 1),
    Key("redundancy", WHOLE, roll="train_env_manager.group_size_redundancy"),
    Key("fraction", NUMBER, 0, 1, loop="rl.rollouts_fraction"),
    Key("group_fraction", NUMBER, 0, 1, loop="rl.rollouts_per_scenario_fraction"),
    Key("drops_equal_groups", FLAG),
    Key("attempts", WHOLE, 1),
    Key("concurrency", WHOLE, 1, loop="rl.num_scenario_runners"),
    Key("episode_limit_s", NUMBER),
    # What is learnt
    Key(
        "learning_rate",
        NUMBER,
        rlinf="actor.optim.lr",
        roll="actor_train.training_args.learning_rate",
        loop="rl.optimizer.lr",
    ),
    Key(
        "weight_decay",
        NUMBER,
        rlinf="actor.optim.weight_decay",
        roll="actor_train.training_args.weight_decay",
        loop="rl.optimizer.weight_decay",
    ),
    Key("max_grad_norm", NUMBER, rlinf="actor.optim.clip_grad", roll="max_grad_norm", loop="rl.max_grad_norm"),
    Key("warmup_steps", WHOLE, rlinf="actor.optim.lr_warmup_iters", roll="actor_train.training_args.warmup_steps"),
    Key("schedule", Schedule, roll="actor_train.training_args.lr_scheduler_type"),
    Key("estimator", Estimator),
    Key("least_advantage", NUMBER, loop="rl.abs_adv_threshold"),
    Key("positive_only", FLAG, loop="rl.pos_adv_only"),
    Key("discount", NUMBER, 0, 1, rlinf="algorithm.gamma", roll="gamma"),
    Key("gae_lambda", NUMBER, 0, 1, rlinf="algorithm.gae_lambda", roll="lambd"),
    Key("ratio", RatioLevel),
    Key("clip_low", NUMBER, 0, 1),
    Key("clip_high", NUMBER),
    Key("dual_clip", NUMBER, rlinf="algorithm.clip_ratio_c"),
    Key("mean", Mean),
    Key("behaviour", Behaviour),
    Key("importance_cap", NUMBER),
    Key("kl_coefficient", NUMBER, rlinf="algorithm.kl_beta", roll="kl_loss_coef"),
    Key("kl_estimator", KlEstimator),
    Key("entropy_coefficient", NUMBER, rlinf="algorithm.entropy_bonus", roll="entropy_loss_coef"),
    # The model
    Key("model", TEXT),
    Key("weight_type", FLOAT_TYPES),
    Key("compute_type", FLOAT_TYPES),
    Key("micro_batch_tokens", WHOLE, 1),
    Key("checkpoints_activations", FLAG),
    Key("adapter_rank", WHOLE, 1),
    Key("adapter_alpha", NUMBER, loop="llm.lora.lora_alpha"),
    Key("engine", ENGINES),
    Key("engine_options", MAPPING),
    # What is kept and shown
    Key(
        "evaluate_every",
        WHOLE,
        rlinf="runner.val_check_interval",
        roll="eval_steps",
        loop="rl.eval.eval_every_n_iterations",
    ),
    Key("evaluation_tasks", WHOLE, 1),
    Key("evaluation_samples", WHOLE, 1),
    Key("evaluation_temperature", NUMBER),
    Key("checkpoint_every", WHOLE, rlinf="runner.save_interval", roll="save_steps"),
    Key("keep_checkpoints", WHOLE, 1, roll="max_ckpt_to_keep", loop="rl.max_ckpts"),
)
