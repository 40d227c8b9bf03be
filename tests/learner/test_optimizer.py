"""The learning rate by step, and what decays."""

import pytest
import torch
from torch import nn

from roost.config.train import LrSchedulerType, OptimizerSettings
from roost.learner.learner import learning_rate, new_optimizer


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "rates"),
    [
        pytest.param(LrSchedulerType.CONSTANT, 0, 0, [1, 1, 1, 1, 1, 1], id="constant"),
        pytest.param(LrSchedulerType.CONSTANT, 3, 0, [1 / 3, 2 / 3, 1, 1, 1, 1], id="constant after warm-up"),
        pytest.param(LrSchedulerType.LINEAR, 0, 4, [1, 0.75, 0.5, 0.25, 0, 0], id="linear"),
        pytest.param(LrSchedulerType.LINEAR, 2, 4, [0.5, 1, 1, 0.5, 0, 0], id="linear after warm-up"),
        pytest.param(LrSchedulerType.COSINE, 0, 4, [1, 0.853553, 0.5, 0.146447, 0, 0], id="cosine"),
        pytest.param(LrSchedulerType.COSINE, 1, 3, [1, 1, 0.5, 0, 0, 0], id="cosine after warm-up"),
    ],
)
def test_learning_rate(schedule, warmup, total, rates):
    settings = OptimizerSettings(learning_rate=2.0, lr_scheduler_type=schedule, warmup_steps=warmup, total_steps=total)
    assert [learning_rate(settings, step) / 2 for step in range(6)] == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("total", [0, 5], ids=["no end", "ends in warm-up"])
def test_a_schedule_that_falls_must_know_its_end(total):
    settings = OptimizerSettings(lr_scheduler_type=LrSchedulerType.LINEAR, warmup_steps=5, total_steps=total)
    with pytest.raises(ValueError, match=f"total_steps, which is {total}"):
        learning_rate(settings, 5)


def test_only_matrices_decay():
    layer = nn.Linear(2, 2)
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    optimizer = new_optimizer(layer.parameters(), OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * 0.95)
    assert torch.equal(layer.bias.detach(), before["bias"])


def test_moments_in_place_from_the_start_change_nothing():
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = (
        new_optimizer(ours.parameters(), OptimizerSettings(weight_decay=0.0)),
        torch.optim.AdamW(theirs.parameters(), lr=1e-6, weight_decay=0.0, fused=True),
    )
    for _ in range(3):
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            layer(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(ours.weight, theirs.weight)
