"""Interpolations such as `${actor.model.size}`: resolved by OmegaConf; a failure is kept until the value is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roost.config.resolvers import register
from roost.config.section import Unresolved

# What all values together, and one value, may lead through; OmegaConf follows a reference each time it meets it, so
# values that double at each step would never end.
MAX_STEPS = 5_000
MAX_STEPS_OF_ONE = 500
MAX_IN_ONE_VALUE = 50
MAX_CHAIN = 100
_NAMES = re.compile(r"[^\W\d]\w*")


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
    register()
    try:
        config: Any = OmegaConf.create(values)
    except failures as error:
        reason = str(error).splitlines()[0]
        return _map_mapping(values, lambda path, text: Unresolved(text, reason))
    weigh = _Weights(values)
    steps_left = MAX_STEPS

    def look_up(path: tuple[Any, ...], text: str) -> Any:
        nonlocal steps_left
        if text.count("${") > MAX_IN_ONE_VALUE:
            return Unresolved(text, f"it holds more than {MAX_IN_ONE_VALUE} interpolations")
        weight = weigh.of(text)
        if weight > min(steps_left, MAX_STEPS_OF_ONE):
            return Unresolved(text, "it leads through too many references")
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


class _Weights:
    """How many references a text leads through at most.

    References are taken by the names in them, however they are spelled (absolute, relative, through a resolver): each
    name counts as the heaviest value that is kept under it anywhere.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.texts: dict[str, set[str]] = {}
        self.known: dict[str, int] = {}
        _map_mapping(values, self._note)

    def _note(self, path: tuple[Any, ...], text: str) -> str:
        for part in path:
            if isinstance(part, str):
                self.texts.setdefault(part, set()).add(text)
        return text

    def of(self, text: str, depth: int = 0) -> int:
        if text in self.known:
            return self.known[text]
        if depth > MAX_CHAIN:
            return MAX_STEPS_OF_ONE + 1
        self.known[text] = 1  # while it is weighed; a text that leads to itself is left to OmegaConf to refuse
        total = 1
        for inner in text.split("${")[1:]:
            names = set(_NAMES.findall(inner.split("}")[0])[-1:])
            weights = [
                self.of(other, depth + 1) for name in names for other in self.texts.get(name, ()) if other != text
            ]
            total += max(weights, default=0)
            if total > MAX_STEPS_OF_ONE:
                break
        self.known[text] = min(total, MAX_STEPS_OF_ONE + 1)
        return self.known[text]
