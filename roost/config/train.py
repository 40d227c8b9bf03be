"""The section `train`: every setting with its type, default, range, description and its key in each notation.

The reader, the JSON Schema, the settings page and `roost explain` all follow these declarations.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import EnumType, StrEnum
from types import NoneType
from typing import Any, TypeVar

from roost.config.findings import Findings, Where
from roost.config.teacher import Teacher, read_teachers
from roost.config.train_choices import AdvantageEstimator as AdvantageEstimator
from roost.config.train_choices import AdvantageLevel as AdvantageLevel
from roost.config.train_choices import DiscountLevel as DiscountLevel
from roost.config.train_choices import ImportanceSamplingLevel as ImportanceSamplingLevel
from roost.config.train_choices import KlEstimator as KlEstimator
from roost.config.train_choices import LossAggregation as LossAggregation
from roost.config.train_choices import Objective as Objective
from roost.config.train_choices import OldLogprobs as OldLogprobs
from roost.config.train_choices import RewardScope as RewardScope
from roost.config.train_choices import Whitening as Whitening

IN_FLIGHT = ("drop", "drain", "hold")
FLOAT_TYPES = ("float32", "bfloat16", "float16")
ENGINES = ("torch", "vllm", "sglang")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the section `train`, declared by a field of the classes below.

    `rlinf`, `roll` and `loop` hold the key of that notation with the same meaning; of several, separated by `|`, the
    first that is given counts. Keys with another meaning are translated in `notations`.
    """

    description: str
    name: str = ""
    minimum: int = 0  # of an int; no number may be negative
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    null: float | None = None  # the value that null stands for; None: the setting is left out
    rlinf: str = ""
    roll: str = ""
    loop: str = ""
    type: type = str  # int, float, bool, str, tuple, Mapping or an enum
    path: tuple[str, ...] = ()  # of attributes, from TrainSettings

    def native(self, notation: str) -> tuple[tuple[str, ...], ...]:
        """The keys of a notation, each as its path from the root of the config."""
        written: str = getattr(self, notation)
        return tuple(tuple(path.split(".")) for path in written.split("|")) if written else ()


def setting(default: T, description: str, **facts: Any) -> T:
    """A dataclass field that is a setting; `facts` are further fields of `Setting`."""
    metadata = {"setting": Setting(description, **facts)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)  # type: ignore[return-value]
    return field(default=default, metadata=metadata)


ROLL_LEARNERS = ("actor_train", "student_train", "sft_train")  # of its pipelines for RL, distillation and SFT


