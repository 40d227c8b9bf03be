"""Scores as plain numbers."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from roost.config.errors import shown
from roost.rollout.rewards.errors import RewardFailed


def finite(value: Any, giver: str) -> float:
    """A score as a float; arrays and tensors of one number count as numbers.

    >>> finite(True, "is_right")
    1.0
    >>> finite("0.5", "is_right")
    Traceback (most recent call last):
        ...
    roost.rollout.rewards.errors.RewardFailed: is_right gives '0.5'; a score is a finite number
    """
    number = value.item() if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 else value
    try:
        is_finite = isinstance(number, Real) and math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        is_finite = False
    if not is_finite:
        raise RewardFailed(f"{giver} gives {shown(value)}; a score is a finite number")
    return float(number)
