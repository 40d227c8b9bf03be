"""Settings of the loss, of advantages and of the optimizer that have no effect because of another setting."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from roost.config.findings import Findings
from roost.config.train import (
    AdvantageEstimator,
    ImportanceSamplingLevel,
    LossAggregation,
    LossSettings,
    LrSchedulerType,
    OldLogprobs,
    OptimizerType,
    PolicyLoss,
    TrainSettings,
    Whitening,
)
from roost.placement.rules.placing import At

CLIPS = ("clip_range", "clip_range_high", "dual_clip")
LOG_CLIPS = ("log_ratio_clip", "log_ratio_clip_high")
OF_GIGPO = ("episode_reward_weight", "step_reward_weight", "state_normalization", "state_scope")
REMOVE = "remove it"


@dataclass(frozen=True, slots=True)
class Idle:
    """Settings that have no effect where `holds`."""

    names: tuple[str, ...]
    holds: Callable[[TrainSettings], bool]
    why: str
    fix: str = REMOVE


def _is_loss(kind: PolicyLoss) -> Callable[[TrainSettings], bool]:
    return lambda settings: settings.learner.loss.loss_type is kind


def _has_no_ratio(settings: TrainSettings) -> bool:
    loss = settings.learner.loss
    return loss.loss_type is PolicyLoss.PPO and loss.importance_sampling_level is ImportanceSamplingLevel.NONE


def _has_no_weights(settings: TrainSettings) -> bool:
    return settings.learner.loss.weight_level is ImportanceSamplingLevel.NONE


def _is_level_unused(settings: TrainSettings) -> bool:
    """Return True for kimi15, unless weights, the mean over turns, max_mean_ratio or the KL use the level."""
    loss = settings.learner.loss
    is_of_weights = loss.old_logprobs is OldLogprobs.DECOUPLED and loss.rollout_is is None
    is_of_turns = loss.importance_sampling_level is ImportanceSamplingLevel.TURN
    is_of_mean = is_of_turns and loss.loss_aggregation is LossAggregation.SEQ_MEAN
    return loss.loss_type is PolicyLoss.KIMI15 and not (is_of_weights or is_of_mean or _uses_ratio_beside_loss(loss))


def _uses_ratio_beside_loss(loss: LossSettings) -> bool:
    """Return True if the ratio limits steps or weighs the KL, whatever the loss of a token."""
    return loss.max_mean_ratio > 0 or (loss.kl_coef > 0 and loss.kl_importance_sampling)


def _clamps_no_ratio(settings: TrainSettings) -> bool:
    loss = settings.learner.loss
    return loss.loss_type is PolicyLoss.KIMI15 and not _uses_ratio_beside_loss(loss)


def _clamps_no_ratio_of_none(settings: TrainSettings) -> bool:
    return _has_no_ratio(settings) and not _uses_ratio_beside_loss(settings.learner.loss)


def _is_only_recomputed(settings: TrainSettings) -> bool:
    loss = settings.learner.loss
    has_no_weights = loss.old_logprobs is OldLogprobs.DECOUPLED and loss.rollout_is is ImportanceSamplingLevel.NONE
    return has_no_weights and not settings.max_staleness  # with stale samples it has a finding of its own


def _never_stops_early(settings: TrainSettings) -> bool:
    """Return True if the only optimizer step of a step starts from the policy whose log-probs are the old ones."""
    loss = settings.learner.loss
    return loss.early_stop_kl > 0 and settings.optimizer_steps == 1 and loss.old_logprobs is not OldLogprobs.ROLLOUT


def _is_not(estimator: AdvantageEstimator) -> Callable[[TrainSettings], bool]:
    return lambda settings: settings.advantage.advantage_estimator is not estimator


IDLE = (
    Idle(CLIPS, _is_loss(PolicyLoss.SAPO), "loss_type is sapo, which has a sigmoid instead of clips"),
    Idle(CLIPS, _is_loss(PolicyLoss.TOPR), "loss_type is topr, which clips ratios to 0 and 1"),
    Idle(CLIPS, _is_loss(PolicyLoss.KIMI15), "loss_type is kimi15, which has no importance ratio"),
    Idle(("dual_clip",), _is_loss(PolicyLoss.CISPO), "loss_type is cispo, which bounds every ratio by the clip range"),
    Idle(CLIPS, _has_no_ratio, "importance_sampling_level is none: the loss is -A log p"),
    Idle(LOG_CLIPS, _clamps_no_ratio, "loss_type is kimi15, which has no importance ratio"),
    Idle(LOG_CLIPS, _clamps_no_ratio_of_none, "importance_sampling_level is none: the loss is -A log p"),
    Idle(("importance_sampling_level",), _is_level_unused, "loss_type is kimi15, which has no importance ratio"),
    Idle(
        ("importance_weight_cap",),
        _has_no_weights,
        "there are no weights to cap",
        "write rollout_is: token, or remove it",
    ),
    Idle(
        ("old_logprobs",),
        _is_only_recomputed,
        "rollout_is is none: decoupled has no weights, and is the same as recompute",
        "remove rollout_is, or old_logprobs",
    ),
    Idle(
        ("early_stop_kl",),
        _never_stops_early,
        "a step has one optimizer step, before which the policy is the one of old_logprobs: their KL is 0",
        "write a smaller minibatch_size or ppo_epochs: 2, or remove it",
    ),
    Idle(
        OF_GIGPO,
        _is_not(AdvantageEstimator.GIGPO),
        "advantage_estimator is not gigpo",
        "write advantage_estimator: gigpo, or remove it",
    ),
    Idle(
        ("kl_estimator",),
        lambda settings: not settings.uses_reference,
        "kl_coef and kl_penalty_coef are 0: there is no reference",
        "write kl_coef, or remove it",
    ),
    Idle(
        ("kl_penalty_estimator", "kl_penalty_target", "kl_penalty_horizon"),
        lambda settings: settings.advantage.kl_penalty_coef == 0,
        "kl_penalty_coef is 0: there is no KL penalty",
        "write kl_penalty_coef, or remove it",
    ),
    Idle(
        ("kl_penalty_horizon",),
        lambda settings: settings.advantage.kl_penalty_coef > 0 and settings.advantage.kl_penalty_target is None,
        "there is no kl_penalty_target: kl_penalty_coef stays as it is",
        "write kl_penalty_target, or remove it",
    ),
    Idle(
        ("reference_sync_steps",),
        lambda settings: settings.moves_reference and 0 < (settings.max_steps or 0) <= settings.reference_sync_steps,
        "the run has no step after it: max_steps is not larger",
        "write a smaller number, or remove it",
    ),
    Idle(
        ("muon_momentum",),
        lambda settings: settings.learner.optimizer.optimizer is not OptimizerType.MUON,
        "optimizer is not muon",
        "write optimizer: muon, or remove it",
    ),
    Idle(
        ("wsd_decay_steps", "wsd_decay_style"),
        lambda settings: settings.learner.optimizer.lr_scheduler_type is not LrSchedulerType.WSD,
        "lr_scheduler_type is not wsd",
        "write lr_scheduler_type: wsd, or remove it",
    ),
    Idle(
        ("lora_alpha", "lora_target_modules"),
        lambda settings: settings.learner.adapter is None,
        "there is no adapter",
        "write lora_rank: 16, or remove it",
    ),
    Idle(
        ("discount_level",),
        lambda settings: settings.advantage.advantage_estimator is AdvantageEstimator.GAE,
        "advantage_estimator is gae: a critic's values are by token",
    ),
    Idle(
        ("whiten_by_tag",),
        lambda settings: (
            settings.advantage.whiten_advantages is Whitening.NONE and not settings.advantage.whiten_rewards
        ),
        "nothing is whitened",
        "write whiten_advantages: tokens, or remove it",
    ),
    Idle(
        (
            *("gae_lambda", "value_clip", "value_huber_delta", "value_loss_aggregation"),
            *("critic_learning_rate", "critic_lr_warmup_steps"),
        ),
        _is_not(AdvantageEstimator.GAE),
        "there is no critic",
        "write advantage_estimator: gae, or remove it",
    ),
)


def check_idle(settings: TrainSettings, written: Collection[str], at: At, findings: Findings) -> None:
    """Warn about settings in section `train` that have no effect; keys of the notation may have none."""
    for rule in IDLE:
        for name in rule.names:
            if name in written and rule.holds(settings):
                findings.warn("RST-T094", at(name), "has no effect", rule.why, rule.fix)
