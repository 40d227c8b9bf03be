"""Losses: importance ratios, clipping, KL, value loss, and token weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roost.config.data import Distillation
from roost.config.learning import Rejection
from roost.config.train import ImportanceSamplingLevel, KlEstimator, LossAggregation, LossSettings, OldLogprobs
from roost.config.train_choices import Divergence, PolicyLoss
from roost.learner.sample import LARGEST_LOG_RATIO, level_values, segment_sums


def ratios(
    logprobs: Tensor,
    old: Tensor,
    sequence: Tensor,
    turn: Tensor,
    level: ImportanceSamplingLevel,
    clamp: tuple[float, float] = (-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO),
    kept: Tensor | None = None,
) -> Tensor:
    """Importance ratios per token, turn or sequence, with one entry per token.

    With d = logprob - old: token exp(d); turn and trajectory exp(Σ d) over their tokens; turn_mean and sequence (GSPO)
    exp(Σ d / n) over their n tokens. Tokens that are not `kept` do not count in their turn or sequence.

    Ratios of means have the slope of the token's own log-prob (GSPO-token), so each token learns from its own advantage
    and weight. Where these are equal in a turn or sequence, the gradient is that of the mean.

    >>> turns = torch.tensor([0, 0, 1])
    >>> halves, quarters = torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.25, 0.25]).log()
    >>> for level in (ImportanceSamplingLevel.TURN, ImportanceSamplingLevel.TURN_MEAN):
    ...     ratios(halves, quarters, torch.zeros_like(turns), turns, level).round(decimals=4).tolist()
    [4.0, 4.0, 2.0]
    [2.0, 2.0, 2.0]
    """
    total = level_values(logprobs - old, sequence, turn, level, kept)
    if level in (ImportanceSamplingLevel.TURN_MEAN, ImportanceSamplingLevel.SEQUENCE):
        total = total.detach() + (logprobs - logprobs.detach())
    return total.clamp(*clamp).exp()


@torch.no_grad()
def importance_weights(
    learner: Tensor,
    engine: Tensor,
    sequence: Tensor,
    turn: Tensor,
    level: ImportanceSamplingLevel,
    cap: float | None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights, min(ratio of learner to engine, cap), and the mask of those above the cap.

    Both have no gradient. The cap trades bias for variance: without it, a few unlikely tokens would outweigh all.
    Tokens that are not `counted` do not count in their turn or sequence.
    """
    found = ratios(learner, engine, sequence, turn, level, kept=counted)
    return (found.clamp(max=cap), found > cap) if cap else (found, torch.zeros_like(found, dtype=torch.bool))


@torch.no_grad()
def kept_tokens(
    learner: Tensor, engine: Tensor, sequence: Tensor, turn: Tensor, rules: tuple[Rejection, ...]
) -> Tensor:
    """Mask of the tokens that all rules keep: low <= value of the token's unit <= high.

    The value is the ratio of learner to engine at the rule's level, or the difference of their probabilities, summed
    (turn, trajectory) or averaged (turn_mean, sequence) over the unit.

    >>> halves, given, places = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.1, 0.4]).log(), torch.tensor([0, 0])
    >>> kept_tokens(halves, given, places, places, (Rejection(ImportanceSamplingLevel.TOKEN, 0.5, 2.0),)).tolist()
    [False, True]
    """
    kept = torch.ones(len(learner), dtype=torch.bool, device=learner.device)
    for rule in rules:
        if rule.of_difference:
            values = level_values(learner.exp() - engine.exp(), sequence, turn, rule.level)
        else:
            values = ratios(learner, engine, sequence, turn, rule.level)
        kept &= (values >= rule.low) & (values <= rule.high)
    return kept


@dataclass(frozen=True, eq=False, slots=True)
class Correction:
    """Importance weights of tokens and the mask of those that no rule rejects; None if the settings ask for none."""

    weights: Tensor | None
    kept: Tensor | None
    capped: Tensor | None = None  # weights that were above the cap


