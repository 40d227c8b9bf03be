"""The settings of a training run by name, and where each notation has its own key for the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roost.config.job import Notation
from roost.config.train import (
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    OldLogprobs,
    Whitening,
)

WHOLE, NUMBER, FLAG, TEXT, MAPPING, WORDS = "whole", "number", "flag", "text", "mapping", "words"
IN_FLIGHT = ("drop", "drain", "hold")
FLOAT_TYPES = ("float32", "bfloat16", "float16")
ENGINES = ("torch", "vllm", "sglang")
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its name in the section `train`, its kind, and its key in each notation, where that has one.

    Several keys of a notation are divided by `|`; the first that is given counts. Settings that a notation spells in
    another way than by one key of the same meaning are in `training_dialects`.
    """

    name: str
    kind: str | type[StrEnum] | tuple[str, ...]
    meaning: str
    least: int = 0  # of a whole number
    most: float | None = None
    null: float | None = None  # what null means; None: that the setting is left out
    rlinf: str = ""
    roll: str = ""
    loop: str = ""

    def native(self, notation: Notation) -> tuple[KeyPath, ...]:
        """The keys of a notation, each as the way to it from the root of the config."""
        written = {Notation.RLINF: self.rlinf, Notation.ROLL: self.roll, Notation.LOOP: self.loop}[notation]
        return tuple(tuple(path.split(".")) for path in written.split("|")) if written else ()


RUN = (
    Key(
        "name",
        TEXT,
        "Name of the run's folder in runs/. Default: the config's file name.",
        rlinf="runner.logger.experiment_name",
        roll="exp_name",
        loop="experiment_name",
    ),
    Key("task", MAPPING, "The scenario: `_target_`, a class that makes tasks and runs episodes, and its arguments."),
    Key(
        "rewards",
        MAPPING,
        "Reward functions beside the task's own: by name, `_target_`, `tags`, `weight` and arguments.",
    ),
    Key(
        "max_steps",
        WHOLE,
        "Training steps.",
        1,
        roll="max_steps",
        loop="rl.params.total_iterations",
    ),
    Key(
        "max_epochs",
        WHOLE,
        "Passes over the training tasks; the run ends after these or after `max_steps`, whichever is less.",
        1,
    ),
    Key(
        "seed",
        WHOLE,
        "Random seed.",
        rlinf="actor.seed",
        roll="seed",
        loop="rl.seed",
    ),
    Key(
        "prompts_per_step",
        WHOLE,
        "Prompts per step.",
        1,
        rlinf="data.rollout_batch_size",
        loop="rl.params.scenarios_per_iteration",
    ),
    Key(
        "num_generations",
        WHOLE,
        "Samples per prompt (group size).",
        1,
        rlinf="algorithm.group_size",
        loop="rl.params.rollouts_per_scenario",
    ),
    Key(
        "ppo_epochs",
        WHOLE,
        "Optimization epochs per step.",
        1,
        rlinf="algorithm.update_epoch",
        roll="ppo_epochs",
        loop="rl.params.epochs_per_iteration",
    ),
    Key(
        "minibatch_size",
        WHOLE,
        "Samples per optimizer step. Default: all of a step.",
        1,
        loop="rl.params.minibatch_size",
    ),
    Key("max_staleness", WHOLE, "Policy versions that a sample may be behind the learner.", 0, 1000),
    Key("in_flight", IN_FLIGHT, "What a weight update does to requests in flight. Default: by mode."),
)