def _of_learner(path: str) -> str:
    """A key of ROLL's learner, whichever role that is."""
    return "|".join(f"{role}.{path}" for role in ROLL_LEARNERS)


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Advantages from rewards, and the samples that are used."""

    advantage_estimator: AdvantageEstimator = setting(AdvantageEstimator.LEAVE_ONE_OUT, "Advantage estimator.")
    normalize_by_std: bool = setting(
        False,
        "Divide by the group's population standard deviation (at least 1e-7), with leave_one_out and group_mean.",
        loop="rl.params.adv_normalization",
    )
    advantage_level: AdvantageLevel = setting(
        AdvantageLevel.EPISODE,
        "Whether rewards belong to episodes or to single samples, where an episode has several samples.",
    )
    step_gamma: float | None = setting(
        None,
        "Give each sample of an episode its own return: the rewards of its turns and, discounted by this factor, those "
        "of later samples. Left out: the episode's reward.",
        maximum=1,
    )
    episode_reward_weight: float = setting(
        1.0, "Weight of the episode's return, with gigpo.", roll="episode_reward_weight"
    )
    step_reward_weight: float = setting(1.0, "Weight of the step's return, with gigpo.", roll="step_reward_weight")
    state_normalization: str = setting(
        "mean_std",
        "Normalisation of step returns among samples that begin in the same state, with gigpo.",
        choices=("none", "mean", "mean_std"),
    )
    reward_baseline: RewardScope = setting(
        RewardScope.NONE, "Subtract the mean reward of these samples before the estimator."
    )
    reward_std: RewardScope = setting(
        RewardScope.NONE, "Divide rewards by the standard deviation (n - 1, plus 1e-6) of these samples."
    )
    reward_clip: float | None = setting(
        None, "Clip normalised rewards, and the rewards of tokens, to this magnitude.", roll="reward_clip"
    )
    kl_penalty_coef: float = setting(
        0.0, "Subtract this times the KL from the reference from the reward of each generated token."
    )
    kl_penalty_estimator: KlEstimator = setting(KlEstimator.K1, "KL estimator of kl_penalty_coef.")
    kl_penalty_target: float | None = setting(
        None, "KL that kl_penalty_coef is adapted to, up or down by up to 20 % times samples / kl_penalty_horizon."
    )
    kl_penalty_horizon: int = setting(10000, "Samples over which kl_penalty_coef adapts.", minimum=1)
    whiten_rewards: bool = setting(
        False, "Normalise the rewards of tokens over all generated tokens of a step.", roll="whiten_rewards"
    )
    whiten_advantages: Whitening = setting(
        Whitening.NONE, "Normalise advantages over all generated tokens of a step; left out: tokens_biased with gae."
    )
    whiten_by_tag: bool = setting(False, "Whiten the samples of each tag alone.")
    advantage_clip: float | None = setting(
        None, "Clip advantages to this magnitude, after whitening.", roll="advantage_clip"
    )
    advantage_offset: float = setting(
        0.0, "Add this to every advantage, after all else.", loop="rl.params.rloo_kl_lambda"
    )
    gamma: float = setting(1.0, "Discount factor.", maximum=1, roll="gamma")
    discount_level: DiscountLevel = setting(
        DiscountLevel.TOKEN, "Whether gamma discounts by token or by turn; a critic's values are by token."
    )
    gae_lambda: float = setting(1.0, "GAE lambda, with a critic.", maximum=1, roll="lambd")
    mask_truncated: bool = setting(False, "Do not learn from samples that a token limit cut off.")
    min_group_reward: float | None = setting(
        None, "Do not learn from groups whose mean reward is not above this; groups of one are kept."
    )
    max_group_reward: float | None = setting(
        None, "Do not learn from groups whose mean reward is not below this; groups of one are kept."
    )
    max_error_tokens: int | None = setting(
        None,
        "Learn only from samples with reward 1, and from those with reward 0 and fewer generated tokens than this.",
        minimum=1,
    )
    min_abs_advantage: float = setting(
        0.0, "Drop samples whose absolute advantage is smaller.", loop="rl.params.abs_adv_threshold"
    )
    positive_advantages_only: bool = setting(
        False, "Learn only from samples with a positive advantage.", loop="rl.params.pos_adv_only"
    )


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The policy and value losses."""

    importance_sampling_level: ImportanceSamplingLevel = setting(
        ImportanceSamplingLevel.TOKEN, "What the importance ratio is computed over, and clipped."
    )
    clip_range: float = setting(0.2, "Clip range (epsilon): ratios are at least 1 - clip_range.", maximum=1)
    clip_range_high: float = setting(
        0.2, "Upper clip range: ratios are at most 1 + clip_range_high. Default: clip_range."
    )
    dual_clip: float | None = setting(
        None,
        "Dual clip: for negative advantages, bound the loss at this multiple of the advantage.",
        rlinf="algorithm.clip_ratio_c",
    )
    loss_aggregation: LossAggregation = setting(LossAggregation.SEQ_MEAN, "How token losses are reduced to one number.")
    old_logprobs: OldLogprobs = setting(
        OldLogprobs.RECOMPUTE,
        "Log-probs in the denominator of the importance ratio. Default: decoupled if max_staleness is above 0.",
    )
    importance_weight_cap: float = setting(
        2.0, "Cap on the importance weight of a token, with old_logprobs: decoupled."
    )
    kl_coef: float = setting(0.0, "KL loss coefficient, against the reference.", rlinf="algorithm.kl_beta")
    kl_estimator: KlEstimator = setting(KlEstimator.K3, "KL estimator.")
    policy_loss_coef: float = setting(1.0, "Weight of the policy loss, beside KL and entropy.", roll="rl_loss_coef")
    entropy_coef: float = setting(0.0, "Entropy bonus coefficient.", roll="entropy_loss_coef")
    value_clip: float | None = setting(
        0.2,
        "Clip range of the critic's values; 0 or null: no clip.",
        null=0.0,
        rlinf="algorithm.value_clip",
        roll="value_clip",
    )


