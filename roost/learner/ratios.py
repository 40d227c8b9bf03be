"""How much more likely the policy is now to make what was made."""

from __future__ import annotations

import torch
from torch import Tensor

from roost.config.training import RatioLevel
from roost.learner.segments import level_sums

# The logarithm of a ratio is cut here, after it is added up. Sums over thousands of tokens reach hundreds, where exp is
# infinite, and infinity times a gradient or an advantage of 0 is NaN. A ratio of exp(20), 5e8, is far out of any clip:
# what is cut has no gradient, where it would have one so large that the step would follow this one segment alone.
LARGEST_LOG_RATIO = 20.0


def ratios(logprobs: Tensor, old: Tensor, sequence: Tensor, turn: Tensor, level: RatioLevel) -> Tensor:
    """For each token the ratio of what it belongs to: the token, its turn, or its sequence.

    >>> turns = torch.tensor([0, 0, 1])
    >>> halves, quarters = torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.25, 0.25]).log()
    >>> ratios(halves, quarters, torch.zeros_like(turns), turns, RatioLevel.TURN).round(decimals=4).tolist()
    [4.0, 4.0, 2.0]
    """
    total = level_sums(logprobs - old, sequence, turn, level)
    return total.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


@torch.no_grad()
def importance_weights(
    old: Tensor, engine: Tensor, sequence: Tensor, turn: Tensor, level: RatioLevel, cap: float
) -> Tensor:
    """How much more likely the learner, before its first step, was to make what the engine made; at most `cap`.

    The cap trades bias for variance: a few unlikely tokens would outweigh all others.
    """
    return ratios(old, engine, sequence, turn, level).clamp(max=cap)
