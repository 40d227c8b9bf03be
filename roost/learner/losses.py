"""Losses: importance ratios, clipping, KL, value loss, and token weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.config.train import ImportanceSamplingLevel, KlEstimator, LossAggregation, LossSettings, OldLogprobs
from roost.learner.packing import level_sums, segment_sums


@dataclass(frozen=True, slots=True)
class Totals:
    """The size of a whole minibatch: over all ranks and all its micro batches."""

    sequences: int  # that have a token made by the policy
    tokens: int  # made by the policy
    longest: int  # made tokens that a sequence may have: the same for all minibatches; for SEQ_SUM_NORM


def token_weights(
    sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel, aggregation: LossAggregation, totals: Totals
) -> Tensor:
    """What the loss of each token is multiplied by, for any part of a minibatch that has whole sequences.

    Weights times losses, added up over all parts, is the loss of the minibatch. So gradients of parts and ranks are
    added, never averaged. Weights of a minibatch add up to 1, but with SEQ_SUM_NORM to what part of the longest is
    used, and with SEQ_SUM to the mean length. With SEQ_MEAN and a ratio for each turn, the turns of a sequence
    count alike, long or short.

    >>> parts = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])
    >>> totals = Totals(sequences=2, tokens=3, longest=8)
    >>> token_weights(*parts, ImportanceSamplingLevel.TOKEN, LossAggregation.SEQ_MEAN, totals).tolist()
    [0.25, 0.25, 0.5]
    """
    ones = torch.ones(len(sequence), device=sequence.device)
    match aggregation:
        case LossAggregation.TOKEN_MEAN:
            return ones / totals.tokens
        case LossAggregation.SEQ_SUM:
            return ones / totals.sequences
        case LossAggregation.SEQ_SUM_NORM:
            return ones / (totals.sequences * totals.longest)
        case LossAggregation.SEQ_MEAN:
            shares = ones / segment_sums(ones, turn) if level is ImportanceSamplingLevel.TURN else ones
            return shares / (segment_sums(shares, sequence) * totals.sequences)


@torch.no_grad()
def shares_of_means(
    told: Mapping[str, Tensor], weights: Tensor, aggregation: LossAggregation, totals: Totals
) -> dict[str, Tensor]:
    """What a part of a minibatch adds to means over all of it, of what is told of each token.

    Tokens count as in the loss; where its weights do not add up to 1 (SEQ_SUM_NORM, SEQ_SUM), they count alike.
    """
    is_sum = aggregation in (LossAggregation.SEQ_SUM_NORM, LossAggregation.SEQ_SUM)
    shares = torch.ones_like(weights) / totals.tokens if is_sum else weights
    return {name: (shares * each).sum() for name, each in told.items()}


# The logarithm of a ratio is cut here, after it is added up. Sums over thousands of tokens reach hundreds, where exp is
# infinite, and infinity times a gradient or an advantage of 0 is NaN. A ratio of exp(20), 5e8, is far out of any clip:
# what is cut has no gradient, where it would have one so large that the step would follow this one segment alone.
LARGEST_LOG_RATIO = 20.0


def ratios(logprobs: Tensor, old: Tensor, sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel) -> Tensor:
    """For each token the ratio of what it belongs to: the token, its turn, or its sequence.

    >>> turns = torch.tensor([0, 0, 1])
    >>> halves, quarters = torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.25, 0.25]).log()
    >>> found = ratios(halves, quarters, torch.zeros_like(turns), turns, ImportanceSamplingLevel.TURN)
    >>> found.round(decimals=4).tolist()
    [4.0, 4.0, 2.0]
    """
    total = level_sums(logprobs - old, sequence, turn, level)
    return total.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


@torch.no_grad()
def importance_weights(
    old: Tensor, engine: Tensor, sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel, cap: float
) -> Tensor:
    """How much more likely the learner, before its first step, was to make what the engine made; at most `cap`.

    The cap trades bias for variance: a few unlikely tokens would outweigh all others.
    """
    return ratios(old, engine, sequence, turn, level).clamp(max=cap)


def divergence(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """For each token an estimate of KL(policy || reference), with d = logprob - reference.

    What each gives as a part of the loss, where tokens were drawn from the policy as it is:

    - k1, d: unbiased, often negative. Its gradient is that of the log-probability alone, which is 0 on average: it
      measures, but does not pull.
    - k2, d²/2: biased a little, never negative. Its gradient is d times that of the log-probability, which on average
      is the gradient of KL(policy || reference).
    - k3, exp(-d) + d - 1: unbiased, never negative. Its gradient is 1 - exp(-d) times that of the log-probability,
      which on average is the gradient of KL(reference || policy): the same near the reference, other far from it.

    Tokens drawn from an older policy are not reweighted.

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> [round(divergence(half, quarter, estimator).item(), 4) for estimator in KlEstimator]
    [0.6931, 0.2402, 0.1931]
    """
    match estimator:
        case KlEstimator.K1:
            return logprobs - reference
        case KlEstimator.K2:
            return 0.5 * (logprobs - reference).square()
        case KlEstimator.K3:
            # cut as a whole: were only the exp cut, the other term would pull away from the reference
            below = (reference - logprobs).clamp(max=LARGEST_LOG_RATIO)
            return torch.expm1(below) - below


@dataclass(frozen=True, eq=False, slots=True)
class PolicyBatch:
    """Tokens made by the policy, flat, in whole sequences; all tensors have one entry for each token."""

    logprobs: Tensor  # of the policy as it is, with gradient; 32 bits, as turns and sequences are added up
    old_logprobs: Tensor | None  # the learner's own before the first step; not needed with OldLogprobs.ROLLOUT
    engine_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor  # the sequence of each token, numbered from 0
    turn: Tensor  # its turn; no two sequences have one of the same number
    entropy: Tensor | None = None  # of the distribution it was drawn from, as it is now
    reference_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        optional = (self.old_logprobs, self.entropy, self.reference_logprobs)
        needed = (self.logprobs, self.engine_logprobs, self.advantages, self.sequence, self.turn)
        sizes = {tuple(tensor.shape) for tensor in (*needed, *optional) if tensor is not None}
        if sizes != {(len(self.logprobs),)}:
            raise ValueError(f"the tensors of a batch have one entry for each token, but here are {sorted(sizes)}")


def policy_loss(batch: PolicyBatch, settings: LossSettings, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of part of a minibatch, and what is told of it.

    `totals` are those of the whole minibatch. Losses of its parts add up to its loss over micro batches and ranks, so
    their gradients are added, too: where gradients of ranks are averaged, multiply by the number of ranks.

    What is told adds up in the same way, to means over the minibatch that are weighted as the loss is (with
    sums, whose weights do not add up to 1: over all tokens alike). Of names that begin with "max/", take the maximum
    instead. `kl` is k1 of the old log-probs and the policy's. `clipped_low` and
    `clipped_high` are where the clip took the gradient away, not all that is out of range.

    >>> made = torch.tensor([0.5, 0.5]).log()
    >>> places = torch.tensor([0, 0])
    >>> batch = PolicyBatch(made.requires_grad_(), made.detach(), made.detach(), torch.ones(2), places, places)
    >>> loss, told = policy_loss(batch, LossSettings(), Totals(sequences=1, tokens=2, longest=2))
    >>> loss.item(), told["ratio"].item(), told["max/ratio"].item()
    (-1.0, 1.0, 1.0)
    """
    level = settings.importance_sampling_level
    old = _old_logprobs(batch, settings.old_logprobs)
    ratio = ratios(batch.logprobs, old, batch.sequence, batch.turn, level)
    losses = policy_losses(batch.logprobs, ratio, batch.advantages, settings)
    told = {"ratio": ratio, "kl": old - batch.logprobs, **_clipped(ratio, batch.advantages, settings)}
    if settings.old_logprobs is OldLogprobs.DECOUPLED:
        importance = importance_weights(
            old, batch.engine_logprobs, batch.sequence, batch.turn, level, settings.importance_weight_cap
        )
        losses = importance * losses
        told |= {"importance": importance, "importance_capped": (importance >= settings.importance_weight_cap).float()}
    told["policy_loss"] = losses
    if batch.reference_logprobs is not None:
        told["reference_kl"] = divergence(batch.logprobs, batch.reference_logprobs, settings.kl_estimator)
    if batch.entropy is not None:
        told["entropy"] = batch.entropy
    if settings.kl_coef:
        apart = _needed(told.get("reference_kl"), "kl_coef", "reference_logprobs")
        losses = losses + settings.kl_coef * apart
    if settings.entropy_coef:
        entropy = _needed(batch.entropy, "entropy_coef", "entropy")
        losses = losses - settings.entropy_coef * entropy
    weights = token_weights(batch.sequence, batch.turn, level, settings.loss_aggregation, totals)
    loss = (weights * losses).sum()
    means = shares_of_means(told, weights, settings.loss_aggregation, totals)
    return loss, {"loss": loss.detach(), "max/ratio": _largest(ratio), **means}