def correction(learner: Tensor, engine: Tensor, sequence: Tensor, turn: Tensor, settings: LossSettings) -> Correction:
    """The correction that the settings ask for; `learner` are the old log-probs, or with `rollout` the current ones."""
    level, rules = settings.weight_level, settings.rejections
    weights = kept = capped = counted = None
    if rules:
        kept = kept_tokens(learner, engine, sequence, turn, rules)
        counted = kept | (learner - engine).isfinite()  # tokens without a finite ratio do not count in their unit
        engine = torch.where(counted, engine, learner)
    if level is not ImportanceSamplingLevel.NONE:
        cap = settings.importance_weight_cap
        weights, capped = importance_weights(learner, engine, sequence, turn, level, cap, counted)
        weights = weights if kept is None else _finite(weights, kept)
    return Correction(weights, kept, capped)


def _finite(values: Tensor, kept: Tensor, other: Tensor | float = 0.0) -> Tensor:
    """Values, with `other` for rejected tokens that have no finite one: 0 times NaN is NaN, also in a gradient."""
    return torch.where(kept | values.isfinite(), values, other)


def _unless_rejected(values: Tensor, kept: Tensor | None, other: float) -> Tensor:
    return values if kept is None else values.masked_fill(~kept, other)


def units_of(sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel) -> Tensor:
    """Index of each token's unit at a level."""
    match level:
        case ImportanceSamplingLevel.TURN | ImportanceSamplingLevel.TURN_MEAN:
            return turn
        case ImportanceSamplingLevel.TRAJECTORY | ImportanceSamplingLevel.SEQUENCE:
            return sequence
        case ImportanceSamplingLevel.TOKEN | ImportanceSamplingLevel.NONE:
            return torch.arange(len(sequence), device=sequence.device)


def mean_over_units(values: Tensor, sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel) -> float:
    """Mean over the units of a level of values that are equal within each; 1 without tokens.

    >>> where = torch.tensor([0, 0, 1])
    >>> mean_over_units(torch.tensor([2.0, 2.0, 1.0]), where, where, ImportanceSamplingLevel.SEQUENCE)
    1.5
    """
    units = units_of(sequence, turn, level)
    if not len(units):
        return 1.0
    shares = 1 / segment_sums(torch.ones_like(values), units)
    return float((values * shares).sum() / shares.sum())


@dataclass(frozen=True, slots=True)
class Totals:
    """Size of a whole minibatch, over all ranks and micro-batches."""

    sequences: int  # with at least one token generated by the policy
    tokens: int  # generated by the policy
    longest: int  # maximum of generated tokens per sequence, the same for all minibatches; for SEQ_SUM_NORM
    kept_sequences: int | None = None  # with a token that no rule rejects; None: not known before the forward pass
    kept_tokens: int | None = None
    mean_weight: float = 1.0  # of the importance weights, if they are normalised

    @property
    def kept(self) -> Totals:
        """Totals without rejected tokens, as far as they are known."""
        if self.kept_tokens is None or self.kept_sequences is None:
            return self
        return replace(self, sequences=self.kept_sequences, tokens=self.kept_tokens)


def token_weights(
    sequence: Tensor,
    turn: Tensor,
    level: ImportanceSamplingLevel,
    aggregation: LossAggregation,
    totals: Totals,
    kept: Tensor | None = None,
) -> Tensor:
    """Weight of each token's loss, for any part of a minibatch that consists of whole sequences.

    Weights times losses, summed over all parts, is the loss of the minibatch, so gradients of parts and ranks are
    summed, never averaged. The weights of a minibatch sum to 1; with SEQ_SUM_NORM to the mean length over `longest`,
    and with SEQ_SUM to the mean length. With SEQ_MEAN and a ratio per turn, all turns of a sequence have the same
    weight, regardless of length. Tokens that are not `kept` have weight 0, and do not count in means over sequences.

    >>> parts = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])
    >>> totals = Totals(sequences=2, tokens=3, longest=8)
    >>> token_weights(*parts, ImportanceSamplingLevel.TOKEN, LossAggregation.SEQ_MEAN, totals).tolist()
    [0.25, 0.25, 0.5]
    """
    ones = torch.ones(len(sequence), device=sequence.device) if kept is None else kept.float()
    match aggregation:
        case LossAggregation.TOKEN_MEAN:
            return ones / totals.tokens
        case LossAggregation.SEQ_SUM:
            return ones / totals.sequences
        case LossAggregation.SEQ_SUM_NORM:
            return ones / (totals.sequences * totals.longest)
        case LossAggregation.SEQ_MEAN:
            tiny = torch.finfo(ones.dtype).tiny  # the divisor if all tokens of a turn or sequence are rejected
            is_by_turn = level is ImportanceSamplingLevel.TURN
            shares = ones / segment_sums(ones, turn).clamp(min=tiny) if is_by_turn else ones
            return shares / (segment_sums(shares, sequence).clamp(min=tiny) * totals.sequences)


