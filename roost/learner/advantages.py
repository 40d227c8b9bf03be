"""Advantages: group baselines, GAE, whitening, and selection of samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config.train import AdvantageEstimator, AdvantageSettings, Whitening

Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

STD_EPSILON = 1e-6  # added to a standard deviation before dividing, as in GRPO of RLinf and ROLL
POPULATION_STD_FLOOR = 1e-7  # smallest divisor, as in ml-loop
ROUNDING = 1e-9  # returns closer than this are equal up to rounding


def advantages(returns: Sequence[float], groups: Sequence[Hashable], settings: AdvantageSettings) -> Doubles:
    """Advantage of each sample, in the order given; `groups` has the group of each sample.

    Groups may differ in size. If all returns of a group are equal or a sample is alone in its group, advantages are
    exactly 0; see `is_alone` for the latter.

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
    """Mask of samples that are the only one of their group.

    >>> is_alone(["a", "a", "b"]).tolist()
    [False, False, True]
    """
    numbers = _numbers(groups)
    return np.asarray(np.bincount(numbers)[numbers] == 1) if len(numbers) else np.zeros(0, dtype=bool)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Returns, and the statistics of each sample's group."""

    returns: Doubles
    sizes: npt.NDArray[np.int64]
    means: Doubles
    stds: Doubles  # sample standard deviation (n - 1); 0 for a single sample
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
    """Group indices from 0 in order of appearance; np.unique cannot sort keys of mixed types."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(group, len(known)) for group in groups], dtype=np.int64)


def _leave_one_out(samples: _Grouped) -> Doubles:
    others = np.maximum(samples.sizes - 1, 1)  # _group_mean gives 0 for a single sample
    return _group_mean(samples) * samples.sizes / others


def _group_mean(samples: _Grouped) -> Doubles:
    return np.where(samples.equal, 0.0, samples.returns - samples.means)


def _grpo(samples: _Grouped) -> Doubles:
    return _group_mean(samples) / (samples.stds + STD_EPSILON)


def _reinforce(samples: _Grouped) -> Doubles:
    """GRPO with all samples as one group."""
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
    """Advantages and returns of the generated tokens of one sample."""

    advantages: Doubles
    returns: Doubles  # targets of the critic


def rewards_of_tokens(turns: npt.NDArray[np.integer], reward: float, turn_rewards: Sequence[float]) -> Doubles:
    """Reward of each generated token; `turns` has the turn of each token, in order.

    A turn's reward goes to its last token; for a turn without tokens, to the last token before it. The rest of the
    sample's reward goes to the last token.

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
    """GAE advantages and returns from the rewards of generated tokens and the critic's values before them.

    `value_after` is the value after the last token: 0 if the task ended, the critic's value of the final state if the
    episode was truncated.

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
    """Advantages normalized to mean 0 and standard deviation 1 over all tokens of all samples.

    Whitening.TOKENS leaves a single token unchanged, as its variance is undefined.

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
    """Indices of the samples to learn from, in order, and counts of those dropped."""

    kept: npt.NDArray[np.int64]
    too_small: int  # below AdvantageSettings.min_abs_advantage
    not_positive: int  # large enough, but dropped by AdvantageSettings.positive_advantages_only

    @property
    def dropped(self) -> int:
        return self.too_small + self.not_positive


def select(advantages: npt.NDArray[np.floating], settings: AdvantageSettings) -> Selection:
    """Select samples whose advantage is large enough, and positive if only those are wanted. May be empty.

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