def policy_losses(logprobs: Tensor, ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """For each token the loss of the policy alone, before it is weighted.

    LOOP clips to [1/(1+ε), 1+ε]; DAPO's clip-higher is clip_range 0.2 and clip_range_high 0.28.
    """
    if settings.importance_sampling_level is ImportanceSamplingLevel.NONE:
        return -advantages * logprobs
    clipped = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range_high)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    if settings.dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -settings.dual_clip * advantages), losses)


def _old_logprobs(batch: PolicyBatch, which: OldLogprobs) -> Tensor:
    """The log-probs in the denominator of the ratio."""
    if which is OldLogprobs.ROLLOUT:
        return batch.engine_logprobs
    if batch.old_logprobs is None:
        raise ValueError(f"old_logprobs {which} needs the learner's own log-probabilities from before the first step")
    return batch.old_logprobs


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> dict[str, Tensor]:
    """Where a clip decides, as 1 and 0."""
    if settings.importance_sampling_level is ImportanceSamplingLevel.NONE:
        return {}
    told = {
        "clipped_low": (ratio < 1 - settings.clip_range) & (advantages < 0),
        "clipped_high": (ratio > 1 + settings.clip_range_high) & (advantages > 0),
    }
    if settings.dual_clip is not None:
        told["clipped_dual"] = (ratio > settings.dual_clip) & (advantages < 0)
    return {name: where.float() for name, where in told.items()}


