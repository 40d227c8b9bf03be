"""A mistake in the declaration of one hardware item, with its fix."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: in which field, what is wrong, and what to write instead.

    >>> print(Problem("RST-H042", ("camera_serials", 0), "1234 is not text", 'put it in quotes: "1234"'))
    camera_serials[0]: 1234 is not text; put it in quotes: "1234"
    """

    code: str  # of the finding
    field: tuple[str | int, ...]
    what: str
    fix: str

    def __str__(self) -> str:
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.field).lstrip(".")
        return f"{path}: {self.what}; {self.fix}" if path else f"{self.what}; {self.fix}"


# What pydantic calls a wrong type, and what the user should have written.
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
}


def explain(kind: str, kind_class: type[BaseModel], error: ErrorDetails) -> Problem:
    """Turn one of pydantic's errors into a problem in the words of someone who edits a YAML file."""
    field, value, context = error["loc"], error["input"], error.get("ctx", {})
    if error["type"] == "missing":
        description = kind_class.model_fields[str(field[0])].description if len(field) == 1 else None
        return Problem(
            "RST-H040", field, "is missing", f"add {field[-1]}" + (f", {description}" if description else "")
        )
    if error["type"] == "extra_forbidden" and len(field) == 1:
        return Problem("RST-H041", field, f"is not a field of {kind}", _nearest_field(kind_class, str(field[0])))
    if "fix" in context:  # raised by a check that knows what to write
        return Problem("RST-H043", field, error["msg"], context["fix"])
    if error["type"] == "literal_error":
        return Problem("RST-H042", field, f"{value!r} is not one of the choices", f"write {context['expected']}")
    if error["type"] in EXPECTED:
        expected = EXPECTED[error["type"]]
        return Problem("RST-H042", field, f"{value!r} is not {expected}", _as_expected(expected, value))
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return Problem(
        "RST-H042", field, f"{value!r} is not allowed", f"it {reason}" if reason.startswith("should") else reason
    )


def _nearest_field(kind_class: type[BaseModel], name: str) -> str:
    near = difflib.get_close_matches(name, kind_class.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else f"remove it; the fields are {', '.join(kind_class.model_fields)}"


def _as_expected(expected: str, value: object) -> str:
    if expected == "a whole number" and isinstance(value, str) and value.strip().isdigit():
        return f"write {int(value)} without quotes"
    if expected == "text" and isinstance(value, int | float) and not isinstance(value, bool):
        return f'put it in quotes: "{value}"'
    if expected == "a list" and isinstance(value, str):
        return f'write it as a list: ["{value}"]'
    return f"write {expected}"
