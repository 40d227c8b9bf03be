"""Advantages of samples, against numbers worked by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roost.config.train import AdvantageEstimator, AdvantageSettings
from roost.learner.advantages import adapted_kl_coef, advantages, is_alone

COMPARING = [
    estimator
    for estimator in AdvantageEstimator
    if estimator not in (AdvantageEstimator.GAE, AdvantageEstimator.GIGPO, AdvantageEstimator.REWARD)
]
FEW_RETURNS = st.lists(st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=1, max_size=6)


def found(estimator, returns, groups):
    return advantages(returns, groups, AdvantageSettings(advantage_estimator=estimator)).tolist()


# group a: 3, 0, 0 (mean 1, squares 4 + 1 + 1 = 6); group b: 1, 2 (mean 1.5, squares 0.5), mixed with a
RETURNS, GROUPS = [3.0, 1.0, 0.0, 2.0, 0.0], ["a", "b", "a", "b", "a"]
OF_A, OF_B = math.sqrt(6 / 2) + 1e-6, math.sqrt(0.5 / 1) + 1e-6


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        pytest.param(AdvantageEstimator.LEAVE_ONE_OUT, [3.0, -1.0, -1.5, 1.0, -1.5], id="less the mean of the others"),
        pytest.param(AdvantageEstimator.GROUP_MEAN, [2.0, -0.5, -1.0, 0.5, -1.0], id="less the mean of the group"),
        pytest.param(
            AdvantageEstimator.GRPO, [2 / OF_A, -0.5 / OF_B, -1 / OF_A, 0.5 / OF_B, -1 / OF_A], id="that over its std"
        ),
        pytest.param(AdvantageEstimator.REWARD, RETURNS, id="as they are"),
    ],
)
def test_groups_of_unequal_size(estimator, expected):
    assert found(estimator, RETURNS, GROUPS) == pytest.approx(expected, abs=1e-12)


def test_reinforce_compares_with_the_whole_batch():
    # mean 2, squares 4 + 4 + 0 + 0 = 8, whatever the groups
    std = math.sqrt(8 / 3) + 1e-6
    expected = [-2 / std, 2 / std, 0.0, 0.0]
    assert found(AdvantageEstimator.REINFORCE, [0.0, 4.0, 2.0, 2.0], ["a", "b", "b", "c"]) == pytest.approx(
        expected, abs=1e-12
    )


# From RLinf's compute_grpo_advantages (groups of 4) and ROLL's reward_norm over the batch.
RLINF_REWARDS = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.028364, 0.596922, 0.189109, 0.349977]
RLINF_GRPO = [-0.8660239, -0.8660239, 0.8660239, 0.8660239, 0, 0, 0, 0, 1.3328314, 0.15270908, -0.96278089, -0.52275902]
ROLL_REWARDS = [-0.497446, -0.497446, -2.299493, -2.299493, 1.542285, 1.542285, -0.393719, -0.393719, -0.158908]
ROLL_REWARDS += [-0.158908]
ROLL_BATCH = [-0.10575553, -0.10575553, -1.5071582, -1.5071582, 1.4804872, 1.4804872, -0.025089873, -0.025089873]
ROLL_BATCH += [0.1575162, 0.1575162]


def test_numbers_of_other_programs():
    by_four = [index // 4 for index in range(12)]
    assert found(AdvantageEstimator.GRPO, RLINF_REWARDS, by_four) == pytest.approx(RLINF_GRPO, abs=1e-6)
    assert found(AdvantageEstimator.REINFORCE, ROLL_REWARDS, range(10)) == pytest.approx(ROLL_BATCH, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # ml-loop's adv_normalization: over the population's standard deviation, sqrt(2) and 0.5
        pytest.param(
            AdvantageEstimator.LEAVE_ONE_OUT, [3 / math.sqrt(2), -2.0, -1.5 / math.sqrt(2), 2.0, -1.5 / math.sqrt(2)]
        ),
        pytest.param(
            AdvantageEstimator.GROUP_MEAN, [2 / math.sqrt(2), -1.0, -1 / math.sqrt(2), 1.0, -1 / math.sqrt(2)]
        ),
    ],
)
def test_divided_by_the_deviation_of_the_population(estimator, expected):
    settings = AdvantageSettings(estimator, normalize_by_std=True)
    assert advantages(RETURNS, GROUPS, settings).tolist() == pytest.approx(expected)
    assert advantages([5.0, 5.0], ["a", "a"], settings).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize(
    ("returns", "groups"),
    [
        pytest.param([0.1, 0.1, 0.1], ["a", "a", "a"], id="all the same"),
        pytest.param([0.3, 0.1 + 0.2], [0, 0], id="the same but for rounding"),
        pytest.param([7.0], [("task", 3)], id="one sample"),
        pytest.param([], [], id="none"),
    ],
)
def test_nothing_to_compare_is_exactly_zero(estimator, returns, groups):
    assert found(estimator, returns, groups) == [0.0] * len(returns)


def test_one_alone_has_no_advantage_and_is_told():
    groups = ["a", "b", "b"]
    assert found(AdvantageEstimator.LEAVE_ONE_OUT, [5.0, 1.0, 0.0], groups) == [0.0, 1.0, -1.0]
    assert is_alone(groups).tolist() == [True, False, False]
    assert is_alone([]).tolist() == []


def test_a_tiny_deviation_is_divided_by_more():
    # deviation 1.4e-8, to which 1e-6 is added
    expected = 1e-8 / (math.sqrt(2) * 1e-8 + 1e-6)
    assert found(AdvantageEstimator.GRPO, [2e-8, 0.0], ["a", "a"]) == pytest.approx([expected, -expected])


@given(FEW_RETURNS.filter(lambda returns: len(returns) > 1))
def test_leave_one_out_is_the_group_mean_scaled(returns):
    size = len(returns)
    exact = [Fraction(one) for one in returns]
    expected = [float(Fraction(size, size - 1) * (one - sum(exact) / size)) for one in exact]
    assert found(AdvantageEstimator.LEAVE_ONE_OUT, returns, ["a"] * size) == pytest.approx(expected, abs=1e-9)


@given(st.lists(FEW_RETURNS, max_size=5), st.sampled_from(COMPARING))
def test_advantages_are_numbers_and_add_up_to_nothing(by_group, estimator):
    returns = [one for group in by_group for one in group]
    groups = [number for number, group in enumerate(by_group) for _ in group]
    result = np.array(found(estimator, returns, groups))
    assert np.isfinite(result).all()
    assert result.sum() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("returns", "groups", "message"),
    [
        pytest.param([1.0, 2.0], ["a"], "2 returns, but 1 groups", id="uneven"),
        pytest.param([1.0, math.nan], ["a", "a"], "return of sample 1 is nan", id="nan"),
        pytest.param([math.inf, 0.0], ["a", "a"], "return of sample 0 is inf", id="infinite"),
    ],
)
def test_mistakes_are_told(returns, groups, message):
    with pytest.raises(ValueError, match=message):
        advantages(returns, groups, AdvantageSettings())


def test_gae_needs_a_critic():
    with pytest.raises(ValueError, match="needs the values of a critic"):
        found(AdvantageEstimator.GAE, [1.0], ["a"])


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        pytest.param(0.15, 50, 0.05 * 1.1, id="follows"),
        pytest.param(0.0, 4096, 0.05 * 0.8, id="more-samples-than-the-horizon"),
        pytest.param(9.0, 4096, 0.05 * 1.2, id="far-above"),
        pytest.param(math.nan, 50, 0.05, id="no-number"),
        pytest.param(math.inf, 50, 0.05, id="infinite"),
    ],
)
def test_the_coefficient_of_the_kl_stays_positive(kl, samples, expected):
    settings = AdvantageSettings(kl_penalty_target=0.1, kl_penalty_horizon=100)
    assert adapted_kl_coef(0.05, kl, samples, settings) == pytest.approx(expected)