def _needed(found: Tensor | None, setting: str, field: str) -> Tensor:
    if found is None:
        raise ValueError(f"{setting} is not 0, but the batch has no {field}: give it, or set {setting} to 0")
    return found


@torch.no_grad()
def _largest(ratio: Tensor) -> Tensor:
    """Of no tokens 0, which is below all ratios: a rank may have nothing in a minibatch."""
    return ratio.max() if len(ratio) else ratio.new_zeros(())


@dataclass(frozen=True, eq=False, slots=True)
class ValueBatch:
    """Tokens made by the policy, flat; all tensors have one entry for each."""

    values: Tensor  # with gradient
    old_values: Tensor  # what the critic said before the first step on them
    returns: Tensor
    sequence: Tensor  # the sequence of each token, numbered from 0

    def __post_init__(self) -> None:
        sizes = {len(tensor) for tensor in (self.values, self.old_values, self.returns, self.sequence)}
        if len(sizes) != 1:
            raise ValueError(f"the tensors of a batch have one entry for each token, but here are {sorted(sizes)}")


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """For each token half the squared error; clipped, that of the value moved at most `clip` if it is larger.

    A clip of 0 is none: values that may not move at all would have no gradient.

    >>> told = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.5])
    >>> value_losses(*told, clip=None).tolist(), value_losses(*told, clip=0.5).tolist()
    ([0.125], [0.5])
    """
    losses = 0.5 * (values - returns).square()
    if not clip:
        return losses
    near = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(losses, 0.5 * (near - returns).square())


def value_loss(batch: ValueBatch, settings: LossSettings, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of part of a minibatch, and what is told of it; both add up over parts and ranks as in `policy_loss`.

    The share of variance that the critic explains is 1 - squared_error / (squared_return - return²), of the sums.
    Tokens are averaged as `settings.loss_aggregation` says, each for itself: a critic has no ratios of turns.
    """
    losses = value_losses(batch.values, batch.old_values, batch.returns, settings.value_clip)
    weights = token_weights(
        batch.sequence, batch.sequence, ImportanceSamplingLevel.TOKEN, settings.loss_aggregation, totals
    )
    loss = (weights * losses).sum()
    errors = (batch.values - batch.returns).square()
    told = {
        "value": batch.values,
        "return": batch.returns,
        "squared_error": errors,
        "squared_return": batch.returns.square(),
        "value_clipped": (losses > 0.5 * errors).float(),
    }
    return loss, {"value_loss": loss.detach(), **shares_of_means(told, weights, settings.loss_aggregation, totals)}
