"""Declared hardware, such as robots: the fields of one item, checked, and filled in from a node's variables.

Accelerators are detected; robots are declared, in `cluster.node_groups[].hardware.configs` or by environment variables
of the node that they are connected to. Nothing here connects to a robot; the live cluster does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from roost.config.findings import did_you_mean

NodeRank = Annotated[int, Field(strict=True, ge=0)]


class HardwareConfig(BaseModel):
    """One item of declared hardware. A kind of hardware is a class derived from this one.

    `kind` is the `type` that users write. If a node declares no items, the variables of `identifying_fields` say how
    many it has.

    >>> class Arm(HardwareConfig):
    ...     kind = "Arm"
    ...     port: str | None = None
    >>> Arm(node_rank=3, port="/dev/ttyUSB0").model
    'Arm'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str] = ""
    identifying_fields: ClassVar[tuple[str, ...]] = ()

    node_rank: NodeRank = Field(description="the rank of the node that the item is connected to")

    @property
    def model(self) -> str:
        """Name shown to users: the kind, unless a kind has variants."""
        return self.kind


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


Config = TypeVar("Config", bound=HardwareConfig)


def parse_config(kind_class: type[Config], mapping: object) -> Config | list[Problem]:
    """Check the fields of one item; return the item, or everything that is wrong with it.

    >>> from roost.cluster.hardware.robots.kinds import FrankaConfig
    >>> parse_config(FrankaConfig, {"node_rank": 1, "robot_ip": "10.10.10.1"}).robot_ip
    '10.10.10.1'
    >>> for problem in parse_config(FrankaConfig, {"robot_ip": "ROBOT_IP", "gripper": "franka"}):
    ...     print(problem)
    node_rank: is missing; add node_rank, the rank of the node that the item is connected to
    robot_ip: 'ROBOT_IP' is a placeholder; write the robot's IP address, such as 10.10.10.1
    gripper: is not a field of Franka; did you mean gripper_type?
    """
    if not isinstance(mapping, Mapping):
        return [
            Problem(
                "RST-H042", (), f"{mapping!r} is not a mapping of fields", "write `node_rank: 0` and the other fields"
            )
        ]
    try:
        return kind_class.model_validate(dict(mapping))
    except ValidationError as error:
        return [_explained(kind_class.kind, kind_class, found) for found in error.errors(include_url=False)]


def fill_from_environment(
    kind_class: type[Config], configs_of_node: Sequence[Config], node_rank: int, environ: Mapping[str, str]
) -> list[Config]:
    """Return the items of one node, with missing fields from the node's environment variables.

    The variable of a field has its name in capitals. Declared items get only their unset (None) fields filled. If a
    node has no declared items, they are created: as many as the variables of the identifying fields list, and then
    variables also replace defaults. A single item takes the whole value, so that a list keeps its commas; for several
    items, the value has one part for each. Node ranks are never read from variables.

    >>> from roost.cluster.hardware.robots.kinds import FrankaConfig
    >>> robots = fill_from_environment(FrankaConfig, [], 16, {"ROBOT_IP": "10.10.10.1,10.10.10.2"})
    >>> [(robot.node_rank, robot.robot_ip) for robot in robots]
    [(16, '10.10.10.1'), (16, '10.10.10.2')]
    """
    others = sorted({config.node_rank for config in configs_of_node} - {node_rank})
    if others:
        raise ValueError(f"configs of nodes {others} were given for node {node_rank}; give only that node's own")
    is_declared = bool(configs_of_node)
    count = len(configs_of_node) if is_declared else _count_items(kind_class, environ)
    items: list[dict[str, Any]] = [config.model_dump() for config in configs_of_node] or [
        {"node_rank": node_rank} for _ in range(count)
    ]
    for name, field in kind_class.model_fields.items():
        unset = [i for i, item in enumerate(items) if not is_declared or item[name] is None]
        text = environ.get(name.upper())
        if text is None or not unset or f"_{name}".endswith("_node_rank"):
            continue
        wanted = _plain(field.annotation)
        # A blank value usually means unset; only for a list does it mean an empty list.
        if not text.strip() and not _is_list(wanted):
            continue
        parts = [text] if count == 1 else _parts(kind_class.kind, name, text, count)
        for i in unset:
            items[i][name] = _converted(name, parts[i].strip(), wanted)
    return [_checked(kind_class, item) for item in items]


