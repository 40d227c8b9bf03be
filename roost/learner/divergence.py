"""How far the policy is from its reference, estimated from the tokens it made."""

from __future__ import annotations

import torch
from torch import Tensor

from roost.config.training import KlEstimator
from roost.learner.ratios import LARGEST_LOG_RATIO


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
