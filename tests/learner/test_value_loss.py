"""The critic's loss, against numbers worked by hand."""

import pytest
import torch

from roost.config.train import LossAggregation, LossSettings
from roost.learner.losses import Totals, ValueBatch, value_loss

TOTALS = Totals(sequences=2, tokens=3, longest=4)


def batch(values):
    return ValueBatch(
        values=values,
        old_values=torch.tensor([0.0, 0.0, 2.0]),
        returns=torch.tensor([2.0, 2.0, 2.0]),
        sequence=torch.tensor([0, 0, 1]),
    )


@pytest.mark.parametrize(
    ("settings", "loss", "gradient"),
    [
        # errors -1, 0, -3 times weights 1/4, 1/4, 1/2
        pytest.param(
            LossSettings(value_clip=None), (0.5 + 0.0) / 4 + 4.5 / 2, [-0.25, 0.0, -1.5], id="squares, by sequences"
        ),
        # moved by 1 and 2 where 1/2 is allowed, toward the return: as if it were 1/2, without gradient;
        # the last moved away from the return: the larger loss is its own
        pytest.param(LossSettings(value_clip=0.5), (1.125 + 1.125) / 4 + 4.5 / 2, [0.0, 0.0, -1.5], id="clipped"),
        pytest.param(
            LossSettings(value_clip=0), (0.5 + 0.0) / 4 + 4.5 / 2, [-0.25, 0.0, -1.5], id="a clip of nothing is none"
        ),
        pytest.param(
            LossSettings(value_clip=None, loss_aggregation=LossAggregation.TOKEN_MEAN),
            (0.5 + 4.5) / 3,
            [-1 / 3, 0.0, -1.0],
            id="by tokens",
        ),
        pytest.param(
            LossSettings(value_clip=None, loss_aggregation=LossAggregation.SEQ_SUM_NORM),
            (0.5 + 4.5) / 8,
            [-1 / 8, 0.0, -3 / 8],
            id="constant",
        ),
    ],
)
def test_loss_and_gradient(settings, loss, gradient):
    values = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    found, described = value_loss(batch(values), settings, TOTALS)
    assert found.item() == pytest.approx(loss)
    assert described["value_loss"].item() == pytest.approx(loss)
    found.backward()
    assert values.grad.tolist() == pytest.approx(gradient)


@pytest.mark.parametrize(("clip", "share"), [(0.5, 2 / 3), (1.0, 1 / 3), (0.0, 0.0), (None, 0.0)])
def test_what_is_told(clip, share):
    values = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    _, described = value_loss(
        batch(values), LossSettings(value_clip=clip, loss_aggregation=LossAggregation.TOKEN_MEAN), TOTALS
    )
    del described["value_loss"]
    assert {name: value.item() for name, value in described.items()} == pytest.approx(
        {"value": 2 / 3, "return": 2.0, "squared_error": 10 / 3, "squared_return": 4.0, "value_clipped": share}
    )


def test_uneven_tensors_are_refused():
    with pytest.raises(ValueError, match=r"but here are \[2, 3\]"):
        batch(torch.zeros(2))
