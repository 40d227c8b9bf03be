"""AdamW, and its learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from roost.config.training import OptimizerSettings, Schedule


def new_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW for those that are trained, with its moments in place from the start.

    So a checkpoint written or read before the first step is like any other. Vectors (norms, biases) do not decay.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of a step, counted from 0.

    It grows over the first `warmup_steps`, has its full value after them, and falls to 0 at `total_steps` unless the
    schedule is constant.

    >>> settings = OptimizerSettings(learning_rate=1.0, schedule=Schedule.LINEAR, warmup_steps=2, total_steps=6)
    >>> [learning_rate(settings, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule is Schedule.CONSTANT:
        return settings.learning_rate
    falling = settings.total_steps - settings.warmup_steps
    if falling < 1:
        raise ValueError(
            f"schedule {settings.schedule} ends after total_steps, which is {settings.total_steps}; "
            f"it must be more than the {settings.warmup_steps} steps of warm-up"
        )
    done = min(1.0, (step - settings.warmup_steps) / falling)
    share = 1.0 - done if settings.schedule is Schedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
