"""Interpolations such as `${actor.model.size}`: resolved by OmegaConf; a failure is kept until the value is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roost.spec.section import Unresolved

MAX_STEPS = 1_000  # references that all values together may lead through, to stop values that double at each step
MAX_IN_ONE_VALUE = 50
MAX_CHAIN = 100
_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")


def resolve(values: dict[Any, Any]) -> dict[Any, Any]:
    """The values with every interpolation resolved or replaced by an `Unresolved`.

    >>> resolve({"a": "${b}", "b": 2, "c": "${nowhere}"})["a"]
    2
    """
    if not _has_interpolation(values):
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    failures = (OmegaConfBaseException, ValueError, TypeError, KeyError, RecursionError)
    try:
        config: Any = OmegaConf.create(values)
    except failures as error:
        reason = str(error).splitlines()[0]
        return _map_mapping(values, lambda path, text: Unresolved(text, reason))
    weights: dict[str, int] = {}
    steps_left = MAX_STEPS

    def look_up(path: tuple[Any, ...], text: str) -> Any:
        nonlocal steps_left
        if text.count("${") > MAX_IN_ONE_VALUE:
            return Unresolved(text, f"it holds more than {MAX_IN_ONE_VALUE} interpolations")
        weight = _weight(text, values, weights, 0)
        if weight > steps_left:
            return Unresolved(text, f"the config leads through more than {MAX_STEPS:,} references")
        steps_left -= weight
        try:
            found = config
            for key in path:
                found = found[key]
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except failures as error:
            return Unresolved(text, str(error).splitlines()[0])

    return _map_mapping(values, look_up)


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(inner) for inner in value.values())
    return isinstance(value, list | tuple) and any(_has_interpolation(inner) for inner in value)


def _map_mapping(values: Mapping[Any, Any], change: Any, path: tuple[Any, ...] = ()) -> dict[Any, Any]:
    return {key: _map_text(inner, change, (*path, key)) for key, inner in values.items()}


def _map_text(value: Any, change: Any, path: tuple[Any, ...] = ()) -> Any:
    """The value with `change` applied to each text that holds an interpolation."""
    if isinstance(value, str):
        return change(path, value) if "${" in value else value
    if isinstance(value, Mapping):
        return _map_mapping(value, change, path)
    if isinstance(value, list | tuple):
        return [_map_text(inner, change, (*path, index)) for index, inner in enumerate(value)]
    return value


def _weight(text: str, values: Mapping[Any, Any], known: dict[str, int], depth: int) -> int:
    """How many references a text leads through, counting each as often as OmegaConf would follow it."""
    if text in known:
        return known[text]
    if depth > MAX_CHAIN:
        return MAX_STEPS + 1
    known[text] = 1  # a text that leads to itself is left to OmegaConf to refuse
    total = 1
    for reference in _REFERENCE.findall(text):
        target: Any = values
        for part in reference.strip().split("."):
            target = target.get(part) if isinstance(target, Mapping) else None
        if isinstance(target, str) and "${" in target:
            total += _weight(target, values, known, depth + 1)
    known[text] = min(total, MAX_STEPS + 1)
    return known[text]
