"""Settings of advantages, losses and the optimizer, and how a setting is declared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roost.config.data import Distillation
from roost.config.findings import Findings, Where, did_you_mean, shown
from roost.config.train_choices import (
    OF_WHOLE_SAMPLES,
    AdvantageEstimator,
    AdvantageLevel,
    DiscountLevel,
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    OldLogprobs,
    OptimizerType,
    PolicyLoss,
    RewardScope,
    Whitening,
    WsdDecayStyle,
    level_of_samples,
)

GROUP_ESTIMATORS = (
    AdvantageEstimator.LEAVE_ONE_OUT,
    AdvantageEstimator.GROUP_MEAN,
    AdvantageEstimator.GRPO,
    AdvantageEstimator.REINFORCE_BASELINE,
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the section `train`, declared by a field of the classes below.

    `rlinf`, `roll` and `loop` hold the key of that notation with the same meaning; of several, separated by `|`, the
    first that is given counts. Keys with another meaning are translated in `notations`.
    """

    description: str
    name: str = ""
    minimum: int = 0  # of an int; other numbers must not be negative
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # values it may have besides those of its type
    null: float | None = None  # the value that null stands for; None: the setting is left out
    rlinf: str = ""
    roll: str = ""
    loop: str = ""
    type: type = str  # int, float, bool, str, tuple, Mapping or an enum
    path: tuple[str, ...] = ()  # of attributes, from TrainSettings

    def native(self, notation: str) -> tuple[tuple[str, ...], ...]:
        """The keys of a notation, each as its path from the root of the config."""
        written: str = getattr(self, notation, "")
        return tuple(tuple(path.split(".")) for path in written.split("|")) if written else ()


def setting(default: T, description: str, **facts: Any) -> T:
    """A dataclass field that is a setting; `facts` are further fields of `Setting`."""
    metadata = {"setting": Setting(description, **facts)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)  # type: ignore[return-value]
    return field(default=default, metadata=metadata)


# Learner roles of ROLL's pipelines for RL, on-policy distillation, SFT, and distillation on given completions.
ROLL_LEARNERS = ("actor_train", "student_train", "sft_train", "student")


def roll_learner_keys(path: str) -> str:
    """A key of ROLL's learner, in each role that may be one, separated by `|`."""
    return "|".join(f"{role}.{path}" for role in ROLL_LEARNERS)