DRAWING = (
    Key(
        "max_new_tokens",
        WHOLE,
        "Maximum tokens per completion.",
        1,
        rlinf="algorithm.sampling_params.max_new_tokens",
        loop="llm.vllm_class.max_new_tokens",
    ),
    Key(
        "temperature",
        NUMBER,
        "Sampling temperature.",
        rlinf="algorithm.sampling_params.temperature",
        loop="llm.temperature",
    ),
    Key(
        "top_p",
        NUMBER,
        "Nucleus sampling: smallest set of tokens with this total probability.",
        0,
        1,
        rlinf="algorithm.sampling_params.top_p",
        loop="llm.vllm_class.top_p",
    ),
    Key(
        "top_k",
        WHOLE,
        "Sample from the k most likely tokens; 0: from all.",
        rlinf="algorithm.sampling_params.top_k",
        loop="llm.vllm_class.top_k",
    ),
    Key(
        "min_p",
        NUMBER,
        "Drop tokens below this fraction of the most likely token's probability.",
        0,
        1,
        loop="llm.vllm_class.min_p",
    ),
    Key(
        "extra_generations",
        WHOLE,
        "Samples generated per prompt beyond num_generations; the slowest are cancelled.",
        roll="train_env_manager.group_size_redundancy",
    ),
    Key(
        "rollout_fraction",
        NUMBER,
        "Fraction of a step's samples at which the rollout ends.",
        0,
        1,
        loop="rl.rollouts_fraction",
    ),
    Key(
        "group_fraction",
        NUMBER,
        "Fraction of every group that must be finished by then.",
        0,
        1,
        loop="rl.rollouts_per_scenario_fraction",
    ),
    Key("dynamic_sampling", FLAG, "Replace groups whose samples all have the same reward."),
    Key("episode_attempts", WHOLE, "Attempts per episode before it counts as failed.", 1),
    Key("max_concurrent_episodes", WHOLE, "Episodes that run at the same time.", 1),
    Key("episode_timeout_s", NUMBER, "Time limit of an episode, in seconds."),
)

OPTIMIZER = (
    Key(
        "learning_rate",
        NUMBER,
        "Learning rate (AdamW).",
        rlinf="actor.optim.lr",
        roll="actor_train.training_args.learning_rate",
        loop="rl.optimization.optimizer.lr",
    ),
    Key(
        "critic_learning_rate",
        NUMBER,
        "Learning rate of the critic. Default: the policy's.",
        rlinf="critic.optim.lr",
        roll="critic.training_args.learning_rate",
    ),
    Key(
        "weight_decay",
        NUMBER,
        "Weight decay (AdamW).",
        rlinf="actor.optim.weight_decay",
        roll="actor_train.training_args.weight_decay",
        loop="rl.optimization.optimizer.weight_decay",
    ),
    Key(
        "adam_beta1",
        NUMBER,
        "AdamW beta1.",
        0,
        1,
        rlinf="actor.optim.adam_beta1",
        roll="actor_train.training_args.adam_beta1",
    ),
    Key(
        "adam_beta2",
        NUMBER,
        "AdamW beta2.",
        0,
        1,
        rlinf="actor.optim.adam_beta2",
        roll="actor_train.training_args.adam_beta2",
    ),
    Key(
        "adam_epsilon",
        NUMBER,
        "AdamW epsilon.",
        rlinf="actor.optim.adam_eps",
        roll="actor_train.training_args.adam_epsilon",
        loop="rl.optimization.optimizer.eps",
    ),
    Key(
        "max_grad_norm",
        NUMBER,
        "Gradient-norm clip.",
        rlinf="actor.optim.clip_grad",
        roll="max_grad_norm",
        loop="rl.params.max_grad_norm",
    ),
    Key(
        "warmup_steps",
        WHOLE,
        "Optimizer steps of linear warm-up.",
        rlinf="actor.optim.lr_warmup_steps|actor.lr_sched.lr_warmup_iters",
        roll="actor_train.training_args.warmup_steps",
    ),
    Key("lr_scheduler_type", LrSchedulerType, "Learning-rate schedule after the warm-up."),
    Key(
        "max_skipped_steps",
        WHOLE,
        "Optimizer steps skipped in a row (loss or gradient not finite) after which the run stops; 0: never.",
    ),
)