@torch.no_grad()
def shares_of_means(
    metrics: Mapping[str, Tensor], weights: Tensor, aggregation: LossAggregation, totals: Totals
) -> dict[str, Tensor]:
    """Contribution of part of a minibatch to the minibatch means of per-token statistics.

    Tokens are weighted as in the loss; equally if the weights of the loss do not sum to 1 (SEQ_SUM_NORM, SEQ_SUM).
    """
    is_sum = aggregation in (LossAggregation.SEQ_SUM_NORM, LossAggregation.SEQ_SUM)
    shares = torch.ones_like(weights) / totals.tokens if is_sum else weights
    return {name: (shares * each).sum() for name, each in metrics.items()}


def divergence(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(policy || reference) per token, with d = logprob - reference.

    Properties as a loss term, for tokens sampled from the current policy:

    - k1, d: unbiased, often negative. Its gradient is that of the log-prob alone, which is 0 in expectation: it
      measures the KL but does not reduce it.
    - k2, d²/2: slightly biased, never negative. Its gradient is d times that of the log-prob, in expectation the
      gradient of KL(policy || reference).
    - k3, exp(-d) + d - 1: unbiased, never negative. Its gradient is 1 - exp(-d) times that of the log-prob, in
      expectation the gradient of KL(reference || policy), which differs from k2's far from the reference.
    - abs, |d|: biased, never negative. Its gradient is the sign of d times that of the log-prob.

    Tokens sampled from an older policy are not reweighted. With `kl_importance_sampling` the loss multiplies the
    estimate by the ratio, so that the gradient of k1 and of k3 becomes that of KL(policy || reference).

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> [round(divergence(half, quarter, estimator).item(), 4) for estimator in KlEstimator]
    [0.6931, 0.2402, 0.1931, 0.6931]
    """
    match estimator:
        case KlEstimator.K1:
            return logprobs - reference
        case KlEstimator.K2:
            return 0.5 * (logprobs - reference).square()
        case KlEstimator.K3:
            # clamp both terms: with only exp clamped, the other term would push away from the reference
            below = (reference - logprobs).clamp(max=LARGEST_LOG_RATIO)
            return torch.expm1(below) - below
        case KlEstimator.ABS:
            return (logprobs - reference).abs()


def distillation_losses(logits: Tensor, teacher: Tensor, settings: Distillation) -> Tensor:
    """Divergence of the policy from the teacher per token; both logits are of the same tokens of the vocabulary.

    Both distributions are normalised over these tokens.

    >>> policy, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.8, 0.2]]).log()
    >>> [round(distillation_losses(policy, teacher, Distillation(divergence=each)).item(), 4) for each in Divergence]
    [0.1927, 0.2231, 0.2079, 0.1585, 0.1724, 0.0507]
    """
    own = torch.log_softmax(logits.float() / settings.temperature, -1)
    other = torch.log_softmax(teacher.float() / (settings.temperature * settings.teacher_temperature), -1)
    match settings.divergence:
        case Divergence.FORWARD_KL:
            return _kl(other, own)
        case Divergence.REVERSE_KL:
            return _kl(own, other)
        case Divergence.ADAPTIVE_KL:
            share = _share_of_head(own, other, settings.adaptive_alpha)
            return share * _kl(other, own) + (1 - share) * _kl(own, other)
        case Divergence.SKEWED_FORWARD_KL:
            return _kl(other, _mixed(other, own, settings.skew))
        case Divergence.SKEWED_REVERSE_KL:
            return _kl(own, _mixed(own, other, settings.skew))
        case Divergence.JS:
            middle = _mixed(own, other, 0.5)
            return 0.5 * (_kl(own, middle) + _kl(other, middle))


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """KL of two distributions, given as log-probs."""
    return (one.exp() * (one - other)).sum(-1)


def _mixed(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Log-probs of a mixture with this share of the first; the sum of probabilities would underflow."""
    shares = torch.tensor([share, 1 - share], device=one.device).log()
    return torch.logaddexp(one + shares[0], other + shares[1])