class LrSchedulerType(StrEnum):
    """Learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


USUAL_RATES = (1e-7, 1e-3)
HIGHEST_RATE = 0.1  # no model is known to learn above this


def unlike_usual(rate: float) -> str:
    """A learning rate next to the usual range.

    >>> unlike_usual(2.0)
    'is 2, where 1e-07 to 0.001 is usual'
    """
    low, high = USUAL_RATES
    return f"is {rate:g}, where {low:g} to {high:g} is usual"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its learning rate."""

    learning_rate: float = setting(
        1e-6,
        "Learning rate (AdamW).",
        rlinf="actor.optim.lr",
        roll=_of_learner("training_args.learning_rate"),
        loop="rl.optimization.optimizer.lr",
    )
    weight_decay: float = setting(
        0.01,
        "Weight decay (AdamW).",
        rlinf="actor.optim.weight_decay",
        roll=_of_learner("training_args.weight_decay"),
        loop="rl.optimization.optimizer.weight_decay",
    )
    adam_beta1: float = setting(
        0.9,
        "AdamW beta1.",
        maximum=1,
        rlinf="actor.optim.adam_beta1",
        roll=_of_learner("training_args.adam_beta1"),
    )
    adam_beta2: float = setting(
        0.999,
        "AdamW beta2.",
        maximum=1,
        rlinf="actor.optim.adam_beta2",
        roll=_of_learner("training_args.adam_beta2"),
    )
    adam_epsilon: float = setting(
        1e-8,
        "AdamW epsilon.",
        rlinf="actor.optim.adam_eps",
        roll=_of_learner("training_args.adam_epsilon"),
        loop="rl.optimization.optimizer.eps",
    )
    max_grad_norm: float = setting(
        1.0, "Gradient-norm clip.", rlinf="actor.optim.clip_grad", roll="max_grad_norm", loop="rl.params.max_grad_norm"
    )
    lr_scheduler_type: LrSchedulerType = setting(LrSchedulerType.CONSTANT, "Learning-rate schedule after the warm-up.")
    warmup_steps: int = setting(
        0,
        "Optimizer steps of linear warm-up.",
        rlinf="actor.optim.lr_warmup_steps|actor.lr_sched.lr_warmup_iters",
        roll=_of_learner("training_args.warmup_steps"),
    )
    total_steps: int = 0  # optimizer steps of the run; linear and cosine schedules end there


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A LoRA adapter that is trained instead of all weights."""

    lora_rank: int = setting(16, "Train a LoRA adapter of this rank instead of all weights.", minimum=1)
    lora_alpha: float = setting(
        32.0, "LoRA alpha. Default: twice the rank.", roll=_of_learner("model_args.lora_alpha"), loop="llm.lora_alpha"
    )
    lora_target_modules: tuple[str, ...] = setting(
        (), "Modules that get an adapter. Default: all linear layers but the last.", loop="llm.lora_target_modules"
    )


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The trained model and its passes."""

    model: str = field(
        metadata={"setting": Setting("Folder or hub name of a Hugging Face model. Default: the placed model's.")}
    )
    weight_dtype: str = setting("float32", "Data type of the master weights.", choices=FLOAT_TYPES)
    compute_dtype: str = setting("float32", "Data type of the forward and backward pass.", choices=FLOAT_TYPES)
    micro_batch_tokens: int = setting(8192, "Tokens packed into one micro-batch.", minimum=1)
    logit_tokens: int = 1024  # tokens whose logits are in memory at the same time
    activation_checkpointing: bool | None = setting(
        None, "Recompute activations in the backward pass. Default: on GPUs."
    )
    adapter: AdapterSettings | None = None
    temperature: float = 1.0  # that samples were generated with
    seed: int = 0
    offloads: tuple[str, ...] = ()  # any of weight, grad, optimizer
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling of completions."""

    max_new_tokens: int = setting(
        256,
        "Maximum tokens per completion.",
        minimum=1,
        rlinf="algorithm.sampling_params.max_new_tokens",
        loop="llm.vllm_class.max_new_tokens",
    )
    temperature: float = setting(
        1.0, "Sampling temperature.", rlinf="algorithm.sampling_params.temperature", loop="llm.temperature"
    )
    top_p: float = setting(
        1.0,
        "Nucleus sampling: smallest set of tokens with this total probability.",
        maximum=1,
        rlinf="algorithm.sampling_params.top_p",
        loop="llm.vllm_class.top_p",
    )
    top_k: int = setting(
        0,
        "Sample from the k most likely tokens; 0: from all.",
        rlinf="algorithm.sampling_params.top_k",
        loop="llm.vllm_class.top_k",
    )
    min_p: float = setting(
        0.0,
        "Drop tokens below this fraction of the most likely token's probability.",
        maximum=1,
        loop="llm.vllm_class.min_p",
    )


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Samples of a step, and when its rollout ends."""

    prompts_per_step: int = setting(
        32, "Prompts per step.", minimum=1, rlinf="data.rollout_batch_size", loop="rl.params.scenarios_per_iteration"
    )
    num_generations: int = setting(
        8,
        "Samples per prompt (group size).",
        minimum=1,
        rlinf="algorithm.group_size",
        loop="rl.params.rollouts_per_scenario",
    )
    extra_generations: int = setting(
        0,
        "Samples generated per prompt beyond num_generations; the slowest are cancelled.",
        roll="train_env_manager.group_size_redundancy",
    )
    rollout_fraction: float = setting(
        1.0, "Fraction of a step's samples at which the rollout ends.", maximum=1, loop="rl.rollouts_fraction"
    )
    group_fraction: float = setting(
        1.0,
        "Fraction of every group that must be finished by then.",
        maximum=1,
        loop="rl.rollouts_per_scenario_fraction",
    )
    dynamic_sampling: bool = setting(False, "Replace groups whose samples all have the same reward.")
    episode_attempts: int = setting(3, "Attempts per episode before it counts as failed.", minimum=1)
    max_concurrent_episodes: int = setting(256, "Episodes that run at the same time.", minimum=1)
    episode_timeout_s: float = setting(3600.0, "Time limit of an episode, in seconds.")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Evaluations of the policy."""

    eval_every: int = setting(0, "Steps between evaluations; 0: at the end only.")
    eval_tasks: int = setting(64, "Prompts per evaluation; 0: all.")
    eval_samples: int = setting(
        1, "Samples per prompt in evaluations.", minimum=1, roll="validation.generating_args.num_return_sequences"
    )
    eval_temperature: float = setting(
        0.0, "Sampling temperature in evaluations.", roll="validation.generating_args.temperature"
    )
    eval_top_p: float | None = setting(
        None, "top_p in evaluations. Default: top_p.", maximum=1, roll="validation.generating_args.top_p"
    )
    eval_top_k: int | None = setting(None, "top_k in evaluations. Default: top_k.")


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Checkpoints of the run."""

    checkpoint_every: int = setting(20, "Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: int = setting(3, "Checkpoints to keep.", minimum=1, loop="rl.max_ckpts")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """A whole training run."""

    learner: LearnerSettings
    name: str = setting(
        "run",
        "Name of the run's folder in runs/. Default: the config's file name.",
        rlinf="runner.logger.experiment_name",
        roll="exp_name",
        loop="experiment_name",
    )
    objective: Objective = setting(
        Objective.RL, "rl: from rewards of generated samples; sft: on given completions, without engines."
    )
    completion: str = setting(
        "",
        "With objective: sft, the column with the text to learn. Default: the assistant messages, else the answer.",
        roll="response_key",
    )
    max_sequence_tokens: int | None = setting(
        None, "With objective: sft, leave out conversations of more tokens.", minimum=1
    )
    task: Mapping[str, Any] = setting(
        {}, "The scenario: `_target_`, a class that makes tasks and runs episodes, and its arguments."
    )
    data: Mapping[str, Any] = setting(
        {},
        "Prompts from data files: `path`, `prompt`, `answer` and others; without a task each is answered in one turn.",
    )
    teacher: Mapping[str, Any] = setting(
        {},
        "A placed model that the policy is distilled from: `model`, `coef`, `estimator`, `tags`; several by name.",
    )
    rewards: Mapping[str, Any] = setting(
        {}, "Reward functions beside the task's own: by name, `_target_`, `tags`, `weight` and arguments."
    )
    max_steps: int | None = setting(
        100, "Training steps.", minimum=1, roll="max_steps", loop="rl.params.total_iterations"
    )
    max_epochs: int | None = setting(
        None,
        "Passes over the training tasks; the run ends after these or after `max_steps`, whichever is less.",
        minimum=1,
    )
    seed: int = setting(0, "Random seed.", rlinf="actor.seed", roll="seed", loop="rl.seed")
    ppo_epochs: int = setting(
        1,
        "Optimization epochs per step.",
        minimum=1,
        rlinf="algorithm.update_epoch",
        roll="ppo_epochs",
        loop="rl.params.epochs_per_iteration",
    )
    minibatches: int = setting(
        1,
        "Samples per optimizer step. Default: all of a step.",
        name="minibatch_size",
        minimum=1,
        loop="rl.params.minibatch_size",
    )
    max_staleness: int = setting(0, "Policy versions that a sample may be behind the learner.", maximum=1000)
    in_flight: str | None = setting(
        None, "What a weight update does to requests in flight. Default: by mode.", choices=IN_FLIGHT
    )
    max_skipped_steps: int = setting(
        3, "Optimizer steps skipped in a row (loss or gradient not finite) after which the run stops; 0: never."
    )
    critic_learning_rate: float | None = setting(
        None,
        "Learning rate of the critic. Default: the policy's.",
        rlinf="critic.optim.lr",
        roll="critic.training_args.learning_rate",
    )
    engine: str = setting("torch", "Inference engine.", choices=ENGINES)
    engine_options: Mapping[str, Any] = setting({}, "Options of the engine.")
    advantage: AdvantageSettings = AdvantageSettings()
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def uses_reference(self) -> bool:
        """Whether KL from the reference is in the loss or in the rewards."""
        return self.learner.loss.kl_coef != 0 or self.advantage.kl_penalty_coef != 0

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """Models that the policy is distilled from."""
        return read_teachers(self.teacher, Where(), Findings())

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.num_generations

    @property
    def minibatch_size(self) -> int:
        return self.samples_per_step // self.minibatches

    @property
    def step_count(self) -> int:
        """The number of steps; call `for_tasks` first where epochs decide it."""
        if self.max_steps is None:
            raise ValueError("the number of steps follows from that of the tasks: use for_tasks first")
        return self.max_steps

    def for_tasks(self, count: int) -> TrainSettings:
        """The settings with their number of steps, for this number of training tasks.

        A pass over the data has as many steps as there are whole batches; the run ends after `max_epochs` passes, or
        after `max_steps`, whichever is less.

        >>> rollout = RolloutSettings(prompts_per_step=4)
        >>> settings = TrainSettings(LearnerSettings("m"), max_steps=None, max_epochs=3, rollout=rollout)
        >>> settings.for_tasks(10).step_count
        6
        """
        if self.max_epochs is None:
            return self
        bound = count // self.rollout.prompts_per_step * self.max_epochs
        steps = bound if self.max_steps is None else min(bound, self.max_steps)
        optimizer = replace(self.learner.optimizer, total_steps=steps * self.ppo_epochs * self.minibatches)
        return replace(self, max_steps=steps, max_epochs=None, learner=replace(self.learner, optimizer=optimizer))


# Settings without a meaning in supervised training: there are no engines, rewards and advantages.
NOT_IN_SFT = frozenset(
    (
        *("rewards", "teacher", "ppo_epochs", "max_staleness", "in_flight", "critic_learning_rate", "engine"),
        *("engine_options", "eval_samples", "eval_temperature", "eval_top_p", "eval_top_k", "num_generations"),
        *("extra_generations", "rollout_fraction", "group_fraction", "dynamic_sampling", "episode_attempts"),
        *("max_concurrent_episodes", "episode_timeout_s"),
    )
)


# Where each class is in TrainSettings, in the order of the settings page.
PARTS: Mapping[str, type] = {
    "": TrainSettings,
    "rollout": RolloutSettings,
    "sampling": SamplingSettings,
    "learner.optimizer": OptimizerSettings,
    "advantage": AdvantageSettings,
    "learner.loss": LossSettings,
    "learner": LearnerSettings,
    "learner.adapter": AdapterSettings,
    "evaluation": EvaluationSettings,
    "checkpoint": CheckpointSettings,
}


def _declared(part: str) -> tuple[Setting, ...]:
    """The settings that the class of a part declares."""
    hints = typing.get_type_hints(PARTS[part])
    found = []
    for each in fields(PARTS[part]):
        declared: Setting | None = each.metadata.get("setting")
        if declared is None:
            continue
        kind = hints[each.name]
        if NoneType in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
        kind = typing.get_origin(kind) or kind
        name = declared.name or each.name
        choices = tuple(kind.__members__.values()) if isinstance(kind, EnumType) else declared.choices
        path = (*(part.split(".") if part else ()), name)
        found.append(replace(declared, name=name, type=kind, choices=choices, path=path))
    return tuple(found)


SETTINGS_OF: Mapping[str, tuple[Setting, ...]] = {part: _declared(part) for part in PARTS}
SETTINGS = {each.name: each for part in SETTINGS_OF.values() for each in part}


def value_of(settings: TrainSettings, name: str) -> Any:
    """The value of a setting; None for those of an adapter that is not trained."""
    found: Any = settings
    for attribute in SETTINGS[name].path:
        found = None if found is None else getattr(found, attribute)
    return found


def default_of(name: str) -> Any:
    """Roost's default of a setting; None where it has none, or where it depends on other settings."""
    value = value_of(TrainSettings(LearnerSettings(""), name=""), name)
    return None if name == "minibatch_size" or value in ("", {}) else value