LOSS = (
    Key("advantage_estimator", AdvantageEstimator, "Advantage estimator."),
    Key(
        "normalize_by_std",
        FLAG,
        "Divide by the group's population standard deviation (at least 1e-7), with leave_one_out and group_mean.",
        loop="rl.params.adv_normalization",
    ),
    Key(
        "whiten_advantages",
        Whitening,
        "Normalise advantages over all generated tokens of a step; left out: tokens_biased with gae.",
    ),
    Key("advantage_clip", NUMBER, "Clip advantages to this magnitude, after whitening.", roll="advantage_clip"),
    Key(
        "min_abs_advantage",
        NUMBER,
        "Drop samples whose absolute advantage is smaller.",
        loop="rl.params.abs_adv_threshold",
    ),
    Key(
        "positive_advantages_only",
        FLAG,
        "Learn only from samples with a positive advantage.",
        loop="rl.params.pos_adv_only",
    ),
    Key("gamma", NUMBER, "Discount factor, with a critic.", 0, 1, rlinf="algorithm.gamma", roll="gamma"),
    Key(
        "gae_lambda",
        NUMBER,
        "GAE lambda, with a critic.",
        0,
        1,
        rlinf="algorithm.gae_lambda",
        roll="lambd",
    ),
    Key(
        "importance_sampling_level", ImportanceSamplingLevel, "What the importance ratio is computed over, and clipped."
    ),
    Key("clip_range", NUMBER, "Clip range (epsilon): ratios are at least 1 - clip_range.", 0, 1),
    Key("clip_range_high", NUMBER, "Upper clip range: ratios are at most 1 + clip_range_high. Default: clip_range."),
    Key(
        "dual_clip",
        NUMBER,
        "Dual clip: for negative advantages, bound the loss at this multiple of the advantage.",
        rlinf="algorithm.clip_ratio_c",
    ),
    Key("loss_aggregation", LossAggregation, "How token losses are reduced to one number."),
    Key(
        "old_logprobs",
        OldLogprobs,
        "Log-probs in the denominator of the importance ratio. Default: decoupled if max_staleness is above 0.",
    ),
    Key("importance_weight_cap", NUMBER, "Cap on the importance weight of a token, with old_logprobs: decoupled."),
    Key("kl_coef", NUMBER, "KL loss coefficient, against the reference.", rlinf="algorithm.kl_beta"),
    Key("kl_estimator", KlEstimator, "KL estimator."),
    Key(
        "entropy_coef",
        NUMBER,
        "Entropy bonus coefficient.",
        roll="entropy_loss_coef",
    ),
    Key(
        "value_clip",
        NUMBER,
        "Clip range of the critic's values; 0 or null: no clip.",
        null=0.0,
        rlinf="algorithm.value_clip",
        roll="value_clip",
    ),
)

MODEL = (
    Key("model", TEXT, "Folder or hub name of a Hugging Face model. Default: the placed model's."),
    Key("weight_dtype", FLOAT_TYPES, "Data type of the master weights."),
    Key("compute_dtype", FLOAT_TYPES, "Data type of the forward and backward pass."),
    Key("micro_batch_tokens", WHOLE, "Tokens packed into one micro-batch.", 1),
    Key(
        "activation_checkpointing",
        FLAG,
        "Recompute activations in the backward pass. Default: on GPUs.",
    ),
    Key("lora_rank", WHOLE, "Train a LoRA adapter of this rank instead of all weights.", 1),
    Key(
        "lora_alpha",
        NUMBER,
        "LoRA alpha. Default: twice the rank.",
        roll="actor_train.model_args.lora_alpha",
        loop="llm.lora_alpha",
    ),
    Key(
        "lora_target_modules",
        WORDS,
        "Modules that get an adapter. Default: all linear layers but the last.",
        loop="llm.lora_target_modules",
    ),
    Key("engine", ENGINES, "Inference engine."),
    Key("engine_options", MAPPING, "Options of the engine."),
)

KEPT = (
    Key(
        "eval_every",
        WHOLE,
        "Steps between evaluations; 0: at the end only.",
    ),
    Key("eval_tasks", WHOLE, "Prompts per evaluation.", 1),
    Key(
        "eval_samples",
        WHOLE,
        "Samples per prompt in evaluations.",
        1,
        roll="validation.generating_args.num_return_sequences",
    ),
    Key(
        "eval_temperature",
        NUMBER,
        "Sampling temperature in evaluations.",
        roll="validation.generating_args.temperature",
    ),
    Key(
        "checkpoint_every",
        WHOLE,
        "Steps between checkpoints; 0: at the end only.",
    ),
    Key("keep_checkpoints", WHOLE, "Checkpoints to keep.", 1, loop="rl.max_ckpts"),
)

KEYS = (*RUN, *DRAWING, *OPTIMIZER, *LOSS, *MODEL, *KEPT)