@torch.no_grad()
def _share_of_head(own: Tensor, other: Tensor, alpha: float) -> Tensor:
    """Share of the difference of both distributions that is in the head, the tokens likely under the teacher.

    All other tokens together have a probability of at most `alpha`.
    """
    probabilities, order = other.exp().sort(-1)
    apart = (probabilities - own.exp().gather(-1, order)).abs()
    head = (apart * (probabilities.cumsum(-1) > alpha)).sum(-1)
    return head / apart.sum(-1).clamp(min=torch.finfo(apart.dtype).tiny)


@dataclass(frozen=True, eq=False, slots=True)
class PolicyBatch:
    """Tokens generated by the policy, flat, in whole sequences; all tensors have one entry per token."""

    logprobs: Tensor  # of the current policy, with gradient; float32, because turns and sequences are summed
    old_logprobs: Tensor | None  # the learner's own before the first step; not needed with OldLogprobs.ROLLOUT
    engine_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor  # index of each token's sequence, from 0
    turn: Tensor  # index of each token's turn, unique across sequences
    entropy: Tensor | None = None  # of the current policy's distribution at each token
    reference_logprobs: Tensor | None = None
    distillation: Tensor | None = None  # divergence from the teacher, with gradient
    rewards: Tensor | None = None  # of each token's sample, for PolicyLoss.TOPR

    def __post_init__(self) -> None:
        optional = (self.old_logprobs, self.entropy, self.reference_logprobs, self.distillation, self.rewards)
        needed = (self.logprobs, self.engine_logprobs, self.advantages, self.sequence, self.turn)
        sizes = {tuple(tensor.shape) for tensor in (*needed, *optional) if tensor is not None}
        if sizes != {(len(self.logprobs),)}:
            raise ValueError(f"the tensors of a batch have one entry for each token, but here are {sorted(sizes)}")


