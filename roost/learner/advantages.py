"""Advantages: group baselines, GAE, and which samples are kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config.train import AdvantageEstimator, AdvantageSettings, Whitening

Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

STD_EPSILON = 1e-6  # added to a standard deviation before dividing by it, as GRPO of RLinf and ROLL does
POPULATION_STD_FLOOR = 1e-7  # ml-loop divides by at least this
ROUNDING = 1e-9  # returns added up in another order differ by rounding; that is no difference to learn from


def advantages(returns: Sequence[float], groups: Sequence[Hashable], settings: AdvantageSettings) -> Doubles:
    """The advantage of each sample, in the order given; `groups` says which samples answer the same prompt.

    Groups may differ in size. Where there is nothing to compare with, as all returns are equal or a sample is alone in
    its group, advantages are exactly 0; `is_alone` tells which samples the latter are.

    >>> advantages([1.0, 0.0, 0.0, 5.0], ["a", "a", "a", "b"], AdvantageSettings()).tolist()
    [1.0, -0.5, -0.5, 0.0]
    """
    if settings.advantage_estimator not in _ESTIMATORS:
        raise ValueError(
            f"{settings.advantage_estimator} needs the values of a critic, token by token: use roost.learner.advantages"
        )
    grouped = _grouped(returns, groups)
    found = _ESTIMATORS[settings.advantage_estimator](grouped)
    return found / np.maximum(grouped.population_stds, POPULATION_STD_FLOOR) if settings.normalize_by_std else found


def is_alone(groups: Sequence[Hashable]) -> Flags:
    """Which samples are the only one of their group.

    >>> is_alone(["a", "a", "b"]).tolist()
    [False, False, True]
    """
    numbers = _numbers(groups)
    return np.asarray(np.bincount(numbers)[numbers] == 1) if len(numbers) else np.zeros(0, dtype=bool)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """The returns, and for each sample what is known of its group."""

    returns: Doubles
    sizes: npt.NDArray[np.int64]
    means: Doubles
    stds: Doubles  # of a sample: n - 1; 0 for one that is alone
    population_stds: Doubles
    equal: Flags


def _grouped(returns: Sequence[float], groups: Sequence[Hashable]) -> _Grouped:
    values = np.asarray(returns, dtype=np.float64)
    if len(values) != len(groups):
        raise ValueError(f"{len(values)} returns, but {len(groups)} groups: give the group of each sample")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(f"the return of sample {bad[0]} is {values[bad[0]]}; rewards must be finite numbers")
    numbers = _numbers(groups)
    sizes = np.bincount(numbers)
    means = np.bincount(numbers, values) / sizes
    squares = np.bincount(numbers, (values - means[numbers]) ** 2)
    stds, population_stds = np.sqrt(squares / np.maximum(sizes - 1, 1)), np.sqrt(squares / sizes)
    lowest, highest = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(lowest, numbers, values)
    np.maximum.at(highest, numbers, values)
    equal = highest - lowest <= ROUNDING
    return _Grouped(values, sizes[numbers], means[numbers], stds[numbers], population_stds[numbers], equal[numbers])


def _numbers(groups: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """The groups numbered from 0 as they come: numpy cannot sort names of all kinds."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(group, len(known)) for group in groups], dtype=np.int64)


def _leave_one_out(samples: _Grouped) -> Doubles:
    others = np.maximum(samples.sizes - 1, 1)  # one that is alone gets 0 from _group_mean
    return _group_mean(samples) * samples.sizes / others


def _group_mean(samples: _Grouped) -> Doubles:
    return np.where(samples.equal, 0.0, samples.returns - samples.means)


def _grpo(samples: _Grouped) -> Doubles:
    return _group_mean(samples) / (samples.stds + STD_EPSILON)


def _reinforce(samples: _Grouped) -> Doubles:
    """One group of all samples: what GRPO does in each."""
    return _grpo(_grouped(samples.returns.tolist(), [None] * len(samples.returns)))


def _reward(samples: _Grouped) -> Doubles:
    return samples.returns


_ESTIMATORS: Mapping[AdvantageEstimator, Callable[[_Grouped], Doubles]] = {
    AdvantageEstimator.LEAVE_ONE_OUT: _leave_one_out,
    AdvantageEstimator.GROUP_MEAN: _group_mean,
    AdvantageEstimator.GRPO: _grpo,
    AdvantageEstimator.REINFORCE: _reinforce,
    AdvantageEstimator.REWARD: _reward,
}


VARIANCE_EPSILON = 1e-8  # of Whitening.TOKENS
BIASED_STD_EPSILON = 1e-5  # of Whitening.TOKENS_BIASED


@dataclass(frozen=True, eq=False, slots=True)
class TokenAdvantages:
    """Of the tokens that the policy made in one sample."""

    advantages: Doubles
    returns: Doubles  # what the critic should have said


def rewards_of_tokens(turns: npt.NDArray[np.integer], reward: float, turn_rewards: Sequence[float]) -> Doubles:
    """What each token that the policy made earned, from the turns of the tokens, in order.

    A turn earns at its last token; one without a token at the last before it. What is left of the whole comes at the
    very end.

    >>> rewards_of_tokens(np.array([0, 0, 1]), 3.0, [1.0, 1.5]).tolist()
    [0.0, 1.0, 2.0]
    """
    earned = np.zeros(len(turns))
    if len(turns):
        ends = np.maximum(np.searchsorted(turns, np.arange(len(turn_rewards)), side="right") - 1, 0)
        np.add.at(earned, ends, np.asarray(turn_rewards, dtype=np.float64))
        earned[-1] += reward - sum(turn_rewards)
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
        scale = tokens.std() + BIASED_STD_EPSILON
    return [(sample - tokens.mean()) / scale for sample in samples]


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The samples to learn from, by position, in the order they came; and how many were left out."""

    kept: npt.NDArray[np.int64]
    too_small: int  # nearer to zero than AdvantageSettings.min_abs_advantage
    not_positive: int  # far enough from zero, but AdvantageSettings.positive_advantages_only leaves them out

    @property
    def dropped(self) -> int:
        return self.too_small + self.not_positive


def select(advantages: npt.NDArray[np.floating], settings: AdvantageSettings) -> Selection:
    """The samples whose advantage is large enough, and positive where only those count. May be none, or any number.

    >>> settings = AdvantageSettings(min_abs_advantage=0.1, positive_advantages_only=True)
    >>> chosen = select(np.array([0.5, -0.5, 0.01]), settings)
    >>> chosen.kept.tolist(), chosen.too_small, chosen.not_positive
    ([0], 1, 1)
    """
    small = np.abs(advantages) < settings.min_abs_advantage
    unwanted = ~small & (advantages <= 0) & settings.positive_advantages_only
    return Selection(
        kept=np.flatnonzero(~small & ~unwanted),
        too_small=int(small.sum()),
        not_positive=int(unwanted.sum()),
    )
