"""The settings of a training run by name, and where each notation has its own key for the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roost.spec.job import Notation
from roost.spec.training import Behaviour, Estimator, KlEstimator, Mean, RatioLevel, Schedule, Whitening

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
        "The run's folder in runs/; the config's file name if left out.",
        rlinf="runner.logger.experiment_name",
        roll="exp_name",
        loop="experiment_name",
    ),
    Key("task", MAPPING, "What makes tasks and plays episodes: `_target_`, a class, and the keys it is made with."),
    Key("rewards", MAPPING, "What scores answers beside the task: by name, `_target_`, `tags`, `weight` and its keys."),
    Key(
        "steps",
        WHOLE,
        "Updates of the policy.",
        1,
        roll="max_steps",
        loop="rl.params.total_iterations",
    ),
    Key(
        "max_epochs",
        WHOLE,
        "Passes over the training tasks; the run ends after these or after `steps`, whichever is less.",
        1,
    ),
    Key(
        "seed",
        WHOLE,
        "What all that is drawn by chance begins from.",
        rlinf="actor.seed",
        roll="seed",
        loop="rl.seed",
    ),
    Key(
        "groups",
        WHOLE,
        "Prompts of a step.",
        1,
        rlinf="data.rollout_batch_size",
        loop="rl.params.scenarios_per_iteration",
    ),
    Key(
        "group_size",
        WHOLE,
        "Samples of a prompt.",
        1,
        rlinf="algorithm.group_size",
        loop="rl.params.rollouts_per_scenario",
    ),
    Key(
        "epochs",
        WHOLE,
        "Times that a step's samples are gone through.",
        1,
        rlinf="algorithm.update_epoch",
        roll="ppo_epochs",
        loop="rl.params.epochs_per_iteration",
    ),
    Key(
        "minibatch_size",
        WHOLE,
        "Samples of one step of the optimizer; all of a step if left out.",
        1,
        loop="rl.params.minibatch_size",
    ),
    Key("max_policy_lag", WHOLE, "Updates that a sample may be behind the policy that learns from it.", 0, 1000),
    Key("in_flight", IN_FLIGHT, "What an update does to requests under way; what suits the mode if left out."),
)

DRAWING = (
    Key(
        "max_tokens",
        WHOLE,
        "Tokens of a completion.",
        1,
        rlinf="algorithm.sampling_params.max_new_tokens",
        loop="llm.vllm_class.max_new_tokens",
    ),
    Key(
        "temperature",
        NUMBER,
        "What log-probabilities are divided by before a token is drawn.",
        rlinf="algorithm.sampling_params.temperature",
        loop="llm.temperature",
    ),
    Key(
        "top_p",
        NUMBER,
        "Draw from the likeliest tokens that have this probability together.",
        0,
        1,
        rlinf="algorithm.sampling_params.top_p",
        loop="llm.vllm_class.top_p",
    ),
    Key(
        "top_k",
        WHOLE,
        "Draw from so many of the likeliest tokens; 0: from all.",
        rlinf="algorithm.sampling_params.top_k",
        loop="llm.vllm_class.top_k",
    ),
    Key(
        "min_p",
        NUMBER,
        "Leave out tokens below this part of the likeliest's probability.",
        0,
        1,
        loop="llm.vllm_class.min_p",
    ),
    Key(
        "redundancy",
        WHOLE,
        "More samples of each prompt than are needed; the slowest are cancelled.",
        roll="train_env_manager.group_size_redundancy",
    ),
    Key("fraction", NUMBER, "Part of a step's samples that ends collecting.", 0, 1, loop="rl.rollouts_fraction"),
    Key(
        "group_fraction",
        NUMBER,
        "Part of every group that must be there for that.",
        0,
        1,
        loop="rl.rollouts_per_scenario_fraction",
    ),
    Key("drops_equal_groups", FLAG, "Replace groups whose samples all got the same (dynamic sampling)."),
    Key("attempts", WHOLE, "Times that an episode is tried.", 1),
    Key("concurrency", WHOLE, "Episodes at a time.", 1),
    Key("episode_limit_s", NUMBER, "Seconds after which an episode has failed."),
)

OPTIMIZER = (
    Key(
        "learning_rate",
        NUMBER,
        "Of AdamW.",
        rlinf="actor.optim.lr",
        roll="actor_train.training_args.learning_rate",
        loop="rl.optimization.optimizer.lr",
    ),
    Key(
        "critic_learning_rate",
        NUMBER,
        "Of the critic's AdamW; the policy's if left out.",
        rlinf="critic.optim.lr",
        roll="critic.training_args.learning_rate",
    ),
    Key(
        "weight_decay",
        NUMBER,
        "Of AdamW.",
        rlinf="actor.optim.weight_decay",
        roll="actor_train.training_args.weight_decay",
        loop="rl.optimization.optimizer.weight_decay",
    ),
    Key(
        "beta1",
        NUMBER,
        "Of AdamW.",
        0,
        1,
        rlinf="actor.optim.adam_beta1",
        roll="actor_train.training_args.adam_beta1",
    ),
    Key(
        "beta2",
        NUMBER,
        "Of AdamW.",
        0,
        1,
        rlinf="actor.optim.adam_beta2",
        roll="actor_train.training_args.adam_beta2",
    ),
    Key(
        "epsilon",
        NUMBER,
        "Of AdamW.",
        rlinf="actor.optim.adam_eps",
        roll="actor_train.training_args.adam_epsilon",
        loop="rl.optimization.optimizer.eps",
    ),
    Key(
        "max_grad_norm",
        NUMBER,
        "Longer gradients are shortened to this.",
        rlinf="actor.optim.clip_grad",
        roll="max_grad_norm",
        loop="rl.params.max_grad_norm",
    ),
    Key(
        "warmup_steps",
        WHOLE,
        "Steps of the optimizer until the learning rate is reached.",
        rlinf="actor.optim.lr_warmup_steps|actor.lr_sched.lr_warmup_iters",
        roll="actor_train.training_args.warmup_steps",
    ),
    Key("schedule", Schedule, "How the learning rate goes on from there."),
    Key(
        "max_skipped_steps",
        WHOLE,
        "Optimizer steps skipped in a row (loss or gradient not finite) after which the run stops; 0: never.",
    ),
)

LOSS = (
    Key("estimator", Estimator, "How much better a sample was than could be expected."),
    Key(
        "divides_by_std",
        FLAG,
        "Divide by the group's population standard deviation (at least 1e-7), with leave_one_out and group_mean.",
        loop="rl.params.adv_normalization",
    ),
    Key(
        "whitening",
        Whitening,
        "Normalise advantages over all generated tokens of a step; left out: tokens_biased with gae.",
    ),
    Key("advantage_clip", NUMBER, "Larger advantages are cut to this, after whitening.", roll="advantage_clip"),
    Key(
        "least_advantage",
        NUMBER,
        "Samples whose advantage is nearer to zero are left out.",
        loop="rl.params.abs_adv_threshold",
    ),
    Key(
        "positive_only",
        FLAG,
        "Learn only from samples that were better than expected.",
        loop="rl.params.pos_adv_only",
    ),
    Key("discount", NUMBER, "Of later rewards, with a critic.", 0, 1, rlinf="algorithm.gamma", roll="gamma"),
    Key(
        "gae_lambda",
        NUMBER,
        "Between one step of rewards (0) and all of them (1), with a critic.",
        0,
        1,
        rlinf="algorithm.gae_lambda",
        roll="lambd",
    ),
    Key("ratio", RatioLevel, "What the ratio of new to old probability is taken of, and clipped."),
    Key("clip_low", NUMBER, "The ratio's lower bound.", 0, 1),
    Key("clip_high", NUMBER, "The ratio's upper bound."),
    Key(
        "dual_clip",
        NUMBER,
        "For samples worse than expected, no loss above this multiple of the advantage.",
        rlinf="algorithm.clip_ratio_c",
    ),
    Key("mean", Mean, "How the losses of tokens become one number."),
    Key("behaviour", Behaviour, "Which log-probabilities the ratio is taken against; proximal where there is a lag."),
    Key("importance_cap", NUMBER, "On the weight of a token with behaviour: proximal."),
    Key("kl_coefficient", NUMBER, "Of the divergence from the reference, in the loss.", rlinf="algorithm.kl_beta"),
    Key("kl_estimator", KlEstimator, "How the divergence is estimated."),
    Key(
        "entropy_coefficient",
        NUMBER,
        "Of the entropy, which the loss rewards.",
        roll="entropy_loss_coef",
    ),
    Key(
        "value_clip",
        NUMBER,
        "How far a critic's value may move from what it was; 0 or null: without such a bound.",
        null=0.0,
        rlinf="algorithm.value_clip",
        roll="value_clip",
    ),
)

MODEL = (
    Key("model", TEXT, "The folder or name of a Hugging Face checkpoint; the placed model's if left out."),
    Key("weight_type", FLOAT_TYPES, "Of the weights that the optimizer changes."),
    Key("compute_type", FLOAT_TYPES, "Of activations, and of the weights while they are used."),
    Key("micro_batch_tokens", WHOLE, "Tokens that are packed together into one pass.", 1),
    Key(
        "checkpoints_activations",
        FLAG,
        "Compute activations twice rather than keep them; if left out, where models run on GPUs.",
    ),
    Key("adapter_rank", WHOLE, "Train a LoRA adapter of this rank, and nothing else.", 1),
    Key(
        "adapter_alpha",
        NUMBER,
        "The adapter's weight, divided by its rank; twice the rank if left out.",
        roll="actor_train.model_args.lora_alpha",
        loop="llm.lora_alpha",
    ),
    Key(
        "adapter_targets",
        WORDS,
        "Names of the layers that the adapter is for; all linear layers but the last if left out.",
        loop="llm.lora_target_modules",
    ),
    Key("engine", ENGINES, "What generates."),
    Key("engine_options", MAPPING, "Options of that, by their names there."),
)

KEPT = (
    Key(
        "evaluate_every",
        WHOLE,
        "Steps between evaluations; 0: at the end only.",
    ),
    Key("evaluation_tasks", WHOLE, "Prompts of an evaluation.", 1),
    Key(
        "evaluation_samples",
        WHOLE,
        "Samples of each.",
        1,
        roll="validation.generating_args.num_return_sequences",
    ),
    Key(
        "evaluation_temperature",
        NUMBER,
        "As temperature, in evaluations.",
        roll="validation.generating_args.temperature",
    ),
    Key(
        "checkpoint_every",
        WHOLE,
        "Steps between checkpoints; 0: at the end only.",
    ),
    Key("keep_checkpoints", WHOLE, "Newest checkpoints that are kept.", 1, loop="rl.max_ckpts"),
)

KEYS = (*RUN, *DRAWING, *OPTIMIZER, *LOSS, *MODEL, *KEPT)
