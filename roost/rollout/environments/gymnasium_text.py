"""Gymnasium observations as text, and text as actions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete, Text, Tuple


def text_of(content: Any) -> str:
    """Format an observation as text: numbers of an array in a row, parts of a mapping or tuple in lines.

    >>> text_of({"at": np.array([0.5, -2.0]), "has key": np.int64(1)})
    'at: 0.5 -2\\nhas key: 1'
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return "\n".join(f"{name}: {text_of(value)}" for name, value in content.items())
    if isinstance(content, tuple | list):
        return "\n".join(map(text_of, content))
    numbers = np.asarray(content)
    if numbers.ndim > 2:
        raise ValueError(f"what is observed has the shape {numbers.shape}, and has no text form; leave out as_text")
    return "\n".join(" ".join(f"{number:.4g}" for number in row) for row in np.atleast_2d(numbers).tolist())


def fitted(space: gymnasium.Space[Any], action: Any) -> Any:
    """Return the action as the space expects it. Raise for an invalid one, before it reaches the vector.

    Text is read as JSON, or as numbers with spaces or commas between them.

    >>> fitted(Box(-1, 1, (2,)), [0, 0.5]), fitted(Box(-1, 1, (2,)), "0 -0.5")
    (array([0. , 0.5], dtype=float32), array([ 0. , -0.5], dtype=float32))
    """
    try:
        found = _cast(space, action)
    except (TypeError, ValueError, KeyError):
        found = None
    if found is None or not space.contains(found):
        raise ValueError(f"{action!r} is no action of {space}")
    return found


def _cast(space: gymnasium.Space[Any], action: Any) -> Any:
    if isinstance(action, str) and not isinstance(space, Text):
        action = _read(action)
    if isinstance(space, Box | MultiDiscrete | MultiBinary):
        return np.asarray(action, space.dtype)
    if isinstance(space, Tuple):
        return tuple(_cast(part, each) for part, each in zip(space.spaces, action, strict=True))
    if isinstance(space, Dict):
        return {name: _cast(part, action[name]) for name, part in space.spaces.items()}
    return action


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [float(part) for part in text.replace(",", " ").split()]
