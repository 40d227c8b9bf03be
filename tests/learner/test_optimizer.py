"""The learning rate by step, and what decays."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from roost.config.train import LearnerSettings, LrSchedulerType, OptimizerSettings, TrainSettings, WsdDecayStyle
from roost.learner.optimizer import learning_rate, new_optimizer


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "rates"),
    [
        pytest.param(LrSchedulerType.CONSTANT, 0, 0, [1, 1, 1, 1, 1, 1], id="constant"),
        pytest.param(LrSchedulerType.CONSTANT, 3, 0, [1 / 3, 2 / 3, 1, 1, 1, 1], id="constant after warm-up"),
        pytest.param(LrSchedulerType.LINEAR, 0, 4, [1, 0.75, 0.5, 0.25, 0, 0], id="linear"),
        pytest.param(LrSchedulerType.LINEAR, 2, 4, [0.5, 1, 1, 0.5, 0, 0], id="linear after warm-up"),
        pytest.param(LrSchedulerType.COSINE, 0, 4, [1, 0.853553, 0.5, 0.146447, 0, 0], id="cosine"),
        pytest.param(LrSchedulerType.COSINE, 1, 3, [1, 1, 0.5, 0, 0, 0], id="cosine after warm-up"),
        pytest.param(LrSchedulerType.WSD, 1, 4, [1, 1, 1, 1, 0, 0], id="wsd of one step"),
    ],
)
def test_learning_rate(schedule, warmup, total, rates):
    settings = OptimizerSettings(learning_rate=2.0, lr_scheduler_type=schedule, warmup_steps=warmup, total_steps=total)
    assert [learning_rate(settings, step) / 2 for step in range(6)] == pytest.approx(rates, abs=1e-6)


def megatron_rate(step, rate, least, warmup, decay, style):
    """Megatron's schedule, whose warm-up has the rate 0 in its first step."""
    if step <= warmup and warmup > 0:
        return rate * step / warmup
    if step > decay:
        return least
    done = (step - warmup) / (decay - warmup)
    return least + (rate - least) * (1 - done if style == "linear" else 0.5 * (math.cos(math.pi * done) + 1))


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_ratio": 0.2}, {}], ids=["steps", "ratio", "none"])
def test_a_schedule_ends_at_its_floor_before_the_run(style, warmup):
    settings = OptimizerSettings(
        1e-3, lr_scheduler_type=LrSchedulerType(style), decay_steps=20, min_learning_rate=1e-4, total_steps=30, **warmup
    )
    steps = 4 if warmup else 0
    rates = [learning_rate(settings, step) for step in range(30)]
    assert rates[:steps] == pytest.approx([1e-3 * (step + 1) / 4 for step in range(steps)])
    expected = [megatron_rate(step, 1e-3, 1e-4, steps, 20, style) for step in range(steps, 30)]
    assert rates[steps:] == pytest.approx(expected)
    assert rates[20:] == pytest.approx([1e-4] * 10)


@pytest.mark.parametrize(
    ("form", "falling"),
    [
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.853553, 0.5, 0.146447]),
        ("minus_sqrt", [1, 0.5, 0.292893, 0.133975]),
        ("exponential", [1, 0.681793, 0.414214, 0.189207]),
    ],
)
def test_wsd_is_stable_until_its_decay(form, falling):
    settings = OptimizerSettings(
        2.0,
        lr_scheduler_type=LrSchedulerType.WSD,
        warmup_steps=2,
        wsd_decay_steps=4,
        wsd_decay_style=WsdDecayStyle(form),
        min_learning_rate=1.0,
        total_steps=8,
    )
    shares = [learning_rate(settings, step) - 1 for step in range(10)]
    assert shares == pytest.approx([0, 1, 1, 1, *falling, 0, 0], abs=1e-6)


@pytest.mark.parametrize("total", [0, 5], ids=["no end", "ends in warm-up"])
def test_a_schedule_that_falls_must_know_its_end(total):
    settings = OptimizerSettings(lr_scheduler_type=LrSchedulerType.LINEAR, warmup_steps=5, total_steps=total)
    with pytest.raises(ValueError, match=f"total_steps, which is {total}"):
        learning_rate(settings, 5)


def test_only_matrices_decay():
    layer = nn.Linear(2, 2)
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    optimizer = new_optimizer(layer, OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * 0.95)
    assert torch.equal(layer.bias.detach(), before["bias"])


def test_moments_in_place_from_the_start_change_nothing():
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = (
        new_optimizer(ours, OptimizerSettings(weight_decay=0.0)),
        torch.optim.AdamW(theirs.parameters(), lr=1e-6, weight_decay=0.0, fused=True),
    )
    for _ in range(3):
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            layer(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(ours.weight, theirs.weight)


def test_the_critic_warms_up_by_itself():
    optimizer = OptimizerSettings(1e-3, warmup_ratio=0.5, total_steps=8)
    settings = TrainSettings(LearnerSettings("m", optimizer=optimizer), max_steps=8, critic_lr_warmup_steps=2)
    assert [learning_rate(settings.critic_optimizer, step) for step in range(3)] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert replace(settings, critic_lr_warmup_steps=None).critic_optimizer == optimizer
