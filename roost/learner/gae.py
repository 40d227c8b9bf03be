"""Advantages token by token, from what a critic expected before each token (generalised advantage estimation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.learner.advantages import STD_FLOOR, Doubles
from roost.spec.training import AdvantageSettings


@dataclass(frozen=True, eq=False, slots=True)
class TokenAdvantages:
    """Of the tokens that the policy made in one sample."""

    advantages: Doubles
    returns: Doubles  # what the critic should have said


def token_advantages(outcome: float, values: npt.NDArray[np.floating], settings: AdvantageSettings) -> TokenAdvantages:
    """From the return of a sample and the critic's value before each token that the policy made.

    All reward is at the last token, and after it there is none: an episode that was cut off is worth what it got.

    >>> found = token_advantages(1.0, np.array([0.5, 0.75]), AdvantageSettings(discount=1.0, gae_lambda=0.0))
    >>> found.advantages.tolist(), found.returns.tolist()
    ([0.25, 0.25], [0.75, 1.0])
    """
    expected = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(outcome) and np.isfinite(expected).all()):
        raise ValueError(f"the return {outcome} and the critic's {len(expected)} values must be finite numbers")
    following = np.append(expected[1:], 0.0)
    rewards = np.zeros(len(expected))
    rewards[-1:] = outcome
    surprises = (rewards + settings.discount * following - expected).tolist()
    found, later = np.zeros(len(expected)), 0.0
    for token in range(len(expected) - 1, -1, -1):
        later = surprises[token] + settings.discount * settings.gae_lambda * later
        found[token] = later
    return TokenAdvantages(found, found + expected)


def whitened(samples: Sequence[Doubles]) -> list[Doubles]:
    """The same advantages with mean 0 and standard deviation 1 over all tokens of all samples.

    >>> [sample.tolist() for sample in whitened([np.array([1.0, 3.0]), np.array([3.0, 1.0])])]
    [[-1.0, 1.0], [1.0, -1.0]]
    """
    tokens = np.concatenate([np.zeros(0), *samples])
    if len(tokens) == 0:
        return list(samples)
    return [(sample - tokens.mean()) / max(tokens.std(), STD_FLOOR) for sample in samples]