def _count_items(kind_class: type[HardwareConfig], environ: Mapping[str, str]) -> int:
    values = {name.upper(): environ.get(name.upper(), "") for name in kind_class.identifying_fields}
    counts = {name: len(text.split(",")) for name, text in values.items() if text.strip()}
    if len(set(counts.values())) > 1:
        written = " but ".join(f"{name} lists {count}" for name, count in counts.items())
        raise ValueError(f"{written}; give every {kind_class.kind} on this node one value in each, separated by commas")
    return next(iter(counts.values()), 0)


def _parts(kind: str, name: str, text: str, count: int) -> list[str]:
    parts = text.split(",")
    if len(parts) != count:
        raise ValueError(
            f"{name.upper()} has {len(parts)} values ({text!r}) for {count} items of {kind} on this node; "
            f"give {count} values separated by commas, in the order of the items"
        )
    return parts


def _plain(annotation: Any) -> Any:
    """Return the type inside `Annotated[...]` and `... | None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        inner = [choice for choice in get_args(annotation) if choice is not NoneType]
        return _plain(inner[0]) if len(inner) == 1 else str
    return annotation


def _is_list(wanted: Any) -> bool:
    return get_origin(wanted) in (tuple, list) or wanted in (tuple, list)


def _converted(name: str, text: str, wanted: Any) -> Any:
    """Turn a variable's text into the type of its field."""
    if _is_list(wanted):
        each = _plain((*get_args(wanted), str)[0])
        return [_converted(name, part.strip(), each) for part in text.split(",") if part.strip()]
    if wanted is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"{name.upper()} is {text!r}, neither yes nor no; write 1 or 0")
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            raise ValueError(f"{name.upper()} is {text!r}, not a number; write a number") from None
    return text


def _checked(kind_class: type[Config], item: Mapping[str, Any]) -> Config:
    result = parse_config(kind_class, item)
    if isinstance(result, list):
        # Declared items were checked when the config was read, so the mistake is in a variable.
        found = ", and ".join(f"{str(problem.field[0]).upper()}: {problem.what}; {problem.fix}" for problem in result)
        raise ValueError(f"environment of node {item['node_rank']}: {found}")
    return result


# pydantic's names of type errors, and the types that were expected.
_EXPECTED = {
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


def _explained(kind: str, kind_class: type[BaseModel], error: ErrorDetails) -> Problem:
    """Translate an error of pydantic for the user of a YAML file."""
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
    if error["type"] in _EXPECTED:
        expected = _EXPECTED[error["type"]]
        return Problem("RST-H042", field, f"{value!r} is not {expected}", _as_expected(expected, value))
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return Problem(
        "RST-H042", field, f"{value!r} is not allowed", f"it {reason}" if reason.startswith("should") else reason
    )


def _nearest_field(kind_class: type[BaseModel], name: str) -> str:
    fields = kind_class.model_fields
    return did_you_mean(name, fields, cutoff=0.6) or f"remove it; the fields are {', '.join(fields)}"


def _as_expected(expected: str, value: object) -> str:
    if expected == "a whole number" and isinstance(value, str) and value.strip().isdigit():
        return f"write {int(value)} without quotes"
    if expected == "text" and isinstance(value, int | float) and not isinstance(value, bool):
        return f'put it in quotes: "{value}"'
    if expected == "a list" and isinstance(value, str):
        return f'write it as a list: ["{value}"]'
    return f"write {expected}"
