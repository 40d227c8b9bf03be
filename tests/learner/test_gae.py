"""Advantages token by token, against numbers worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roost.config.train import AdvantageSettings, Whitening
from roost.learner.advantages import rewards_of_tokens, token_advantages, whitened


@pytest.mark.parametrize(
    ("discount", "gae_lambda", "advantages"),
    [
        # surprises: 0.6 - 0.5, 0.2 - 0.6, 1 - 0.2
        pytest.param(1.0, 0.0, [0.1, -0.4, 0.8], id="one step: the surprises"),
        pytest.param(1.0, 1.0, [0.5, 0.4, 0.8], id="to the end: outcome less value"),
        pytest.param(1.0, 0.5, [0.1 + 0.5 * 0.0, -0.4 + 0.5 * 0.8, 0.8], id="half way"),
        # surprises: 0.3 - 0.5, 0.1 - 0.6, 1 - 0.2; each later one counts a quarter
        pytest.param(0.5, 0.5, [-0.2 + 0.25 * -0.3, -0.5 + 0.25 * 0.8, 0.8], id="discounted"),
    ],
)
def test_along_a_sample(discount, gae_lambda, advantages):
    values = np.array([0.5, 0.6, 0.2], dtype=np.float32)
    found = token_advantages(np.array([0, 0, 1.0]), values, AdvantageSettings(gamma=discount, gae_lambda=gae_lambda))
    assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-6)
    assert found.returns.tolist() == pytest.approx([a + v for a, v in zip(advantages, (0.5, 0.6, 0.2), strict=True)])


def test_one_token():
    found = token_advantages(np.array([2.0]), np.array([0.5]), AdvantageSettings(gamma=0.9, gae_lambda=0.9))
    assert (found.advantages.tolist(), found.returns.tolist()) == ([1.5], [2.0])


def test_no_token():
    found = token_advantages(np.array([]), np.array([]), AdvantageSettings())
    assert (found.advantages.tolist(), found.returns.tolist()) == ([], [])


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.floats(-10, 10), st.floats(0, 1))
def test_to_the_end_the_critic_is_to_say_the_discounted_outcome(values, outcome, discount):
    rewards = rewards_of_tokens(np.zeros(len(values), int), outcome, ())
    found = token_advantages(rewards, np.array(values), AdvantageSettings(gamma=discount, gae_lambda=1.0))
    expected = [outcome * discount**left for left in reversed(range(len(values)))]
    assert found.returns.tolist() == pytest.approx(expected, abs=1e-9)


NUMBERS = st.floats(-10, 10)


def plainly(rewards, values, discount, gae_lambda, after):
    """Each advantage as the sum that defines it, and what the critic should have said."""
    states = [*values, after]
    surprises = [rewards[at] + discount * states[at + 1] - states[at] for at in range(len(rewards))]
    advantages = [
        sum((discount * gae_lambda) ** (later - at) * surprises[later] for later in range(at, len(surprises)))
        for at in range(len(surprises))
    ]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=9), NUMBERS, st.floats(0, 1), st.floats(0, 1))
def test_against_the_sum_that_defines_it(steps, after, discount, gae_lambda):
    rewards, values = [reward for reward, _ in steps], [value for _, value in steps]
    chosen = AdvantageSettings(gamma=discount, gae_lambda=gae_lambda)
    found = token_advantages(np.array(rewards), np.array(values), chosen, after)
    advantages, returns = plainly(rewards, values, discount, gae_lambda, after)
    assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-9)
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-9)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=9), st.data(), st.floats(0, 1))
def test_a_critic_that_is_right_makes_a_cut_no_difference(steps, data, discount):
    cut = data.draw(st.integers(1, len(steps) - 1))
    rewards, values = (np.array([step[place] for step in steps]) for place in (0, 1))
    chosen = AdvantageSettings(gamma=discount, gae_lambda=1.0)
    whole = token_advantages(rewards, values, chosen)
    part = token_advantages(rewards[:cut], values[:cut], chosen, value_after=float(whole.returns[cut]))
    assert part.advantages.tolist() == pytest.approx(whole.advantages[:cut].tolist(), abs=1e-9)


@pytest.mark.parametrize(("outcome", "values"), [(math.nan, [0.0]), (1.0, [0.0, math.inf])], ids=["return", "value"])
def test_what_is_not_finite_is_refused(outcome, values):
    with pytest.raises(ValueError, match="must be finite"):
        token_advantages(np.full(len(values), outcome), np.array(values), AdvantageSettings())
    with pytest.raises(ValueError, match="must be finite"):
        token_advantages(np.zeros(1), np.zeros(1), AdvantageSettings(), value_after=math.nan)


@pytest.mark.parametrize(
    ("turns", "reward", "turn_rewards", "expected"),
    [
        pytest.param([0, 0, 1], 2.0, (), [0, 0, 2], id="all at the end"),
        pytest.param([0, 0, 1, 1], 3.0, (1, 2), [0, 1, 0, 2], id="each turn at its last token"),
        pytest.param([0, 1], 5.0, (1, 1), [1, 4], id="and what is left at the end"),
        pytest.param([0, 2], 6.0, (1, 2, 3), [3, 3], id="a turn without a token earns before it"),
        pytest.param([1], 3.0, (1, 2), [3], id="the first turn without a token"),
        pytest.param([], 3.0, (), [], id="no token"),
    ],
)
def test_what_tokens_earn(turns, reward, turn_rewards, expected):
    assert rewards_of_tokens(np.array(turns, int), reward, turn_rewards).tolist() == expected


def test_whitened_over_all_tokens_of_all_samples():
    # mean 2, variance (4 + 0 + 4) / 3
    deviation = math.sqrt(8 / 3) + 1e-5
    first, second = whitened([np.array([0.0, 2.0]), np.array([4.0])], Whitening.TOKENS_BIASED)
    assert first.tolist() == pytest.approx([-2 / deviation, 0.0])
    assert second.tolist() == pytest.approx([2 / deviation])


@pytest.mark.parametrize("samples", [[np.array([3.0, 3.0]), np.array([3.0])], [np.array([])], []])
def test_nothing_to_whiten(samples):
    for whitening in (Whitening.TOKENS, Whitening.TOKENS_BIASED):
        assert [sample.tolist() for sample in whitened(samples, whitening)] == [[0.0] * len(each) for each in samples]


def test_whitened_as_other_programs_do():
    # RLinf's masked_normalization and ROLL's masked_whiten, of the same two programs' own advantages
    rlinf = whitened([np.full(2, 0.70710605), np.full(3, -0.70710605)], Whitening.TOKENS_BIASED)
    assert [sample[0] for sample in rlinf] == pytest.approx([1.2247272, -0.81648481], abs=1e-6)
    (roll,) = whitened([np.array([-0.491968, -0.049666])], Whitening.TOKENS)
    assert roll.tolist() == pytest.approx([-0.70710671, 0.70710677], abs=1e-6)


def test_one_token_is_left_by_what_divides_by_one_less():
    assert [each.tolist() for each in whitened([np.array([3.0])], Whitening.TOKENS)] == [[3.0]]
    assert [each.tolist() for each in whitened([np.array([3.0])], Whitening.TOKENS_BIASED)] == [[0.0]]
    given = [np.array([1.0, 2.0])]
    assert whitened(given, Whitening.NONE) == given