def policy_loss(batch: PolicyBatch, settings: LossSettings, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss of part of a minibatch, and its statistics.

    `totals` are those of the whole minibatch. Losses of its parts sum to its loss over micro-batches and ranks, and so
    do their gradients: if gradients are averaged over ranks, multiply by the number of ranks.

    Statistics sum in the same way to means over the minibatch, weighted as the loss (for SEQ_SUM_NORM and SEQ_SUM,
    equally over tokens), rejected ones included. For names that begin with "max/", take the maximum instead. `kl` is
    k1 of the old log-probs and the policy's. `clipped_low` and `clipped_high` count tokens whose gradient was clipped,
    not all that are out of range; CISPO's `bounded_low` and `bounded_high` tokens with a clipped ratio and a gradient.

    >>> new = torch.tensor([0.5, 0.5]).log()
    >>> places = torch.tensor([0, 0])
    >>> batch = PolicyBatch(new.requires_grad_(), new.detach(), new.detach(), torch.ones(2), places, places)
    >>> loss, stats = policy_loss(batch, LossSettings(), Totals(sequences=1, tokens=2, longest=2))
    >>> loss.item(), stats["ratio"].item(), stats["max/ratio"].item()
    (-1.0, 1.0, 1.0)
    """
    level = settings.importance_sampling_level
    old = _old_logprobs(batch, settings.old_logprobs)
    clamp = (-settings.log_ratio_clip, settings.log_ratio_clip_high)
    learner = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    corrected = correction(learner, batch.engine_logprobs, batch.sequence, batch.turn, settings)
    if corrected.kept is not None:
        old = _finite(old, corrected.kept, batch.logprobs.detach())
    ratio = ratios(batch.logprobs, old, batch.sequence, batch.turn, level, clamp, corrected.kept)
    losses = token_losses(batch, old, ratio, settings)
    metrics = {"ratio": ratio, "kl": old - batch.logprobs, **_clipped(ratio, batch.advantages, settings)}
    if corrected.weights is not None:
        metrics["importance"] = corrected.weights
        if settings.importance_weight_cap and corrected.capped is not None:
            metrics["importance_capped"] = corrected.capped.float()
        losses = corrected.weights / totals.mean_weight * losses
    metrics["policy_loss"] = losses if corrected.kept is None else losses.masked_fill(~corrected.kept, 0.0)
    losses = settings.policy_loss_coef * losses if settings.policy_loss_coef != 1 else losses
    if batch.reference_logprobs is not None:
        metrics["reference_kl"] = divergence(batch.logprobs, batch.reference_logprobs, settings.kl_estimator)
    if batch.entropy is not None:
        metrics["entropy"] = batch.entropy
    if settings.kl_coef:
        apart = _needed(metrics.get("reference_kl"), "kl_coef", "reference_logprobs")
        apart = ratio * apart if settings.kl_importance_sampling else apart
        losses = losses + settings.kl_coef * apart
    if settings.entropy_coef:
        entropy = _needed(batch.entropy, "entropy_coef", "entropy")
        losses = losses - settings.entropy_coef * entropy
    if settings.distillation is not None:
        metrics["distillation"] = _needed(batch.distillation, "distillation", "distribution of a teacher")
        weight = settings.distillation.weight
        losses = (1 - weight) * losses + weight * metrics["distillation"]
    places = batch.sequence, batch.turn, level, settings.loss_aggregation
    weights = of_all = token_weights(*places, totals)
    if corrected.kept is not None:
        metrics["rejected"] = (~corrected.kept).float()
        weights = token_weights(*places, totals.kept, corrected.kept)
    loss = (weights * losses).sum()
    means = shares_of_means(metrics, of_all, settings.loss_aggregation, totals)
    stats = {"loss": loss.detach(), "max/ratio": _largest(ratio), **means}
    if corrected.kept is not None:
        stats["rejected_sequences"] = _share_without(corrected.kept, batch.sequence, totals)
        if totals.kept_tokens is None:
            stats[KEPT] = corrected.kept.sum().float()
    if settings.max_mean_ratio:
        stats[MEAN_RATIO] = _unless_rejected(ratio.detach(), corrected.kept, 1.0).sum() / totals.tokens
    if settings.early_stop_kl:
        apart = _unless_rejected(old - batch.logprobs.detach(), corrected.kept, 0.0)
        stats[SEQUENCE_KL] = apart.sum() / totals.sequences
    return loss, stats


MEAN_RATIO, SEQUENCE_KL = "mean_ratio", "sequence_kl"  # over all tokens, and summed over the tokens of a sample
OVER_RATIO, OVER_KL = "steps/over_ratio", "steps/over_kl"
KEPT = "kept"  # number of tokens that are not rejected, where it is not known before the forward pass
REJECTED = "steps/rejected"  # minibatches of which rollout_rejection left no token


def exceeded_limits(stats: Mapping[str, float], settings: LossSettings) -> dict[str, float]:
    """Whether (1.0 or 0.0) a minibatch exceeds each limit, by the statistics of its policy loss.

    If it does, no optimizer step is taken. Nor is one if all tokens are rejected: momentum and weight decay would
    move the weights even without a gradient.

    >>> exceeded_limits({"mean_ratio": 6.0, "sequence_kl": -3.0}, LossSettings(max_mean_ratio=5, early_stop_kl=20))
    {'steps/over_ratio': 1.0, 'steps/over_kl': 0.0}
    """
    found = {}
    if settings.max_mean_ratio and MEAN_RATIO in stats:
        found[OVER_RATIO] = float(stats[MEAN_RATIO] > settings.max_mean_ratio)
    if settings.early_stop_kl and SEQUENCE_KL in stats:
        found[OVER_KL] = float(abs(stats[SEQUENCE_KL]) > settings.early_stop_kl)
    if KEPT in stats:
        found[REJECTED] = float(stats[KEPT] == 0)
    return found


def token_losses(batch: PolicyBatch, old: Tensor, ratio: Tensor, settings: LossSettings) -> Tensor:
    """Policy loss per token, without weights, KL and entropy terms; without a ratio, -A log p."""
    logprobs, advantages = batch.logprobs, batch.advantages
    if settings.importance_sampling_level is ImportanceSamplingLevel.NONE:
        return -advantages * logprobs
    match settings.loss_type:
        case PolicyLoss.PPO:
            return ppo_losses(ratio, advantages, settings)
        case PolicyLoss.CISPO:
            return cispo_losses(logprobs, ratio, advantages, settings)
        case PolicyLoss.SAPO:
            return sapo_losses(ratio, advantages, settings)
        case PolicyLoss.TOPR:
            rewards = _needed(batch.rewards, "loss_type: topr", "reward of its sample")
            return topr_losses(logprobs, ratio, advantages, rewards, settings)
        case PolicyLoss.KIMI15:
            return kimi15_losses(logprobs, old, advantages, settings)


def ppo_losses(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A); with a dual clip c, at most -c A where A < 0.

    PPO and GRPO with ratios of tokens, GSPO with those of sequences. DAPO's clip-higher is clip_range 0.2 and
    clip_range_high 0.28; LOOP clips to [1/(1+ε), 1+ε].
    """
    clipped = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range_high)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    if settings.dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -settings.dual_clip * advantages), losses)


