"""Sums over segments of flat tokens."""

import pytest
import torch

from roost.config.train import ImportanceSamplingLevel
from roost.learner.sample import level_values, segment_sums

SEQUENCE, TURN = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2])


@pytest.mark.parametrize(
    ("level", "sums"),
    [
        (ImportanceSamplingLevel.TOKEN, [1.0, 2.0, 4.0, 8.0]),
        (ImportanceSamplingLevel.NONE, [1.0, 2.0, 4.0, 8.0]),
        (ImportanceSamplingLevel.TURN, [3.0, 3.0, 4.0, 8.0]),
        (ImportanceSamplingLevel.TRAJECTORY, [7.0, 7.0, 7.0, 8.0]),
    ],
)
def test_what_is_added_up_at_each_level(level, sums):
    assert level_values(torch.tensor([1.0, 2.0, 4.0, 8.0]), SEQUENCE, TURN, level).tolist() == sums


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param([0, 0, 1], id="in order"),
        pytest.param([2, 2, 7], id="numbers left out, above the count of tokens"),
    ],
)
def test_the_gradient_of_each_token_reaches_all_of_its_segment(segments):
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = segment_sums(values, torch.tensor(segments))
    assert sums.tolist() == [3.0, 3.0, 4.0]
    (sums * torch.tensor([10.0, 1.0, 5.0])).sum().backward()
    assert values.grad.tolist() == [11.0, 11.0, 5.0]


def test_no_tokens():
    assert segment_sums(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []
