"""How much each token counts in the loss of a minibatch, however the minibatch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.config.training import LossAggregation, RatioLevel
from roost.learner.segments import segment_sums


@dataclass(frozen=True, slots=True)
class Totals:
    """The size of a whole minibatch: over all ranks and all its micro batches."""

    sequences: int  # that have a token made by the policy
    tokens: int  # made by the policy
    longest: int  # made tokens that a sequence may have: the same for all minibatches; for SEQ_SUM_NORM


def token_weights(
    sequence: Tensor, turn: Tensor, level: RatioLevel, aggregation: LossAggregation, totals: Totals
) -> Tensor:
    """What the loss of each token is multiplied by, for any part of a minibatch that has whole sequences.

    Weights times losses, added up over all parts, is the loss of the minibatch. So gradients of parts and ranks are
    added, never averaged. Weights of a minibatch add up to 1, but with SEQ_SUM_NORM to what part of the longest is
    used, and with SEQ_SUM to the mean length. With SEQ_MEAN and a ratio for each turn, the turns of a sequence
    count alike, long or short.

    >>> parts = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])
    >>> totals = Totals(sequences=2, tokens=3, longest=8)
    >>> token_weights(*parts, RatioLevel.TOKEN, LossAggregation.SEQ_MEAN, totals).tolist()
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
            shares = ones / segment_sums(ones, turn) if level is RatioLevel.TURN else ones
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
