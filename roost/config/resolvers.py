"""What configs of the three systems compute in interpolations: `${subtract:${runner.seq_length}, 1024}`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

Number = int | float


def _of_numbers(compute: Callable[[Number, Number], Number], one: Any, other: Any) -> Number:
    if not all(isinstance(value, int | float) for value in (one, other)):
        raise TypeError(f"{one!r} and {other!r} are not both numbers")
    return compute(one, other)


def safe_min(*values: Any) -> Any:
    """The smallest of those that are not null.

    >>> safe_min(None, 3, 2)
    2
    """
    return min((value for value in values if value is not None), default=None)


RESOLVERS: dict[str, Callable[..., Any]] = {
    "multiply": partial(_of_numbers, operator.mul),
    "divide": partial(_of_numbers, operator.truediv),
    "int_div": partial(_of_numbers, operator.floordiv),
    "subtract": partial(_of_numbers, operator.sub),
    "not": operator.not_,
    "safe_min": safe_min,
}


def register() -> None:
    """Make them known to OmegaConf; a resolver that somebody gave one of these names stays."""
    from omegaconf import OmegaConf

    for name, resolver in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)
