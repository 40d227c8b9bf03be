"""Weights of tokens, against numbers worked by hand."""

import pytest
import torch

from roost.config.train import ImportanceSamplingLevel, LossAggregation
from roost.learner.losses import Totals, shares_of_means, token_weights

# two sequences: turns of 3 and 1 tokens, and one turn of 2 tokens
SEQUENCE, TURN = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 2, 2])
WHOLE = Totals(sequences=2, tokens=6, longest=10)
EACH_EIGHTH = [1 / 8] * 4 + [1 / 4] * 2


@pytest.mark.parametrize(
    ("level", "mean", "expected"),
    [
        pytest.param(ImportanceSamplingLevel.TOKEN, LossAggregation.SEQ_MEAN, EACH_EIGHTH, id="token, sequences"),
        pytest.param(ImportanceSamplingLevel.NONE, LossAggregation.SEQ_MEAN, EACH_EIGHTH, id="none, sequences"),
        pytest.param(
            ImportanceSamplingLevel.TRAJECTORY, LossAggregation.SEQ_MEAN, EACH_EIGHTH, id="trajectory, sequences"
        ),
        pytest.param(
            ImportanceSamplingLevel.TURN, LossAggregation.SEQ_MEAN, [1 / 12] * 3 + [1 / 4] * 3, id="turn, sequences"
        ),
        pytest.param(ImportanceSamplingLevel.TURN, LossAggregation.TOKEN_MEAN, [1 / 6] * 6, id="turn, tokens"),
        pytest.param(ImportanceSamplingLevel.TOKEN, LossAggregation.TOKEN_MEAN, [1 / 6] * 6, id="token, tokens"),
        pytest.param(ImportanceSamplingLevel.TOKEN, LossAggregation.SEQ_SUM_NORM, [1 / 20] * 6, id="token, constant"),
        pytest.param(ImportanceSamplingLevel.TOKEN, LossAggregation.SEQ_SUM, [1 / 2] * 6, id="token, sums"),
    ],
)
def test_weights(level, mean, expected):
    assert token_weights(SEQUENCE, TURN, level, mean, WHOLE).tolist() == pytest.approx(expected)


def test_a_part_counts_as_in_the_whole():
    alone = token_weights(
        torch.tensor([0, 0]), torch.tensor([0, 0]), ImportanceSamplingLevel.TURN, LossAggregation.SEQ_MEAN, WHOLE
    )
    assert alone.tolist() == pytest.approx([1 / 4] * 2)


@pytest.mark.parametrize(
    ("mean", "weights", "expected"),
    [
        pytest.param(LossAggregation.TOKEN_MEAN, [0.5, 0.25], 0.5 * 4 + 0.25 * 8, id="as the loss"),
        pytest.param(LossAggregation.SEQ_SUM_NORM, [0.01, 0.01], (4 + 8) / 6, id="over all tokens alike"),
        pytest.param(LossAggregation.SEQ_SUM, [0.5, 0.5], (4 + 8) / 6, id="sums, over all tokens alike"),
    ],
)
def test_what_a_part_adds_to_a_mean(mean, weights, expected):
    described = {"size": torch.tensor([4.0, 8.0], requires_grad=True)}
    share = shares_of_means(described, torch.tensor(weights), mean, WHOLE)["size"]
    assert share.item() == pytest.approx(expected)
    assert not share.requires_grad
