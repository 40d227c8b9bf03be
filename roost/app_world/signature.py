"""API signatures, read from functions: documentation and argument checks."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.app_world.state import ApiError, Json, Record, unknown

MOST_TEXT = 20_000  # characters of one argument
LARGEST = 10**12  # of an integer
MOST_ITEMS = 100  # of a list
DEEPEST = 10  # levels of nested lists and mappings
TYPE_NAMES: dict[Any, str] = {
    str: "string",
    int: "integer",
    bool: "boolean",
    list[str]: "list of strings",
    Any: "any JSON value",
}


@dataclass(frozen=True)
class Parameter:
    """One keyword parameter of an API."""

    name: str
    annotation: Any  # one of TYPE_NAMES
    may_be_null: bool
    is_required: bool
    default: Json
    description: str

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.annotation] + (" or null" if self.may_be_null else "")

    def doc(self) -> Record:
        """Documentation of the parameter for agents."""
        doc = {"name": self.name, "type": self.type_name, "required": self.is_required}
        default = {} if self.is_required else {"default": self.default}
        return {**doc, **default, "description": self.description}

    def convert(self, value: Json) -> Json:
        """Check a value and convert it for the API; an integer may arrive as a float."""
        if value is None and self.may_be_null:
            return None
        if self.annotation is Any:
            return _plain(self.name, value)
        if self.annotation is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_of(value, self.annotation):
            raise ApiError(f"{self.name} must be a value of type {self.type_name}, not {_short(value)}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ApiError(f"{self.name} must be between {-LARGEST} and {LARGEST}")
        if isinstance(value, list | tuple) and len(value) > MOST_ITEMS:
            raise ApiError(f"{self.name} has {len(value)} items; {MOST_ITEMS} are allowed")
        if _text_size(value) > MOST_TEXT:
            raise ApiError(f"{self.name} has {_text_size(value)} characters; {MOST_TEXT} are allowed")
        return list(value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Api:
    """One API of an app."""

    app: str
    name: str
    description: str
    parameters: tuple[Parameter, ...]
    returns: str
    function: Callable[..., Json]

    def doc(self) -> Record:
        """Documentation of the API for agents."""
        return {
            "app_name": self.app,
            "api_name": self.name,
            "description": self.description,
            "parameters": [parameter.doc() for parameter in self.parameters],
            "returns": self.returns,
        }

    def bind(self, kwargs: Mapping[str, Json]) -> dict[str, Json]:
        """Check and convert keyword arguments; defaults of missing ones are left to the function."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in kwargs:
            if name not in known:
                raise unknown(f"parameter of {self.app}.{self.name}", name, known)
        missing = [name for name, parameter in known.items() if parameter.is_required and name not in kwargs]
        if missing:
            raise ApiError(f"{self.app}.{self.name} needs {', '.join(missing)}")
        return {name: known[name].convert(value) for name, value in kwargs.items()}


def read_api(app: str, function: Callable[..., Json]) -> Api:
    """Read an API from a method's annotations and docstring.

    Below the first paragraph, a docstring has a line `name: description` for each parameter, and one for `Returns`.
    """
    description, lines = _docstring(function)
    hints = typing.get_type_hints(function)
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        annotation, may_be_null = _without_none(hints[name])
        is_required = parameter.default is inspect.Parameter.empty
        default = None if is_required else parameter.default
        described = lines.get(name, "")
        parameters.append(Parameter(name, annotation, may_be_null, is_required, default, described))
    return Api(app, function.__name__, description, tuple(parameters), lines.get("Returns", ""), function)


def _docstring(function: Callable[..., Json]) -> tuple[str, dict[str, str]]:
    description, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
    parts = (line.partition(": ") for line in rest.splitlines())
    return " ".join(description.split()), {name: text for name, _, text in parts}


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if isinstance(annotation, types.UnionType):
        (kept,) = [part for part in annotation.__args__ if part is not type(None)]
        return kept, True
    return annotation, annotation is Any


def _is_of(value: Json, annotation: Any) -> bool:
    if annotation == list[str]:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _text_size(value: Json) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(len(item) + 1 for item in value) if isinstance(value, list | tuple) else 0


def _plain(name: str, value: Json) -> Json:
    """Return the value after a JSON round trip."""
    if not _is_within(value, DEEPEST):
        raise ApiError(f"{name} is nested too deeply; {DEEPEST} levels are allowed")
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ApiError(f"{name} must be a JSON value, not {_short(value)}") from None
    if len(text) > MOST_TEXT:
        raise ApiError(f"{name} has {len(text)} characters as JSON; {MOST_TEXT} are allowed")
    return json.loads(text)


def _is_within(value: Json, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return not inner or (levels > 0 and all(_is_within(item, levels - 1) for item in inner))


def _short(value: object) -> str:
    kind = type(value).__name__
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST)
    return f"{kind} {value!r}" if is_number else kind  # Python refuses to print very large integers