def cispo_losses(logprobs: Tensor, ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log p, where sg stops the gradient: no token loses its gradient (MiniMax-M1).

    With `cispo_mask`, tokens whose gradient PPO would clip have loss 0.
    """
    weights = ratio.detach().clamp(1 - settings.clip_range, 1 + settings.clip_range_high)
    losses = -weights * advantages * logprobs
    if not settings.cispo_mask:
        return losses
    low, high = _beyond_clip(ratio, advantages, settings)
    return losses * ~(low | high)


def sapo_losses(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """-(4/τ) σ(τ (r - 1)) A, with τ by the sign of A: a gate of slope 1 at r = 1 that closes gradually (SAPO)."""
    temperature = torch.where(advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages


def topr_losses(logprobs: Tensor, ratio: Tensor, advantages: Tensor, rewards: Tensor, settings: LossSettings) -> Tensor:
    """-w+ A log p where the sample's reward is above 0, else -w- sg(clip(r, 0, 1)) A log p (TOPR)."""
    tapered = settings.topr_negative_weight * ratio.detach().clamp(0, 1)
    weights = torch.where(rewards > 0, settings.topr_positive_weight, tapered)
    return -weights * advantages * logprobs


def kimi15_losses(logprobs: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """-A log p + τ/2 (log p - log p_old)² (Kimi k1.5)."""
    return -advantages * logprobs + 0.5 * settings.kimi15_tau * (logprobs - old).square()


def _old_logprobs(batch: PolicyBatch, which: OldLogprobs) -> Tensor:
    """The log-probs in the denominator of the ratio."""
    if which is OldLogprobs.ROLLOUT:
        return batch.engine_logprobs
    if batch.old_logprobs is None:
        raise ValueError(f"old_logprobs {which} needs the learner's own log-probabilities from before the first step")
    return batch.old_logprobs


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> dict[str, Tensor]:
    """Indicators (1.0 or 0.0) of tokens where a clip is active."""
    is_cispo = settings.loss_type is PolicyLoss.CISPO
    if settings.importance_sampling_level is ImportanceSamplingLevel.NONE:
        return {}
    if not is_cispo and settings.loss_type is not PolicyLoss.PPO:
        return {}
    metrics: dict[str, Tensor] = {}
    left_out = torch.zeros_like(ratio, dtype=torch.bool)
    if not is_cispo or settings.cispo_mask:
        low, high = _beyond_clip(ratio, advantages, settings)
        metrics, left_out = {"clipped_low": low, "clipped_high": high}, low | high
    if is_cispo:
        metrics["bounded_low"] = (ratio < 1 - settings.clip_range) & ~left_out
        metrics["bounded_high"] = (ratio > 1 + settings.clip_range_high) & ~left_out
    elif settings.dual_clip is not None:
        metrics["clipped_dual"] = (ratio > settings.dual_clip) & (advantages < 0)
    return {name: where.float() for name, where in metrics.items()}


def _beyond_clip(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Masks of tokens whose gradient PPO clips at the lower and at the upper end of the range."""
    low = (ratio < 1 - settings.clip_range) & (advantages < 0)
    return low, (ratio > 1 + settings.clip_range_high) & (advantages > 0)


@torch.no_grad()
def _share_without(kept: Tensor, sequence: Tensor, totals: Totals) -> Tensor:
    """Sequences of this part without a kept token, as a share of those of the minibatch."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    zeros = kept.float().new_zeros(count)
    left, whole = (zeros.index_add(0, sequence, each.float()) for each in (kept, torch.ones_like(kept)))
    return ((left == 0) & (whole > 0)).sum().float() / max(1, totals.sequences)


def _needed(found: Tensor | None, setting: str, field: str) -> Tensor:
    if found is None:
        raise ValueError(f"{setting} needs the {field} of every token, which the batch does not have")
    return found


@torch.no_grad()
def _largest(ratio: Tensor) -> Tensor:
    """Largest ratio; 0 without tokens, as a rank may have none in a minibatch."""
    return ratio.max() if len(ratio) else ratio.new_zeros(())


@dataclass(frozen=True, eq=False, slots=True)
class ValueBatch:
    """Tokens generated by the policy, flat; all tensors have one entry per token."""

    values: Tensor  # with gradient
    old_values: Tensor  # the critic's values before the first step on them
    returns: Tensor
    sequence: Tensor  # index of each token's sequence, from 0

    def __post_init__(self) -> None:
        sizes = {len(tensor) for tensor in (self.values, self.old_values, self.returns, self.sequence)}
        if len(sizes) != 1:
            raise ValueError(f"the tensors of a batch have one entry for each token, but here are {sorted(sizes)}")


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None, delta: float | None = None
) -> Tensor:
    """Half the squared error per token; with `clip`, the maximum of that and of the clipped value's.

    A clip of 0 disables clipping, as fully clipped values would have no gradient. With `delta` it is the Huber loss:
    beyond an error of delta, delta (|error| - delta / 2).

    >>> batch = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.5])
    >>> value_losses(*batch, clip=None).tolist(), value_losses(*batch, clip=0.5).tolist()
    ([0.125], [0.5])
    """
    losses = _halved_squares(values - returns, delta)
    if not clip:
        return losses
    near = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(losses, _halved_squares(near - returns, delta))


def _halved_squares(errors: Tensor, delta: float | None) -> Tensor:
    """Half the squared errors, or their Huber loss."""
    squares = 0.5 * errors.square()
    return squares if not delta else torch.where(errors.abs() <= delta, squares, delta * (errors.abs() - 0.5 * delta))


def value_loss(batch: ValueBatch, settings: LossSettings, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss of part of a minibatch, and its statistics; both sum over parts and ranks as in `policy_loss`.

    Tokens are aggregated at token level, as a critic has no ratios per turn.
    """
    delta = settings.value_huber_delta
    losses = value_losses(batch.values, batch.old_values, batch.returns, settings.value_clip, delta)
    aggregation = settings.value_loss_aggregation or settings.loss_aggregation
    weights = token_weights(batch.sequence, batch.sequence, ImportanceSamplingLevel.TOKEN, aggregation, totals)
    loss = (weights * losses).sum()
    errors = (batch.values - batch.returns).square()
    metrics = {
        "value": batch.values,
        "return": batch.returns,
        "squared_error": errors,
        "squared_return": batch.returns.square(),
        "value_clipped": (losses > _halved_squares(batch.values - batch.returns, delta)).float(),
    }
    return loss, {"value_loss": loss.detach(), **shares_of_means(metrics, weights, aggregation, totals)}
