"""Advantages token by token, from what a critic expected before each token (generalised advantage estimation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config.training import AdvantageSettings, Whitening
from roost.learner.advantages import Doubles

VARIANCE_EPSILON = 1e-8  # of Whitening.TOKENS
STD_EPSILON = 1e-5  # of Whitening.TOKENS_BIASED


@dataclass(frozen=True, eq=False, slots=True)
class TokenAdvantages:
    """Of the tokens that the policy made in one sample."""

    advantages: Doubles
    returns: Doubles  # what the critic should have said


def rewards_of_tokens(turns: npt.NDArray[np.integer], reward: float, of_turns: Sequence[float]) -> Doubles:
    """What each token that the policy made earned, from the turns of the tokens, in order.

    A turn earns at its last token; one without a token at the last before it. What is left of the whole comes at the
    very end.

    >>> rewards_of_tokens(np.array([0, 0, 1]), 3.0, [1.0, 1.5]).tolist()
    [0.0, 1.0, 2.0]
    """
    earned = np.zeros(len(turns))
    if len(turns):
        ends = np.maximum(np.searchsorted(turns, np.arange(len(of_turns)), side="right") - 1, 0)
        np.add.at(earned, ends, np.asarray(of_turns, dtype=np.float64))
        earned[-1] += reward - sum(of_turns)
    return earned


def token_advantages(
    rewards: npt.NDArray[np.floating],
    values: npt.NDArray[np.floating],
    settings: AdvantageSettings,
    value_after: float = 0.0,
) -> TokenAdvantages:
    """From what each token that the policy made in an episode earned, and the critic's value before it.

    After the last one comes `value_after`: nothing where the task was over, and where a limit cut the episode off, what
    the critic expects of the state that it stopped in.

    >>> found = token_advantages(np.array([0, 1]), np.array([0.5, 0.75]), AdvantageSettings(gamma=1, gae_lambda=0))
    >>> found.advantages.tolist(), found.returns.tolist()
    ([0.25, 0.25], [0.75, 1.0])
    >>> cut_off = token_advantages(np.array([1]), np.array([0.5]), AdvantageSettings(gamma=0.5), value_after=2.0)
    >>> cut_off.returns.tolist()
    [2.0]
    """
    expected = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(rewards).all() and np.isfinite(expected).all() and np.isfinite(value_after)):
        raise ValueError(f"the rewards and the critic's values of {len(expected)} tokens must be finite numbers")
    following = np.append(expected[1:], value_after)
    surprises = (rewards + settings.gamma * following - expected).tolist()
    found, later = np.zeros(len(expected)), 0.0
    for token in range(len(expected) - 1, -1, -1):
        later = surprises[token] + settings.gamma * settings.gae_lambda * later
        found[token] = later
    return TokenAdvantages(found, found + expected)


def whitened(samples: Sequence[Doubles], whitening: Whitening) -> list[Doubles]:
    """The same advantages with mean 0 and standard deviation 1 over all tokens of all samples.

    Whitening.TOKENS leaves a single token as it is: the variance of one is not defined.

    >>> given = [np.array([1.0, 3.0]), np.array([3.0, 1.0])]
    >>> [sample.round(4).tolist() for sample in whitened(given, Whitening.TOKENS_BIASED)]
    [[-1.0, 1.0], [1.0, -1.0]]
    >>> [sample.round(4).tolist() for sample in whitened(given, Whitening.TOKENS)]
    [[-0.866, 0.866], [0.866, -0.866]]
    """
    tokens = np.concatenate([np.zeros(0), *samples])
    if whitening is Whitening.NONE or len(tokens) < (2 if whitening is Whitening.TOKENS else 1):
        return list(samples)
    if whitening is Whitening.TOKENS:
        scale = np.sqrt(tokens.var(ddof=1) + VARIANCE_EPSILON)
    else:
        scale = tokens.std() + STD_EPSILON
    return [(sample - tokens.mean()) / scale for sample in samples]
