"""How a job trains: what is drawn, how it is learnt from, and when. Values only; see `training_keys` for what a config
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

DEFAULT_STEPS = 100


class AdvantageEstimator(StrEnum):
    """How much better a sample was than what could be expected."""

    LEAVE_ONE_OUT = "leave_one_out"  # its return less the mean of the others of its group (LOOP, RLOO)
    GROUP_MEAN = "group_mean"  # less the mean of its group
    GRPO = "grpo"  # that, divided by the group's standard deviation (of a sample: n - 1)
    REINFORCE = "reinforce++"  # its return, normalised over the whole batch
    REWARD = "reward"  # its return as it is
    GAE = "gae"  # from a critic's values


class ImportanceSamplingLevel(StrEnum):
    """What an importance ratio is computed over, and clipped."""

    TOKEN = "token"
    TURN = "turn"
    TRAJECTORY = "trajectory"
    NONE = "none"  # no ratio: plain policy gradient


class LossAggregation(StrEnum):
    """How the losses of tokens become one number."""

    SEQ_MEAN = "seq-mean-token-mean"  # mean per sequence, then over sequences
    TOKEN_MEAN = "token-mean"  # mean over all tokens of the minibatch
    SEQ_SUM = "seq-mean-token-sum"  # sum per sequence, then the mean over sequences
    SEQ_SUM_NORM = "seq-mean-token-sum-norm"  # sum, divided by sequences times max_new_tokens


class Whitening(StrEnum):
    """Advantages with mean 0 and standard deviation 1 over all generated tokens of a step."""

    NONE = "none"
    TOKENS = "tokens"  # divided by sqrt(variance + 1e-8), the variance of a sample (n - 1): ROLL's
    TOKENS_BIASED = "tokens_biased"  # divided by (standard deviation + 1e-5), that of n: RLinf's


class KlEstimator(StrEnum):
    """Estimates of the divergence from one token's log-probabilities."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class OldLogprobs(StrEnum):
    """The log-probs in the denominator of the importance ratio."""

    RECOMPUTE = "recompute"  # the learner's, before the first optimizer step on the samples
    ROLLOUT = "rollout"  # those that the engine reported
    DECOUPLED = "decoupled"  # the learner's, weighted by their ratio to the engine's (decoupled PPO, for stale samples)


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """From returns to advantages, and which samples are learnt from."""

    advantage_estimator: AdvantageEstimator = AdvantageEstimator.LEAVE_ONE_OUT
    normalize_by_std: bool = False  # leave_one_out and group_mean: by the group's population standard deviation
    whiten_advantages: Whitening = Whitening.NONE
    advantage_clip: float | None = None  # larger advantages are cut to this, after whitening
    gamma: float = 1.0  # of GAE
    gae_lambda: float = 1.0
    min_abs_advantage: float = 0.0  # samples whose advantage is nearer to zero are left out
    positive_advantages_only: bool = False


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What is minimised."""

    importance_sampling_level: ImportanceSamplingLevel = ImportanceSamplingLevel.TOKEN
    clip_range: float = 0.2  # ratios are clipped to [1 - clip_range, 1 + clip_range_high]
    clip_range_high: float = 0.2
    dual_clip: float | None = None  # where the advantage is negative, no loss above this multiple of it
    loss_aggregation: LossAggregation = LossAggregation.SEQ_MEAN
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE
    importance_weight_cap: float = 2.0  # on the weight of a token in OldLogprobs.DECOUPLED
    kl_coef: float = 0.0  # of the divergence from the reference, added to the loss
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coef: float = 0.0
    value_clip: float | None = 0.2  # how far a critic's value may move from what it was; 0 or None: any distance


class LrSchedulerType(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


USUAL_RATES = (1e-7, 1e-3)
HIGHEST_RATE = 0.1  # above this no model is known to learn


def unlike_usual(rate: float) -> str:
    """A learning rate beside those that are usual.

    >>> unlike_usual(2.0)
    'is 2, where 1e-07 to 0.001 is usual'
    """
    low, high = USUAL_RATES
    return f"is {rate:g}, where {low:g} to {high:g} is usual"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its learning rate."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    lr_scheduler_type: LrSchedulerType = LrSchedulerType.CONSTANT
    warmup_steps: int = 0
    total_steps: int = 0  # of the optimizer; what a schedule that ends needs to know


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A LoRA adapter, where only that is trained."""

    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_target_modules: tuple[str, ...] = ()  # empty: all linear layers but the last


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The model that is trained, and how its work is cut."""

    model: str
    weight_dtype: str = "float32"  # of the weights that the optimizer changes
    compute_dtype: str = "float32"  # of activations and of the weights while they are used
    micro_batch_tokens: int = 8192  # that are packed together into one pass
    logit_tokens: int = 1024  # whose logits exist at a time
    activation_checkpointing: bool | None = None  # None: where models run on GPUs
    adapter: AdapterSettings | None = None
    temperature: float = 1.0  # that samples were drawn with
    seed: int = 0
    offloads: tuple[str, ...] = ()  # of weight, grad, optimizer
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How completions are drawn."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How much is generated for a step, and when collecting ends."""

    prompts_per_step: int = 32  # prompts of a step
    num_generations: int = 8  # samples of a prompt
    extra_generations: int = 0  # more samples of each prompt than are needed; the slowest are cancelled
    rollout_fraction: float = 1.0  # of a step's samples that end collecting, once
    group_fraction: float = 1.0  # this part of every group is there
    dynamic_sampling: bool = False  # groups whose samples all got the same are replaced (dynamic sampling)
    episode_attempts: int = 3  # of an episode that fails
    max_concurrent_episodes: int = 256  # episodes at a time
    episode_timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """How the policy is tried out."""

    eval_every: int = 0  # steps; 0: at the end only
    eval_tasks: int = 64
    eval_samples: int = 1
    eval_temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When the state of the run is kept."""

    checkpoint_every: int = 20  # steps; 0: at the end only
    keep_checkpoints: int = 3


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """A whole training run."""

    learner: LearnerSettings
    task: Mapping[str, Any] = field(default_factory=dict)  # what makes tasks and runs episodes: `_target_` and its keys
    name: str = "run"
    max_steps: int | None = DEFAULT_STEPS  # None: by max_epochs alone
    max_epochs: int | None = None  # passes over the training tasks, whose number is known at launch
    ppo_epochs: int = 1  # times that a step's samples are gone through
    minibatches: int = 1  # optimizer steps that one time is cut into
    critic_learning_rate: float | None = None  # None: the policy's
    max_staleness: int = 0
    in_flight: str | None = None  # what updates do to requests: drop, drain, hold; None: what suits the mode
    max_skipped_steps: int = 3  # in a row, then the run stops; 0: never
    seed: int = 0
    advantage: AdvantageSettings = AdvantageSettings()
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    engine: str = "torch"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, Any] = field(default_factory=dict)  # by name: what scores answers beside the scenario

    @property
    def step_count(self) -> int:
        """The number of steps, of settings that `for_tasks` gave."""
        if self.max_steps is None:
            raise ValueError("the number of steps follows from that of the tasks: use for_tasks first")
        return self.max_steps

    def for_tasks(self, count: int) -> TrainSettings:
        """The settings with their number of steps, for so many training tasks.

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
