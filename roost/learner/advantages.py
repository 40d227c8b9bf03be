"""Advantages: group baselines, GAE, whitening, and selection of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config.train import AdvantageEstimator, AdvantageSettings, KlEstimator, RewardScope, Whitening

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
            f"{settings.advantage_estimator} needs the values of a critic and rewards of tokens; use `token_advantages`"
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


def normalised_rewards(
    rewards: Sequence[float],
    means_over: Sequence[Hashable] | None,
    stds_over: Sequence[Hashable] | None,
) -> Doubles:
    """Rewards less the mean of their set, divided by the standard deviation (n - 1, plus 1e-6) of their set.

    `means_over` and `stds_over` name the set of each reward; None leaves that part out. Rewards become 0 where the
    standard deviation is at most 1e-6, as that of a single reward.

    >>> normalised_rewards([1.0, 0.0, 2.0], ["a", "a", "b"], None).tolist()
    [0.5, -0.5, 0.0]
    >>> normalised_rewards([2.0, 1.0, 3.0], None, [0, 0, 0]).round(3).tolist()
    [2.0, 1.0, 3.0]
    """
    values = np.asarray(rewards, dtype=np.float64)
    if means_over is not None:
        values = _group_mean(_grouped(rewards, means_over))
    if stds_over is None:
        return values
    spread = _grouped(rewards, stds_over)
    return np.where(spread.stds <= STD_EPSILON, 0.0, values / (spread.stds + STD_EPSILON))


def overlong_penalties(lengths: Sequence[int], settings: AdvantageSettings) -> Doubles:
    """DAPO's soft overlong punishment: penalty · clip((length - (max - buffer)) / buffer, 0, 1).

    >>> settings = AdvantageSettings(overlong_buffer_tokens=20, overlong_penalty=0.5, max_new_tokens=100)
    >>> overlong_penalties([80, 90, 100], settings).tolist()
    [0.0, 0.25, 0.5]
    """
    buffer = settings.overlong_buffer_tokens
    if not buffer:
        return np.zeros(len(lengths))
    over = (np.asarray(lengths, dtype=np.float64) - (settings.max_new_tokens - buffer)) / buffer
    return np.asarray(settings.overlong_penalty * over.clip(0.0, 1.0))


def step_returns(rewards: Sequence[float], episodes: Sequence[Hashable], steps: Sequence[int], gamma: float) -> Doubles:
    """Reward of each sample plus the discounted rewards of the later samples of its episode, in the order of `steps`.

    >>> step_returns([1.0, 2.0, 4.0], ["a", "a", "b"], [1, 0, 0], 0.5).tolist()
    [1.0, 2.5, 4.0]
    """
    found, later = np.zeros(len(rewards)), dict.fromkeys(episodes, 0.0)
    for index in sorted(range(len(rewards)), key=lambda index: -steps[index]):
        found[index] = later[episodes[index]] = rewards[index] + gamma * later[episodes[index]]
    return found


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
    """R - mean of the others = (R - mean) · n / (n - 1)."""
    others = np.maximum(samples.sizes - 1, 1)  # _group_mean gives 0 for a single sample
    return _group_mean(samples) * samples.sizes / others


def _group_mean(samples: _Grouped) -> Doubles:
    """R - mean; exactly 0 where all are equal."""
    return np.where(samples.equal, 0.0, samples.returns - samples.means)


def _grpo(samples: _Grouped) -> Doubles:
    """(R - mean) / (std with n - 1, plus 1e-6)."""
    return _group_mean(samples) / (samples.stds + STD_EPSILON)


def _reinforce(samples: _Grouped) -> Doubles:
    """(R - mean) / (std with n - 1, plus 1e-6), of all samples as one group."""
    return _grpo(_grouped(samples.returns.tolist(), [None] * len(samples.returns)))


def _none(samples: _Grouped) -> Doubles:
    return np.zeros_like(samples.returns)


def _reward(samples: _Grouped) -> Doubles:
    return samples.returns


_ESTIMATORS: Mapping[AdvantageEstimator, Callable[[_Grouped], Doubles]] = {
    AdvantageEstimator.LEAVE_ONE_OUT: _leave_one_out,
    AdvantageEstimator.GROUP_MEAN: _group_mean,
    AdvantageEstimator.GRPO: _grpo,
    AdvantageEstimator.REINFORCE: _reinforce,
    AdvantageEstimator.REINFORCE_BASELINE: _group_mean,
    AdvantageEstimator.REWARD: _reward,
    AdvantageEstimator.TEACHER: _none,
}


VARIANCE_EPSILON = 1e-8  # of Whitening.TOKENS and TOKENS_CLAMPED
WHITENING_STD_EPSILON = 1e-5  # of Whitening.TOKENS_BIASED and TOKENS_UNBIASED
LARGEST_K3 = 10.0  # as in RLinf and ROLL
LARGEST_KL_CHANGE = 0.2  # of the KL coefficient, as in ROLL


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
    token_rewards = np.zeros(len(turns))
    if len(turns):
        ends = np.maximum(np.searchsorted(turns, np.arange(len(turn_rewards)), side="right") - 1, 0)
        np.add.at(token_rewards, ends, np.asarray(turn_rewards, dtype=np.float64))
        token_rewards[-1] += reward - sum(turn_rewards)
    return token_rewards


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
    values = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(rewards).all() and np.isfinite(values).all() and np.isfinite(value_after)):
        raise ValueError(f"the rewards and the critic's values of {len(values)} tokens must be finite numbers")
    next_values = np.append(values[1:], value_after)
    deltas = (rewards + settings.gamma * next_values - values).tolist()
    found, later = np.zeros(len(values)), 0.0
    for token in range(len(values) - 1, -1, -1):
        later = deltas[token] + settings.gamma * settings.gae_lambda * later
        found[token] = later
    return TokenAdvantages(found, found + values)


def discounted(rewards: Doubles, columns: npt.NDArray[np.integer], gamma: float) -> Doubles:
    """Sum of each token's reward and all later ones, discounted by `gamma` for every column between them.

    `columns` are the positions of the tokens in their sequence: observations between turns count.

    >>> discounted(np.array([0.0, 1.0]), np.array([3, 5]), 0.5).tolist()
    [0.25, 1.0]
    """
    if gamma == 1:
        return np.asarray(rewards[::-1].cumsum()[::-1])
    found, later, after = np.zeros(len(rewards)), 0.0, 0
    steps, given = columns.tolist(), rewards.tolist()
    for token in range(len(given) - 1, -1, -1):
        later = given[token] + (gamma ** (after - steps[token]) * later if later else 0.0)
        found[token], after = later, steps[token]
    return found


def discounted_turns(rewards: Doubles, turns: npt.NDArray[np.integer], gamma: float) -> Doubles:
    """Discounted return of each token's turn, from the reward of each turn's last token.

    >>> discounted_turns(np.array([0.0, 1.0, 2.0]), np.array([0, 0, 1]), 0.5).tolist()
    [2.0, 2.0, 2.0]
    """
    ends = np.flatnonzero(np.append(turns[1:] != turns[:-1], True)) if len(turns) else np.zeros(0, np.int64)
    returns = discounted(rewards[ends], np.arange(len(ends)), gamma)
    return np.asarray(returns[np.searchsorted(ends, np.arange(len(turns)))])


def kl_estimates(logprobs: npt.ArrayLike, reference: npt.ArrayLike, estimator: KlEstimator) -> Doubles:
    """KL(policy || reference) of each token, for a penalty in the rewards; k3 is at most 10.

    >>> kl_estimates([-1.0], [-2.0], KlEstimator.K2).tolist()
    [0.5]
    """
    apart = np.asarray(logprobs, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    match estimator:
        case KlEstimator.K1:
            return apart
        case KlEstimator.ABS:
            return np.abs(apart)
        case KlEstimator.K2:
            return np.asarray(0.5 * apart**2)
        case KlEstimator.K3:
            below = -apart.clip(-LARGEST_K3 * 2, LARGEST_K3 * 2)
            return np.asarray(np.minimum(np.expm1(below) - below, LARGEST_K3))


def adapted_kl_coef(coef: float, kl: float, samples: int, settings: AdvantageSettings) -> float:
    """Coefficient of the KL penalty after a step with this mean KL; unchanged if the KL is not finite.

    >>> adapted_kl_coef(0.05, 0.3, 4, AdvantageSettings(kl_penalty_target=0.1, kl_penalty_horizon=10))
    0.054000000000000006
    """
    if not settings.kl_penalty_target or not math.isfinite(kl):
        return coef
    error = kl / settings.kl_penalty_target - 1
    change = min(max(error, -LARGEST_KL_CHANGE), LARGEST_KL_CHANGE)
    return coef * (1 + change * min(1.0, samples / settings.kl_penalty_horizon))


def whitened(samples: Sequence[Doubles], whitening: Whitening) -> list[Doubles]:
    """Advantages normalized to mean 0 and standard deviation 1 over all tokens of all samples.

    The kinds with n - 1 leave a single token unchanged, as its variance is undefined.

    >>> given = [np.array([1.0, 3.0]), np.array([3.0, 1.0])]
    >>> [sample.round(4).tolist() for sample in whitened(given, Whitening.TOKENS_BIASED)]
    [[-1.0, 1.0], [1.0, -1.0]]
    >>> [sample.round(4).tolist() for sample in whitened(given, Whitening.TOKENS)]
    [[-0.866, 0.866], [0.866, -0.866]]
    """
    tokens = np.concatenate([np.zeros(0), *samples])
    is_unbiased = whitening in (Whitening.TOKENS, Whitening.TOKENS_UNBIASED)
    if whitening is Whitening.NONE or len(tokens) < (2 if is_unbiased else 1):
        return list(samples)
    match whitening:
        case Whitening.TOKENS:
            scale = np.sqrt(tokens.var(ddof=1) + VARIANCE_EPSILON)
        case Whitening.TOKENS_CLAMPED:
            scale = np.sqrt(max(tokens.var(), VARIANCE_EPSILON))
        case _:
            scale = tokens.std(ddof=int(is_unbiased)) + WHITENING_STD_EPSILON
    return [(sample - tokens.mean()) / scale for sample in samples]


def whitened_by(
    samples: Sequence[Doubles], whitening: Whitening, sets: Sequence[Hashable], kept: Flags
) -> list[Doubles]:
    """Like `whitened`, within each of `sets`; samples that are not kept do not count and stay as they are."""
    found = list(samples)
    for name in dict.fromkeys(sets):
        indices = [index for index, each in enumerate(sets) if each == name and kept[index]]
        for index, sample in zip(indices, whitened([samples[index] for index in indices], whitening), strict=True):
            found[index] = sample
    return found


def are_learnt_from(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    tokens: Sequence[int],
    are_truncated: Sequence[bool],
    settings: AdvantageSettings,
) -> Flags:
    """Mask of the samples that no rule excludes. Excluded ones still count in the statistics of their group.

    >>> settings = AdvantageSettings(min_group_reward=0.0, max_error_tokens=9)
    >>> given = [0.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"], [1, 1, 9, 9], [False] * 4
    >>> are_learnt_from(*given, settings).tolist()
    [False, False, True, False]
    """
    found = np.ones(len(groups), dtype=bool)
    if settings.mask_truncated:
        found &= ~np.asarray(are_truncated, dtype=bool)
    if settings.min_group_reward is not None or settings.max_group_reward is not None:
        grouped = _grouped(rewards, groups)
        low = -np.inf if settings.min_group_reward is None else settings.min_group_reward
        high = np.inf if settings.max_group_reward is None else settings.max_group_reward
        found &= (grouped.sizes == 1) | ((grouped.means > low) & (grouped.means < high))
    if settings.max_error_tokens is not None:
        values = np.asarray(rewards)
        found &= (values == 1) | ((values == 0) & (np.asarray(tokens) < settings.max_error_tokens))
    return found


def scope_keys(scope: RewardScope, groups: Sequence[Hashable], tags: Sequence[Hashable]) -> Sequence[Hashable] | None:
    """The set of each sample in a scope; None for no scope."""
    match scope:
        case RewardScope.NONE:
            return None
        case RewardScope.GROUP:
            return groups
        case RewardScope.TAG:
            return tags
        case RewardScope.BATCH:
            return [None] * len(groups)


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """Indices of the samples to learn from, in order, and counts of those dropped."""

    kept: npt.NDArray[np.int64]
    too_small: int  # below AdvantageSettings.min_abs_advantage
    not_positive: int  # large enough, but dropped by AdvantageSettings.positive_advantages_only
    masked: int = 0  # excluded by `are_learnt_from`

    @property
    def dropped(self) -> int:
        return self.too_small + self.not_positive + self.masked


def select(advantages: npt.NDArray[np.floating], settings: AdvantageSettings, among: Flags | None = None) -> Selection:
    """Select samples whose advantage is large enough, and positive if only those are wanted. May be empty.

    `among` excludes samples beforehand.

    >>> settings = AdvantageSettings(min_abs_advantage=0.1, positive_advantages_only=True)
    >>> chosen = select(np.array([0.5, -0.5, 0.01]), settings)
    >>> chosen.kept.tolist(), chosen.too_small, chosen.not_positive
    ([0], 1, 1)
    """
    masked = np.zeros(len(advantages), dtype=bool) if among is None else ~among
    small = ~masked & (np.abs(advantages) < settings.min_abs_advantage)
    unwanted = ~masked & ~small & (advantages <= 0) & settings.positive_advantages_only
    return Selection(
        kept=np.flatnonzero(~masked & ~small & ~unwanted),
        too_small=int(small.sum()),
        not_positive=int(unwanted.sum()),
        masked=int(masked.sum()),
    )


def downsample_group(rewards: Sequence[float], penalties: Sequence[float], settings: AdvantageSettings) -> list[int]:
    """Indices of the samples of a group that `keep_generations` keeps, in order.

    Samples with a reward above 0 and the others are kept in their proportion, but at least `keep_positive` and
    `keep_others` of each; the former by penalty, the others as they come.

    >>> settings = AdvantageSettings(keep_generations=4, keep_others=2)
    >>> downsample_group([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], settings)
    [1, 3, 4, 7]
    """
    count, size = settings.keep_generations, len(rewards)
    if not 0 < count < size:
        return list(range(size))
    positive = sorted((index for index in range(size) if rewards[index] > 0), key=lambda index: penalties[index])
    others = [index for index in range(size) if rewards[index] <= 0]
    share = round(len(positive) * count / size)
    share = min(share, count - min(settings.keep_others, len(others)))
    share = max(share, min(settings.keep_positive, len(positive)))
    share = min(max(share, count - len(others)), len(positive))
    return sorted([*positive[:share], *others[: count - share]])
