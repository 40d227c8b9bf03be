"""Advantages of samples, against numbers worked by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.learner.advantages import advantages, is_alone
from roost.spec.training import AdvantageSettings, Estimator

WITHOUT_CRITIC = [estimator for estimator in Estimator if estimator is not Estimator.GAE]
FEW_RETURNS = st.lists(st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=1, max_size=6)


def found(estimator, returns, groups):
    return advantages(returns, groups, AdvantageSettings(estimator=estimator)).tolist()


# group a: 3, 0, 0 (mean 1, variance (4+1+1)/3 = 2); group b: 1, 2 (mean 1.5, variance 0.25), mixed with a
RETURNS, GROUPS = [3.0, 1.0, 0.0, 2.0, 0.0], ["a", "b", "a", "b", "a"]
ROOT = math.sqrt(2.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        pytest.param(Estimator.LEAVE_ONE_OUT, [3.0, -1.0, -1.5, 1.0, -1.5], id="less the mean of the others"),
        pytest.param(Estimator.GROUP_MEAN, [2.0, -0.5, -1.0, 0.5, -1.0], id="less the mean of the group"),
        pytest.param(Estimator.GRPO, [2 / ROOT, -1.0, -1 / ROOT, 1.0, -1 / ROOT], id="that over its deviation"),
    ],
)
def test_groups_of_unequal_size(estimator, expected):
    assert found(estimator, RETURNS, GROUPS) == pytest.approx(expected, abs=1e-12)


def test_reinforce_compares_with_the_whole_batch():
    # mean 2, variance (4 + 4 + 0 + 0) / 4 = 2, whatever the groups
    expected = [-2 / ROOT, 2 / ROOT, 0.0, 0.0]
    assert found(Estimator.REINFORCE, [0.0, 4.0, 2.0, 2.0], ["a", "b", "b", "c"]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC)
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
    assert found(Estimator.LEAVE_ONE_OUT, [5.0, 1.0, 0.0], groups) == [0.0, 1.0, -1.0]
    assert is_alone(groups).tolist() == [True, False, False]
    assert is_alone([]).tolist() == []


def test_a_tiny_deviation_is_divided_by_the_floor():
    # deviation 1e-8: divided by 1e-6 instead
    assert found(Estimator.GRPO, [2e-8, 0.0], ["a", "a"]) == pytest.approx([0.01, -0.01])


@given(FEW_RETURNS.filter(lambda returns: len(returns) > 1))
def test_leave_one_out_is_the_group_mean_scaled(returns):
    size = len(returns)
    exact = [Fraction(one) for one in returns]
    expected = [float(Fraction(size, size - 1) * (one - sum(exact) / size)) for one in exact]
    assert found(Estimator.LEAVE_ONE_OUT, returns, ["a"] * size) == pytest.approx(expected, abs=1e-9)


@given(st.lists(FEW_RETURNS, max_size=5), st.sampled_from(WITHOUT_CRITIC))
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
        found(Estimator.GAE, [1.0], ["a"])
