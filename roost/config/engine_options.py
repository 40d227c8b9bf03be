"""Valid values of engine options, in every section that may have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

Form = tuple[Callable[[Any], bool], str]  # a check of a value, and the valid values in words


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("tensor", "pipeline", "max_context"), (is_count, "a whole number above 0")),
    "memory_fraction": (_is_share, "a number above 0, and at most 1"),
    **dict.fromkeys(("dtype", "python", "served_name", "host", "api_key"), (is_text, "a text")),
    "seed": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "weight_transfer": (lambda value: value in ("ipc", "nccl"), "ipc or nccl"),
    "args": (lambda value: isinstance(value, list | tuple), "a list of words of the command line"),
    "env": (lambda value: isinstance(value, Mapping), "a mapping from names to values"),
}
