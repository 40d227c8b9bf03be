"""Ratios and importance weights, against numbers worked by hand."""

import math

import pytest
import torch

from roost.config.train import ImportanceSamplingLevel
from roost.learner.losses import importance_weights, ratios

SEQUENCE, TURN = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2])


def logs(*probabilities):
    return torch.tensor(probabilities).log()


@pytest.mark.parametrize(
    ("level", "expected", "gradient"),
    [
        pytest.param(ImportanceSamplingLevel.TOKEN, [2.0, 0.75, 0.5, 1.0], [2.0, 0.75, 0.5, 1.0], id="token"),
        # two tokens hold the ratio of the first turn, and each of them moves both
        pytest.param(ImportanceSamplingLevel.TURN, [1.5, 1.5, 0.5, 1.0], [3.0, 3.0, 0.5, 1.0], id="turn"),
        pytest.param(ImportanceSamplingLevel.TRAJECTORY, [0.75] * 3 + [1.0], [2.25] * 3 + [1.0], id="trajectory"),
    ],
)
def test_levels(level, expected, gradient):
    logprobs = logs(0.8, 0.3, 0.2, 0.7).requires_grad_()
    found = ratios(logprobs, logs(0.4, 0.4, 0.4, 0.7), SEQUENCE, TURN, level)
    assert found.tolist() == pytest.approx(expected)
    found.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(1e4, math.exp(20)), (-1e4, math.exp(-20)), (math.inf, math.exp(20)), (19.0, math.exp(19))],
)
def test_huge_differences_stay_finite(difference, expected):
    logprobs = torch.zeros(1, requires_grad=True)
    place = torch.tensor([0])
    found = ratios(logprobs, torch.tensor([-difference]), place, place, ImportanceSamplingLevel.TOKEN)
    assert found.item() == pytest.approx(expected)
    found.sum().backward()
    assert logprobs.grad.item() == pytest.approx(expected if abs(difference) < 20 else 0.0)


def test_the_sum_is_cut_and_not_its_parts():
    # 30 and -29 cancel out to 1
    found = ratios(torch.tensor([30.0, -29.0]), torch.zeros(2), SEQUENCE[:2], TURN[:2], ImportanceSamplingLevel.TURN)
    assert found.tolist() == pytest.approx([math.e, math.e], rel=1e-5)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        pytest.param(ImportanceSamplingLevel.TOKEN, [2.0, 0.5, 0.25, 1.0], id="token"),
        pytest.param(ImportanceSamplingLevel.NONE, [2.0, 0.5, 0.25, 1.0], id="none"),
        pytest.param(ImportanceSamplingLevel.TURN, [1.5, 1.5, 0.25, 1.0], id="turn"),
        pytest.param(ImportanceSamplingLevel.TRAJECTORY, [0.375] * 3 + [1.0], id="trajectory"),
    ],
)
def test_importance_is_capped_and_has_no_gradient(level, expected):
    old = logs(0.6, 0.2, 0.1, 0.5).requires_grad_()  # 3, 1/2, 1/4 and 1 times the engine's
    found, capped = importance_weights(old, logs(0.2, 0.4, 0.4, 0.5), SEQUENCE, TURN, level, cap=2.0)
    assert found.tolist() == pytest.approx(expected)
    assert capped.tolist() == [each == 2.0 for each in expected]
    assert not found.requires_grad


def test_a_weight_that_equals_the_cap_is_not_capped():
    old = logs(0.5, 0.5, 0.5, 0.5)
    found, capped = importance_weights(old, old, SEQUENCE, TURN, ImportanceSamplingLevel.TOKEN, cap=1.0)
    assert (found.tolist(), capped.any().item()) == ([1.0] * 4, False)
