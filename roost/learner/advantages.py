"""How much better each sample was than expected, from the returns of a step alone: one number for each sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config.training import AdvantageSettings, Estimator

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
    if settings.estimator not in _ESTIMATORS:
        raise ValueError(f"{settings.estimator} needs the values of a critic, token by token: use roost.learner.gae")
    grouped = _grouped(returns, groups)
    found = _ESTIMATORS[settings.estimator](grouped)
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


_ESTIMATORS: Mapping[Estimator, Callable[[_Grouped], Doubles]] = {
    Estimator.LEAVE_ONE_OUT: _leave_one_out,
    Estimator.GROUP_MEAN: _group_mean,
    Estimator.GRPO: _grpo,
    Estimator.REINFORCE: _reinforce,
    Estimator.REWARD: _reward,
}
