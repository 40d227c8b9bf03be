"""What a policy minimises: one number for part of a minibatch, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roost.config.training import LossSettings, OldLogprobs, RatioLevel
from roost.learner.divergence import divergence
from roost.learner.ratios import importance_weights, ratios
from roost.learner.token_weights import Totals, shares_of_means, token_weights


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
    if settings.importance_sampling_level is RatioLevel.NONE:
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
    if settings.importance_sampling_level is RatioLevel.NONE:
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