def roll_policy_keys(path: str) -> str:
    """A key of ROLL's learner, in each role that learns from its own samples, separated by `|`."""
    return "|".join(f"{role}.{path}" for role in ROLL_LEARNERS[:2])


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
        "Whether rewards belong to episodes or to single samples, where an episode has several samples. Default: "
        "sample with step_gamma and with gigpo.",
    )
    step_gamma: float | None = setting(
        None,
        "Give each sample of an episode its own return: the rewards of its turns and, discounted by this factor, those "
        "of later samples. Left out: the episode's reward; with gigpo 0.95.",
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
    state_scope: str = setting(
        "group",
        "Samples among which those that begin in the same state are compared, with gigpo: of a group, or of the step.",
        choices=("group", "batch"),
    )
    reward_baseline: RewardScope = setting(
        RewardScope.NONE, "Subtract the mean reward of these samples before the estimator. Default: group with gigpo."
    )
    reward_std: RewardScope = setting(
        RewardScope.NONE,
        "Divide rewards by the standard deviation (n - 1, plus 1e-6) of these samples. Default: group with gigpo.",
    )
    reward_clip: float | None = setting(
        None, "Clip normalised rewards, and the rewards of tokens, to this magnitude.", roll="reward_clip"
    )
    overlong_buffer_tokens: int = setting(
        0,
        "DAPO's overlong shaping: within so many tokens of max_new_tokens, the reward falls linearly by up to "
        "overlong_penalty. The longest turn of an episode counts. 0: no shaping.",
    )
    overlong_penalty: float = setting(1.0, "Penalty of a turn of max_new_tokens, with overlong_buffer_tokens.")
    kl_penalty_coef: float = setting(
        0.0, "Subtract this times the KL from the reference from the reward of each generated token."
    )
    kl_penalty_estimator: KlEstimator = setting(KlEstimator.K1, "KL estimator of kl_penalty_coef.")
    kl_penalty_target: float | None = setting(
        None,
        "KL that kl_penalty_coef is adapted to, up or down by up to 20 % times samples / kl_penalty_horizon, or 1.",
    )
    kl_penalty_horizon: int = setting(10000, "Samples over which kl_penalty_coef adapts.", minimum=1)
    whiten_rewards: bool = setting(
        False, "Normalise the rewards of tokens over all generated tokens of a step.", roll="whiten_rewards"
    )
    whiten_advantages: Whitening = setting(
        Whitening.NONE,
        "Normalise advantages over all generated tokens of a step; default: tokens_biased with gae, "
        "tokens with reinforce++_baseline.",
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
    drop_equal_groups: bool = setting(
        False,
        "Do not learn from groups whose samples all have the same reward; with dynamic_sampling others replace them.",
    )
    keep_generations: int = setting(
        0,
        "Learn from so many samples of each group: from those with a reward above 0 and from the others in their "
        "proportion, those with the lowest numbers in the group. 0: from all.",
    )
    keep_positive: int = setting(
        0, "With keep_generations, keep at least so many samples with a reward above 0, if there are."
    )
    keep_others: int = setting(0, "With keep_generations, keep at least so many samples with a reward of 0 or less.")
    keep_by_tool_errors: bool = setting(
        False, "With keep_generations, prefer samples with a reward above 0 whose tools returned fewer errors."
    )
    max_learn_tokens: int | None = setting(
        None, "Learn from the first tokens of longer samples alone, prompt and all.", minimum=1
    )
    min_abs_advantage: float = setting(
        0.0, "Drop samples whose absolute advantage is smaller.", loop="rl.params.abs_adv_threshold"
    )
    positive_advantages_only: bool = setting(
        False, "Learn only from samples with a positive advantage.", loop="rl.params.pos_adv_only"
    )
    max_new_tokens: int = 256  # token limit of a turn, for overlong shaping

    @property
    def compared_among(self) -> RewardScope:
        """Samples among which rewards are compared: those of a group or of the step; none with teacher.

        >>> [AdvantageSettings(each).compared_among.value for each in ("grpo", "gae", "teacher")]
        ['group', 'batch', 'none']
        """
        if self.advantage_estimator == AdvantageEstimator.TEACHER:
            return RewardScope.NONE
        is_by_group = self.advantage_estimator in GROUP_ESTIMATORS or self.reward_baseline is RewardScope.GROUP
        return RewardScope.GROUP if is_by_group else RewardScope.BATCH


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rule for tokens to leave out of the loss: those whose ratio or difference is outside the bounds."""

    level: ImportanceSamplingLevel
    low: float
    high: float
    of_difference: bool = False  # bounds of the learner's less the engine's probability, not of their ratio


REJECTION_LEVELS = tuple(level for level in ImportanceSamplingLevel if level is not ImportanceSamplingLevel.NONE)
RATIO, DIFFERENCE = "ratio", "difference"


def read_rejection(values: Mapping[str, Any], where: Where, findings: Findings) -> tuple[Rejection, ...]:
    """The rules of `rollout_rejection`: by level, bounds of the ratio, or of the difference of probabilities as well.

    >>> rules = {"token": [0.5, 2.0], "sequence": {"ratio": [None, 1.01]}}
    >>> [(rule.level.value, rule.low, rule.high) for rule in read_rejection(rules, Where(), Findings())]
    [('token', 0.5, 2.0), ('sequence', -inf, 1.01)]
    """
    found = []
    for level, written in values.items():
        if level not in REJECTION_LEVELS:
            hint, fix = did_you_mean(str(level), REJECTION_LEVELS), f"write one of {', '.join(REJECTION_LEVELS)}"
            if str(level).lower() in OF_WHOLE_SAMPLES:
                hint, fix = "", f"write {level_of_samples(where.key_path.rpartition('.')[2])}"
            findings.error("RST-T093", where.under(str(level)), "is not a level of the ratio", hint, fix)
            continue
        bounds = written if isinstance(written, Mapping) else {RATIO: written}
        for name, pair in bounds.items():
            place = where.under(str(level))
            limits = _bounds(pair)
            if name not in (RATIO, DIFFERENCE):
                hint = did_you_mean(name, (RATIO, DIFFERENCE), cutoff=0.5)
                fix = f"write {RATIO} or {DIFFERENCE}"
                findings.error("RST-T093", place.under(str(name)), "is not what a rule bounds", hint, fix)
                continue
            if limits is None:
                what = f"is {shown(written)}; it must be two bounds, the lower one first"
                why = "null is not a bound" if pair is None or (isinstance(pair, list) and None in pair) else ""
                fix = f"write {level}: [0.5, 2.0], or {level}: {{difference: [-0.2, 0.2]}}"
                findings.error("RST-T093", place, what, why, fix)
                continue
            found.append(Rejection(ImportanceSamplingLevel(level), *limits, of_difference=name == DIFFERENCE))
    return tuple(found)


def _bounds(pair: Any) -> tuple[float, float] | None:
    """A lower and an upper bound from two numbers or nulls; None for anything else."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    if not all(each is None or (isinstance(each, int | float) and not isinstance(each, bool)) for each in pair):
        return None
    low, high = -math.inf if pair[0] is None else float(pair[0]), math.inf if pair[1] is None else float(pair[1])
    return (low, high) if low < high else None


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The policy and value losses."""

    loss_type: PolicyLoss = setting(PolicyLoss.PPO, "Policy loss of a token.")
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
    cispo_mask: bool = setting(
        False, "With loss_type: cispo, leave out tokens that PPO's clip would leave without a gradient."
    )
    sapo_temperature_pos: float = setting(1.0, "With loss_type: sapo, steepness of the sigmoid where A is positive.")
    sapo_temperature_neg: float = setting(1.05, "With loss_type: sapo, steepness of the sigmoid where A is not.")
    topr_positive_weight: float = setting(
        1.0,
        "With loss_type: topr, weight of samples with a reward above 0.",
        roll=roll_policy_keys("topr_positive_weight"),
    )
    topr_negative_weight: float = setting(
        1.0, "With loss_type: topr, weight of the other samples.", roll=roll_policy_keys("topr_negative_weight")
    )
    kimi15_tau: float = setting(0.1, "With loss_type: kimi15, weight of half the squared log-ratio.")
    log_ratio_clip: float = setting(
        20.0, "Clamp log-ratios to at least minus this, before ratios are computed from them.", maximum=80
    )
    log_ratio_clip_high: float = setting(
        20.0, "Clamp log-ratios to at most this.", maximum=80, rlinf="algorithm.clip_log_ratio_max"
    )
    max_mean_ratio: float = setting(
        0.0, "Skip the optimizer step of a minibatch whose mean importance ratio is above this; 0: never."
    )
    early_stop_kl: float = setting(
        0.0,
        "Skip an optimizer step, and all further ones of the step, if the KL from the old policy is above this: the "
        "magnitude of the mean of old less new log-probs of a sample, summed over its tokens. 0: never.",
    )
    loss_aggregation: LossAggregation = setting(LossAggregation.SEQ_MEAN, "How token losses are reduced to one number.")
    old_logprobs: OldLogprobs = setting(
        OldLogprobs.RECOMPUTE,
        "Log-probs in the denominator of the importance ratio. Default: decoupled if max_staleness is above 0.",
    )
    max_logprob_mismatch: float = setting(
        0.0,
        "Stop the run if the log-probs of a token, of engine and learner with the same weights, differ by more. "
        "Without recomputed log-probs the first step alone is checked. 0: never.",
    )
    rollout_is: ImportanceSamplingLevel | None = setting(
        None,
        "Weigh the loss by the ratio of the learner's log-probs, before its first step, to the engine's, at this "
        "level. Default: none; with old_logprobs: decoupled importance_sampling_level, or token where that is a mean "
        "or none.",
    )
    importance_weight_cap: float | None = setting(2.0, "Cap on the weights of rollout_is; 0 or null: no cap.", null=0.0)
    rollout_is_batch_normalize: bool = setting(
        False,
        "Divide the weights of rollout_is by their mean over a minibatch. With old_logprobs: rollout, the learner's "
        "log-probs are computed for them.",
    )
    rollout_rejection: Mapping[str, Any] = setting(
        {},
        "Leave tokens out of the loss whose ratio of learner to engine is outside bounds: by level, [low, high], or "
        "{ratio: [low, high], difference: [low, high]}, the latter of probabilities.",
    )
    kl_coef: float = setting(0.0, "KL loss coefficient, against the reference.", rlinf="algorithm.kl_beta")
    kl_estimator: KlEstimator = setting(KlEstimator.K3, "KL estimator.")
    kl_importance_sampling: bool = setting(
        False,
        "Multiply the KL of the loss by the importance ratio; k1 and k3 then have the gradient of the reverse KL.",
    )
    policy_loss_coef: float = setting(1.0, "Weight of the policy loss, beside KL and entropy.", roll="rl_loss_coef")
    entropy_coef: float = setting(0.0, "Entropy bonus coefficient.", roll="entropy_loss_coef")
    entropy_coef_end: float | None = setting(
        None, "Entropy bonus coefficient at the end of the run, approached linearly. Default: entropy_coef."
    )
    value_clip: float | None = setting(
        0.2,
        "Clip range of the critic's values; 0 or null: no clip.",
        null=0.0,
        rlinf="algorithm.value_clip",
        roll="value_clip",
    )
    value_loss_aggregation: LossAggregation | None = setting(
        None, "How the critic's token losses are reduced to one number. Default: loss_aggregation."
    )
    value_huber_delta: float | None = setting(
        None, "Huber loss of the critic: errors beyond this count linearly.", rlinf="algorithm.huber_delta"
    )
    distillation: Distillation | None = None  # of supervised training with a teacher

    @property
    def learns_entropy(self) -> bool:
        """True if the loss has an entropy bonus at any time of the run."""
        return bool(self.entropy_coef or self.entropy_coef_end)

    def at(self, done: float) -> LossSettings:
        """The settings when this fraction of the run is done.

        >>> LossSettings(entropy_coef=0.02, entropy_coef_end=0.01).at(0.5).entropy_coef
        0.015
        """
        if self.entropy_coef_end is None:
            return self
        change = self.entropy_coef_end - self.entropy_coef
        return replace(self, entropy_coef=self.entropy_coef + change * min(1.0, done))

    @property
    def weight_level(self) -> ImportanceSamplingLevel:
        """Level of the weights that correct for the engine's log-probs; NONE: there are none.

        >>> LossSettings(old_logprobs=OldLogprobs.DECOUPLED).weight_level.value, LossSettings().weight_level.value
        ('token', 'none')
        >>> gspo = LossSettings(importance_sampling_level=ImportanceSamplingLevel.SEQUENCE)
        >>> replace(gspo, old_logprobs=OldLogprobs.DECOUPLED).weight_level.value
        'token'
        """
        if self.rollout_is is not None:
            return self.rollout_is
        if self.old_logprobs is not OldLogprobs.DECOUPLED:
            return ImportanceSamplingLevel.NONE
        level = self.importance_sampling_level
        # A mean over many tokens is near 1 however stale they are, so it would correct nothing.
        is_product = level in (ImportanceSamplingLevel.TURN, ImportanceSamplingLevel.TRAJECTORY)
        return level if is_product else ImportanceSamplingLevel.TOKEN

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rules of `rollout_rejection`."""
        return read_rejection(self.rollout_rejection, Where(), Findings())

    @property
    def corrects_rollout(self) -> bool:
        """True if the loss corrects for the difference between engine and learner log-probs."""
        return self.weight_level is not ImportanceSamplingLevel.NONE or bool(self.rollout_rejection)

    @property
    def scores_policy(self) -> bool:
        """True if the learner's own log-probs are computed before the first optimizer step.

        >>> rollout = LossSettings(old_logprobs=OldLogprobs.ROLLOUT, rollout_is=ImportanceSamplingLevel.TOKEN)
        >>> rollout.scores_policy, replace(rollout, rollout_is_batch_normalize=True).scores_policy
        (False, True)
        """
        needs_mean = self.rollout_is_batch_normalize and self.weight_level is not ImportanceSamplingLevel.NONE
        return self.old_logprobs is not OldLogprobs.ROLLOUT or needs_mean

    @property
    def uses_engine_logprobs(self) -> bool:
        """True if the loss needs the engine's log-probs of every token."""
        return self.old_logprobs is not OldLogprobs.RECOMPUTE or self.corrects_rollout


USUAL_RATES = (1e-7, 1e-3)
HIGHEST_RATE = 0.1  # no model is known to learn at a higher rate


def unlike_usual(rate: float) -> str:
    """A learning rate and the usual range, for a message.

    >>> unlike_usual(2.0)
    'is 2, where 1e-07 to 0.001 is usual'
    """
    low, high = USUAL_RATES
    return f"is {rate:g}, where {low:g} to {high:g} is usual"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The optimizer and its learning rate."""

    learning_rate: float = setting(
        1e-6,
        "Learning rate. Muon's updates are scaled to the size of AdamW's, so that both take the same.",
        rlinf="actor.optim.lr",
        roll=roll_learner_keys("training_args.learning_rate"),
        loop="rl.optimization.optimizer.lr",
    )
    weight_decay: float = setting(
        0.01,
        "Weight decay of matrices; norms and biases have none.",
        rlinf="actor.optim.weight_decay",
        roll=roll_learner_keys("training_args.weight_decay"),
        loop="rl.optimization.optimizer.weight_decay",
    )
    adam_beta1: float = setting(
        0.9,
        "AdamW beta1.",
        maximum=1,
        rlinf="actor.optim.adam_beta1",
        roll=roll_learner_keys("training_args.adam_beta1"),
    )
    adam_beta2: float = setting(
        0.999,
        "AdamW beta2.",
        maximum=1,
        rlinf="actor.optim.adam_beta2",
        roll=roll_learner_keys("training_args.adam_beta2"),
    )
    adam_epsilon: float = setting(
        1e-8,
        "AdamW epsilon.",
        rlinf="actor.optim.adam_eps",
        roll=roll_learner_keys("training_args.adam_epsilon"),
        loop="rl.optimization.optimizer.eps",
    )
    optimizer: OptimizerType = setting(OptimizerType.ADAMW, "Optimizer.")
    muon_momentum: float = setting(0.95, "Momentum of Muon, with Nesterov's look-ahead.", maximum=1)
    optimizer_cpu_offload: bool = setting(
        False,
        "Keep the optimizer's state in host memory; an optimizer step moves it through the device in parts.",
        rlinf="actor.optim.optimizer_cpu_offload",
    )
    max_grad_norm: float = setting(
        1.0, "Gradient-norm clip.", rlinf="actor.optim.clip_grad", roll="max_grad_norm", loop="rl.params.max_grad_norm"
    )
    skip_outlier_gradients: bool = setting(
        False,
        "Skip optimizer steps whose gradient norm is above max_grad_norm, or more than 5 standard deviations above the "
        "mean of earlier ones.",
        loop="rl.params.skip_outlier_grads",
    )
    lr_scheduler_type: LrSchedulerType = setting(LrSchedulerType.CONSTANT, "Learning-rate schedule after the warm-up.")
    warmup_steps: int = setting(
        0, "Optimizer steps of linear warm-up.", roll=roll_learner_keys("training_args.warmup_steps")
    )
    warmup_ratio: float = setting(
        0.0,
        "Linear warm-up as a fraction of the schedule's steps, where warmup_steps is 0.",
        maximum=1,
        roll=roll_learner_keys("training_args.warmup_ratio"),
    )
    decay_steps: int | None = setting(
        None,
        "Optimizer steps, with the warm-up, after which a schedule is at min_learning_rate. Default: those of the run.",
        minimum=1,
    )
    min_learning_rate: float = setting(0.0, "Learning rate that linear, cosine and wsd schedules end at.")
    wsd_decay_steps: int | None = setting(
        None, "Optimizer steps of the decay that ends a wsd schedule. Default: a tenth of the schedule.", minimum=1
    )
    wsd_decay_style: WsdDecayStyle = setting(WsdDecayStyle.LINEAR, "Form of that decay.")
    total_steps: int = 0  # optimizer steps of the run

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps after which the learning rate no longer changes."""
        return self.decay_steps or self.total_steps

    @property
    def steps_of_wsd_decay(self) -> int:
        """Optimizer steps of the decay that ends a WSD schedule.

        >>> OptimizerSettings(total_steps=30).steps_of_wsd_decay
        3
        """
        return self.wsd_decay_steps or math.ceil(self.schedule_steps / 10)

    @property
    def steps_of_warmup(self) -> int:
        """Optimizer steps of warm-up, by number or by fraction.

        >>> OptimizerSettings(warmup_ratio=0.1, total_steps=30).steps_of_warmup
        3
        """
        return self.warmup_steps or math.ceil(round(self.warmup_ratio * self.schedule_steps, 6))
