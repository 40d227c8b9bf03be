"""What a critic minimises: how far its values are from the returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roost.config.training import LossSettings, RatioLevel
from roost.learner.token_weights import Totals, shares_of_means, token_weights


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
    weights = token_weights(batch.sequence, batch.sequence, RatioLevel.TOKEN, settings.loss_aggregation, totals)
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
